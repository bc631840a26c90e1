"""The backward of sparse attention on a GPU, versus cuDNN's front end.

4096 queries have lists of 2048 rows each: random ones, or such that neighbours share 90 % of theirs. The whole backward
is timed, in order and with atomic additions, interleaved with the peer's in one process, and its parts come from a
profile. All gradients are first compared with the reference. The peer is the package nvidia-cudnn-frontend.
"""

import argparse
import importlib
import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import mla_backend
from mla_backend import reference
from serving_benchmarks import options as opt
from serving_benchmarks.ops import kernels, timing
from serving_benchmarks.ops.batches import positions

HEADS, ROWS, LISTS = (8, 16, 32, 64, 128), (8192, 131072), ("random", "overlapping")
OVERLAP = 0.9
WIDTH, SCALE = 576, 576**-0.5
SIMILARITY = 1e-5  # largest error 1 - 2xy / (x^2 + y^2) of a gradient. docs/training.md promises it.
CHUNK = 64  # queries that the reference computes at once: their rows in float64 take 600 MB
PARTS = {"order": "backward_order", "delta": "sparse_delta", "main": "sparse_backward", "sum": "backward_sum"}
"""Our ops."""
CUDNN = "cudnn.deepseek_sparse_attention.sparse_attention_backward.api"
PROFILED = 3  # calls


@dataclass(frozen=True)
class Case:
    heads: int
    rows: int
    lists: str
    queries: int = 4096
    topk: int = 2048

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def cases() -> list[Case]:
    return [Case(heads, rows, lists) for lists in LISTS for rows in ROWS for heads in HEADS]


@dataclass
class Inputs:
    """What a backward is given. Sinks of 0 are there because cuDNN has no way without."""

    q: Tensor
    kv: Tensor
    lists: Tensor
    d_out: Tensor
    sink: Tensor

    @classmethod
    def random(cls, case: Case) -> "Inputs":
        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, device=kernels.DEVICE).bfloat16()

        queries, heads = case.queries, case.heads
        q, kv, d_out = numbers(queries, heads, WIDTH), numbers(case.rows, WIDTH), numbers(queries, heads, 512)
        return cls(q, kv, new_lists(case), d_out, torch.zeros(heads, device=kernels.DEVICE))

    def forward(self, lists: Tensor) -> tuple[Tensor, Tensor]:
        return mla_backend.sparse_mla(self.q, self.kv, lists, scale=SCALE, sink=self.sink)

    def exact(self, lists: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of q and kv in float64."""
        d_q, d_kv = [], torch.zeros(self.kv.shape, dtype=torch.float64, device=self.kv.device)
        for some in torch.arange(len(lists), device=lists.device).split(CHUNK):
            given = self.q[some], self.kv, lists[some], self.d_out[some]
            of_q, of_kv, _ = reference.sparse_mla_backward(*given, scale=SCALE, sink=self.sink)
            d_q.append(of_q)
            d_kv += of_kv
        return torch.cat(d_q), d_kv


def new_lists(case: Case) -> Tensor:
    """int32 `[queries, topk]`: different rows in each."""
    if case.lists == "random":
        return positions(torch.full((case.queries,), case.rows, device=kernels.DEVICE), case.topk)
    first = torch.arange(case.queries, device=kernels.DEVICE).unsqueeze(1) * round((1 - OVERLAP) * case.topk)
    rows = torch.randperm(case.rows, dtype=torch.int32, device=kernels.DEVICE)
    return rows[(first + torch.arange(case.topk, device=kernels.DEVICE)) % case.rows]


def check(got: tuple[Tensor, ...], want: tuple[Tensor, ...], times: float = 1) -> dict[str, float]:
    """The errors of gradients. Raises WrongResult beyond `times` the bound."""
    found = {}
    for name, x, y in zip(("d_q", "d_kv"), got, want, strict=True):
        x = x.double().view(y.shape)
        found[name] = (1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum())).item()
    if not max(found.values()) <= times * SIMILARITY or any(map(math.isnan, found.values())):
        raise kernels.WrongResult(f"wrong gradients: {', '.join(f'{name} {one:.3g}' for name, one in found.items())}")
    return found


def cudnn(inputs: Inputs, exact: tuple[Tensor, Tensor]) -> timing.Candidate:
    """The wrapper of cuDNN's front end. It compiles its kernel at the first call."""
    attend = importlib.import_module(CUDNN).sparse_attention_backward_wrapper
    out, lse = inputs.forward(inputs.lists)
    results = torch.empty_like(inputs.q), torch.empty_like(inputs.kv)
    given = inputs.q, inputs.kv, out, inputs.d_out, lse, inputs.sink, inputs.lists, SCALE
    call = partial(attend, *given, dq=results[0], dkv=results[1])
    return timing.Candidate([call], results, lambda: check(results, exact, kernels.PEERS_ALLOWED))


def profiled(call: timing.Call) -> dict[str, float]:
    """Seconds that each of PARTS takes in a call."""
    activity, on_gpu = torch.profiler.ProfilerActivity, kernels.DEVICE == "cuda"
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if on_gpu else [])]) as profile:
        for _ in range(PROFILED):
            call()
        torch.cuda.synchronize()
    took = {event.key: event.device_time_total if on_gpu else event.cpu_time_total for event in profile.key_averages()}
    return {part: took.get(f"mla_backend::{op}", 0.0) * 1e-6 / PROFILED for part, op in PARTS.items()}


def measure(case: Case, loaded: set[str], rounds: int) -> dict[str, Any]:
    """Checks and times one case: ours, and the peers."""
    torch.manual_seed(0)
    inputs = Inputs.random(case)
    (out, lse), exact = inputs.forward(inputs.lists), inputs.exact(inputs.lists)
    results = torch.empty_like(inputs.q), torch.empty_like(inputs.kv)
    given = inputs.q, inputs.kv, inputs.lists, out, lse, inputs.d_out
    how = {"scale": SCALE, "sink": inputs.sink, "d_q": results[0], "d_kv": results[1]}
    call = partial(mla_backend.sparse_mla_backward, *given, **how)
    calls = {name: partial(call, deterministic=name == "ours") for name in ("ours", "atomic")}
    ours = {name: timing.Candidate([call], results, lambda: check(results, exact)) for name, call in calls.items()}
    found = timing.measure(ours, {name: partial(cudnn, inputs, exact) for name in loaded}, rounds, timing.Burst)
    try:
        found["parts"] = profiled(calls["ours"])
    except RuntimeError as error:  # whatever is wrong with the profiler, what was timed counts
        found["parts"], found["failed"]["profile"] = {}, timing.first_line(error)
    return {"useful_flops": 2 * case.heads * inputs.lists.numel() * (3 * WIDTH + 2 * 512), **found}


def add_options(parser: argparse.ArgumentParser) -> None:
    kernels.add_cases(parser, "backward", cases())
    kernels.add_ends(parser, 8)


def run(options: argparse.Namespace) -> int:
    chosen = kernels.asked_for(options, "backward", cases())
    opt.require_gpu()
    found = {"cudnn": timing.version_of(CUDNN, "nvidia-cudnn-frontend")}
    return kernels.measure_cases(options, "backward", chosen, measure, found)
