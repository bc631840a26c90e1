"""CUDA graphs of decode steps, so that a step takes one launch and not a thousand."""

import torch
from torch import Tensor

from kv_cache import Storage
from mla_backend.engine.batch import LayerCache, TokenBatch
from mla_backend.engine.model import Model
from mla_backend.engine.rows import Rows, to_device

SMALL_SIZES = (1, 2, 4, 8, 16)
STEP = 16
"""Distance of larger sizes: padding to it costs little compared with what 16 rows cost."""


class DecodeGraphs:
    """Passes in which each sequence has one token. A graph is captured when it is first needed.

    A graph serves a number of rows and all contexts up to a length, as both are shapes of what the indexer computes.
    The rows are rounded up to one of a few sizes, the length to the model's top-k times a power of two. Up to the top-k
    nothing is scored. The graph computes the plan of its attention.

    Args:
        model: on a GPU. With experts, its dtype has to be bf16: grouped products of others ask the device for counts.
        storage, caches: those that the model always runs on.
        most_rows: the most rows of a pass.
        most_tokens: the most tokens of a context.
    """

    def __init__(self, model: Model, storage: Storage, caches: list[LayerCache], most_rows: int, most_tokens: int):
        self.model, self.device, self.caches = model, storage.device, caches
        self.sizes = [size for size in SMALL_SIZES if size < most_rows]
        self.sizes += range(2 * STEP, most_rows, STEP) if most_rows > 2 * STEP else []
        self.sizes.append(most_rows)
        self.most_tokens = most_tokens
        blocks = -(-most_tokens // storage.layout.block_size)
        # the inputs of a replay; a graph of fewer rows reads the first ones
        self._token_ids = torch.zeros(most_rows, dtype=torch.int64, device=self.device)
        self._positions = torch.zeros_like(self._token_ids)
        self._slots = torch.full_like(self._token_ids, -1)
        self._table = torch.full((most_rows, blocks), -1, dtype=torch.int32, device=self.device)
        # one stream for all captures: cuBLAS keeps a workspace for every stream, on Hopper of 32 MiB
        self._warm_up = torch.cuda.Stream(self.device)
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, TokenBatch]] = {}
        self._pool = None

    @property
    def largest(self) -> int:
        """The number of rows of the largest graph."""
        return self.sizes[-1]

    def run(self, rows: Rows, size: int | None = None) -> Tensor:
        """Computes up to `largest` rows.

        Args:
            rows: each of one token.
            size: take the graph of this size; the smallest that fits if left out.

        Returns:
            Logits of all rows, fp32 `[T, vocab_size]`.
        """
        size = next(known for known in self.sizes if known >= len(rows)) if size is None else size
        context = self._context(max(rows.contexts))
        padded = rows.padded(size, self._table.shape[1])
        for buffer, values in (
            (self._token_ids, padded.token_ids),
            (self._positions, padded.positions),
            (self._slots, padded.slots),
            (self._table, padded.table),
        ):
            buffer[:size].copy_(to_device(values, self.device))
        if (size, context) not in self._captured:
            self._captured[size, context] = self._capture(size, context)
        graph, logits, _ = self._captured[size, context]
        graph.replay()
        return logits[: len(rows)].to(torch.float32, copy=True)  # the next replay writes there again

    def _context(self, longest: int) -> int:
        """The context length of the graph that serves a context this long."""
        length = self.model.config.index_topk
        while length < longest:
            length *= 2
        return min(length, self.most_tokens)

    def _capture(self, size: int, context: int) -> tuple[torch.cuda.CUDAGraph, Tensor, TokenBatch]:
        # the graph does not own the batch's tensors: they are kept along with it
        batch = TokenBatch(
            block_table=self._table[:size],
            slots=self._slots[:size],
            token_counts=[1] * size,
            context_lengths=[context] * size,
            logits_at=torch.arange(size, device=self.device),
            keeps_some=True,
        )

        def forward() -> Tensor:
            return self.model(self._token_ids[:size], self._positions[:size], batch, self.caches, widen=False)

        # Libraries initialise themselves in their first calls, which is not allowed in a capture. The buffers already
        # hold the rows to be computed, so these passes write only what the replay will write again.
        self._warm_up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._warm_up):
            for _ in range(2):
                forward()
        torch.cuda.current_stream(self.device).wait_stream(self._warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()
        self._pool = graph.pool()
        return graph, logits, batch
