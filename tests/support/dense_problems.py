"""Random problems for dense_attention."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import mla_backend
from mla_backend import reference
from problems import MAGNITUDE, SCALE, Arguments, all_bytes, copy_with_gaps, poison_padding, random_cache, scale_of

GARBAGE = (2147480000, -5)
"""What a page table holds beyond a sequence's end."""


@dataclass
class DenseProblem(Arguments):
    """The arguments of dense_attention."""

    q: Tensor | tuple[Tensor, Tensor]
    cache: Tensor
    block_table: Tensor
    lengths: Tensor
    scale: float = SCALE
    causal: bool = True
    cache_format: str | None = None
    cache_scale: float = 1.0
    products: str = "exact"

    def solve(self, **options) -> tuple[Tensor, Tensor]:
        """Our answer: out and lse, written over poisoned memory."""
        q = self.q[0] if isinstance(self.q, tuple) else self.q
        requests, queries, heads, _ = q.shape
        out = torch.full((requests, queries, heads, 512), torch.nan, dtype=q.dtype, device=q.device)
        lse = torch.full((requests, heads, queries), torch.nan, device=q.device)
        given = {**vars(self), "out": out, "lse": lse, **options}
        found = mla_backend.dense_attention(**given)
        assert found[0] is given["out"] and found[1] is given["lse"]
        return found

    def oracle(self) -> tuple[Tensor, Tensor]:
        q = torch.cat(self.q, -1) if isinstance(self.q, tuple) else self.q
        return reference.dense_attention(**{**vars(self), "q": q})

    def check(self, device: str = "cpu", **options) -> None:
        there = self.to(device)  # on a GPU the oracle is fast, too
        there.hold(there.solve(**options))

    def slots(self, request: int) -> Tensor:
        """Those of a request's positions, in their order; -1 where the cache has none."""
        block_size = self.cache.shape[1]
        length = min(max(int(self.lengths[request]), 0), self.block_table.shape[1] * block_size)
        positions = torch.arange(length)
        block = self.block_table[request, positions // block_size].long()
        inside = (block >= 0) & (block < self.cache.shape[0])
        return torch.where(inside, block * block_size + positions % block_size, -1)

    def poisoned(self) -> "DenseProblem":
        """The same, but all bytes of rows that belong to no sequence are 0xff: NaN in every type of number."""
        if self.cache.shape[0] == 0:
            return self
        rows, poison = reference.format_of(self.cache, self.cache_format), copy_with_gaps(self.cache)
        named = torch.cat([torch.zeros(0, dtype=torch.int64), *(self.slots(i) for i in range(len(self.lengths)))])
        named = named[named >= 0]
        address = reference.token_address(rows, self.cache, named)
        all_bytes(poison).fill_(0xFF)
        poison[address] = self.cache[address]
        poison_padding(rows, poison, named)
        return self.but(cache=poison)


def random_dense(
    fmt="bf16", lengths=(100, 37), queries=1, heads=16, block_size=16, *, max_blocks=None, gap=0, **more
) -> DenseProblem:
    """Sequences of these lengths in blocks at random places; beyond their ends the page table holds garbage."""
    used = [max(-(-n // block_size), 0) for n in lengths]
    if max_blocks is None:
        max_blocks = max(used, default=0) + 1
    table = torch.tensor(GARBAGE, dtype=torch.int32)[torch.randint(0, 2, (len(lengths), max_blocks))]
    blocks = sum(used) + 2
    places = torch.randperm(blocks).int()
    for row, own in zip(table, used, strict=True):
        own = min(own, max_blocks)
        row[:own], places = places[:own], places[own:]
    form = mla_backend.FORMATS[fmt]
    q = (torch.randn(len(lengths), queries, heads, form.head_dim) / MAGNITUDE).to(form.number)
    cache, lengths = random_cache(fmt, blocks, block_size, gap=gap), torch.tensor(lengths, dtype=torch.int32)
    return DenseProblem(q, cache, table, lengths, cache_scale=scale_of(fmt), **more)


@st.composite
def dense_problems(draw, formats=tuple(mla_backend.FORMATS), max_rows=160, max_length=300):
    """Problems of any shape, with up to `max_rows` heads of all queries of a request."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    queries = draw(st.sampled_from([1, 1, 2, 3, 4, 5, 8, 64]))
    heads = draw(st.integers(1, max(max_rows // queries, 1)))
    block_size = draw(st.sampled_from([1, 2, 7, 61, 64, 69, 256]))
    lengths = draw(st.lists(st.one_of(st.integers(-3, 6), st.integers(0, max_length)), max_size=4))
    fmt, gap, causal = draw(st.sampled_from(formats)), draw(st.sampled_from([0, 0, 8, 5])), draw(st.booleans())
    problem = random_dense(fmt, tuple(lengths), queries, heads, block_size, gap=gap, causal=causal)
    table = problem.block_table
    if draw(st.booleans()):  # blocks outside the cache within a sequence
        bad = torch.tensor([-1, -(2**31), problem.cache.shape[0], 2**31 - 1], dtype=torch.int32)
        outside = torch.rand(table.shape) < 0.2
        table[outside] = bad[torch.randint(0, 4, (int(outside.sum()),))]
    if lengths and draw(st.booleans()):  # a sequence that claims to be longer than its page table
        problem.lengths[0] = draw(st.sampled_from([table.shape[1] * block_size + 5, 2**31 - 1]))
        table[0] = torch.randint(0, problem.cache.shape[0], (table.shape[1],))
    if mla_backend.FORMATS[fmt].fp8:
        problem.products = draw(st.sampled_from(["exact", "fp8"]))
    return problem.poisoned()
