"""What all layers of a forward pass share, so that each of it is computed once."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kv_cache.keys import KeyPlaces
from mla_backend.cache import convert_indices
from mla_backend.engine.batch import Batch

Selection = tuple[Tensor, Tensor]
"""Slots int32 `[T, topk]` and how many of each row count, int32 `[T]`."""


@dataclass
class Step:
    """Made anew for each pass: within a captured graph its tensors have to be the graph's own."""

    batch: Batch
    positions: Tensor
    """int64 `[T]`."""
    turns: Tensor
    """complex64 `[T, rope_dim / 2]`: what `rotate` multiplies with."""
    topk: int
    """Tokens that a token attends to, at most."""
    block_size: int
    plan: Tensor | None = None
    """The attention's."""
    _places: KeyPlaces | None = None
    _turns_of_keys: Tensor | None = None

    @cached_property
    def longest(self) -> int:
        """Of the contexts."""
        return max(self.batch.context_lengths, default=0)

    @cached_property
    def lengths(self) -> Tensor:
        """int32 `[T]`: how many positions of its request each token sees, up to its own."""
        return (self.positions + 1).int()

    @property
    def scores(self) -> bool:
        """Whether anybody has to choose: a context no longer than the top-k is taken as a whole."""
        return self.longest > self.topk

    @cached_property
    def scored(self) -> Tensor:
        """int32 `[T]`: how many positions each token's choice is among; none where there is no choice."""
        return self.lengths * (self.lengths > self.topk)

    @cached_property
    def everything(self) -> Selection:
        """What is attended to where nobody has to choose: each token's context."""
        positions = torch.arange(self.longest, dtype=torch.int32, device=self.positions.device)
        return self.slots_of(torch.where(positions < self.lengths.unsqueeze(1), positions, -1))

    def slots_of(self, chosen: Tensor) -> Selection:
        """Positions int32 `[T, n]`, negative where there is none, as a selection."""
        batch = self.batch
        return convert_indices(chosen, batch.block_table, batch.request_ids, self.block_size, compact=True)

    def key_places(self, cache: Tensor) -> KeyPlaces:
        """Where the indexer's keys of these tokens go, in the caches of all layers, as they have one shape."""
        if self._places is None:
            self._places = KeyPlaces(cache, self.batch.slots, some=self.batch.keeps_some)
        return self._places

    def turns_of_keys(self, places: KeyPlaces) -> Tensor:
        """`turns`, rearranged as the keys are."""
        if self._turns_of_keys is None:
            self._turns_of_keys = self.turns[places.source]
        return self._turns_of_keys
