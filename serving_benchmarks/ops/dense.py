"""Dense decode on a GPU, from page tables, versus FlashMLA and FlashAttention 3.

Batches are written as those of `kernels` are: 64q4s8k is 64 requests with 4 query tokens each at 8K tokens. Candidates
are timed and checked as there. The peers come out of vLLM's wheels. They read BF16 rows, for an FP8 cache a BF16 copy
of it, which is not timed; FlashMLA has a second kernel for rows with one scale.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import mla_backend
from mla_backend import reference
from mla_backend.plan import workspace_floats
from serving_benchmarks.ops import kernels, peer_kernels, timing
from serving_benchmarks.ops.batches import BLOCK, SETS, CaseOfBatch
from serving_benchmarks.ops.kernels import SCALE
from serving_benchmarks.ops.peer_kernels import DenseProblem

BF16 = (("1q1s128k", 16), ("2q1s16k", 16), ("8q1s32k", 16), ("8q1s32k", 128), ("128q1s4k", 128), ("64q2s8k", 128))
BF16 += (("128q1s8k", 16), ("64q4s8k", 16))
FP8 = (("1q1s128k", 16), ("8q1s32k", 16), ("128q1s8k", 16), ("64q4s8k", 16))
FP8_TENSOR = (("1q1s128k", 16), ("16q1s4k", 16), ("64q1s4k", 16), ("8q1s32k", 16), ("128q1s8k", 16))
FP8_TENSOR += (("16q1s4k", 128), ("128q1s4k", 128))
"""Batches and heads that are measured with rows of each format."""


@dataclass(frozen=True)
class Case(CaseOfBatch):
    """All requests have equally many query tokens, at equally long sequences."""

    batch: str
    heads: int
    format: str


def cases() -> list[Case]:
    chosen = {"bf16": BF16, "fp8_ds_mla": FP8, "fp8_tensor_576": FP8_TENSOR}
    return [Case(*one, fmt) for fmt, some in chosen.items() for one in some]


def new_problem(case: Case, blocks: int) -> DenseProblem:
    """Random queries of requests that own random blocks of a cache."""
    batch, device = case.requests, kernels.DEVICE
    table = kernels.new_table(batch.blocks(BLOCK), blocks)
    lengths = torch.tensor([length for _, length in batch.requests], dtype=torch.int32, device=device)
    shape = len(batch.requests), batch.queries, case.heads, 576
    q = torch.randn(shape, device=device).div_(kernels.MAGNITUDE).bfloat16()
    return DenseProblem(q, table, lengths, SCALE, batch.longest)


def measure(case: Case, caches: kernels.Caches, loaded: set[str], rounds: int) -> dict[str, Any]:
    """Checks and times one case: ours, our plan, and every peer."""
    cache, in_bf16 = caches[case.format, BLOCK], caches.copied(case.format, BLOCK, "bf16")
    torch.manual_seed(0)  # the tables of a case are those of a like case with other rows
    problems = [new_problem(case, len(cache)) for _ in range(SETS)]
    last, batch, fmt = problems[-1], case.requests, mla_backend.FORMATS[case.format]
    how = {"scale": SCALE, "cache_format": case.format, "cache_scale": kernels.SCALES.get(case.format, 1.0)}
    exact_out, exact_lse = reference.dense_attention(last.q, cache, last.table, last.lengths, **how)
    exact_out, exact_lse = exact_out.flatten(0, 1).float(), exact_lse.float()

    requests, rows, slots = len(batch.requests), batch.queries * case.heads, last.table.shape[1] * BLOCK
    about = {"topk_length": last.lengths, "num_heads": rows, "cache_format": case.format}
    make_plan = partial(mla_backend.plan, requests, slots, **about)
    plan = make_plan(device=kernels.DEVICE)
    workspace = torch.zeros(workspace_floats(plan.launch.ctas, rows), device=kernels.DEVICE)
    outs = [torch.empty(*one.q.shape[:3], 512, dtype=torch.bfloat16, device=kernels.DEVICE) for one in problems]
    lse, pairs = torch.empty_like(exact_lse), zip(problems, outs, strict=True)
    attend = partial(mla_backend.dense_attention, cache=cache, plan=plan, workspace=workspace, lse=lse, **how)
    calls = [partial(attend, one.q, block_table=one.table, lengths=one.lengths, out=out) for one, out in pairs]
    check = partial(kernels.check_ours, (outs[-1].flatten(0, 1), lse), (exact_out, exact_lse), cache, "exact")
    ours = {"ours": timing.Candidate(calls, [outs[-1], lse], check)}
    ours["plan"] = timing.Candidate([lambda: make_plan(out=plan)])
    found = {name: partial(one, cache=in_bf16) for name, one in peer_kernels.DENSE.items()}
    if case.format == "fp8_tensor_576":
        found["flashmla_fp8"] = partial(peer_kernels.flashmla_dense_fp8, cache=cache)
    make = partial(kernels.prepared_candidate, problems=problems, want=exact_out)
    peers = {name: partial(make, prepare) for name, prepare in found.items() if name in loaded}
    flops = 2 * int(batch.visible().sum()) * case.heads * (576 + 512)
    moved = batch.cached * fmt.token_bytes + batch.tokens * case.heads * (2 * (576 + 512) + 4)
    return {"useful_flops": flops, "bytes": moved, "launch": str(plan.launch), **timing.measure(ours, peers, rounds)}


def add_options(parser: argparse.ArgumentParser) -> None:
    kernels.add_cases(parser, "dense", cases())
    kernels.add_ways(parser, 15)


def run(options: argparse.Namespace) -> int:
    return kernels.measure_batches(options, "dense", kernels.asked_for(options, "dense", cases()), measure)
