"""Runs a model over what the scheduler decided."""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from kv_cache import Sequence, Storage
from mla_backend.engine.batch import LayerCache
from mla_backend.engine.graphs import DecodeGraphs
from mla_backend.engine.model import Model
from mla_backend.engine.rows import Rows, to_device

INVARIANT_ROWS = 16
"""Tokens in a pass where bits must not depend on the batch: as many rows as the tiles of most matrix products have."""


def layer_caches(model: Model, storage: Storage) -> list[LayerCache]:
    """A storage's caches, layer by layer."""
    return [
        LayerCache(storage.latent[i], None if shares else storage.keys[i])
        for i, shares in enumerate(model.config.shares_selection)
    ]


class Runner:
    """Computes tokens of sequences that have room for them.

    A batch-invariant model gets passes of `INVARIANT_ROWS` tokens, each a request of its own as far as the model knows.
    So all products have one shape, whatever the work is, and what a row gives doesn't depend on the others.

    Args:
        model: on the device of the storage.
        storage: the caches of all its layers.
        graphs: for passes in which all sequences have one token, on a GPU.
    """

    def __init__(self, model: Model, storage: Storage, graphs: DecodeGraphs | None = None):
        self.model, self.storage, self.graphs = model, storage, graphs
        self.caches = layer_caches(model, storage)

    def run(self, work: Many[tuple[Sequence, int]]) -> Tensor:
        """Computes the next tokens of each sequence, so many of it.

        Returns:
            Logits fp32 `[N, vocab_size]` for the N sequences that are computed to their end then, in their order.
        """
        return self.run_rows(Rows.of(work))

    def run_rows(self, rows: Rows) -> Tensor:
        """The same for rows that have been laid out."""
        if not self.model.batch_invariant:
            return self._pass(rows)
        return torch.cat([self._pass(part, INVARIANT_ROWS) for part in rows.cut(INVARIANT_ROWS)])

    def _pass(self, rows: Rows, size: int | None = None) -> Tensor:
        """size: of the pass, if that must not depend on how many tokens there are."""
        if self.graphs is not None and rows.decodes_only and len(rows) <= self.graphs.largest:
            return self._wanted(self.graphs.run(rows, size), rows)
        if size is None:
            token_ids, positions, batch = rows.batch(self.storage.device, logits_at=rows.wanted)
            return self.model(token_ids, positions, batch, self.caches)
        everything = list(range(size)) if rows.wanted else []
        token_ids, positions, batch = rows.padded(size).batch(self.storage.device, logits_at=everything)
        return self._wanted(self.model(token_ids, positions, batch, self.caches), rows)

    def _wanted(self, logits: Tensor, rows: Rows) -> Tensor:
        """The wanted ones of the logits of all rows."""
        if len(rows.wanted) == len(logits):
            return logits
        return logits[to_device(torch.tensor(rows.wanted, dtype=torch.int64), self.storage.device)]
