"""What the layers of one step share: the length of each token's index list, the plan, and buffers for results."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

import mla_backend
from mla_backend.attention import PLAN_COLUMNS, VALUE_DIM, default_workers, workspace_floats
from mla_backend.vllm_plugin.models import ROPE

FEW_TOKENS = 128
"""From this number of tokens on, plans always have the same number of rows. A plan for clusters needs fewer tokens than
that: at most half as many as a GPU has multiprocessors."""
NOWHERE = -(1 << 30)
"""The position of padding in its sequence: so far before the first token that it attends to nothing."""


@dataclass(frozen=True)
class Batch:
    """Which requests a step's tokens belong to."""

    query_start_loc: Tensor
    """int32 `[R + 1]`, the first token of each request."""
    seq_lens: Tensor
    """int32 `[R]`, the length of each request, including its tokens of this step."""
    tokens: int
    """The step's tokens. Those after the last request's are padding. They belong to request R, which has no row in the
    block table, and attend to nothing."""
    most_queries: int | None = None
    """The largest number of tokens of a request, if the host knows it. If that is 1, the step takes only two launches
    to prepare."""

    def is_where(self, other: "Batch") -> bool:
        """Whether both have their tensors at the same addresses."""
        return (
            self.seq_lens.data_ptr() == other.seq_lens.data_ptr()
            and self.query_start_loc.data_ptr() == other.query_start_loc.data_ptr()
        )


class StepBuffers:
    """Tensors that outlive a step, so that a captured CUDA graph finds them at the same addresses.

    Args:
        max_tokens: of a step.
        captured_tokens: of a step that runs as a CUDA graph. Buffers for slots and results are this large; larger
            steps allocate their own.
        topk: slots that a token attends to, at most.
        heads: query heads that attention sees on this device.
        batch_invariant: give a token the same bits whatever else is in the batch.
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
        self.no_rope = torch.zeros(1, 1, ROPE, dtype=torch.bfloat16, device=device)

    def locate(self, batch: Batch) -> Tensor:
        """Computes each token's request and how many tokens it may attend to, on the device, allocating nothing.

        Returns:
            int32 `[tokens]`, each token's row of the block table. `lengths` is filled as well.
        """
        tokens, requests = batch.tokens, batch.seq_lens.shape[0]
        ids, lengths = self.request_ids[:tokens], self.lengths[:tokens]
        if batch.most_queries == 1 and tokens == requests:
            torch.clamp(batch.seq_lens, 0, self.topk, out=lengths)
            return ids.copy_(self.token_numbers[:tokens])
        ends, ordinals = batch.query_start_loc[1 : requests + 1], self.token_numbers[1 : tokens + 1]
        torch.searchsorted(ends, ordinals, out_int32=True, out=ids)
        # a token is as far from the end of its sequence as from the end of its request's tokens in this step
        before_first = self.before_first[: requests + 1]
        torch.sub(batch.seq_lens, ends, out=before_first[:requests])
        before_first[requests:].fill_(NOWHERE)
        torch.index_select(before_first, 0, ids, out=lengths)
        lengths.add_(ordinals).clamp_(0, self.topk)
        return ids

    def _workers(self, tokens: int) -> int:
        return default_workers(self.device, self.heads, None if self.batch_invariant else tokens, self.topk)

    def make_plan(self, tokens: int) -> Tensor:
        """The plan for the first so many of the tokens that `locate` was given."""
        return self._plan(tokens, self.plan[: self._workers(tokens)])

    def _plan(self, tokens: int, out: Tensor) -> Tensor:
        return mla_backend.plan(
            tokens, self.topk, topk_length=self.lengths[:tokens], batch_invariant=self.batch_invariant, out=out
        )

    def another_plan(self, tokens: int) -> Tensor:
        """A plan for fewer tokens than the step's own plan."""
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
    """What the layers of one batch need besides their queries.

    Where possible, the first layer of a model's pass prepares it before it attends. In a captured CUDA graph that is
    part of the graph, and a step costs the host nothing.

    Args:
        buffers: shared with the steps before and after it.
        batch: which requests its tokens belong to.
        tokens: how many of the batch's tokens, from the first on, our op serves.
        leaders: names of the layers that prepare it. None prepares it now, for a batch whose tensors are not at the
            addresses that a captured graph reads.
    """

    def __init__(self, buffers: StepBuffers, batch: Batch, tokens: int, leaders: Collection[str] | None = None) -> None:
        self.buffers, self.batch, self.tokens, self.leaders = buffers, batch, tokens, leaders
        self.plan: Tensor | None = None
        self.slots: Tensor | None = None
        """The slots of the last layer with an indexer, for the layers that share its selection."""
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
