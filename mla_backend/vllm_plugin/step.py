"""What the layers of one step share: the length of each token's index list, the plan, and buffers for results."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import mla_backend
from mla_backend.attention import PLAN_COLUMNS, VALUE_DIM, default_workers, workspace_floats
from mla_backend.vllm_plugin import versions
from mla_backend.vllm_plugin.models import ROPE

FEW_TOKENS = 320
"""From this number of tokens on, plans always have the same number of rows: those of fewer tokens than twice a GPU's
multiprocessors are fitted to their number."""
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


class Room(NamedTuple):
    """Where a layer writes."""

    slots: Tensor
    """int32 `[tokens, topk]`."""
    counts: Tensor
    """int32 `[tokens]`, how many of the slots are valid."""
    out: Tensor
    """bf16 `[tokens, heads, 512]`."""
    lse: Tensor
    """fp32 `[tokens, heads]`."""

    @staticmethod
    def shared(tokens: int, heads: int, topk: int, device: torch.device) -> "Room":
        """In memory that other layers of the model use too, so what is there lasts until this layer has ended."""
        shapes = (tokens, topk), (tokens,), (tokens, heads, VALUE_DIM), (tokens, heads)
        dtypes = torch.int32, torch.int32, torch.bfloat16, torch.float32
        return Room(*versions.shared_memory(*zip(shapes, dtypes, strict=True), device=device))


class StepBuffers:
    """Tensors that outlive a step, so that a captured CUDA graph finds them at the same addresses.

    Args:
        max_tokens: of a step.
        captured_tokens: of a step that runs as a CUDA graph. Buffers for slots and results are this large; larger
            steps use memory that they share with other layers.
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
        self.own = Room(
            room(captured_tokens, topk),
            room(captured_tokens),
            room(captured_tokens, heads, VALUE_DIM, dtype=torch.bfloat16),
            room(captured_tokens, heads, dtype=torch.float32),
        )
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

    def make_plan(self, lengths: Tensor, *, lasts: bool = True) -> Tensor:
        """The plan for tokens whose lists are so long, int32 `[tokens]`. If it lasts, it is the step's plan from now
        on."""
        plan = self.plan[: self._workers(len(lengths))]
        return mla_backend.plan(
            len(lengths),
            self.topk,
            topk_length=lengths,
            batch_invariant=self.batch_invariant,
            out=plan if lasts else torch.empty_like(plan),
        )

    def room(self, tokens: int, heads: int) -> Room:
        """Where a layer writes."""
        if self.keeps(tokens, heads):
            return Room(*(tensor[:tokens] for tensor in self.own))
        return Room.shared(tokens, heads, self.topk, self.device)

    def keeps(self, tokens: int, heads: int) -> bool:
        """Whether what is in `room` stays there until another layer writes."""
        return tokens <= len(self.own.out) and heads == self.heads


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
        self.room: Room | None = None
        """Where the last layer wrote."""
        self.plan: Tensor | None = None
        self.lengths: Tensor | None = None
        """The length of each token's list, int32 `[tokens]`, which the plan is for."""
        self.slots: Tensor | None = None
        """The slots of the last layer with an indexer, for the layers that share its selection. None if that layer had
        no lasting memory for them."""
        if leaders is None:
            self._prepare()

    def begin(self, layer: str | None) -> None:
        """Called by each layer before it attends."""
        if self.plan is None or (self.leaders is not None and layer in self.leaders):
            self._prepare()

    def _prepare(self) -> None:
        self.buffers.locate(self.batch)
        self.use_lengths(self.buffers.lengths[: self.tokens])
        self.slots = None

    def room_for(self, tokens: int, heads: int) -> Room:
        """Where a layer writes. All layers of a step have the same room."""
        if self.room is None or self.room.lse.shape != (tokens, heads):
            self.room = self.buffers.room(tokens, heads)
        return self.room

    def follow(self) -> None:
        """Called, possibly in a captured graph, where lengths have changed in place: prepares the step if no layer
        will."""
        if self.leaders is None:
            self._prepare()

    def use_lengths(self, lengths: Tensor) -> None:
        """Makes the plan for lists of other lengths, int32 `[tokens]`."""
        self.lengths, self.plan = lengths, self.buffers.make_plan(lengths)

    def work_for(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The length of each token's list, int32 `[tokens]`, and the plan for them."""
        if tokens == len(self.lengths):
            return self.lengths, self.plan
        lengths = self.buffers.lengths[:tokens]  # fewer than the step was prepared for
        return lengths, self.buffers.make_plan(lengths, lasts=False)
