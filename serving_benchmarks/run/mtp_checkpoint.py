"""Adds a layer that drafts (multi-token prediction) to a checkpoint without one.

    python serving_benchmarks/run/mtp_checkpoint.py FOLDER

Its block is a copy of the last layer's. What leads into it, `eh_proj`, is fitted by least squares, so that it alone
predicts the next hidden state from the last one and the token in between; the block adds a little of its own to that.
Such drafts are often right where a word follows from the one before it, and wrong otherwise: tokens are accepted and
rejected. What is generated must not depend on them.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from examples.recall.accuracy import CHECKPOINT  # noqa: E402
from examples.recall.task import prompts  # noqa: E402
from mla_backend.engine import Batch, Model, load_model, new_caches  # noqa: E402

CONTEXTS, TOKENS, QUESTIONS = 8, 500, 12
"""What is fitted to: some 8000 tokens."""
FIRST_SEED = 1000
"""Of those contexts; the questions that are asked come from smaller ones."""
RIDGE = 1e-3
"""Added to the diagonal of the products of features, of size 1, lest rare ones get large weights."""
BLOCK_SHARE = 0.1
"""Of what the block adds: it has not been trained for what it gets."""


def add_mtp_layer(source: Path, folder: Path) -> None:
    """Writes a copy of a checkpoint with one layer that drafts.

    Args:
        source: a checkpoint in the Hugging Face layout, of one file of weights, for the recall task.
        folder: where the copy goes; made if it isn't there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder)
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}, indent=2) + "\n")
    weights = load_file(source / "model.safetensors")
    last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    added = {name.replace(last, draft): tensor.clone() for name, tensor in weights.items() if name.startswith(last)}
    for name in added:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            added[name] *= BLOCK_SHARE
    ones = torch.ones_like(weights["model.norm.weight"])
    added |= {f"{draft}{name}.weight": ones.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    added[f"{draft}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    added[f"{draft}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    added[f"{draft}eh_proj.weight"] = _fitted(load_model(source, dtype=torch.float32)).to(ones.dtype)
    save_file({**weights, **added}, folder / "model.safetensors", metadata={"format": "pt"})


def _fitted(model: Model) -> Tensor:
    """fp32 `[hidden, 2 * hidden]`: from a token's embedding and the hidden state that it was predicted from, both of
    mean square 1, to the next hidden state."""
    features, wanted = [], []
    for seed in range(FIRST_SEED, FIRST_SEED + CONTEXTS):
        asked = prompts(seed, TOKENS, QUESTIONS)
        tokens = list(asked[0].context_tokens)
        for one in asked:
            tokens += one.question_tokens + one.answer_tokens
        hidden = _hidden(model, tokens)
        embedded = model.model.embed_tokens(torch.tensor(tokens))
        features.append(torch.cat([_even(embedded[1:]), _even(hidden[:-1])], dim=1))
        wanted.append(_even(hidden[1:]))
    x, y = torch.cat(features).double(), torch.cat(wanted).double()
    products = x.T @ x / len(x) + RIDGE * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(products, x.T @ y / len(x)).T.float().contiguous()


@torch.inference_mode()
def _hidden(model: Model, tokens: list[int]) -> Tensor:
    """fp32 `[tokens, hidden]`: what the model takes its logits from, token by token."""
    kept: list[Tensor] = []
    hook = model.model.norm.register_forward_hook(lambda module, given, out: kept.append(out))
    count = torch.arange(len(tokens))
    batch = Batch(
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        slots=count,
        token_counts=[len(tokens)],
        context_lengths=[len(tokens)],
        logits_at=count,
    )
    try:
        model(torch.tensor(tokens), count, batch, new_caches(model.config, 1, len(tokens), latent="bf16", keys="bf16"))
    finally:
        hook.remove()
    return kept[0]


def _even(x: Tensor) -> Tensor:
    """Rows `[N, size]` with a mean square of 1."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the copy with that layer goes")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="what is copied")
    given = parser.parse_args()
    add_mtp_layer(given.checkpoint, given.folder)
    print(f"{given.folder} has the checkpoint with a layer that drafts")


if __name__ == "__main__":
    main()
