"""Decode of every size on a GPU, ours alone: where a smaller problem takes longer than a larger one.

The number of tokens, top-k and heads choose a kernel and how lists are cut. Where that choice is good, no time is above
that of a problem which is larger in one of the three and equal in the others. Calls are timed in situ, as by `kernels`.
"""

import argparse
import itertools
from collections.abc import Mapping
from functools import partial

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
"""Less may be noise."""
Size = tuple[int, int, int]
"""Tokens, top-k, heads."""


def cliffs(seconds: Mapping[Size, float]) -> list[tuple[float, Size, Size]]:
    """Sizes that take longer than one that is larger in one of its numbers: by what share of its time, the size, and
    the fastest such. Worst first."""
    axes, found = [sorted(set(values)) for values in zip(*seconds, strict=True)], {}
    for size, axis in itertools.product(seconds, range(3)):
        larger = [(*size[:axis], value, *size[axis + 1 :]) for value in axes[axis] if value > size[axis]]
        fastest = min(filter(seconds.__contains__, larger), key=seconds.__getitem__, default=size)
        if (excess := seconds[size] / seconds[fastest] - 1) > CLIFF:
            found[size] = max(found.get(size, (0.0,)), (excess, size, fastest))
    return sorted(found.values(), reverse=True)


def clock(size: Size, sets: list[tuple[Tensor, Tensor]], cache: Tensor, before: list[timing.Call]) -> timing.Clock:
    """Times our calls on the first queries, slots and heads of each set, with their default plan."""
    tokens, topk, heads = size
    plan = mla_backend.plan(tokens, topk, num_heads=heads, device=cache.device)
    how = {"cache": cache, "plan": plan, "workspace": new_workspace(len(plan), heads, cache.device)}
    counts = torch.full((tokens,), topk, dtype=torch.int32, device=cache.device)
    given = ((q[:tokens, :heads].contiguous(), slots[:tokens, :topk].contiguous()) for q, slots in sets)
    calls = [kernels.prepare_ours(Problem(*one, counts, kernels.SCALE, 1), **how)[0].call for one in given]
    return timing.capture_situ(before, calls)[1]


def add_options(parser: argparse.ArgumentParser) -> None:
    opt.add_list(parser, "--tokens", opt.count, "query tokens", TOKENS)
    opt.add_list(parser, "--topk", opt.count, "slots of each", TOPK)
    opt.add_list(parser, "--heads", opt.whole(1, batches.MOST_HEADS), "of each", HEADS)
    opt.add_rounds(parser, 5)


def run(options: argparse.Namespace) -> int:
    opt.require_gpu()
    torch.manual_seed(0)
    cache = kernels.Caches(0)["fp8_ds_mla", batches.BLOCK]
    t, k, h = map(max, (options.tokens, options.topk, options.heads))
    new_q = partial(torch.randn, t, h, 576, dtype=torch.bfloat16, device=cache.device)
    new_lists = partial(torch.randint, len(cache) * batches.BLOCK, (t, k), dtype=torch.int32, device=cache.device)
    sets = [(new_q(), new_lists()) for _ in range(batches.SETS)]
    before, seconds = kernels.products(batches.SETS), {}
    for k, h in itertools.product(options.topk, options.heads):
        for t in options.tokens:
            timed = timing.interleaved({"ours": clock((t, k, h), sets, cache, before)}, rounds=options.rounds)
            seconds[t, k, h] = timed["ours"].median
        times = ", ".join(f"T {t} {seconds[t, k, h] * 1e6:.1f}" for t in options.tokens)
        print(f"topk {k}, h {h}, us: {times}", flush=True)
    found = cliffs(seconds)
    print(f"{len(found)} of {len(seconds)} sizes (T, topk, h) take more than {CLIFF:.0%} longer than a larger one:")
    for excess, size, larger in found:
        print(f"{size} {seconds[size] * 1e6:.1f} us, {larger} {seconds[larger] * 1e6:.1f} us: {excess:.0%}")
    return 0
