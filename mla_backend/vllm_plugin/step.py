"""What the layers of one step share: the length of each token's index list, the plan, and buffers for results."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import mla_backend
from mla_backend import STAGED
from mla_backend.attention import VALUE_DIM
from mla_backend.plan import PLAN_COLUMNS, Plan, choose_launch
from mla_backend.vllm_plugin import versions
from mla_backend.vllm_plugin.models import ROPE
from mla_backend.vllm_plugin.staging import StagedRequests

NOWHERE = -(1 << 30)
"""The position of padding in its sequence: so far before the first token that it attends to nothing."""


@dataclass(frozen=True)
class StepBatch:
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

    def is_where(self, other: "StepBatch") -> bool:
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
    staged: Tensor
    """uint8 `[bytes]`, for staged rows."""

    @staticmethod
    def shared(tokens: int, heads: int, topk: int, staged: int, device: torch.device) -> "Room":
        """In memory that other layers of the model use too, so what is there lasts until this layer has ended."""
        shapes = (tokens, topk), (tokens,), (tokens, heads, VALUE_DIM), (tokens, heads), (staged,)
        dtypes = torch.int32, torch.int32, torch.bfloat16, torch.float32, torch.uint8
        return Room(*versions.shared_memory(*zip(shapes, dtypes, strict=True), device=device))


def bytes_for_rows(rows: int) -> int:
    """Memory for so many staged rows."""
    block = versions.GPU_BLOCK_SIZE
    return -(-rows // block) * STAGED.page_bytes(block)


class StepBuffers:
    """Tensors that outlive a step, so that a captured CUDA graph finds them at the same addresses.

    Args:
        max_tokens: of a step.
        captured_tokens: of a step that runs as a CUDA graph. Buffers for slots and results are this large; larger
            steps use memory that they share with other layers.
        topk: slots that a token attends to, at most.
        heads: query heads that attention sees on this device.
        batch_invariant: give a token the same bits whatever else is in the batch.
        cache_format, products: of the cache; see `plan`.
        staged_rows: room for rows that are staged for a layer.
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
        cache_format: str | None = None,
        products: str = "exact",
        staged_rows: int = 0,
    ) -> None:
        self.cache_format, self.products, self.staged_rows = cache_format, products, staged_rows
        self.topk, self.heads, self.device, self.batch_invariant = topk, heads, device, batch_invariant

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        most = Plan.bounds(heads, device)
        self.token_numbers = torch.arange(max_tokens + 1, dtype=torch.int32, device=device)
        self.request_ids, self.lengths = room(max_tokens), room(max_tokens)
        self.before_first = room(max_tokens + 1)
        self.plan_table = room(most.ctas, PLAN_COLUMNS)
        floats = most.workspace_floats
        self.workspace = torch.zeros(floats, device=device) if floats else None
        self.own = Room(
            room(captured_tokens, topk),
            room(captured_tokens),
            room(captured_tokens, heads, VALUE_DIM, dtype=torch.bfloat16),
            room(captured_tokens, heads, dtype=torch.float32),
            room(0, dtype=torch.uint8),
        )
        self.no_rope = torch.zeros(1, 1, ROPE, dtype=torch.bfloat16, device=device)

    def locate(self, batch: StepBatch) -> Tensor:
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

    def make_plan(self, lengths: Tensor, *, lasts: bool = True) -> Plan:
        """The plan for tokens whose lists are so long, int32 `[tokens]`. If it lasts, it is the step's plan from now
        on."""
        launch = choose_launch(
            self.device,
            self.heads,
            len(lengths),
            self.topk,
            self.cache_format,
            self.batch_invariant,
            self.products,
        )
        table = self.plan_table[: launch.ctas]
        return mla_backend.plan(
            len(lengths),
            self.topk,
            topk_length=lengths,
            batch_invariant=self.batch_invariant,
            out=Plan(table if lasts else torch.empty_like(table), launch._replace(ctas=len(table))),
        )

    def room(self, tokens: int, heads: int, staged: bool = False) -> Room:
        """Where a layer writes."""
        if self.keeps(tokens, heads) and not staged:
            return Room(*(tensor[:tokens] for tensor in self.own))
        return Room.shared(tokens, heads, self.topk, bytes_for_rows(self.staged_rows) if staged else 0, self.device)

    def keeps(self, tokens: int, heads: int) -> bool:
        """Whether what is in `room` without staged rows stays there until another layer writes."""
        return tokens <= len(self.own.out) and heads == self.heads


