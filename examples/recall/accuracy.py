"""Measures how many held-out prompts the checkpoint of this folder answers, through the engine and its caches.

    python -m examples.recall.accuracy

An answer is right if greedy generation gives it, token for token, with the end after it. Four ways: from a BF16 cache,
from an FP8 cache, from nvfp4_352 rows with FP8 keys, and from a BF16 cache with random positions in place of the
indexer's selection, of which next to nothing must come.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn

from mla_backend import convert_indices
from mla_backend.engine import Model, TokenBatch, load_model, new_caches
from serving_benchmarks.models.recall import CHECKPOINT, EOS, IDS, Prompt, held_out

BLOCK_SIZE = 64
LONGEST_ANSWER = 5
"""Tokens of a code, and what ends it."""


@dataclass(frozen=True)
class Way:
    """How prompts are answered."""

    latent: str
    keys: str
    shuffled: bool = False


WAYS = {
    "BF16 cache": Way("bf16", "bf16"),
    "FP8 cache": Way("fp8_ds_mla", "fp8"),
    "FP4 rows": Way("nvfp4_352", "fp8"),
    "shuffled": Way("bf16", "bf16", shuffled=True),
}


class Shuffle:
    """While it is entered, a model attends to random tokens of its context, as many as the indexer would have selected.

    Args:
        model: whose.
        seed: of the random numbers.
    """

    def __init__(self, model: Model, seed: int = 0):
        self.model, self.generator = model, torch.Generator().manual_seed(seed)

    def __enter__(self) -> None:
        layers = self.model.model.layers
        self.hooks = [layer.self_attn.indexer.register_forward_hook(self._select) for layer in layers]

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()

    def _select(self, _: nn.Module, arguments: tuple, selection: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        step, cache = arguments[3], arguments[4]
        positions, batch = step.positions, step.batch
        order = torch.rand(len(positions), max(batch.context_lengths), generator=self.generator).to(positions.device)
        later = torch.arange(order.shape[1], device=order.device) > positions.unsqueeze(1)
        chosen = order.masked_fill(later, 2.0).argsort(dim=1)[:, : selection[0].shape[1]]
        chosen = torch.where(chosen > positions.unsqueeze(1), -1, chosen).int()
        return convert_indices(chosen, batch.block_table, batch.request_ids, cache.shape[1], compact=True)


def answers(model: Model, asked: list[Prompt], way: Way) -> list[list[int]]:
    """What the model generates for each prompt, greedily and up to the end token.

    Prompts that follow each other with the same context share its blocks, so that it is computed once.
    """
    if way.shuffled:
        with Shuffle(model):
            return answers(model, asked, Way(way.latent, way.keys))
    found: list[list[int]] = []
    for _, group in groupby(asked, lambda prompt: prompt.context):
        found += _from_one_context(model, list(group), way)
    return found


def _from_one_context(model: Model, asked: list[Prompt], way: Way) -> list[list[int]]:
    context = asked[0].context_tokens
    shared = len(context) // BLOCK_SIZE  # full blocks only
    inputs = [context[shared * BLOCK_SIZE :] + prompt.question_tokens for prompt in asked]
    own = -(-(max(map(len, inputs)) + LONGEST_ANSWER) // BLOCK_SIZE)  # blocks of each prompt after those
    table = torch.arange(shared + own * len(asked), dtype=torch.int32)
    tables = torch.cat([table[:shared].expand(len(asked), -1), table[shared:].view(len(asked), own)], dim=1)
    device = model.model.embed_tokens.weight.device
    caches = new_caches(model.config, len(table), BLOCK_SIZE, latent=way.latent, keys=way.keys, device=device)

    def run(table: Tensor, new: list[list[int]], starts: list[int]) -> list[int]:
        """A step of requests with these new tokens at these positions: the likeliest next token of each."""
        counts = [len(tokens) for tokens in new]
        positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        rows = torch.arange(len(new)).repeat_interleave(torch.tensor(counts))
        slots = table[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = TokenBatch(
            block_table=table.to(device),
            slots=slots.to(device),
            token_counts=counts,
            context_lengths=[s + n for s, n in zip(starts, counts, strict=True)],
            logits_at=torch.tensor(counts).cumsum(0).to(device) - 1,
        )
        ids = torch.tensor([token for tokens in new for token in tokens])
        return model(ids.to(device), positions.to(device), batch, caches).argmax(-1).tolist()

    if shared:
        run(tables[:1], [context[: shared * BLOCK_SIZE]], [0])
    starts, found = [shared * BLOCK_SIZE] * len(asked), [[] for _ in asked]
    for _ in range(LONGEST_ANSWER):
        for generated, token in zip(found, run(tables, inputs, starts), strict=True):
            generated.append(token)
        starts = [start + len(tokens) for start, tokens in zip(starts, inputs, strict=True)]
        inputs = [[generated[-1]] for generated in found]
    return [tokens[: tokens.index(IDS[EOS]) + 1] if IDS[EOS] in tokens else tokens for tokens in found]


def is_right(prompt: Prompt, generated: list[int]) -> bool:
    """Whether a prompt was answered."""
    return generated == prompt.answer_tokens


def _share(right: Iterable[bool]) -> str:
    right = list(right)
    return f"{100 * sum(right) / len(right):.1f} %"


def main() -> None:
    """Prints a line for each length and kind of question."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="its folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="a torch device")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[512, 768, 1024], help="tokens of the prompts, or a few more"
    )
    parser.add_argument("--questions", type=int, default=200, help="questions for each length")
    given = parser.parse_args()
    try:
        model = load_model(given.checkpoint, device=given.device)
        asked = {length: held_out(length, given.questions) for length in given.lengths}
    except (OSError, RuntimeError, ValueError) as error:
        parser.error(str(error))
    runs = [(length, name) for length in given.lengths for name in WAYS]
    right: dict[tuple[int, str], list[bool]] = {}
    for length, name in track(runs, "asking", transient=True):
        generated = answers(model, asked[length], WAYS[name])
        right[length, name] = [is_right(*pair) for pair in zip(asked[length], generated, strict=True)]
    kinds = sorted({prompt.kind for prompt in asked[given.lengths[0]]})
    print(f"{'tokens':>8} {'question':>10}" + "".join(f" {name:>12}" for name in WAYS))
    for length in given.lengths:
        for kind in ("all", *kinds):
            rows = [i for i, prompt in enumerate(asked[length]) if kind in ("all", prompt.kind)]
            shares = (_share(right[length, name][i] for i in rows) if rows else "-" for name in WAYS)
            print(f"{length:>8} {kind:>10}" + "".join(f" {share:>12}" for share in shares))


if __name__ == "__main__":
    main()
