"""Trains the small model twice, through this package's attention and through the reference's, and draws both losses.

    python -m examples.training.train --picture loss.png

Both begin with the same weights and see the same text: this project's own documentation.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from examples.training.model import Attention, Model, lists, reference_attention, trained_attention

DOCS = Path(__file__).parents[2] / "docs"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="a torch device")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a step")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--picture", type=Path, help="where to draw the losses (needs matplotlib)")
    return parser.parse_args()


def texts(tokens: int, steps: int) -> Tensor:
    """uint8 `[steps, tokens + 1]`: random pieces of the documentation."""
    text = b"".join(page.read_bytes() for page in sorted(DOCS.glob("*.md")))
    known = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    begin = torch.randint(0, len(known) - tokens, (steps, 1), generator=torch.Generator().manual_seed(1))
    return known[begin + torch.arange(tokens + 1)]


def train(options: argparse.Namespace, attend: Attention, indices: Tensor, batches: Tensor) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    model = Model(heads=options.heads, layers=options.layers).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    losses = []
    for text in batches:
        loss = model.loss(text, indices, attend)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw(curves: dict[str, list[float]], target: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2, 4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(losses, style, label=name, linewidth=1.5)
    axes.set(xlabel="step", ylabel="loss, nats a byte")
    axes.legend()
    figure.savefig(target, dpi=120, metadata={"Software": None})


def main() -> None:
    options = arguments()
    indices = lists(options.tokens).to(options.device)
    batches = texts(options.tokens, options.steps).to(options.device)
    curves = {}
    for name, attend in (("sparse_mla, bf16", trained_attention(indices)), ("reference, fp32", reference_attention)):
        begin = time.perf_counter()
        curves[name] = train(options, attend, indices, batches)
        seconds = time.perf_counter() - begin
        print(f"{name}: loss {curves[name][0]:.3f} at first, {curves[name][-1]:.3f} at last; {seconds:.1f} s")
    ours, theirs = map(torch.tensor, curves.values())
    print(f"largest difference of a step's losses: {(ours - theirs).abs().max():.3f}")
    if options.picture:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()
