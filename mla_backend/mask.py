"""torch's BlockMask as lists of slots, a part of the queries at a time."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from mla_backend import library  # noqa: F401  (registers the ops)
from mla_backend.arguments import call, described, dtype_name, require_count, require_tensors

UNSEEN, FULL = -1, -2
"""In the table of blocks, instead of the number of a block with bits: csrc/include/mla/mask.h."""
MASK_VALUES = 2**22
"""Of a mask_mod, computed at once: its temporaries of 8 bytes take 32 MiB each."""
LIST_ENTRIES = 2**23
"""Of the lists of a part: 32 MiB, and 128 MiB while the backward sorts them. Up to 64K positions a part still has
enough queries to keep a GPU busy."""
LIST_QUERIES = 64
"""A part has these at least, and a multiple of them."""
MOST_POSITIONS = 2**30
"""And queries: what mask_lists takes."""
INDEX_TYPES = (torch.int32, torch.int64)
GROUP_QUERIES = 64
"""Queries of a request in dense attention, at most."""


@dataclass(frozen=True, eq=False)
class FlexMask:
    """A BlockMask as the ops read it, for any number of layers. `flex_mask` makes it."""

    blocks: Tensor
    """int32 `[B, H, q_blocks, kv_blocks]`: UNSEEN, FULL, or the number of a block in `bits`."""
    bits: Tensor
    """int32 `[numbered blocks, q_block, words]`: the positions that a block's queries see, 32 a word."""
    full: Tensor
    """int32 `[B, H, groups, most]`: the full blocks of each group of queries, ascending, and then 0."""
    full_lengths: Tensor
    """int32 `[B, H, groups]`: positions in them."""
    sizes: Sequence[int]
    """Queries, positions, queries and positions of a block, and queries of a group. That is 0 where it is not worth
    while to attend to full blocks apart."""
    parts: Sequence[int]
    """Into which lists are cut: first token, number of tokens and longest list of each part."""
    partial_parts: Sequence[int]
    """The same for lists without the full blocks."""

    def cut(self, batches: int, list_full: bool) -> Iterator[tuple[int, int, int]]:
        """The parts of this many batch elements."""
        parts = self.parts if list_full else self.partial_parts
        repeats, tokens = batches // self.blocks.shape[0], self.blocks.shape[0] * self.blocks.shape[1] * self.sizes[0]
        for repeat in range(repeats):
            for i in range(0, len(parts), 3):
                yield repeat * tokens + parts[i], parts[i + 1], parts[i + 2]

    def lists(
        self,
        first: int,
        count: int,
        topk: int,
        list_full: bool = True,
        block_table: Tensor | None = None,
        page_size: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Slots of what these tokens see, int32 `[count, topk]`, and how many."""
        queries, positions, q_block, kv_block, _ = self.sizes
        slots = torch.empty(count, topk, dtype=torch.int32, device=self.blocks.device)
        lengths = torch.empty(count, dtype=torch.int32, device=self.blocks.device)
        where = q_block, kv_block, queries, positions, first, list_full, block_table, page_size
        call(torch.ops.mla_backend.mask_lists.default, self.blocks, self.bits, *where, slots, lengths)
        return slots, lengths


_MASKS: weakref.WeakKeyDictionary[BlockMask, tuple[Callable, FlexMask]] = weakref.WeakKeyDictionary()


def flex_mask(block_mask: BlockMask) -> FlexMask:
    """A mask as the ops read it. `flex_mla` makes it by itself at a BlockMask's first use, and keeps it with the
    BlockMask; under `torch.compile` and in a captured graph it has to be made before. Waits for the GPU.

    Args:
        block_mask: of any mask_mod and block size. Its mask_mod is called for blocks that are neither full nor empty,
            and what it shows is kept as bits: one for each query and position of such a block.
    """
    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            "block_mask must be a torch.nn.attention.flex_attention.BlockMask, as create_block_mask makes it; "
            f"got {type(block_mask).__name__}"
        )
    known = _MASKS.get(block_mask)
    if known is None or known[0] is not block_mask.mask_mod:
        with torch.inference_mode(False), torch.no_grad():  # tensors made in inference could not be kept for a backward
            known = _MASKS[block_mask] = block_mask.mask_mod, _read(block_mask)
    return known[1]


def _read(block_mask: BlockMask) -> FlexMask:
    _require_fields(block_mask)
    (queries, positions), (q_block, kv_block) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    q_blocks, kv_blocks = -(-queries // q_block), -(-positions // kv_block)
    seen = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, q_blocks, kv_blocks)
    full = torch.zeros_like(seen)
    if block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, q_blocks, kv_blocks)
    seen, full = (x.clone() for x in torch.broadcast_tensors(seen, full))
    if positions % kv_block:  # the last block is cut off, and dense attention would not notice
        seen[..., -1] |= full[..., -1]
        full[..., -1] = False
    partial = seen & ~full
    numbers = partial.flatten().cumsum(0).view(partial.shape) - 1
    blocks = torch.where(full, FULL, torch.where(partial, numbers, UNSEEN)).int()
    sizes = queries, positions, q_block, kv_block, 0
    bits = _bits(block_mask.mask_mod, partial.nonzero(), sizes)
    nothing = blocks.new_empty(0)
    mask = FlexMask(blocks, bits, nothing, nothing, sizes, (), ())

    tokens = blocks.shape[0] * blocks.shape[1] * queries
    every, of_bits = (mask.lists(0, tokens, 0, list_full)[1].cpu() for list_full in (True, False))
    parts = {"parts": _parts(every), "partial_parts": _parts(of_bits)}
    if 2 * of_bits.sum(dtype=torch.int64) > every.sum(dtype=torch.int64):
        return replace(mask, **parts)
    return replace(mask, **parts, **_groups(full, sizes))


def _require_fields(block_mask: BlockMask) -> None:
    """That they are what torch makes: it lets anybody set them."""
    for name, least in (("seq_lengths", 0), ("BLOCK_SIZE", 1)):
        pair = getattr(block_mask, name)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"block_mask must be of a {name} of two ints; got {pair!r}")
        for size in pair:
            require_count(f"block_mask.{name}", size, at_least=least)
            if size > MOST_POSITIONS:
                raise ValueError(f"block_mask.{name} must be {MOST_POSITIONS} or less; got {size}")
    if not callable(block_mask.mask_mod):
        raise TypeError(f"block_mask must be of a mask_mod to call; got {type(block_mask.mask_mod).__name__}")
    queries, first = block_mask.seq_lengths[0], block_mask.kv_indices
    q_blocks = -(-queries // block_mask.BLOCK_SIZE[0])
    for prefix in ("", "full_"):
        counts, indices = (getattr(block_mask, f"{prefix}{name}") for name in ("kv_num_blocks", "kv_indices"))
        if prefix and indices is None:
            continue
        require_tensors(**{f"block_mask.{prefix}kv_num_blocks": counts, f"block_mask.{prefix}kv_indices": indices})
        fits = indices.dim() == 4 and all(
            one == other or 1 in (one, other) for one, other in zip(indices.shape[:2], first.shape[:2], strict=True)
        )
        if not fits or indices.dtype not in INDEX_TYPES or indices.shape[2] < q_blocks:
            raise ValueError(
                f"block_mask must be of {prefix}kv_indices int32 [B, H, {q_blocks}, blocks] for {queries} queries; "
                f"got {described(indices)}"
            )
        if counts.dtype not in INDEX_TYPES or counts.shape != indices.shape[:3]:
            raise ValueError(
                f"block_mask must be of {prefix}kv_num_blocks int32 {list(indices.shape[:3])}; got {described(counts)}"
            )
        for name, x in (("kv_num_blocks", counts), ("kv_indices", indices)):
            if x.device != first.device or x.is_meta:
                raise ValueError(f"block_mask must be of one device; got {prefix}{name} on {x.device}")


def _groups(full: Tensor, sizes: Sequence[int]) -> dict[str, Tensor | Sequence[int]]:
    """The fields about groups of queries: of one row of blocks each, so that they share full blocks."""
    queries, _, q_block, kv_block, _ = sizes
    if q_block >= queries:
        group = min(queries, GROUP_QUERIES)
    else:
        group = max(n for n in range(1, GROUP_QUERIES + 1) if q_block % n == 0)
    counts = full.sum(-1, dtype=torch.int32)
    most = int(counts.max()) if counts.numel() else 0
    if group < 2 or most == 0 or full.shape[0] * full.shape[1] * (queries // group + 1) * most > LIST_ENTRIES:
        return {}
    numbers = torch.argsort(full.int(), dim=-1, descending=True, stable=True)[..., :most].int()
    numbers = torch.where(torch.arange(most, device=full.device) < counts.unsqueeze(-1), numbers, 0)
    row = torch.arange(0, queries, group, device=full.device) // q_block
    return {
        "full": numbers[:, :, row].contiguous(),
        "full_lengths": counts[:, :, row] * kv_block,
        "sizes": (*sizes[:4], group),
    }


def _listed(counts: Tensor, indices: Tensor, q_blocks: int, kv_blocks: int) -> Tensor:
    """bool `[B, H, q_blocks, kv_blocks]`: which blocks the first `counts` of the indices name."""
    counts, indices = counts[:, :, :q_blocks], indices[:, :, :q_blocks]
    valid = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    valid = valid & (indices >= 0) & (indices < kv_blocks)
    named_blocks = torch.where(valid, indices, kv_blocks).long()
    listed = torch.zeros(*indices.shape[:-1], kv_blocks + 1, dtype=torch.bool, device=indices.device)
    return listed.scatter_(-1, named_blocks, True)[..., :kv_blocks]


def _bits(mask_mod: Callable, blocks: Tensor, sizes: Sequence[int]) -> Tensor:
    """What a mask_mod shows of some blocks: int32 `[blocks, q_block, words]`. blocks is `[blocks, 4]`: batch element,
    head, and the numbers of the blocks of queries and positions."""
    queries, positions, q_block, kv_block, _ = sizes
    rows, columns = min(q_block, queries), min(kv_block, positions)
    words = -(-columns // 32)
    bits = torch.empty(len(blocks), rows, words, dtype=torch.int32, device=blocks.device)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=blocks.device)
    strip = min(rows, max(1, MASK_VALUES // max(columns, 1)))
    together = max(1, MASK_VALUES // max(strip * columns, 1))
    for first in range(0, len(blocks), together):
        batch, head, q_number, kv_number = blocks[first : first + together].unbind(1)
        for row in range(0, rows, strip):

            def shown(i, _, query, position, batch=batch, head=head, row=row, q_number=q_number, kv_number=kv_number):
                query, position = query + q_number[i] * q_block + row, position + kv_number[i] * kv_block
                inside = (query < queries) & (position < positions)
                query, position = query.clamp(max=queries - 1), position.clamp(max=positions - 1)
                seen = mask_mod(batch[i], head[i], query, position)
                if not isinstance(seen, bool) and getattr(seen, "dtype", None) != torch.bool:
                    given = dtype_name(seen.dtype) if isinstance(seen, Tensor) else type(seen).__name__
                    raise ValueError(f"block_mask must be of a mask_mod that gives bools; got {given}")
                return inside & seen

            seen = create_mask(shown, len(batch), 1, min(strip, rows - row), columns, blocks.device).squeeze(1)
            seen = torch.nn.functional.pad(seen, (0, 32 * words - columns)).view(torch.uint8)
            packed = (seen.unflatten(-1, (-1, 8)) * powers).sum(-1, dtype=torch.uint8)
            bits[first : first + together, row : row + strip] = packed.view(torch.int32)
    return bits


def _parts(lengths: Tensor) -> tuple[int, ...]:
    """Cuts lists of these lengths into parts of LIST_ENTRIES, or of LIST_QUERIES if those have more."""
    tokens = len(lengths)
    if tokens == 0:
        return ()
    padded = torch.nn.functional.pad(lengths, (0, -tokens % LIST_QUERIES))
    parts, begin, topk = [], 0, 0
    for group, longest in enumerate(padded.view(-1, LIST_QUERIES).amax(1).tolist()):
        first, longer = group * LIST_QUERIES, max(topk, longest)
        if first > begin and (first + LIST_QUERIES - begin) * longer > LIST_ENTRIES:
            parts += [begin, first - begin, topk]
            begin, longer = first, longest
        topk = longer
    return (*parts, begin, tokens - begin, topk)
