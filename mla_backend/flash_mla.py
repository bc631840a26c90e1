"""A drop-in for the `flash_mla` package: `import mla_backend.flash_mla as flash_mla`.

The package's functions, with their arguments and conventions, over this package's kernels. So they also run on a CPU,
for any number of heads, and with any cache of `mla_backend.FORMATS` where the package insists on FP8. `out` and
`base2_lse` are additions.

`flash_mla_with_kvcache_fp8` and `get_mla_metadata_dense_fp8` are vLLM's additions to the package. The
`flash_attn_varlen` functions are in `mha.py`, over other libraries.

How it differs from `mla_backend.sparse_attention`: requests and their tokens have a dimension each, the lse of a row
with nothing to attend to is +inf, and lse is [b, h, s_q].
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_backend import attention, training
from mla_backend.arguments import (
    described,
    dtype_name,
    named,
    require_bools,
    require_count,
    require_optional_tensors,
    require_own_memory,
    require_tensors,
)
from mla_backend.dense import dense_attention
from mla_backend.formats import FORMATS, CacheFormat, format_of
from mla_backend.mha import flash_attn_varlen_func as flash_attn_varlen_func
from mla_backend.mha import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from mla_backend.mha import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from mla_backend.plan import Plan
from mla_backend.plan import plan as make_plan

HEAD_DIM_V = attention.VALUE_DIM
DECODE_NAMES = {
    "cache": "k_cache",
    "sink": "attn_sink",
    "scale": "softmax_scale",
    "extra_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache",
    "lengths": "cache_seqlens",
    "batch_invariant": "enable_batch_invariant",
}
"""The arguments of `sparse_attention` and `dense_attention` as `flash_mla_with_kvcache` calls them."""


@dataclass
class FlashMLASchedMeta:
    """What `get_mla_metadata()` returns: a plan that the first call with it makes, and later calls reuse.

    Reuse it only while the shapes and the values of cache_seqlens, topk_length and extra_topk_length stay the same.
    """

    @dataclass
    class Config:
        """The shapes that the plan was made for."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        has_topk_length: bool
        has_extra_topk_length: bool
        enable_batch_invariant: bool

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Plan | None = None
    num_splits: Tensor | None = None
    enable_batch_invariant: bool = False


