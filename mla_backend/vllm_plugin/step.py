"""What the layers of one step share: how long each token's list is, how the work is cut, and where results go."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

import mla_backend
from mla_backend.attention import PLAN_COLUMNS, VALUE_DIM, default_workers, workspace_floats

FEW_TOKENS = 128
"""From here on plans have the same number of rows, however many tokens there are: half as many as a GPU has processors,
and one more, are too many to be cut for clusters."""
NOWHERE = -(1 << 30)
"""Where padding stands in its sequence: so far before it that it attends to nothing."""


@dataclass(frozen=True)
class Batch:
    """What a step's tokens belong to."""

    query_start_loc: Tensor
    """int32 `[R + 1]`, where each request's tokens begin."""
    seq_lens: Tensor
    """int32 `[R]`, how long each request is, its tokens of this step included."""
    tokens: int
    """Of the step. Those past the last request's are padding: they belong to request R, which has no row in the block
    table, and attend to nothing."""
    most_queries: int | None = None
    """The largest number of tokens that a request has, if the host knows it. A step in which every request has one is
    then a matter of two launches."""

    def is_where(self, other: "Batch") -> bool:
        """Whether both keep this in the same memory."""
        return (
            self.seq_lens.data_ptr() == other.seq_lens.data_ptr()
            and self.query_start_loc.data_ptr() == other.query_start_loc.data_ptr()
        )


class StepBuffers:
    """Tensors that outlive a step, so that a captured CUDA graph finds them at the same place.

    Args:
        max_tokens: of a step.
        captured_tokens: of a step that runs as a CUDA graph. Its slots and results have a place here too; those of
            larger steps are allocated as they come.
        topk: slots that a token attends to, at most.
        heads: query heads that attention sees on this device.
        batch_invariant: a token's bits don't depend on what else is in the batch.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        captured_tokens: int,
        topk: int,
        heads: int,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        self.topk, self.heads, self.device, self.batch_invariant = topk, heads, device, batch_invariant

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        most_workers = max(self._workers(tokens) for tokens in {*range(1, FEW_TOKENS), max_tokens})
        self.token_numbers = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self.request_ids, self.lengths = room(max_tokens), room(max_tokens)
        self.before_first = room(max_tokens + 1)
        self.plan = room(most_workers, PLAN_COLUMNS)
        floats = workspace_floats(most_workers, heads) if device.type == "cuda" else 0
        self.workspace = torch.zeros(floats, device=device) if floats else None
        self.slots, self.counts = room(captured_tokens, topk), room(captured_tokens)
        self.out = room(captured_tokens, heads, VALUE_DIM, dtype=torch.bfloat16)
        self.lse = room(captured_tokens, heads, dtype=torch.float32)

    def locate(self, batch: Batch) -> Tensor:
        """Finds out which request each token belongs to and how many tokens it may attend to, on the device and
        without allocating anything.

        Returns:
            int32 `[tokens]`, each token's row of the block table. `lengths` has been filled as far, too.
        """
        tokens, requests = batch.tokens, batch.seq_lens.shape[0]
        ids, lengths = self.request_ids[:tokens], self.lengths[:tokens]
        if batch.most_queries == 1 and tokens == requests:
            torch.clamp(batch.seq_lens, 0, self.topk, out=lengths)
            return ids.copy_(self.token_numbers[:tokens])
        ends, ordinals = batch.query_start_loc[1 : requests + 1], self.token_numbers[1 : tokens + 1]
        torch.searchsorted(ends, ordinals, out_int32=True, out=ids)
        # a token stands as far before the end of its sequence as before the end of its request's tokens
        before_first = self.before_first[: requests + 1]
        torch.sub(batch.seq_lens, ends, out=before_first[:requests])
        before_first[requests:].fill_(NOWHERE)
        torch.index_select(before_first, 0, ids, out=lengths)
        lengths.add_(ordinals).clamp_(0, self.topk)
        return ids

    def _workers(self, tokens: int) -> int:
        return default_workers(self.device, self.heads, None if self.batch_invariant else tokens)

    def make_plan(self, tokens: int) -> Tensor:
        """Plans for the first so many tokens of those located."""
        return self._plan(tokens, self.plan[: self._workers(tokens)])

    def _plan(self, tokens: int, out: Tensor) -> Tensor:
        return mla_backend.plan(
            tokens, self.topk, topk_length=self.lengths[:tokens], batch_invariant=self.batch_invariant, out=out
        )

    def another_plan(self, tokens: int) -> Tensor:
        """A plan for fewer tokens than the step's own is for."""
        return self._plan(tokens, torch.empty_like(self.plan[: self._workers(tokens)]))

    def room_for_slots(self, tokens: int) -> tuple[Tensor, Tensor]:
        """int32 `[tokens, topk]` and `[tokens]`."""
        if tokens <= len(self.slots):
            return self.slots[:tokens], self.counts[:tokens]
        return (
            torch.empty(tokens, self.topk, dtype=torch.int32, device=self.device),
            torch.empty(tokens, dtype=torch.int32, device=self.device),
        )

    def room_for_results(self, tokens: int, heads: int) -> tuple[Tensor, Tensor]:
        """bf16 `[tokens, heads, 512]` and fp32 `[tokens, heads]`."""
        if tokens <= len(self.out) and heads == self.heads:
            return self.out[:tokens], self.lse[:tokens]
        return (
            torch.empty(tokens, heads, VALUE_DIM, dtype=torch.bfloat16, device=self.device),
            torch.empty(tokens, heads, dtype=torch.float32, device=self.device),
        )


class Step:
    """One batch's share of the buffers: what the layers need besides their queries.

    The layers themselves prepare it where they can, the leading one of a model's pass before it attends. In a captured
    CUDA graph that is a part of the graph, and a step costs the host nothing.

    Args:
        buffers: that it shares with the steps before and after it.
        batch: what its tokens belong to.
        tokens: the first so many of the batch are attended to by our op.
        leaders: names of the layers that prepare it. None to have it prepared now: where a graph that is captured with
            this batch would not find the next one in the same memory.
    """

    def __init__(self, buffers: StepBuffers, batch: Batch, tokens: int, leaders: Collection[str] | None = None) -> None:
        self.buffers, self.batch, self.tokens, self.leaders = buffers, batch, tokens, leaders
        self.plan: Tensor | None = None
        self.slots: Tensor | None = None
        """Of the last layer that has an indexer, for those that share its selection."""
        if leaders is None:
            self._prepare()

    def begin(self, layer: str | None) -> None:
        """Called by each layer before it attends."""
        if self.plan is None or (self.leaders is not None and layer in self.leaders):
            self._prepare()

    def _prepare(self) -> None:
        self.buffers.locate(self.batch)
        self.plan = self.buffers.make_plan(self.tokens)

    def plan_for(self, tokens: int) -> Tensor:
        return self.plan if tokens == self.tokens else self.buffers.another_plan(tokens)
