"""Sparse attention on a GPU on rows other than fp8_ds_mla, versus FlashMLA, FlashInfer and Q8KV8.

CONFIG1 to CONFIG4 and `long` are the cases that FlashMLA measures itself. V4-Flash and V4-Pro are what one of eight
GPUs attends to. Candidates are timed and checked as those of `kernels` are.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from serving_benchmarks.ops import kernels, peer_kernels
from serving_benchmarks.ops.batches import SETS, CaseOfBatch
from serving_benchmarks.ops.peer_kernels import SparseProblem

_FLASHINFER = {"flashinfer": peer_kernels.flashinfer}
_BF16 = {"flashmla": peer_kernels.flashmla_prefill, **_FLASHINFER}
PEERS = {"fp8_model1": {"flashmla": peer_kernels.flashmla_decode}, "bf16": _BF16, "bf16_512": _BF16}
PEERS |= {"fp16": _FLASHINFER, "fp8_528": {}, "fp8_tensor_512": {}, "nvfp4_352": {}}
PEERS["fp8_tensor_576"] = {**_FLASHINFER, "q8kv8": peer_kernels.sglang_q8kv8}
"""What reads rows of each format on Hopper, by the names of candidates."""


@dataclass(frozen=True)
class Case(CaseOfBatch):
    name: str
    format: str
    heads: int
    batch: str
    topk: int
    page: int = 64
    extra_topk: int = 0
    extra_page: int = 64
    uneven: bool = False  # second lists have random lengths, one for each request


def cases() -> list[Case]:
    found: list[Case] = []

    def add(name: str, fmt: str, heads: Sequence[int], requests: Sequence[int], spec: str, topk: int, **more: Any):
        found.extend(Case(name, fmt, h, f"{n}{spec}", topk, **more) for h in heads for n in requests)

    def v4(name: str, heads: Sequence[int], extra_topk: int, served: bool = False, **more: Any):
        requests, spec = ((1, 8, 32, 64, 128), "q1s16k") if served else ((2, 64, 74, 128, 148, 256), "q2s16k")
        add(name, "fp8_model1", heads, requests, spec, 128, page=256, extra_topk=extra_topk, **more)

    v4("CONFIG1", (8, 16, 32, 64), 512)
    v4("CONFIG2", (8, 16, 32, 128), 1024)
    v4("CONFIG3", (64,), 1024, extra_page=2, uneven=True)
    v4("CONFIG4", (128,), 1024, extra_page=2, uneven=True)
    add("long", "fp8_model1", (64, 128), (148,), "q2s32k", 16384)
    v4("V4-Flash", (8,), 512, served=True)
    v4("V4-Pro", (16,), 1024, served=True)
    for fmt in ("bf16", "bf16_512"):
        add("one list", fmt, (8, 16, 64), (1, 32, 128), "q1s32k", 2048)
    for fmt in ("fp16", "fp8_528", "fp8_tensor_576", "fp8_tensor_512"):
        add("one list", fmt, (16, 64), (128,), "q1s32k", 2048)
    add("one list", "nvfp4_352", (8, 16, 32, 64, 128), (1, 32, 128), "q1s32k", 2048)
    return found


def new_problem(case: Case, caches: kernels.Caches, lengths: Tensor | None) -> SparseProblem:
    """A batch of random queries. `lengths` are those of the second lists, if not all of them count."""
    lists = kernels.new_lists(case.requests, case.topk, len(caches[case.format, case.page]), case.page)
    more: dict[str, Any] = {}
    if case.extra_topk:
        extra = caches[case.format, case.extra_page]
        more |= {"extra_cache": extra, "extra_cache_format": case.format, "extra_topk_length": lengths}
        more["extra_indices"], _ = kernels.new_lists(case.requests, case.extra_topk, len(extra), case.extra_page)
        more["sink"] = torch.randn(case.heads, device=kernels.DEVICE)
    return kernels.new_problem(case.requests, case.heads, case.format, lists, **more)


def measure(case: Case, caches: kernels.Caches, loaded: set[str], rounds: int) -> dict[str, Any]:
    """Checks and times one case."""
    cache, batch = caches[case.format, case.page], case.requests
    torch.manual_seed(0)  # the lists of a case are those of a like case with other rows
    lengths = None
    if case.uneven:
        lengths = torch.randint(case.extra_topk + 1, (len(batch.requests),), dtype=torch.int32, device=kernels.DEVICE)
        lengths = lengths.repeat_interleave(batch.queries)
    problems = [new_problem(case, caches, lengths) for _ in range(SETS)]
    peers = {name: partial(prepare, cache=cache) for name, prepare in PEERS[case.format].items() if name in loaded}
    return kernels.time_problems(problems, cache, case.format, peers, rounds)


def add_options(parser: argparse.ArgumentParser) -> None:
    kernels.add_cases(parser, "rows", cases())
    kernels.add_ways(parser, 11)


def run(options: argparse.Namespace) -> int:
    return kernels.measure_batches(options, "rows", kernels.asked_for(options, "rows", cases()), measure)
