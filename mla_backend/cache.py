"""Writing and reading the paged cache, and turning positions into slots."""

import torch
from torch import Tensor

from mla_backend import library  # noqa: F401  (registers the ops)
from mla_backend.arguments import call, require_count, require_optional_tensors, require_tensors
from mla_backend.formats import STAGED, format_number, format_of


def cache_write(
    kv_c: Tensor,
    k_pe: Tensor | None,
    cache: Tensor,
    slots: Tensor,
    *,
    power_of_two: bool = False,
    format: str | None = None,
    scale: float = 1.0,
) -> None:
    """Writes tokens into a paged cache, quantising as the cache's format wants it.

    Args:
        kv_c: `[N, latent]`, the latent values, of any strides whose last is 1: fp32, or bf16 (fp16 for a cache of
            that). latent is 512, and 448 for fp8_model1.
        k_pe: the same dtype, `[N, 64]` or `[N, 1, 64]`, the rope values. None for formats without rope.
        cache: as in `sparse_attention`; the tokens' slots of it are overwritten.
        slots: int64 or int32 `[N]`. A token whose slot is negative or past the end is skipped. If two tokens name
            one slot, it may end up with parts of both.
        power_of_two: round the scales of fp8_ds_mla up to powers of two, as other formats' scales always are.
        format: the cache's format, a name in `FORMATS`; by default what its dtype and width say.
        scale: of fp8_tensor_576 and fp8_tensor_512: what is stored is divided by it.

    A group of latent values gets the scale amax / 448. In a group with an infinity ordinary numbers become 0; NaN stays
    NaN and changes nothing else. docs/formats.md has the details.
    """
    require_optional_tensors(k_pe=k_pe)
    if k_pe is not None and k_pe.dim() == 3 and k_pe.shape[1] == 1:
        k_pe = k_pe.squeeze(1)
    number = format_number(format, "format")
    call(torch.ops.mla_backend.cache_write.default, kv_c, k_pe, cache, slots, power_of_two, number, scale)


def cache_gather(
    cache: Tensor, slots: Tensor, *, format: str | None = None, scale: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Reads rows of a paged cache, dequantised.

    Args:
        cache: as in `sparse_attention`.
        slots: int64 or int32 `[N]`.
        format, scale: as in `cache_write`.
        out: where to write, bf16 (fp16 for a cache of that) `[N, head_dim]`.

    Returns:
        bf16 or fp16 `[N, head_dim]`, 576 or 512 values: latent, then rope; zeros where the slot is not in the cache.
    """
    require_tensors(cache=cache, slots=slots)
    number = format_number(format, "format")
    if out is None:
        rows = format_of(cache, format)
        out = torch.empty((slots.numel(), rows.head_dim), dtype=rows.number, device=cache.device)
    call(torch.ops.mla_backend.cache_gather.default, cache, slots, number, scale, out)
    return out


def stage_rows(
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    staged_table: Tensor | None = None,
    format: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Copies the fp8_ds_mla rows of requests, converted as the GPU kernel for more than 32 heads multiplies them.

    That kernel converts a row each time a token attends to it. If a prefill reads each row often, converting it once is
    faster. `sparse_attention` of more than 32 heads gives the same bits with either cache, if both calls have one plan
    and that kernel.

    Args:
        cache: fp8_ds_mla rows, as in `sparse_attention`.
        block_table: int32 `[R, max_blocks]`, each request's blocks; blocks that are not in the cache are passed over.
        lengths: int32 `[R]`, how many rows of each request to copy.
        staged_table: int32 `[R, max_blocks]`, which block of the result each one becomes, if any; by default the blocks
            of all requests one after the other, so that row i of request r is slot r * max_blocks * block_size + i.
            With it `convert_indices` makes slots of the result.
        format: as in `cache_write`.
        out: where to write, `[blocks, block_size, 1153]` as `STAGED.new_cache` makes it. Needed with staged_table.

    Returns:
        The staged rows. Blocks and rows that no request has keep what they held.
    """
    require_tensors(cache=cache, block_table=block_table, lengths=lengths)
    require_optional_tensors(staged_table=staged_table)
    number = format_number(format, "format")
    if out is None:
        if staged_table is not None:
            raise ValueError("out must be given with staged_table; got None")
        format_of(cache, format)
        block_size = cache.shape[1] if cache.dim() > 1 and cache.shape[1] > 0 else 1  # else the op refuses the cache
        out = STAGED.new_cache(block_table.numel(), block_size, cache.device)
    call(torch.ops.mla_backend.stage_rows.default, cache, block_table, lengths, staged_table, number, out)
    return out


def convert_indices(
    positions: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    block_size: int,
    *,
    compact: bool = False,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Turns the positions that an indexer picked in each token's own sequence into physical slots.

    Args:
        positions: int32 `[T, topk]`; negative ones and ones past the block table's end have no slot.
        block_table: int32 `[R, max_blocks]`, each request's blocks; a negative block has no slots.
        request_ids: int32 `[T]`, the row of the block table that a token uses; one outside of it has no slots.
        block_size: slots in a block.
        compact: valid slots first, in their order, then -1, so that the counts can serve as `topk_length`.
        ranks, rank, interleave: of context parallelism: runs of `interleave` positions go to the ranks round robin, and
            the block table is that of the positions which this rank keeps. Others have no slot.
        slots, counts: where to write, int32 `[T, topk]` and int32 `[T]`.

    Returns:
        slots, -1 where there is none, and how many of each token's are valid.
    """
    require_tensors(positions=positions)
    for name, number in dict(block_size=block_size, ranks=ranks, interleave=interleave).items():
        require_count(name, number, at_least=1)
    require_count("rank", rank)
    if slots is None:
        slots = torch.empty_like(positions, memory_format=torch.contiguous_format)
    if counts is None:
        counts = torch.empty(positions.shape[:1], dtype=torch.int32, device=positions.device)
    call(
        torch.ops.mla_backend.convert_indices.default,
        positions,
        block_table,
        request_ids,
        block_size,
        compact,
        ranks,
        rank,
        interleave,
        slots,
        counts,
    )
    return slots, counts
