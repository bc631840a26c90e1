"""Trains the tiny checkpoint of this folder, from nothing.

    python -m examples.recall.train --device cuda --minutes 8 --output examples/recall/checkpoint

First the model attends to everything while the indexer learns to tell what it attends to; contexts grow as answers
become right. Then it attends to the indexer's selection only, half of the time with latent vectors and keys rounded as
FP8 caches round them. Accuracy is measured on held-out prompts, with the answers given (an answer counts if each of its
tokens is the likeliest after the right ones, which is what greedy generation would say).
"""

import argparse
import json
import math
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional

from examples.recall import files
from examples.recall.dialogues import IGNORED, dialogue
from examples.recall.network import Mode, Network
from mla_backend.engine.config import ModelConfig
from serving_benchmarks.models.recall import prompts

LENGTHS = (64, 128, 256, 512, 1088)
"""Of the sequences, from easy to hard."""
DECAY_FROM = 0.65
"""Share of the training after which the learning rate falls."""
SPARSE_FROM = 0.7
"""Share of the training after which selections count."""
ALL_LENGTHS_FROM = 0.3
"""Share of the training after which sequences of all lengths are used, however well it goes."""
GOOD = 0.6
"""Share of right tokens at which longer sequences join."""
TEST_LENGTHS = (256, 520, 1024)
QUERIES = 64
"""Tokens of a sequence at which the indexer learns."""
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.01


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the checkpoint and its log")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="a torch device")
    parser.add_argument("--minutes", type=float, default=8.0, help="how long to train")
    parser.add_argument("--steps", type=int, default=100_000, help="how many steps at most")
    parser.add_argument("--batch-tokens", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--warmup", type=int, default=100, help="steps until the highest learning rate")
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="tokens of the longest sequences")
    parser.add_argument("--report", type=float, default=5.0, help="seconds between lines of the log")
    parser.add_argument("--test-every", type=float, default=15.0, help="seconds between tests while training")
    parser.add_argument("--tests", type=int, default=24, help="questions for each length in tests while training")
    given = parser.parse_args()
    if not given.output.resolve().parent.is_dir():
        parser.error(f"--output can't be made: there is no folder {given.output.resolve().parent}")
    if not given.minutes > 0:
        parser.error(f"--minutes must be more than 0; got {given.minutes}")
    if given.longest < LENGTHS[0]:
        parser.error(f"--longest must be {LENGTHS[0]} or more; got {given.longest}")
    if given.batch_tokens < given.longest:
        parser.error(f"--batch-tokens must be --longest={given.longest} or more; got {given.batch_tokens}")
    return given


