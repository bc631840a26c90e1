"""The bytes of the blocks, of all layers: the latent cache and, where the model has an indexer, its keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kv_cache.arguments import require_a, require_count, require_device


@runtime_checkable
class RowFormat(Protocol):
    """What a format says of the bytes that it keeps, as those in `mla_backend.FORMATS` and `mla_backend.KEY_FORMATS`
    do."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a cache tensor."""

    @property
    def width(self) -> int:
        """Last dimension of a cache tensor."""

    def page_bytes(self, block_size: int) -> int:
        """Bytes from one block of so many tokens to the next. Some formats pad their blocks."""


@dataclass(frozen=True)
class Layout:
    """What a block holds.

    Args:
        layers: of the model; each has a cache.
        block_size: tokens in a block.
        latent: the format of the latent cache, one of `mla_backend.FORMATS`.
        keys: the format of the indexer's keys, one of `mla_backend.KEY_FORMATS`, or None without an indexer.
    """

    layers: int
    block_size: int
    latent: RowFormat
    keys: RowFormat | None = None

    def __post_init__(self) -> None:
        require_count("layers", self.layers, at_least=1)
        require_count("block_size", self.block_size, at_least=1)
        if not isinstance(self.latent, RowFormat):
            raise TypeError(f"latent must be one of mla_backend.FORMATS; got {self.latent!r}")
        if self.keys is not None and not isinstance(self.keys, RowFormat):
            raise TypeError(f"keys must be one of mla_backend.KEY_FORMATS or None; got {self.keys!r}")

    @property
    def formats(self) -> list[RowFormat]:
        """The formats of the caches that a layer has."""
        return [self.latent] if self.keys is None else [self.latent, self.keys]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers, padding included."""
        return self.layers * sum(f.page_bytes(self.block_size) for f in self.formats)

    def blocks_in(self, capacity: int) -> int:
        """How many blocks fit into so many bytes."""
        require_count("capacity", capacity)
        return capacity // self.block_bytes


class Storage:
    """`blocks` blocks of a layout, zeros at first.

    A layer's blocks lie together, as the kernels that read one layer at a time want it.

    Attributes:
        latent: `[layers, blocks, block_size, width]`; `latent[i]` is what `sparse_attention` takes as a cache. Blocks
            may be padded: see `RowFormat.page_bytes`.
        keys: the same for the indexer's keys, or None. `keys[i]` is what `index_scores` takes.
    """

    def __init__(self, layout: Layout, blocks: int, device: torch.device | str = "cpu"):
        require_a(Layout, layout=layout)
        require_count("blocks", blocks, at_least=1)
        require_device("device", device)
        self.layout, self.blocks, self.device = layout, blocks, torch.device(device)
        self.parts = [self._blocks_of_words(f) for f in layout.formats]
        """Every cache as words, `[layers, blocks, words]`: for whoever copies blocks without reading them."""
        typed = [
            part.view(f.dtype)[..., : layout.block_size * f.width].unflatten(-1, (layout.block_size, f.width))
            for part, f in zip(self.parts, layout.formats, strict=True)
        ]
        self.latent: Tensor = typed[0]
        self.keys: Tensor | None = typed[1] if layout.keys is not None else None

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies blocks onto others, in all layers, on the current stream. All are read before any is written."""
        if len(sources) != len(targets):
            raise ValueError(f"targets must be {len(sources)} blocks, as sources are; got {len(targets)}")
        source_ids, target_ids = self.ids(sources), self.ids(targets)
        for part in self.parts:
            part.index_copy_(1, target_ids, part.index_select(1, source_ids))

    def ids(self, blocks: Sequence[int]) -> Tensor:
        """Blocks as an int64 tensor on the device, without waiting for it."""
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.blocks:
            raise ValueError(f"blocks must be 0 to {self.blocks - 1}; got {list(blocks)}")
        ids = torch.tensor(blocks, dtype=torch.int64)
        return ids.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else ids

    def _blocks_of_words(self, fmt: RowFormat) -> Tensor:
        """Zeros, of the largest integer dtype whose size divides a block's: a GPU copies 8 bytes as fast as one."""
        block_bytes = fmt.page_bytes(self.layout.block_size)
        word = torch.int64 if block_bytes % 8 == 0 else torch.int32
        shape = self.layout.layers, self.blocks, block_bytes // word.itemsize
        return torch.zeros(shape, dtype=word, device=self.device)