class PlanTable(Tensor):
    """What `get_mla_metadata` returned in September 2025: the table of a plan, int32 `[ctas, 8]`. A copy is a plain
    tensor, for which a call makes a plan of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    plan: Plan
    made_for: tuple[int, int | None, bool]
    """Tokens, topk and batch invariance: a call uses the plan only if it agrees with all of these."""

    @staticmethod
    def of(plan: Plan, *made_for: Any) -> "PlanTable":
        table = plan.table.as_subclass(PlanTable)
        table.plan, table.made_for = plan, made_for
        return table


def get_mla_metadata(
    *args: Any, enable_batch_invariant: bool = False, **kwargs: Any
) -> tuple[FlashMLASchedMeta, None] | tuple[Tensor, Tensor]:
    """How the work is split, for `flash_mla_with_kvcache`.

    The newest version of the package ignores its arguments and returns an empty FlashMLASchedMeta and None. The first
    call to `flash_mla_with_kvcache` fills it. So does this function, with no arguments or any.

    The exception are the arguments of the package's version of September 2025, in their order or by name:
    cache_seqlens int32 `[b]`, num_q_tokens_per_head_k (s_q * num_heads_q // num_heads_k), num_heads_k, and for sparse
    attention num_heads_q, is_fp8_kvcache and topk. Its callers copy both results into tensors of their own. They get
    the plan, int32 `[ctas, 8]`, and int32 `[b + 1]`, the number of splits of all requests before each one.

    Args:
        enable_batch_invariant: give a token the same bits whatever else is in the batch, by never splitting its list.
    """
    require_bools(enable_batch_invariant=enable_batch_invariant)
    if _is_of_september_2025(args, kwargs):
        return _metadata_of_september_2025(*args, **kwargs, batch_invariant=enable_batch_invariant)
    return FlashMLASchedMeta(enable_batch_invariant=enable_batch_invariant), None


def _is_of_september_2025(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether these are arguments of that version, and all that it needs."""
    try:
        given = inspect.signature(_metadata_of_september_2025).bind(*args, **kwargs).arguments
    except TypeError:
        return False
    tells_tokens_from_heads = given.get("topk") is None or given.get("num_heads_q") is not None
    return isinstance(given["cache_seqlens"], Tensor) and tells_tokens_from_heads


def _metadata_of_september_2025(
    cache_seqlens: Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    require_tensors(cache_seqlens=cache_seqlens)
    require_bools(is_fp8_kvcache=is_fp8_kvcache)
    require_count("num_q_tokens_per_head_k", num_q_tokens_per_head_k, at_least=1)
    require_count("num_heads_k", num_heads_k, at_least=1)
    if cache_seqlens.dim() != 1:
        raise ValueError(f"cache_seqlens must be int32 [b]; got {list(cache_seqlens.shape)}")
    requests = cache_seqlens.shape[0]
    if topk is None:
        with named(topk_length="cache_seqlens"):
            plan = make_plan(
                requests,
                attention.MAX_SLOTS,
                topk_length=cache_seqlens,
                num_heads=num_q_tokens_per_head_k,
                cache_format="fp8_tensor_576" if is_fp8_kvcache else "bf16",
                batch_invariant=batch_invariant,
            )
        return PlanTable.of(plan, requests, topk, batch_invariant), _splits_before(plan.table, requests, 1)
    _require_one_kv_head("num_heads_k", num_heads_k)
    require_count("num_heads_q", num_heads_q, at_least=1)
    if num_q_tokens_per_head_k % num_heads_q:
        raise ValueError(
            f"num_q_tokens_per_head_k must be a multiple of num_heads_q ({num_heads_q}); got {num_q_tokens_per_head_k}"
        )
    s_q = num_q_tokens_per_head_k // num_heads_q
    tokens = requests * s_q
    plan = make_plan(
        tokens,
        topk,
        num_heads=num_heads_q,
        cache_format=None if is_fp8_kvcache else "bf16",
        device=cache_seqlens.device,
        batch_invariant=batch_invariant,
    )
    return PlanTable.of(plan, tokens, topk, batch_invariant), _splits_before(plan.table, requests, s_q)


def _splits_before(table: Tensor, requests: int, s_q: int) -> Tensor:
    """int32 `[requests + 1]`: the splits of all requests before each one. A CTA that begins inside a token adds a
    split to that token."""
    begins_inside = (table[:, 2] > 0) & (table[:, 1] > table[:, 0])
    splits = torch.ones(requests * s_q + 1, dtype=torch.int32, device=table.device)
    splits.index_add_(0, table[:, 0].clamp(max=requests * s_q), begins_inside.int())
    before = splits[:-1].view(requests, s_q).sum(1).cumsum(0)
    return torch.nn.functional.pad(before, (1, 0)).int()


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    out: Tensor | None = None,
    *,
    enable_batch_invariant: bool = False,
    base2_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of s_q query tokens a request over a paged cache: sparse with `indices`, else over whole sequences.

    Args:
        q: bf16 (fp16 with a cache of that) `[b, s_q, h_q, head_dim]`, of the cache's head_dim.
        k_cache: `[blocks, block_size, 1, width]`. The package's own are 656 bytes wide (head_dim 576) or 584 bytes
            (head_dim 512, blocks padded to a multiple of 576 bytes); bf16 ones are 576 or 512 wide. Without indices
            `[blocks, block_size, h_k, width]`: each KV head serves h_q // h_k query heads, one after the other.
        block_table, cache_seqlens: int32 `[b, max_blocks]` and `[b]`, for attention over whole sequences.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: what `get_mla_metadata` returned.
        softmax_scale: head_dim ** -0.5 if left out.
        causal: a request's last query token sees its whole sequence, the one before it one less, and so on. Not
            with `indices`, which say themselves what is seen.
        is_fp8_kvcache: must agree with k_cache.
        indices, extra_indices_in_kvcache: int32 `[b, s_q, topk]`, slots of k_cache and extra_k_cache. The latter may
            have another block size.
        attn_sink: fp32 `[h_q]`.
        topk_length, extra_topk_length: int32 `[b]`.
        out: where to write, of q's dtype `[b, s_q, h_q, 512]`.
        enable_batch_invariant: give a token the same bits whatever else is in the batch. Also on if what
            `get_mla_metadata` returned was made for it (and is no copy).
        base2_lse: return lse to base 2, as early versions of the package did.

    Returns:
        out `[b, s_q, h_q, 512]` and lse fp32 `[b, h_q, s_q]`, +inf where there was nothing to attend to.
    """
    sparse_only = {
        "attn_sink": attn_sink,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "topk_length": topk_length,
        "extra_topk_length": extra_topk_length,
    }
    require_tensors(q=q, k_cache=k_cache)
    read = {"block_table": block_table, "cache_seqlens": cache_seqlens, "indices": indices, **sparse_only}
    require_optional_tensors(out=out, **read)
    flags = {"enable_batch_invariant": enable_batch_invariant, "base2_lse": base2_lse}
    require_bools(causal=causal, is_fp8_kvcache=is_fp8_kvcache, **flags)
    dense = indices is None
    rows = _require_paged("k_cache", k_cache, is_fp8_kvcache, any_kv_heads=dense)
    _require_queries(q, out, rows, k_cache.shape[2])
    if extra_k_cache is not None:
        _require_paged("extra_k_cache", extra_k_cache, is_fp8_kvcache)
    _require_value_dim("head_dim_v", head_dim_v)
    if softmax_scale is None:
        softmax_scale = attention.default_scale(q)
    batch_invariant = enable_batch_invariant or _asked_for_batch_invariance(tile_scheduler_metadata)
    b, s_q, h_q, _ = q.shape
    if out is not None and (s_q > 1 or k_cache.shape[2] > 1):  # else the op sees what was given, and not a part or copy
        require_own_memory(out=out, q=q, k_cache=k_cache, **read)
    slots = _per_query(indices, "indices", b, s_q)
    extra_slots = _per_query(extra_indices_in_kvcache, "extra_indices_in_kvcache", b, s_q)
    config = FlashMLASchedMeta.Config(
        b=b,
        s_q=s_q,
        h_q=h_q,
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=None if slots is None else slots.shape[1],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_slots is None else extra_slots.shape[1],
        has_topk_length=topk_length is not None,
        has_extra_topk_length=extra_topk_length is not None,
        enable_batch_invariant=batch_invariant,
    )
    if dense:
        if given := [name for name, value in sparse_only.items() if value is not None]:
            raise ValueError(f"{given[0]} must be None without indices; got a tensor")
        require_tensors(block_table=block_table, cache_seqlens=cache_seqlens)
        if block_table.dim() != 2:
            raise ValueError(f"block_table must be int32 [b={b}, max_blocks]; got {list(block_table.shape)}")
        most = min(block_table.shape[1] * k_cache.shape[1], attention.MAX_SLOTS)
        with named(topk_length="cache_seqlens"):
            plan = _plan_for(tile_scheduler_metadata, num_splits, config, rows, q.device, most, cache_seqlens)
        result, lse = _dense(q, k_cache, block_table, cache_seqlens, softmax_scale, causal, plan, batch_invariant, out)
    else:
        if causal:
            raise ValueError("causal must be False with indices, which say themselves what a token sees; got True")
        lengths = _per_token(topk_length, "topk_length", b, s_q)
        extra_lengths = _per_token(extra_topk_length, "extra_topk_length", b, s_q)
        most = slots.shape[1]
        plan = _plan_for(tile_scheduler_metadata, num_splits, config, rows, q.device, most, lengths, extra_lengths)
        # tokens of one request, or with requests next to each other, are a view of out; others are copied there
        flat_out = None if out is None else out.squeeze(1) if s_q == 1 else out.flatten(0, 1)
        with named(**DECODE_NAMES):
            result, lse = attention.sparse_attention(
                q.flatten(0, 1),
                k_cache,
                slots,
                scale=softmax_scale,
                topk_length=lengths,
                sink=attn_sink,
                extra_cache=extra_k_cache,
                extra_indices=extra_slots,
                extra_topk_length=extra_lengths,
                plan=plan,
                batch_invariant=batch_invariant,
                out=flat_out,
            )
        if out is None:
            result = result.view(b, s_q, h_q, HEAD_DIM_V)
        elif result.data_ptr() != out.data_ptr():
            out.copy_(result.view_as(out))
        lse = lse.view(b, s_q, h_q).transpose(1, 2).contiguous()
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        tile_scheduler_metadata.tile_scheduler_metadata, tile_scheduler_metadata.config = plan, config
        tile_scheduler_metadata.have_initialized = True
    return result if out is None else out, _as_the_package_has_it(lse, base2_lse)


def _dense(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    scale: float,
    causal: bool,
    plan: Tensor | None,
    batch_invariant: bool,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Whole sequences; each KV head with its group of query heads, as a view of everything."""
    kv_heads = k_cache.shape[2]
    group = q.shape[2] // kv_heads
    if out is None:
        out = torch.empty((*q.shape[:3], HEAD_DIM_V), dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
    for head in range(kv_heads):
        heads = slice(head * group, (head + 1) * group)
        with named(**DECODE_NAMES):
            dense_attention(
                q[:, :, heads],
                k_cache[:, :, head],
                block_table,
                cache_seqlens,
                scale=scale,
                causal=causal,
                plan=plan,
                batch_invariant=batch_invariant,
                out=out[:, :, heads],
                lse=lse[:, heads],
            )
    return out, lse


def get_mla_metadata_dense_fp8(
    cache_seqlens: Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[Tensor, Tensor]:
    """How the work of `flash_mla_with_kvcache_fp8` is split; see `get_mla_metadata` for arguments and results."""
    return _metadata_of_september_2025(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def flash_mla_with_kvcache_fp8(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over whole sequences whose cache and queries are e4m3 with a scale each.

    Queries and weights are bf16 in our kernels. Scales that are powers of two lose nothing; others round a query, and
    a result once more, to bf16.

    Args:
        q: e4m3 `[b, s_q, h_q, 576]`.
        k_cache: e4m3 (or bytes) `[blocks, block_size, h_k, 576]`.
        descale_q, descale_k: fp32 of one number; what q and k_cache are multiplied with. 1 if left out.
        The others are as for `flash_mla_with_kvcache`.

    Returns:
        out bf16 `[b, s_q, h_q, 512]` and lse fp32 `[b, h_q, s_q]`, +inf where there was nothing to attend to.
    """
    require_tensors(q=q, k_cache=k_cache)
    if q.dtype != torch.float8_e4m3fn:
        raise ValueError(f"q must be float8_e4m3fn [b, s_q, h_q, 576]; got {q.dtype} {list(q.shape)}")
    if k_cache.shape[-1:] != (FORMATS["fp8_tensor_576"].width,):
        raise ValueError(f"k_cache must be float8_e4m3fn [blocks, block_size, h_k, 576]; got {list(k_cache.shape)}")
    scales = {"descale_q": descale_q, "descale_k": descale_k}
    require_optional_tensors(**scales)
    queries = q.float()
    for name, scale in scales.items():
        if scale is None:
            continue
        if scale.dtype != torch.float32 or scale.numel() != 1 or scale.device != q.device:
            raise ValueError(
                f"{name} must be float32 of one number on {q.device}; "
                f"got {scale.dtype} {list(scale.shape)} on {scale.device}"
            )
        queries *= scale.view(())
    out, lse = flash_mla_with_kvcache(
        queries.bfloat16(),
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits if isinstance(tile_scheduler_metadata, Tensor) else None,
        softmax_scale,
        causal,
        is_fp8_kvcache=True,
    )
    # the op takes a cache's scale as a number, which would have to be waited for
    return out if descale_k is None else out.mul_(descale_k.view(())), lse


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    indexer_topk: int = 0,
    out: Tensor | None = None,
    *,
    enable_batch_invariant: bool = False,
    base2_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sparse attention for prefill, over rows that are not paged.

    Args:
        q: bf16 `[s_q, h_q, head_dim]`.
        kv: bf16 `[s_kv, 1, head_dim]`, 576 or 512 wide (or quantised rows, as for `flash_mla_with_kvcache`).
        indices: int32 `[s_q, 1, topk]`, rows of kv; -1 or s_kv and more for none.
        sm_scale, attn_sink: as in `flash_mla_with_kvcache`. topk_length: int32 `[s_q]`.
        indexer_topk: also return the lse over the first so many entries of each list.
        out: where to write, bf16 `[s_q, h_q, 512]`.
        enable_batch_invariant: give a token the same bits whatever else is in the batch.
        base2_lse: return max_logits and lse to base 2, as early versions of the package did.

    Returns:
        out `[s_q, h_q, 512]`, max_logits and lse fp32 `[s_q, h_q]` (-inf and +inf where there was nothing to attend
        to) and, with indexer_topk, the lse over those entries.
    """
    require_tensors(q=q, kv=kv, indices=indices)
    require_optional_tensors(topk_length=topk_length, out=out)
    require_bools(base2_lse=base2_lse)
    _require_value_dim("d_v", d_v)
    require_count("indexer_topk", indexer_topk)
    _require_one_list(kv, indices)
    slots = indices.squeeze(1)

    def attend(topk: int, out: Tensor | None) -> tuple[Tensor, ...]:
        with named(cache="kv", sink="attn_sink", scale="sm_scale"):
            return attention.sparse_attention(
                q,
                kv,
                slots[:, :topk],
                scale=sm_scale,
                topk_length=topk_length,
                sink=attn_sink,
                batch_invariant=enable_batch_invariant,
                out=out,
                return_max_logits=True,
            )

    result, lse, max_logits = attend(slots.shape[1], out)
    if base2_lse:
        max_logits = max_logits * math.log2(math.e)
    results = result, max_logits, _as_the_package_has_it(lse, base2_lse)
    if not indexer_topk:
        return results
    return *results, _as_the_package_has_it(attend(min(indexer_topk, slots.shape[1]), None)[1], base2_lse)


def flash_mla_sparse_bwd(
    q: Tensor,
    kv: Tensor,
    o: Tensor,
    dO: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    topk_length: Tensor | None = None,
    q_start_index_s: int = 0,
    *,
    base2_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """The gradients of `flash_mla_sparse_fwd` (without sinks), with the arguments that forks of the package have.

    Args:
        q: bf16 `[s_q, h_q, head_dim]`, of 1 to 128 heads.
        kv: bf16 `[s_kv, 1, head_dim]`, 576 or 512 wide.
        o, lse: what `flash_mla_sparse_fwd` returned, `[s_q, h_q, 512]` and `[s_q, h_q]`.
        dO: the gradient with respect to o.
        indices, topk_length: as there.
        sm_scale: head_dim ** -0.5 if left out.
        q_start_index_s: if more than 0, the position of the first query: then rows after a query's own position are
            skipped. With 0 the lists alone say what is seen, as in `flash_mla_sparse_fwd`.
        base2_lse: lse is to base 2.

    Returns:
        dQ `[s_q, h_q, head_dim]` and dKV `[s_kv, 1, head_dim]`, bf16; the same bits every time where
        `torch.use_deterministic_algorithms` is on.
    """
    require_tensors(q=q, kv=kv, o=o, dO=dO, indices=indices, lse=lse)
    require_optional_tensors(topk_length=topk_length)
    require_bools(base2_lse=base2_lse)
    _require_value_dim("d_v", d_v)
    require_count("q_start_index_s", q_start_index_s)
    _require_one_list(kv, indices)
    slots = (up_to_own_position(kv, indices, q_start_index_s) if q_start_index_s > 0 else indices).squeeze(1)
    with named(scale="sm_scale", out="o", d_out="dO"), torch.no_grad():
        d_q, d_kv, _ = training.sparse_mla_backward(
            q,
            kv.squeeze(1),
            slots,
            o,
            lse / math.log2(math.e) if base2_lse else lse,
            dO,
            scale=attention.default_scale(q) if sm_scale is None else sm_scale,
            topk_length=topk_length,
        )
    return d_q, d_kv.unsqueeze(1)


def _require_value_dim(name: str, value: object) -> None:
    require_count(name, value)
    attention.require_value_dim(name, value)


def up_to_own_position(kv: Tensor, indices: Tensor, q_start_index_s: int) -> Tensor:
    """Lists `[s_q, 1, topk]` of queries from this position on, with -1 for rows after a query's own."""
    require_tensors(kv=kv, indices=indices)
    require_count("q_start_index_s", q_start_index_s)
    _require_one_list(kv, indices)
    first = min(q_start_index_s, len(kv))  # from there on all rows are seen
    position = torch.arange(first, first + len(indices), device=indices.device).view(-1, 1, 1)
    return torch.where(indices <= position, indices, -1)


def _require_one_list(kv: Tensor, indices: Tensor) -> None:
    if kv.dim() != 3 or kv.shape[1] != 1:
        raise ValueError(f"kv must be bfloat16 [s_kv, 1, 576 or 512]; got {list(kv.shape)}")
    if indices.dtype != torch.int32 or indices.dim() != 3 or indices.shape[1] != 1:
        raise ValueError(f"indices must be int32 [s_q, 1, topk]; got {described(indices)}")


def _as_the_package_has_it(lse: Tensor, base2: bool) -> Tensor:
    if base2:
        lse = lse * math.log2(math.e)
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _require_one_kv_head(name: str, heads: int) -> None:
    if heads != 1:
        raise ValueError(f"{name} must be 1, as MLA has one KV head; got {heads}")


def _require_paged(name: str, cache: Tensor, is_fp8: bool, any_kv_heads: bool = False) -> CacheFormat:
    """The format of a cache of the package's shape."""
    if cache.dim() != 4 or cache.shape[2] == 0:
        heads = "h_k" if any_kv_heads else "1"
        raise ValueError(f"{name} must be [blocks, block_size, {heads}, width]; got {list(cache.shape)}")
    if not any_kv_heads:
        _require_one_kv_head(f"{name}.shape[2]", cache.shape[2])
    with named(cache=name):
        rows = format_of(cache)
    if rows.fp8 != is_fp8:
        raise ValueError(f"is_fp8_kvcache must agree with {name}; got {is_fp8} for {rows.name}")
    return rows


def _require_queries(q: Tensor, out: Tensor | None, rows: CacheFormat, kv_heads: int) -> None:
    number = dtype_name(rows.number)
    if q.dtype != rows.number or q.dim() != 4 or q.shape[-1] != rows.head_dim:
        raise ValueError(
            f"q must be {number} [b, s_q, h_q, {rows.head_dim}] with {rows.name} rows in k_cache; "
            f"got {q.dtype} {list(q.shape)}"
        )
    if not q.shape[2] or q.shape[2] % kv_heads:
        raise ValueError(f"q must be of a multiple of k_cache's {kv_heads} heads; got {q.shape[2]}")
    if out is not None and out.shape != (*q.shape[:3], HEAD_DIM_V):
        b, s_q, h_q, _ = q.shape
        raise ValueError(f"out must be {number} [b={b}, s_q={s_q}, h_q={h_q}, 512]; got {list(out.shape)}")


def _per_query(indices: Tensor | None, name: str, b: int, s_q: int) -> Tensor | None:
    """Index lists `[b, s_q, topk]` as `[b * s_q, topk]`."""
    if indices is None:
        return None
    if indices.dtype != torch.int32 or indices.dim() != 3 or indices.shape[:2] != (b, s_q):
        raise ValueError(f"{name} must be int32 [b={b}, s_q={s_q}, topk]; got {described(indices)}")
    return indices.flatten(0, 1)


def _per_token(lengths: Tensor | None, name: str, b: int, s_q: int) -> Tensor | None:
    """Lengths `[b]` as `[b * s_q]`."""
    if lengths is None:
        return None
    if lengths.shape != (b,):
        raise ValueError(f"{name} must be int32 [b={b}]; got {list(lengths.shape)}")
    return lengths if s_q == 1 else lengths.repeat_interleave(s_q)


def _asked_for_batch_invariance(metadata: FlashMLASchedMeta | Tensor) -> bool:
    """Whether `get_mla_metadata` was asked for it."""
    if isinstance(metadata, Tensor):
        return isinstance(metadata, PlanTable) and metadata.made_for[2]
    return getattr(metadata, "enable_batch_invariant", False)


def _plan_for(
    metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None,
    config: FlashMLASchedMeta.Config,
    rows: CacheFormat,
    device: torch.device,
    slots: int,
    lengths: Tensor | None,
    extra_lengths: Tensor | None = None,
) -> Plan | None:
    dense = config.topk is None
    tokens = config.b if dense else config.b * config.s_q
    if isinstance(metadata, Tensor):
        # a plan of September 2025 is for whole sequences, or one list of topk slots a token; others are made anew
        plain = dense or (lengths is None and config.extra_topk is None)
        wanted = tokens, config.topk, config.enable_batch_invariant
        return metadata.plan if plain and isinstance(metadata, PlanTable) and metadata.made_for == wanted else None
    if not isinstance(metadata, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata must be the first of what get_mla_metadata returned; "
            f"got {type(metadata).__name__}"
        )
    if num_splits is not None:
        raise ValueError("num_splits must be None with a FlashMLASchedMeta; got a tensor")
    if not metadata.have_initialized:
        with named(batch_invariant="enable_batch_invariant"):
            return make_plan(
                tokens,
                slots,
                topk_length=lengths,
                num_heads=config.s_q * config.h_q // config.h_k if dense else config.h_q,
                cache_format=rows.name,
                extra_topk=config.extra_topk or 0,
                extra_topk_length=extra_lengths,
                batch_invariant=config.enable_batch_invariant,
                device=device,
            )
    if metadata.config != config:
        changed = [
            f"{name} was {was}, is {now}"
            for (name, was), now in zip(vars(metadata.config).items(), vars(config).values(), strict=True)
            if was != now
        ]
        raise ValueError("tile_scheduler_metadata must be new when shapes change: " + "; ".join(changed))
    return metadata.tile_scheduler_metadata
