"""The peers' kernels: which cases each one takes, and how it is called.

FlashMLA and FlashAttention 3 are called as vLLM calls them, but without it: each library registers ops with torch.
FlashInfer is a Python package that compiles its kernel with nvcc at the first call. `Peer.prepare` does what serving
does once a step, outside of any timing: it reshapes lists and makes schedules.
"""

import ctypes
import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serving_benchmarks.ops import peers, timing

LATENT = 512
FP8_TENSOR_SCALE = 2.0**-8  # what rows with one scale for a whole cache are divided by


@dataclass
class SparseProblem:
    """One batch. q `[T, H, 576 or 512]`, indices int32 `[T, topk]` with the valid ones first, counts int32 `[T]`."""

    q: Tensor
    indices: Tensor
    counts: Tensor
    scale: float
    queries: int | None  # query tokens of each request, where all have equally many
    more: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `sparse_attention`: sinks, a second cache and its lists, formats, a scale."""


@dataclass
class DenseProblem:
    """One batch of whole sequences. q `[B, S, H, 576]`, table int32 `[B, blocks of each]`, lengths int32 `[B]`."""

    q: Tensor
    table: Tensor
    lengths: Tensor
    scale: float
    longest: int


@dataclass
class Prepared:
    """A call, and its result `[T, H, 512]` (dense FlashMLA's is `[B, S, H, 512]`)."""

    call: Callable[[], object]
    out: Tensor
    pad: Callable[[], object] | None = None  # what a layer does before each call: it pads heads
    rounds: bool = False  # queries and P to e4m3, so that the result is less exact

    def layer(self) -> None:
        """The call as a layer of a model makes it."""
        if self.pad is not None:
            self.pad()
        self.call()


@dataclass(frozen=True)
class Peer:
    library: str  # what `load` has to find
    cache: str  # format of the cache that it reads: of another cache, it gets a copy
    prepare: Callable[[SparseProblem, Tensor], Prepared]
    takes: Callable[[SparseProblem, bool], bool] = lambda problem, decode: True
    """Whether vLLM would call it for a problem. The flag says whether that is decode."""


def flashmla_decode(problem: SparseProblem, cache: Tensor, one_batch: bool = False) -> Prepared:
    """FlashMLA's decode kernel on FP8 rows of 656 or 584 bytes. It runs 64 or 128 heads, so fewer are padded. With less
    than 32 heads and 656 bytes vLLM passes all tokens as one request (`one_batch`), otherwise requests are a dimension
    of their own. The tokens of a request have one length in the second cache."""
    tokens, heads, _ = problem.q.shape
    shape = (1, tokens) if one_batch else (tokens // problem.queries, problem.queries)
    q, pad = _padded(problem.q, 64 if heads <= 64 else 128)
    q = q.view(*shape, -1, problem.q.shape[2])
    out = torch.empty((*q.shape[:3], LATENT), dtype=q.dtype, device=q.device)
    sink, extra, lists, lengths = map(problem.more.get, ("sink", "extra_cache", "extra_indices", "extra_topk_length"))
    if sink is not None:
        sink = torch.nn.functional.pad(sink, (0, q.shape[2] - heads))
    if extra is not None:
        extra, lists = extra.view(torch.uint8).unsqueeze(-2), lists.view(*shape, -1)
        lengths = lengths if lengths is None else lengths.view(shape)[:, 0].contiguous()
    arguments = q, cache.view(torch.uint8).unsqueeze(-2), problem.indices.view(*shape, -1), None, sink
    rest = extra, lists, lengths, LATENT, problem.scale, out
    attend = torch.ops._flashmla_C.sparse_decode_fwd
    schedule = attend(*arguments, None, None, *rest)[2:4]
    return Prepared(lambda: attend(*arguments, *schedule, *rest), out.view(tokens, -1, LATENT)[:, :heads], pad)


def flashmla_prefill(problem: SparseProblem, cache: Tensor) -> Prepared:
    """FlashMLA's prefill kernel on a BF16 cache. Heads are padded to a multiple of 64."""
    tokens, heads = problem.q.shape[:2]
    q, pad = _padded(problem.q, -(-heads // 64) * 64)
    out = torch.empty((*q.shape[:2], LATENT), dtype=q.dtype, device=q.device)
    rows, indices = cache.view(-1, 1, cache.shape[-1]), problem.indices.view(tokens, 1, -1)
    arguments = q, rows, indices, problem.scale, LATENT, None, None, out
    return Prepared(lambda: torch.ops._flashmla_C.sparse_prefill_fwd(*arguments), out[:, :heads], pad)


def fa3(problem: SparseProblem, cache: Tensor) -> Prepared:
    """FlashAttention 3 on a BF16 cache: every token is a request, its index list a block table of pages of one token.
    vLLM gives it no schedule and lets it choose the splits, so both are part of the call."""
    longest = problem.indices.shape[1]
    tokens = DenseProblem(problem.q.unsqueeze(1), problem.indices, problem.counts, problem.scale, longest)
    return _fa3(tokens, cache.view(-1, 1, 1, cache.shape[-1]), None)


def fa3_dense(problem: DenseProblem, cache: Tensor) -> Prepared:
    """FlashAttention 3 on a BF16 cache in pages. vLLM makes the schedule once a step."""
    requests, queries, heads, width = problem.q.shape
    about = requests, queries, problem.longest, heads, 1, width - LATENT, LATENT, problem.q.dtype, problem.lengths
    rest = _starts(problem), None, None, None, None, cache.shape[1], 0, True, -1, -1, False, 0, None, 0
    schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata(*about, *rest)
    return _fa3(problem, cache.unsqueeze(-2), schedule)


def flashmla_dense(problem: DenseProblem, cache: Tensor) -> Prepared:
    """FlashMLA's dense decode on a BF16 cache. vLLM makes the schedule once a step."""
    requests, queries, heads, _ = problem.q.shape
    out = torch.empty((requests, 1, queries * heads, LATENT), dtype=problem.q.dtype, device=problem.q.device)
    arguments = problem.q, cache.unsqueeze(-2), LATENT, problem.lengths, problem.table, problem.scale, True
    attend = torch.ops._flashmla_C.dense_decode_fwd
    schedule = attend(*arguments, None, None, out)[2:4]
    return Prepared(lambda: attend(*arguments, *schedule, out), out.view(requests, queries, heads, LATENT))


def flashmla_dense_fp8(problem: DenseProblem, cache: Tensor) -> Prepared:
    """FlashMLA's dense decode on rows of fp8_tensor_576. Queries and P are e4m3 too. It makes its own result."""
    requests, queries, heads, _ = problem.q.shape
    ops, one = torch.ops._flashmla_extension_C, torch.ones(1, device=problem.q.device)
    schedule = ops.get_mla_decoding_metadata_dense_fp8(problem.lengths, queries * heads, 1)
    q, rows = problem.q.to(torch.float8_e4m3fn), cache.view(torch.float8_e4m3fn).unsqueeze(-2)
    rest = LATENT, problem.lengths, problem.table, problem.scale, True, *schedule, one, one * FP8_TENSOR_SCALE
    out = torch.empty(requests, queries, heads, LATENT, dtype=problem.q.dtype, device=problem.q.device)
    return Prepared(lambda: out.set_(ops.fwd_kvcache_mla_fp8(q, rows, *rest)[0]), out, rounds=True)


def _starts(problem: DenseProblem) -> Tensor:
    """int32 `[B + 1]`: where each request's queries begin."""
    requests, queries = problem.q.shape[:2]
    return torch.arange(0, requests * queries + 1, queries, dtype=torch.int32, device=problem.q.device)


def _fa3(problem: DenseProblem, pages: Tensor, schedule: Tensor | None) -> Prepared:
    """With pages `[pages, tokens of a page, 1, 576]`."""
    q = problem.q.flatten(0, 1)
    latent, rope = q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous()
    out = torch.empty_like(latent)
    # fmt: off
    arguments = (
        rope, pages[..., LATENT:], pages[..., :LATENT],
        None, None,  # new k and v
        latent, out,
        _starts(problem), None, None,  # where each request's queries, keys and new keys start
        None, problem.lengths,  # how many of its queries and keys are used
        problem.q.shape[1], problem.longest,  # most queries and keys of a request
        problem.table, None, None,  # block table, batch index, padding on the left
        None, None, None,  # rotary embedding
        None, None, None,  # scales of FP8
        problem.scale, True, -1, -1, 0.0, True,  # causal, no window, no soft cap, rotary layout
        schedule, 0, None, 0,  # splits, packing and free SMs: its own choice
        None, 1, 0, None,  # sinks, context parallelism
    )
    # fmt: on
    return Prepared(lambda: torch.ops._vllm_fa3_C.fwd(*arguments), out)


def flashinfer(problem: SparseProblem, cache: Tensor) -> Prepared:
    """FlashInfer's MLA decode for SM90: every token is a request with pages of one token, as in vLLM. It reads 16-bit
    rows and FP8 rows with one scale, and plans from the lists' lengths on the host, once a step. Lists with padding are
    packed here, which is not timed."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata

    tokens, heads, _ = problem.q.shape
    device = problem.q.device
    valid = torch.arange(problem.indices.shape[1], device=device) < problem.counts.unsqueeze(1)
    query_starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    list_starts = torch.nn.functional.pad(problem.counts.cumsum(0, dtype=torch.int32), (1, 0))
    metadata = query_starts, list_starts, problem.indices[valid], problem.counts
    rows, scales = cache.view(-1, 1, cache.shape[-1]), {}
    if rows.dtype == torch.uint8:
        rows = rows.view(torch.float8_e4m3fn)
        scales = dict.fromkeys(("ckv_scale", "kpe_scale"), problem.more["cache_scale"])
    buffers = (torch.empty_like(tensor) for tensor in metadata)  # a graph reads these, plan() fills them
    named = dict(zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), buffers, strict=True))
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, use_cuda_graph=True, **named, backend="fa3")
    sizes = {"num_heads": heads, "head_dim_ckv": LATENT, "head_dim_kpe": rows.shape[-1] - LATENT, "page_size": 1}
    types = {"q_data_type": problem.q.dtype, "kv_data_type": rows.dtype}
    layouts = dict.fromkeys(("query_layout", "kv_cache_layout"), "split")
    about = {**sizes, **types, **layouts, "causal": False, "sm_scale": problem.scale}
    wrapper.plan(metadata=MLAPlanMetadata.csr(*metadata), **about)
    query = problem.q[..., :LATENT], problem.q[..., LATENT:]
    kv_cache = rows[..., :LATENT], rows[..., LATENT:]
    out = torch.empty((tokens, heads, LATENT), dtype=problem.q.dtype, device=device)
    return Prepared(lambda: wrapper.run(query=query, kv_cache=kv_cache, out=out, **scales), out)


def sglang_q8kv8(problem: SparseProblem, cache: Tensor) -> Prepared:
    """SGLang's FP8 prefill kernel on rows of fp8_tensor_576, also for decode. Queries have one scale as well. Padding
    heads to a multiple of 64 and rounding queries is not timed."""
    heads, topk = problem.q.shape[1], problem.indices.shape[1]
    q = torch.nn.functional.pad(problem.q.float(), (0, 0, 0, -heads % 64))
    scales = torch.tensor([q.abs().max() / 448, FP8_TENSOR_SCALE], device=q.device)
    out, lse_and_max = q.new_empty((*q.shape[:2], LATENT), dtype=torch.bfloat16), q.new_empty((2, *q.shape[:2]))
    tensors = (q / scales[0]).to(torch.float8_e4m3fn), cache, problem.indices, scales, out, lse_and_max
    sizes = *q.shape[:2], cache.shape[0] * cache.shape[1], topk
    attend, scale_log2 = peers.q8kv8().q8kv8, ctypes.c_float(problem.scale * math.log2(math.e))

    def call() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        attend(*(ctypes.c_void_p(each.data_ptr()) for each in tensors), *sizes, scale_log2, stream)

    return Prepared(call, out[:, :heads], rounds=True)


PEERS = {
    "flashmla_fp8_one_batch": Peer(
        "flashmla", "fp8_ds_mla", partial(flashmla_decode, one_batch=True), lambda problem, _: problem.q.shape[1] < 32
    ),
    "flashmla_fp8": Peer(
        "flashmla", "fp8_ds_mla", flashmla_decode, lambda problem, decode: decode and problem.queries is not None
    ),
    "flashmla_bf16": Peer("flashmla", "bf16", flashmla_prefill),
    "fa3_bf16": Peer("fa3", "bf16", fa3),
    "flashinfer_bf16": Peer("flashinfer", "bf16", flashinfer),
    "q8kv8": Peer("q8kv8", "fp8_tensor_576", sglang_q8kv8, lambda problem, _: problem.indices.shape[1] % 128 == 0),
}
"""By their names in result files."""
DENSE = {"flashmla": flashmla_dense, "fa3": fa3_dense}  # from a BF16 cache


def load(folder: Path | None, version: str) -> dict[str, str]:
    """Loads each peer's library, and returns its name and version, or why it is missing, as "missing: ...". FlashMLA
    and FA3 come from `folder`, or from an installed vllm if it is None."""
    found = {}
    if folder is None:
        installed = importlib.util.find_spec("vllm")
        if installed is not None and installed.origin is not None:
            folder, version = Path(installed.origin).parent, importlib.metadata.version("vllm")
    major = (torch.version.cuda or "").partition(".")[0]
    runtime = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "lib64" / f"libcudart.so.{major}"
    if runtime.is_file():  # some of the libraries look for it, and a torch that brings its own does not help
        ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    for name in peers.LIBRARIES:
        try:
            if folder is None:
                raise peers.PeerError("--peers names no folder, and vllm is not installed")
            torch.ops.load_library(peers.find(name, folder, version))
            found[name] = f"vllm {version}"
        except (peers.PeerError, OSError) as error:
            found[name] = f"missing: {error}"
    try:
        if torch.cuda.get_device_capability()[0] != 9:
            raise peers.PeerError("Q8KV8 is for Hopper")
        peers.q8kv8()
        found["q8kv8"] = f"sglang {importlib.metadata.version('sglang')}"
    except Exception as error:  # of any kind: it is optional
        found["q8kv8"] = f"missing: {timing.first_line(error)}"
    flashinfer = timing.version_of("flashinfer.mla", "flashinfer-python").replace("-python", "")  # as files have it
    return {**found, "flashinfer": flashinfer}


def _padded(q: Tensor, heads: int) -> tuple[Tensor, Callable[[], object] | None]:
    """Queries with more heads, and the copy that makes them: one kernel, where vLLM may also write zeros."""
    padded = torch.nn.functional.pad(q, (0, 0, 0, heads - q.shape[1])).contiguous()
    return padded, (lambda: padded[:, : q.shape[1]].copy_(q)) if heads > q.shape[1] else None
