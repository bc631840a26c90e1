"""A drop-in for the `flash_mla` package: `import mla_backend.flash_mla as flash_mla`.

The package's functions, with their arguments and conventions, over this package's kernels. So they also run on a CPU,
for any number of heads, and with any cache of `mla_backend.FORMATS` where the package insists on FP8. `out` and
`base2_lse` are additions.

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
from mla_backend.arguments import named, require_count, require_optional_tensors, require_tensors
from mla_backend.cache import convert_indices
from mla_backend.formats import CacheFormat, format_of

HEAD_DIM_V = attention.VALUE_DIM
DECODE_NAMES = {
    "cache": "k_cache",
    "sink": "attn_sink",
    "scale": "softmax_scale",
    "extra_cache": "extra_k_cache",
    "extra_indices": "extra_indices_in_kvcache",
}
"""The arguments of `sparse_attention` as `flash_mla_with_kvcache` calls them."""


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
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None
    enable_batch_invariant: bool = False


def get_mla_metadata(
    *args: Any, enable_batch_invariant: bool = False, **kwargs: Any
) -> tuple[FlashMLASchedMeta, None] | tuple[Tensor, Tensor]:
    """How the work is split, for `flash_mla_with_kvcache`.

    The newest version of the package ignores its arguments and returns an empty FlashMLASchedMeta and None. The first
    call to `flash_mla_with_kvcache` fills it. So does this function, with no arguments or any.

    The exception are the arguments of the package's version of September 2025, in their order or by name:
    cache_seqlens int32 `[b]`, num_q_tokens_per_head_k (s_q * num_heads_q // num_heads_k), num_heads_k=1, and for sparse
    attention num_heads_q, is_fp8_kvcache and topk. Its callers copy both results into tensors of their own. They get
    the plan, int32 `[parts, 8]`, and int32 `[b + 1]`, the number of parts of all requests before each one.

    Args:
        enable_batch_invariant: give a token the same bits whatever else is in the batch, by never splitting its list.
    """
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
    require_count("num_q_tokens_per_head_k", num_q_tokens_per_head_k, at_least=1)
    _require_one_kv_head("num_heads_k", num_heads_k)
    if cache_seqlens.dim() != 1:
        raise ValueError(f"cache_seqlens must be int32 [b]; got {list(cache_seqlens.shape)}")
    if num_heads_q is None:
        num_heads_q = num_q_tokens_per_head_k  # in attention over whole sequences the plan is not used
    require_count("num_heads_q", num_heads_q, at_least=1)
    if num_q_tokens_per_head_k % num_heads_q:
        raise ValueError(
            f"num_q_tokens_per_head_k must be a multiple of num_heads_q ({num_heads_q}); got {num_q_tokens_per_head_k}"
        )
    requests, s_q = cache_seqlens.shape[0], num_q_tokens_per_head_k // num_heads_q
    tokens = requests * s_q
    if topk is None:
        longest = torch.iinfo(torch.int32).max
        with named(topk_length="cache_seqlens"):
            table = attention.plan(
                tokens,
                longest,
                topk_length=cache_seqlens.repeat_interleave(s_q),
                num_heads=num_heads_q,
                batch_invariant=batch_invariant,
            )
    else:
        table = attention.plan(
            tokens, topk, num_heads=num_heads_q, device=cache_seqlens.device, batch_invariant=batch_invariant
        )
    table.made_for = tokens, topk, batch_invariant  # a call uses the table only if it agrees with all of these
    return table, _splits_before(table, requests, s_q)


def _splits_before(table: Tensor, requests: int, s_q: int) -> Tensor:
    """int32 `[requests + 1]`: the parts of all requests before each one. A worker that begins inside a token adds a
    part to that token."""
    begins_inside = (table[:, 2] > 0) & (table[:, 1] > table[:, 0])
    parts = torch.ones(requests * s_q + 1, dtype=torch.int32, device=table.device)
    parts.index_add_(0, table[:, 0].clamp(max=requests * s_q), begins_inside.int())
    before = parts[:-1].view(requests, s_q).sum(1).cumsum(0)
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
        q: bf16 `[b, s_q, h_q, head_dim]`, of the cache's head_dim.
        k_cache: `[blocks, block_size, 1, width]`. The package's own are 656 bytes wide (head_dim 576) or 584 bytes
            (head_dim 512, blocks padded to a multiple of 576 bytes); bf16 ones are 576 or 512 wide.
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
    require_optional_tensors(indices=indices, out=out, **sparse_only)
    _require_queries(q, out, _require_paged("k_cache", k_cache, is_fp8_kvcache))
    if extra_k_cache is not None:
        _require_paged("extra_k_cache", extra_k_cache, is_fp8_kvcache)
    _require_value_dim(head_dim_v, "head_dim_v")
    b, s_q, h_q, head_dim = q.shape
    extra_slots = _per_query(extra_indices_in_kvcache, "extra_indices_in_kvcache", b, s_q)
    extra_lengths = _per_token(extra_topk_length, "extra_topk_length", b, s_q)
    if indices is not None:
        if causal:
            raise ValueError("causal must be False with indices, which say themselves what a token sees; got True")
        slots, lengths = _per_query(indices, "indices", b, s_q), _per_token(topk_length, "topk_length", b, s_q)
    else:
        if given := [name for name, value in sparse_only.items() if value is not None]:
            raise ValueError(f"{given[0]} must be None without indices; got a tensor")
        slots, lengths = _whole_sequences(block_table, cache_seqlens, b, s_q, k_cache.shape[1], causal)

    batch_invariant = enable_batch_invariant or _asked_for_batch_invariance(tile_scheduler_metadata)
    config = _config_of(q, k_cache, causal, is_fp8_kvcache, batch_invariant, indices, **sparse_only)
    plan = _plan_for(tile_scheduler_metadata, num_splits, config, slots, lengths, extra_slots, extra_lengths)
    # tokens of one request, or with requests next to each other, are a view of out; others are copied there
    flat_out = None if out is None else out.squeeze(1) if s_q == 1 else out.flatten(0, 1)
    with named(**DECODE_NAMES):
        result, lse = attention.sparse_attention(
            q.flatten(0, 1),
            k_cache,
            slots,
            scale=head_dim**-0.5 if softmax_scale is None else softmax_scale,
            topk_length=lengths,
            sink=attn_sink,
            extra_cache=extra_k_cache,
            extra_indices=extra_slots,
            extra_topk_length=extra_lengths,
            plan=plan,
            batch_invariant=batch_invariant,
            out=flat_out,
        )
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        tile_scheduler_metadata.tile_scheduler_metadata, tile_scheduler_metadata.config = plan, config
        tile_scheduler_metadata.have_initialized = True
    if out is not None and result.data_ptr() != out.data_ptr():
        out.copy_(result.view_as(out))
    lse = _as_the_package_has_it(lse, base2_lse).view(b, s_q, h_q).transpose(1, 2).contiguous()
    return result.view(b, s_q, h_q, HEAD_DIM_V) if out is None else out, lse


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
    _require_value_dim(d_v, "d_v")
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
        dQ `[s_q, h_q, head_dim]` and dKV `[s_kv, 1, head_dim]`, bf16, of the same bits every time.
    """
    require_tensors(q=q, kv=kv, o=o, dO=dO, indices=indices, lse=lse)
    require_optional_tensors(topk_length=topk_length)
    _require_value_dim(d_v, "d_v")
    require_count("q_start_index_s", q_start_index_s)
    _require_one_list(kv, indices)
    slots = indices.squeeze(1)
    if q_start_index_s > 0:
        position = torch.arange(q_start_index_s, q_start_index_s + len(slots), device=slots.device).unsqueeze(1)
        slots = torch.where(slots <= position, slots, -1)
    with named(scale="sm_scale", out="o", d_out="dO"), torch.no_grad():
        d_q, d_kv, _ = training.sparse_mla_backward(
            q,
            kv.squeeze(1),
            slots,
            o,
            lse / math.log2(math.e) if base2_lse else lse,
            dO,
            scale=q.shape[-1] ** -0.5 if sm_scale is None else sm_scale,
            topk_length=topk_length,
        )
    return d_q, d_kv.unsqueeze(1)


def _require_one_list(kv: Tensor, indices: Tensor) -> None:
    if kv.dim() != 3 or kv.shape[1] != 1:
        raise ValueError(f"kv must be bfloat16 [s_kv, 1, 576 or 512]; got {list(kv.shape)}")
    if indices.dim() != 3 or indices.shape[1] != 1:
        raise ValueError(f"indices must be int32 [s_q, 1, topk]; got {list(indices.shape)}")


def _as_the_package_has_it(lse: Tensor, base2: bool) -> Tensor:
    if base2:
        lse = lse * math.log2(math.e)
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _require_one_kv_head(name: str, heads: int) -> None:
    if heads != 1:
        raise ValueError(f"{name} must be 1, as MLA has one KV head; got {heads}")


def _require_value_dim(value: int, name: str) -> None:
    if value != HEAD_DIM_V:
        raise ValueError(f"{name} must be {HEAD_DIM_V}; got {value}")


def _require_paged(name: str, cache: Tensor, is_fp8: bool) -> CacheFormat:
    """The format of a cache of the package's shape."""
    if cache.dim() != 4:
        raise ValueError(f"{name} must be [blocks, block_size, 1, width]; got {list(cache.shape)}")
    _require_one_kv_head(f"{name}.shape[2]", cache.shape[2])
    with named(cache=name):
        rows = format_of(cache)
    if rows.quantised != is_fp8:
        raise ValueError(f"is_fp8_kvcache must agree with {name}; got {is_fp8} for {rows.name}")
    return rows


def _require_queries(q: Tensor, out: Tensor | None, rows: CacheFormat) -> None:
    number = str(rows.number).removeprefix("torch.")
    if q.dtype != rows.number or q.dim() != 4 or q.shape[-1] != rows.head_dim:
        raise ValueError(
            f"q must be {number} [b, s_q, h_q, {rows.head_dim}] with {rows.name} rows in k_cache; "
            f"got {q.dtype} {list(q.shape)}"
        )
    if out is not None and out.shape != (*q.shape[:3], HEAD_DIM_V):
        b, s_q, h_q, _ = q.shape
        raise ValueError(f"out must be {number} [b={b}, s_q={s_q}, h_q={h_q}, 512]; got {list(out.shape)}")


def _per_query(indices: Tensor | None, name: str, b: int, s_q: int) -> Tensor | None:
    """Index lists `[b, s_q, topk]` as `[b * s_q, topk]`."""
    if indices is None:
        return None
    if indices.dim() != 3 or indices.shape[:2] != (b, s_q):
        raise ValueError(f"{name} must be int32 [b={b}, s_q={s_q}, topk]; got {list(indices.shape)}")
    return indices.flatten(0, 1)


def _per_token(lengths: Tensor | None, name: str, b: int, s_q: int) -> Tensor | None:
    """Lengths `[b]` as `[b * s_q]`."""
    if lengths is None:
        return None
    if lengths.shape != (b,):
        raise ValueError(f"{name} must be int32 [b={b}]; got {list(lengths.shape)}")
    return lengths if s_q == 1 else lengths.repeat_interleave(s_q)


def _whole_sequences(
    block_table: Tensor | None, cache_seqlens: Tensor | None, b: int, s_q: int, block_size: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention over whole sequences as index lists `[b * s_q, longest]`, and how much of each is read."""
    require_tensors(block_table=block_table, cache_seqlens=cache_seqlens)
    if block_table.dim() != 2 or block_table.shape[0] != b or cache_seqlens.shape != (b,):
        raise ValueError(
            f"block_table and cache_seqlens must be int32 [b={b}, max_blocks] and [b={b}]; "
            f"got {list(block_table.shape)} and {list(cache_seqlens.shape)}"
        )
    if cache_seqlens.dtype != torch.int32:
        raise ValueError(f"cache_seqlens must be int32 [b={b}]; got {cache_seqlens.dtype}")
    device = block_table.device
    longest = block_table.shape[1] * block_size
    positions = torch.arange(longest, dtype=torch.int32, device=device).expand(b * s_q, longest).contiguous()
    requests = torch.arange(b, dtype=torch.int32, device=device).repeat_interleave(s_q)
    slots, _ = convert_indices(positions, block_table, requests, block_size)
    hidden = torch.arange(s_q - 1, -1, -1, dtype=torch.int32, device=device) if causal else 0
    lengths = (cache_seqlens.unsqueeze(1) - hidden).expand(b, s_q)
    return slots, lengths.flatten()


def _config_of(
    q: Tensor,
    k_cache: Tensor,
    causal: bool,
    is_fp8_kvcache: bool,
    batch_invariant: bool,
    indices: Tensor | None,
    attn_sink: Tensor | None,
    extra_k_cache: Tensor | None,
    extra_indices_in_kvcache: Tensor | None,
    topk_length: Tensor | None,
    extra_topk_length: Tensor | None,
) -> FlashMLASchedMeta.Config:
    return FlashMLASchedMeta.Config(
        b=q.shape[0],
        s_q=q.shape[1],
        h_q=q.shape[2],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        is_fp8_kvcache=is_fp8_kvcache,
        topk=None if indices is None else indices.shape[-1],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
        has_topk_length=topk_length is not None,
        has_extra_topk_length=extra_topk_length is not None,
        enable_batch_invariant=batch_invariant,
    )


def _asked_for_batch_invariance(metadata: FlashMLASchedMeta | Tensor) -> bool:
    """Whether `get_mla_metadata` was asked for it."""
    if isinstance(metadata, Tensor):
        return getattr(metadata, "made_for", (0, 0, False))[2]
    return getattr(metadata, "enable_batch_invariant", False)


def _plan_for(
    metadata: FlashMLASchedMeta | Tensor,
    num_splits: Tensor | None,
    config: FlashMLASchedMeta.Config,
    slots: Tensor,
    lengths: Tensor | None,
    extra_slots: Tensor | None,
    extra_lengths: Tensor | None,
) -> Tensor | None:
    if isinstance(metadata, Tensor):
        # a plan of September 2025 is for one list of topk slots a token; for everything else one is made anew
        plain = lengths is None and extra_slots is None
        wanted = config.b * config.s_q, config.topk, config.enable_batch_invariant
        return metadata if plain and getattr(metadata, "made_for", None) == wanted else None
    if not isinstance(metadata, FlashMLASchedMeta):
        raise TypeError(
            "tile_scheduler_metadata must be the first of what get_mla_metadata returned; "
            f"got {type(metadata).__name__}"
        )
    if num_splits is not None:
        raise ValueError("num_splits must be None with a FlashMLASchedMeta; got a tensor")
    if not metadata.have_initialized:
        return attention.plan(
            config.b * config.s_q,
            slots.shape[1],
            topk_length=lengths,
            num_heads=config.h_q,
            extra_topk=config.extra_topk or 0,
            extra_topk_length=extra_lengths,
            batch_invariant=config.enable_batch_invariant,
            device=slots.device,
        )
    if metadata.config != config:
        changed = [
            f"{name} was {was}, is {now}"
            for (name, was), now in zip(vars(metadata.config).items(), vars(config).values(), strict=True)
            if was != now
        ]
        raise ValueError("tile_scheduler_metadata must be new when shapes change: " + "; ".join(changed))
    return metadata.tile_scheduler_metadata
