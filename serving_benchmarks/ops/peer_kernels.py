"""The peers' kernels as vLLM calls them, without vLLM: each library registers its ops with torch, and that is enough.

A function here prepares one problem outside of any timing (heads padded, lists reshaped, schedules made, as far as vLLM
does so once a step) and returns the call to be timed, whose result stands in `out`.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from serving_benchmarks.ops import peers

LATENT = 512


@dataclass
class Problem:
    """One batch. q `[T, H, 576]`, slots int32 `[T, topk]` with the valid ones first, counts int32 `[T]`."""

    q: Tensor
    slots: Tensor
    counts: Tensor
    scale: float
    queries: int | None
    """Query tokens of each request, where all have equally many."""


@dataclass
class Prepared:
    """A call, and where its result of shape `[T, H, 512]` will be."""

    call: Callable[[], object]
    out: Tensor


def flashmla_decode(problem: Problem, cache: Tensor, one_batch: bool) -> Prepared:
    """FlashMLA's decode kernel on an FP8 cache: `flash_mla_with_kvcache(is_fp8_kvcache=True, indices=...)`.

    Runs 64 or 128 heads, so fewer are padded. vLLM makes the schedule once a step, for all layers. With fewer than 32
    heads it passes all tokens as those of one request (`one_batch`), otherwise requests are a dimension of their own.
    """
    tokens, heads, topk = *problem.q.shape[:2], problem.slots.shape[1]
    shape = (1, tokens) if one_batch else (tokens // problem.queries, problem.queries)
    q = _padded(problem.q, 64 if heads <= 64 else 128).view(*shape, -1, problem.q.shape[2])
    out = torch.empty((*q.shape[:3], LATENT), dtype=q.dtype, device=q.device)
    arguments = q, cache.view(torch.uint8).unsqueeze(-2), problem.slots.view(*shape, topk), None, None
    attend = torch.ops._flashmla_C.sparse_decode_fwd
    schedule = attend(*arguments, None, None, None, None, None, LATENT, problem.scale, out)[2:4]
    return Prepared(
        lambda: attend(*arguments, *schedule, None, None, None, LATENT, problem.scale, out),
        out.view(tokens, -1, LATENT)[:, :heads],
    )


def flashmla_prefill(problem: Problem, cache: Tensor) -> Prepared:
    """FlashMLA's prefill kernel on a BF16 cache: `flash_mla_sparse_fwd`. Heads are padded to a multiple of 64.

    With an FP8 cache vLLM first copies whole sequences into a BF16 workspace for it; that copy is not timed.
    """
    tokens, heads = problem.q.shape[:2]
    q = _padded(problem.q, -(-heads // 64) * 64)
    out = torch.empty((*q.shape[:2], LATENT), dtype=q.dtype, device=q.device)
    rows, slots = cache.view(-1, 1, cache.shape[-1]), problem.slots.view(tokens, 1, -1)
    return Prepared(
        lambda: torch.ops._flashmla_C.sparse_prefill_fwd(q, rows, slots, problem.scale, LATENT, None, None, out),
        out[:, :heads],
    )


def fa3(problem: Problem, cache: Tensor) -> Prepared:
    """FlashAttention 3 on a BF16 cache: every token a request, its list a block table of pages of one slot.

    vLLM gives it no schedule and lets it choose the splits, so both are part of the call.
    """
    tokens, heads, _ = problem.q.shape
    latent, rope = problem.q[..., :LATENT].contiguous(), problem.q[..., LATENT:].contiguous()
    rows = cache.view(-1, 1, 1, cache.shape[-1])
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=latent.device)
    out = torch.empty((tokens, heads, LATENT), dtype=latent.dtype, device=latent.device)
    # fmt: off
    arguments = (
        rope, rows[..., LATENT:], rows[..., :LATENT],
        None, None,  # new k and v
        latent, out,
        starts, None, None,  # where each request's queries, keys and new keys start
        None, problem.counts,  # how many of its queries and keys are used
        1, problem.slots.shape[1],  # the longest of either
        problem.slots, None, None,  # block table, batch index, padding on the left
        None, None, None,  # rotary embedding
        None, None, None,  # scales of FP8
        problem.scale, True, -1, -1, 0.0, True,  # causal, no window, no soft cap, rotary layout
        None, 0, None, 0,  # schedule, splits, packing and SMs kept free: its own choice
        None, 1, 0, None,  # sinks, context parallelism
    )
    # fmt: on
    return Prepared(lambda: torch.ops._vllm_fa3_C.fwd(*arguments), out)


def load(folder: Path | None, version: str) -> dict[str, str]:
    """Loads what there is of the peers, and says of each which version it is or why it is not there.

    Without a folder the package vllm is used if it is installed. Versions register their ops under one name, so a
    process can have one of them only.
    """
    if folder is None:
        installed = importlib.util.find_spec("vllm")
        if installed is not None and installed.origin is not None:
            folder, version = Path(installed.origin).parent, importlib.metadata.version("vllm")
    found = {}
    for name in peers.LIBRARIES:
        if folder is None:
            found[name] = "not installed"
            continue
        try:
            _load_library(peers.find(name, folder, version))
            found[name] = f"vllm {version}"
        except (peers.PeerError, OSError) as error:
            found[name] = f"not loaded: {error}"
    for name in ("flashinfer", "tilelang"):
        found[name] = "installed, but not measured" if importlib.util.find_spec(name) else "not installed"
    return found


def _load_library(path: Path) -> None:
    runtime = (
        Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
        / "lib64"
        / f"libcudart.so.{torch.version.cuda.split('.')[0]}"
    )
    if runtime.is_file():  # some of the libraries look for it, and a torch that brings its own does not help
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    torch.ops.load_library(path)


def _padded(q: Tensor, heads: int) -> Tensor:
    return torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1])).contiguous()
