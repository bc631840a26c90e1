"""Runs a model over the tokens that the scheduler chose."""

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from kv_cache import Sequence, Storage
from mla_backend.engine.batch import LayerCache
from mla_backend.engine.graphs import DecodeGraphs
from mla_backend.engine.model import Model
from mla_backend.engine.rows import Rows, to_device

INVARIANT_ROWS = 16
"""Tokens in a batch-invariant pass: the rows of a tile of most matrix products."""


def layer_caches(model: Model, storage: Storage) -> list[LayerCache]:
    """A storage's caches, layer by layer."""
    return [
        LayerCache(storage.latent[i], None if shares else storage.keys[i])
        for i, shares in enumerate(model.config.shares_selection)
    ]


class Runner:
    """Computes tokens of sequences that have room for them.

    A batch-invariant model gets passes of `INVARIANT_ROWS` tokens, each passed as a request of its own. So all products
    have the same shape whatever the work is, and a row's results don't depend on the others.

    Args:
        model: on the device of the storage.
        storage: the caches of all its layers.

    Attributes:
        graphs: for passes in which all sequences have one token, on a GPU.
    """

    def __init__(self, model: Model, storage: Storage):
        self.model, self.storage = model, storage
        self.graphs: DecodeGraphs | None = None
        self.caches = layer_caches(model, storage)

    def run(self, work: Many[tuple[Sequence, int]]) -> Tensor:
        """Computes the next tokens of each sequence, as many as its number says.

        Returns:
            Logits fp32 `[N, vocab_size]` of the N sequences that are now computed to their end, in their order.
        """
        return self.run_rows(Rows.of(work))

    def run_rows(self, rows: Rows) -> Tensor:
        """The same for rows."""
        if not self.model.batch_invariant:
            return self._pass(rows)
        return torch.cat([self._pass(part, INVARIANT_ROWS) for part in rows.cut(INVARIANT_ROWS)])

    def _pass(self, rows: Rows, size: int | None = None) -> Tensor:
        """size: rows of the pass, if they must not depend on the number of tokens."""
        if self.graphs is not None and rows.decodes_only and len(rows) <= self.graphs.largest:
            return self._wanted(self.graphs.run(rows, size), rows)
        if size is None:
            token_ids, positions, batch = rows.batch(self.storage.device, logits_at=rows.wanted)
            return self.model(token_ids, positions, batch, self.caches)
        everything = list(range(size)) if rows.wanted else []
        token_ids, positions, batch = rows.padded(size).batch(self.storage.device, logits_at=everything)
        return self._wanted(self.model(token_ids, positions, batch, self.caches), rows)

    def _wanted(self, logits: Tensor, rows: Rows) -> Tensor:
        """The logits that are wanted, out of those of all rows."""
        if len(rows.wanted) == len(logits):
            return logits
        return logits[to_device(torch.tensor(rows.wanted, dtype=torch.int64), self.storage.device)]