class Data:
    """Batches of dialogues, made as they are needed."""

    def __init__(self, batch_tokens: int, device: str):
        self.random = random.Random("training 0")
        self.batch_tokens, self.device = batch_tokens, device

    def batch(self, length: int) -> tuple[Tensor, ...]:
        """Token ids `[B, length]`, the positions at which the indexer learns `[B, N]`, half of them those of answers,
        the places of the answers' tokens among all `[M]`, and what they are `[M]`."""
        pairs = [dialogue(self.random, length) for _ in range(max(1, self.batch_tokens // length))]
        ids, labels = (torch.tensor(part) for part in zip(*pairs, strict=True))
        is_answer = labels != IGNORED
        likely = is_answer / is_answer.sum(1, keepdim=True).clamp(min=1) + 1 / length
        at = likely.multinomial(min(QUERIES, length))
        # all that depends on the data is found out here, so that nothing waits for the device
        parts = ids, at, is_answer.flatten().nonzero().squeeze(1), labels[is_answer]
        if self.device.startswith("cuda"):
            parts = tuple(part.pin_memory().to(self.device, non_blocking=True) for part in parts)
        return parts


@torch.inference_mode()
def accuracy(network: Network, mode: Mode, length: int, questions: int, given: argparse.Namespace) -> float:
    """Share of held-out prompts of this length whose answers are right."""
    asked = [prompt for seed in range(-(-questions // 4)) for prompt in prompts(1000 + seed, length, 4)]
    rows = [p.context_tokens + p.question_tokens + p.answer_tokens for p in asked]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    labels = torch.full_like(ids, IGNORED)
    for i, (row, prompt) in enumerate(zip(rows, asked, strict=True)):
        ids[i, : len(row)] = torch.tensor(row)
        start = len(row) - len(prompt.answer_tokens)
        labels[i, start - 1 : len(row) - 1] = torch.tensor(prompt.answer_tokens)
    right = []
    for part, wanted in zip(ids.split(8), labels.split(8), strict=True):
        part, wanted = part.to(given.device), wanted.to(given.device)
        with autocast(given):
            found = network.lm_head(network(part, mode)[0]).argmax(-1)
        right.append(((found == wanted) | (wanted == IGNORED)).all(1))
    return torch.cat(right).float().mean().item()


def test(network: Network, given: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Shares of right answers to held-out prompts, by mode and length."""
    modes = {"dense": Mode(), "sparse": Mode(sparse=True), "sparse, fp8": Mode(sparse=True, rounded=True)}
    lengths = [length for length in TEST_LENGTHS if length < given.longest] or [given.longest]
    return {
        name: {length: round(accuracy(network, mode, length, given.tests, given), 3) for length in lengths}
        for name, mode in modes.items()
    }


def autocast(given: argparse.Namespace) -> torch.autocast:
    """What the forward pass runs under."""
    return torch.autocast(given.device.partition(":")[0], dtype=torch.bfloat16)


def learning_rate(step: int, progress: float, given: argparse.Namespace) -> float:
    """Up to the highest, constant, and down to nothing."""
    fall = max(0.0, (progress - DECAY_FROM) / (1 - DECAY_FROM))
    return LEARNING_RATE * min(1.0, (step + 1) / given.warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, fall)))


class Curriculum:
    """Which lengths there are by now: a longer one joins when the longest so far goes well, or time demands it."""

    def __init__(self, longest: int):
        self.lengths = [length for length in LENGTHS if length < longest] + [longest]
        self.known = 1
        self.random = random.Random("lengths 0")

    def next(self) -> int:
        """The longest so far, or as often one of the others."""
        return self.random.choice([self.lengths[self.known - 1], self.random.choice(self.lengths[: self.known])])

    def update(self, shares: dict[int, float], progress: float) -> None:
        """shares: of right tokens, by length; progress: of the training."""
        if self.known < len(self.lengths) and (
            shares.get(self.lengths[self.known - 1], 0.0) > GOOD
            or progress > ALL_LENGTHS_FROM * self.known / len(self.lengths)
        ):
            self.known += 1


def train(given: argparse.Namespace) -> None:
    """The whole training; writes the checkpoint, and a line of the log for each report."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # keys are wider than values
    network = Network(ModelConfig.from_dict(files.CONFIG))
    network.begin_with_recall()
    network.to(given.device)
    indexer = [p for name, p in network.named_parameters() if ".indexer." in name]
    others = [p for name, p in network.named_parameters() if ".indexer." not in name and p.requires_grad]
    optimiser = torch.optim.AdamW(
        [{"params": others}, {"params": indexer}], betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )
    data, curriculum = Data(given.batch_tokens, given.device), Curriculum(given.longest)
    given.output.mkdir(exist_ok=True)
    interactive = sys.stderr.isatty()
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=Console(stderr=True),
        disable=not interactive,
    )  # fmt: skip
    sums: dict[int, list] = defaultdict(lambda: [0, 0])  # right tokens on the device, and all tokens, by length
    losses: list[Tensor] = []
    started = reported = tested = time.monotonic()
    best, tokens, step = -1.0, 0, 0
    with bar, (given.output / "training.jsonl").open("w") as log:
        task = bar.add_task("training", total=1.0)
        while True:
            progress = max(step / given.steps, (time.monotonic() - started) / 60 / given.minutes)
            length = curriculum.next()
            ids, at, places, wanted = data.batch(length)
            sparse = progress >= SPARSE_FROM
            mode = Mode(sparse=sparse, rounded=sparse and step % 2 == 0, queries=at)
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, progress, given)
            with autocast(given):
                hidden, index_losses = network(ids, mode)
                logits = network.lm_head(hidden.flatten(0, 1)[places])
            loss = functional.cross_entropy(logits.float(), wanted)
            index_loss = torch.stack(index_losses).mean()
            optimiser.zero_grad(set_to_none=True)
            (loss + index_loss).backward()
            for parameters in (others, indexer):  # apart, as neither loss reaches the other's
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            network.balance()
            step, tokens = step + 1, tokens + ids.numel()
            sums[length][0] += (logits.argmax(-1) == wanted).sum()
            sums[length][1] += len(wanted)
            losses.append(torch.stack([loss.detach(), index_loss.detach()]))
            done = progress >= 1 or step == given.steps
            if time.monotonic() - reported < given.report and not done:
                continue
            shares = {length: float(right) / total for length, (right, total) in sums.items() if total}
            answer_loss, indexer_loss = torch.stack(losses).mean(0).tolist()
            line = {
                "step": step,
                "minutes": round((time.monotonic() - started) / 60, 2),
                "tokens": tokens,
                "loss": round(answer_loss, 4),
                "index_loss": round(indexer_loss, 4),
                "sparse": sparse,
                "right_tokens": {length: round(share, 4) for length, share in sorted(shares.items())},
            }
            if time.monotonic() - tested >= given.test_every or done:
                line["right_answers"] = test(network, given)
                worst = min(line["right_answers"]["sparse, fp8"].values())
                if sparse and worst >= best:
                    best = worst
                    files.save(given.output, network.state_dict())
                tested = time.monotonic()
            text = json.dumps(line)
            log.write(text + "\n")
            log.flush()
            if interactive:
                bar.update(task, completed=progress, description=f"loss {answer_loss:.3f}")
            bar.console.print(text, highlight=False, soft_wrap=True)
            curriculum.update(shares, progress)
            sums.clear()
            losses.clear()
            reported = time.monotonic()
            if done:
                break


if __name__ == "__main__":
    train(arguments())