class SparseStep:
    """What the layers of one batch need besides their queries.

    Where possible, the first layer of a model's pass prepares it before it attends. In a captured CUDA graph that is
    part of the graph, and a step costs the host nothing.

    Args:
        buffers: shared with the steps before and after it.
        batch: which requests its tokens belong to.
        tokens: how many of the batch's tokens, from the first on, our op serves.
        leaders: names of the layers that prepare it. None prepares it now, for a batch whose tensors are not at the
            addresses that a captured graph reads.
        staged: whose tokens attend to staged rows. Each layer stages them anew. Never part of a captured graph.
        spans: which tokens attend, without those that do so densely; None for all. Never part of a captured graph.
    """

    def __init__(
        self,
        buffers: StepBuffers,
        batch: StepBatch,
        tokens: int,
        leaders: Collection[str] | None = None,
        staged: StagedRequests | None = None,
        spans: Sequence[slice] | None = None,
    ) -> None:
        self.buffers, self.batch, self.tokens, self.leaders, self.staged = buffers, batch, tokens, leaders, staged
        self.spans = spans
        self.staged_table: Tensor | None = None
        self.plans: dict[tuple[int, int], Plan] = {}
        """Where requests are staged, or some tokens attend densely: the plans of parts, which all layers share."""
        self.room: Room | None = None
        """Where the last layer wrote."""
        self.plan: Plan | None = None
        self.lengths: Tensor | None = None
        """The length of each token's list, int32 `[tokens]`, which the plan is for, if there is one."""
        self.selected: tuple[int, int] | None = None
        """Whose selection the slots in the room are, and of how many tokens. vLLM gives layers without an indexer a
        step of their own, which other layers' selections don't pass through. None if the room doesn't last."""
        if leaders is None:
            self._prepare()

    def begin(self, layer: str | None) -> None:
        """Called by each layer before it attends."""
        if self.lengths is None or (self.leaders is not None and layer in self.leaders):
            self._prepare()

    def _prepare(self) -> None:
        self.buffers.locate(self.batch)
        self.lengths = self.buffers.lengths[: self.tokens]
        if self.spans is None:
            self.use_lengths(self.lengths)
        self.selected = self.staged_table = None
        self.plans.clear()

    def room_for(self, tokens: int, heads: int) -> Room:
        """Where a layer writes. All layers of a step have the same room."""
        if self.room is None or self.room.lse.shape != (tokens, heads):
            self.room = self.buffers.room(tokens, heads, self._stages(tokens))
        return self.room

    def keeps_slots(self, tokens: int, heads: int) -> bool:
        """Whether slots in the room are there for the next layer, too."""
        return self.buffers.keeps(tokens, heads) and not self._stages(tokens)

    def _stages(self, tokens: int) -> bool:
        capturing = self.buffers.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return self.staged is not None and tokens == self.tokens and not capturing

    def parts(self, tokens: int, first: int = 0) -> list[tuple[slice, bool]]:
        """The tokens, from `first` to `tokens`, that attend in one launch each, and whether they attend to staged
        rows."""
        middle = self.staged.token if self._stages(tokens) else tokens
        whole = (slice(first, middle), False), (slice(middle, tokens), True)
        found = [
            (slice(max(span.start, all_of_it.start), min(span.stop, all_of_it.stop)), staged)
            for all_of_it, staged in whole
            for span in ([all_of_it] if self.spans is None else self.spans)
        ]
        return [(part, staged) for part, staged in found if part.start < part.stop]

    def table(self, block_table: Tensor, block_size: int) -> Tensor:
        """The block table of staged rows, int32 `[R, blocks]`, for requests that have blocks of the cache."""
        if self.staged_table is None:
            table = self.staged.table(self.batch.seq_lens, block_size)
            self.staged_table = table[:, : block_table.shape[1]]
        return self.staged_table

    def stage(self, cache: Tensor, block_table: Tensor, memory: Tensor) -> Tensor:
        """Stages the requests' rows in memory, uint8 `[bytes]`. Returns the staged cache."""
        staged, first = STAGED.in_memory(memory, cache.shape[1]), self.staged.request
        table = self.table(block_table, cache.shape[1])[first:]
        own_blocks = block_table[first : first + len(table), : table.shape[1]]
        mla_backend.stage_rows(cache, own_blocks, self.batch.seq_lens[first:], staged_table=table, out=staged)
        return staged

    def follow(self) -> None:
        """Called, possibly in a captured graph, where lengths have changed in place: prepares the step if no layer
        will."""
        if self.leaders is None:
            self._prepare()

    def use_lengths(self, lengths: Tensor) -> None:
        """Makes the plan for lists of other lengths, int32 `[tokens]`."""
        self.lengths, self.plan = lengths, self.buffers.make_plan(lengths)

    def work_for(self, part: slice) -> tuple[Tensor, Plan]:
        """The length of the list of each token of a part, int32 `[tokens]`, and the plan for them."""
        if self.spans is None and part == slice(0, len(self.lengths)):
            return self.lengths, self.plan
        lengths, key = self.buffers.lengths[part], (part.start, part.stop)
        if self.spans is None and not self._stages(self.tokens):  # fewer than the step was prepared for
            return lengths, self.buffers.make_plan(lengths, lasts=False)
        if key not in self.plans:
            self.plans[key] = self.buffers.make_plan(lengths, lasts=False)
        return lengths, self.plans[key]
