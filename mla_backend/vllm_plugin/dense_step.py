"""What the layers of one step of dense attention share: which requests attend together, plans, and the workspace."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

import mla_backend
from mla_backend.attention import VALUE_DIM
from mla_backend.plan import PLAN_COLUMNS, Plan, choose_launch


@dataclass(frozen=True)
class Group:
    """Neighbouring requests with the same number of query tokens. The op takes one group at a time."""

    first: int
    """The number of the first request."""
    requests: int
    start: int
    """The number of the first token."""
    queries: int
    """Tokens of each request."""

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.requests)

    def of(self, tensor: Tensor) -> Tensor:
        """Its tokens of a step's `[T, ...]`, as `[requests, queries, ...]`."""
        tokens = tensor[self.start : self.start + self.requests * self.queries]
        return tokens.unflatten(0, (self.requests, self.queries))


def groups_of(starts: Sequence[int], tokens: int) -> list[Group]:
    """The groups of a step's decode requests.

    Args:
        starts: the first token of each request, and the end of the last one.
        tokens: those of the step. In a captured graph that is more than starts say: requests are added as padding, with
            no tokens in starts and no context, which get as many tokens as each of the others.
    """
    counts = [end - start for start, end in pairwise(starts)]
    if tokens == len(counts) * max(counts):
        return [Group(0, len(counts), 0, max(counts))]
    groups = []
    for queries, numbers in groupby(range(len(counts)), counts.__getitem__):
        first, *more = numbers
        if queries:
            groups.append(Group(first, 1 + len(more), starts[first], queries))
    return groups


class DenseBuffers:
    """The plan and the workspace, at addresses that captured CUDA graphs keep; one for all layers.

    Args:
        most_queries: decode tokens of a request.
        slots: tokens of a sequence, at most.
        heads: query heads that attention sees on this device.
        batch_invariant: give a token the same bits whatever else is in the batch.
        cache_format, products: of the cache; see `plan`.
    """

    def __init__(
        self,
        *,
        most_queries: int,
        slots: int,
        heads: int,
        device: torch.device,
        batch_invariant: bool,
        cache_format: str | None = None,
        products: str = "exact",
    ) -> None:
        self.slots, self.heads, self.device, self.batch_invariant = slots, heads, device, batch_invariant
        self.cache_format, self.products = cache_format, products
        most = Plan.bounds(heads, device, queries=most_queries)
        self.plan_table = torch.empty(most.ctas, PLAN_COLUMNS, dtype=torch.int32, device=device)
        self.workspace = torch.zeros(most.workspace_floats, device=device) if most.workspace_floats else None

    def make_plan(self, lengths: Tensor, queries: int, slots: int, *, alone: bool) -> Plan:
        """The plan of a group whose block table has room for so many slots. If it is alone in its step, the plan is in
        the buffer."""
        heads = queries * self.heads
        launch = choose_launch(self.device, heads, len(lengths), self.slots, self.cache_format, self.batch_invariant)
        table = self.plan_table[: launch.ctas]
        return mla_backend.plan(
            len(lengths),
            slots,
            topk_length=lengths,
            batch_invariant=self.batch_invariant,
            out=Plan(table if alone else torch.empty_like(table), launch._replace(ctas=len(table))),
        )


class DenseStep:
    """The decode requests of one batch.

    Args:
        buffers: shared with the steps before and after it.
        groups: the requests.
        leaders: names of the layers that make the plans anew: the first of each pass. In a captured CUDA graph that is
            part of the graph, and a step costs the host nothing.
    """

    def __init__(self, buffers: DenseBuffers, groups: Sequence[Group], leaders: Collection[str]) -> None:
        self.buffers, self.groups, self.leaders = buffers, groups, leaders
        self.plans: list[Plan] = []

    def attend(
        self,
        layer: str,
        q: Tensor | tuple[Tensor, Tensor],
        cache: Tensor,
        block_table: Tensor,
        lengths: Tensor,
        *,
        scale: float,
        cache_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The attention of a layer.

        Args:
            layer: its name.
            q: `[T, H, 576]` or `([T, H, 512], [T, H, 64])`. T is more than the groups have where a step is padded.
            block_table, lengths: int32 `[R, max_blocks]` and `[R]` of all decode requests.

        Returns:
            bf16 `[T, H, 512]` and the lse, fp32 `[T, H]`.
        """
        if not self.plans or layer in self.leaders:
            slots = block_table.shape[1] * cache.shape[1]
            self.plans = [
                self.buffers.make_plan(lengths[group.rows], group.queries, slots, alone=len(self.groups) == 1)
                for group in self.groups
            ]
        parts = q if isinstance(q, tuple) else (q,)
        tokens, heads = parts[0].shape[:2]
        room = torch.empty if len(self.groups) == 1 else torch.zeros  # there may be padding behind several
        out = room(tokens, heads, VALUE_DIM, dtype=torch.bfloat16, device=cache.device)
        lse = room(tokens, heads, dtype=torch.float32, device=cache.device)
        for group, plan in zip(self.groups, self.plans, strict=True):
            queries = tuple(group.of(part).bfloat16() for part in parts)
            mla_backend.dense_attention(
                queries if len(queries) == 2 else queries[0],
                cache,
                block_table[group.rows],
                lengths[group.rows],
                scale=scale,
                cache_scale=cache_scale,
                products=self.buffers.products,
                plan=plan,
                workspace=self.buffers.workspace,
                batch_invariant=self.buffers.batch_invariant,
                out=group.of(out),
                lse=group.of(lse).transpose(1, 2),
            )
        return out, lse
