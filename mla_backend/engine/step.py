"""What all layers of a forward pass share. Each part is computed once."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mla_backend.cache import convert_indices
from mla_backend.engine.batch import TokenBatch
from mla_backend.keys import KeyAddresses

Selection = tuple[Tensor, Tensor]
"""Slots int32 `[T, topk]`, and how many of each row are valid, int32 `[T]`."""


@dataclass
class EngineStep:
    """Made anew for each pass, as the tensors of a captured graph have to be its own."""

    batch: TokenBatch
    positions: Tensor
    """int64 `[T]`."""
    rotations: Tensor
    """complex64 `[T, rope_dim / 2]`: what `rotate` multiplies with."""
    topk: int
    """The most tokens that a token attends to."""
    block_size: int
    plan: Tensor | None = None
    """Of the attention."""
    _key_addresses: KeyAddresses | None = None
    _key_rotations: Tensor | None = None

    @cached_property
    def longest(self) -> int:
        """The length of the longest context."""
        return max(self.batch.context_lengths, default=0)

    @cached_property
    def lengths(self) -> Tensor:
        """int32 `[T]`: how many positions of its request each token sees, up to its own."""
        return (self.positions + 1).int()

    @property
    def scores(self) -> bool:
        """Whether any token has to choose. A context no longer than the top-k is taken as a whole."""
        return self.longest > self.topk

    @cached_property
    def everything(self) -> Selection:
        """The selection where no token has to choose: each token's context."""
        positions = torch.arange(self.longest, dtype=torch.int32, device=self.positions.device)
        return self.slots_of(torch.where(positions < self.lengths.unsqueeze(1), positions, -1))

    def slots_of(self, chosen: Tensor) -> Selection:
        """Positions int32 `[T, n]`, negative for none, as a selection."""
        batch = self.batch
        return convert_indices(chosen, batch.block_table, batch.request_ids, self.block_size, compact=True)

    def key_addresses(self, cache: Tensor) -> KeyAddresses:
        """The addresses of these tokens' indexer keys. The caches of all layers have one shape, so they share them."""
        if self._key_addresses is None:
            self._key_addresses = KeyAddresses(cache, self.batch.slots, any_valid=self.batch.keeps_some)
        return self._key_addresses

    def key_rotations(self, addresses: KeyAddresses) -> Tensor:
        """`rotations`, rearranged as the keys are."""
        if self._key_rotations is None:
            self._key_rotations = self.rotations[addresses.source]
        return self._key_rotations
