"""Decode of every size on a GPU, ours alone: where a smaller problem takes longer than a larger one.

The number of tokens, top-k and heads choose a kernel and how lists are cut. Where that choice is good, no time is above
that of a problem which is larger in one of the three and equal in the others. Calls are timed in situ, as by `kernels`.
"""

import argparse
import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import mla_backend
from mla_backend.attention import new_workspace
from serving_benchmarks import options as opt
from serving_benchmarks.ops import batches, kernels, timing
from serving_benchmarks.ops.peer_kernels import Problem

TOKENS = "1,2,3,4,5,6,8,10,12,14,16,17,20,24,28,32,33,36,40,44,48,51,56,60,64,66,67,70,80,96,112,128,132,133,140,160"
TOKENS += ",192,224,256,264,300,352,400,448,512"
TOPK, HEADS = "128,256,512,1024,2048,4096", "8,16,24,32,48,64,96,128"
CLIFF = 0.03
"""More is a cliff, less may be noise."""
SETS = 4


class Size(NamedTuple):
    tokens: int
    topk: int
    heads: int

    def __str__(self) -> str:
        return f"T {self.tokens}, topk {self.topk}, h {self.heads}"


class Cliff(NamedTuple):
    excess: float
    """By how much of its time the larger problem is exceeded."""
    size: Size
    larger: Size


def cliffs(seconds: dict[Size, float]) -> list[Cliff]:
    """For each size that takes longer than one that is larger in one of its numbers, the fastest such. Worst first."""
    axes = {name: sorted({getattr(size, name) for size in seconds}) for name in Size._fields}
    found = {}
    for size, (name, values) in itertools.product(seconds, axes.items()):
        larger = [size._replace(**{name: value}) for value in values if value > getattr(size, name)]
        fastest = min(filter(seconds.__contains__, larger), key=seconds.__getitem__, default=size)
        cliff = Cliff(seconds[size] / seconds[fastest] - 1, size, fastest)
        if cliff.excess > CLIFF:
            found[size] = max(cliff, found.get(size, cliff))
    return sorted(found.values(), reverse=True)


def clock(
    size: Size, sets: Sequence[tuple[Tensor, Tensor]], cache: Tensor, before: Sequence[timing.Call]
) -> timing.Clock:
    """Times our calls on the first queries, slots and heads of each set, with their default plan."""
    plan = mla_backend.plan(size.tokens, size.topk, num_heads=size.heads, device=kernels.DEVICE)
    workspace = new_workspace(len(plan), size.heads, plan.device)
    counts = torch.full((size.tokens,), size.topk, dtype=torch.int32, device=kernels.DEVICE)
    calls = []
    for q, slots in sets:
        parts = q[: size.tokens, : size.heads].contiguous(), slots[: size.tokens, : size.topk].contiguous()
        calls.append(kernels.prepare_ours(Problem(*parts, counts, kernels.SCALE, 1), cache, plan, workspace)[0].call)
    return timing.capture_situ(before, calls)[1] if before else timing.capture(calls).clock


def add_options(parser: argparse.ArgumentParser) -> None:
    opt.add_list(parser, "--tokens", opt.count, "query tokens", TOKENS)
    opt.add_list(parser, "--topk", opt.count, "slots of each", TOPK)
    opt.add_list(parser, "--heads", opt.between(1, batches.MOST_HEADS), "of each", HEADS)
    parser.add_argument("--loop", action="store_true", help="calls in a loop of their own, not in situ")
    parser.add_argument("--worst", type=opt.count, default=30, metavar="N", help="cliffs shown; default: %(default)s")
    opt.add_rounds(parser, 5)


def run(options: argparse.Namespace) -> int:
    opt.require_gpu()
    torch.manual_seed(0)
    cache = kernels.Caches(0)["fp8_ds_mla", kernels.BLOCK]
    most, slots = Size(*map(max, (options.tokens, options.topk, options.heads))), cache.shape[0] * cache.shape[1]
    new_q = partial(torch.randn, most.tokens, most.heads, 576, dtype=torch.bfloat16, device=cache.device)
    new_lists = partial(torch.randint, slots, (most.tokens, most.topk), dtype=torch.int32, device=cache.device)
    sets = [(new_q(), new_lists()) for _ in range(SETS)]
    before, seconds = [] if options.loop else kernels.products(SETS), {}
    for k, h in itertools.product(options.topk, options.heads):
        sizes = [Size(t, k, h) for t in options.tokens]
        for size in sizes:
            timed = timing.interleaved({"ours": clock(size, sets, cache, before)}, rounds=options.rounds)
            seconds[size] = timed["ours"].median
        print(f"topk {k}, h {h}: " + ", ".join(f"T {s.tokens} {seconds[s] * 1e6:.1f}" for s in sizes), flush=True)
    found = cliffs(seconds)
    print(f"us; {len(found)} of {len(seconds)} sizes take more than {CLIFF:.0%} longer than a larger one. The worst:")
    for cliff in found[: options.worst]:
        times = f"{seconds[cliff.size] * 1e6:.1f} us, {cliff.larger} {seconds[cliff.larger] * 1e6:.1f} us"
        print(f"{cliff.size}: {times}: {cliff.excess:.0%}")
    return 0
