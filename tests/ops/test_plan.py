"""The plan covers every token and tile exactly once, in order, and keeps the CTAs busy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import Launch, Plan
from plans import TOKEN_UNITS, by_load, gpu, gpu_launch, gpu_plan, planned, tiles_of, walk
from problems import random_problem

MIN_PART = 8  # tiles of 16 slots
CPU_TILE_SLOTS, GPU_TILE_SLOTS = 16, 64


@given(st.data())
def test_every_tile_is_covered_exactly_once(data):
    topk, extra_topk = data.draw(st.integers(0, 3000)), data.draw(st.integers(0, 500))
    tokens = data.draw(st.integers(0, 40))
    lengths = data.draw(st.lists(st.integers(-5, topk + 5), min_size=tokens, max_size=tokens))
    extra = data.draw(st.lists(st.integers(0, extra_topk), min_size=tokens, max_size=tokens))
    ctas, whole = data.draw(st.integers(1, 140)), data.draw(st.booleans())
    lists = {"extra_topk": extra_topk, "batch_invariant": whole}
    lists |= {"topk_length": torch.tensor(lengths, dtype=torch.int32)}
    lists |= {"extra_topk_length": torch.tensor(extra, dtype=torch.int32)}
    launch = by_load(ctas, data.draw(st.integers(1, 16)), data.draw(st.integers(0, 20)))
    of_cpu, of_gpu = planned(tokens, topk, ctas=ctas, **lists).table, gpu_plan(tokens, topk, launch, **lists)
    for table, slots in ((of_cpu, CPU_TILE_SLOTS), (of_gpu, GPU_TILE_SLOTS)):
        own = tiles_of([min(n, topk) for n in lengths], slots), tiles_of(extra, slots)
        splits = walk(table, [a + b for a, b in zip(*own, strict=True)], slots)
        assert all(n >= 1 for n in splits), "every token has a CTA, if only to write zeros"
        assert not whole or all(n == 1 for n in splits)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=60), st.integers(1, 140))
def test_no_split_is_shorter_than_it_is_worth(lengths, ctas):
    table, _ = planned(len(lengths), 4000, topk_length=torch.tensor(lengths, dtype=torch.int32), ctas=ctas)
    tiles = tiles_of(lengths)
    for token_begin, token_end, tile_begin, tile_end, *_ in table.tolist():
        if token_begin < token_end and tile_begin > 0:
            own_end = tile_end if token_end == token_begin + 1 else tiles[token_begin]
            assert 2 * (own_end - tile_begin) >= MIN_PART and 2 * tile_begin >= MIN_PART


@pytest.mark.parametrize("lengths", [[20000], [20000] * 8, [100] * 500, [0] * 100 + [30000] + [10] * 100])
def test_work_is_shared_evenly(lengths):
    ctas = 8
    table, _ = planned(len(lengths), 30000, topk_length=torch.tensor(lengths, dtype=torch.int32), ctas=ctas)
    tiles = tiles_of(lengths)
    loads = []
    for token_begin, token_end, tile_begin, tile_end, *_ in table.tolist():
        inner = sum(tiles[token_begin:token_end]) + token_end - token_begin
        if token_end > token_begin:
            inner -= tile_begin + tiles[token_end - 1] - tile_end
        loads.append(inner)
    average = sum(loads) / ctas
    assert max(loads) <= average + MIN_PART + 1


def test_enormous_plans_do_not_overflow():
    table, _ = planned(100_000, 2**31 - 1, ctas=100_000)
    begins = table[:, 0].long() * 2**28 + table[:, 2]
    assert (begins.diff() > 0).all()


def test_without_lengths_every_list_is_full():
    full = torch.full((7,), 500, dtype=torch.int32)
    assert torch.equal(planned(7, 500, ctas=9).table, planned(7, 500, topk_length=full, ctas=9).table)


def test_a_plan_is_written_into_a_given_table():
    plan = planned(3, 100, ctas=5)
    given = Plan(torch.full((5, 8), -1, dtype=torch.int32), plan.launch)
    assert mla_backend.plan(3, 100, out=given) is given
    assert torch.equal(given.table, plan.table)


def units_of_token(tokens, ctas):
    return TOKEN_UNITS if 2 * tokens > ctas else 1


def units_of_ctas(table, tiles):
    """Tiles that each CTA of a GPU has, with some more for each token, which those that share it share."""
    more, units = units_of_token(len(tiles), len(table)), []
    for token_begin, token_end, tile_begin, tile_end, *_ in table.tolist():
        ends = [(t, tile_begin if t == token_begin else 0) for t in range(token_begin, token_end)]
        splits = [(t, (tile_end if t == token_end - 1 else tiles[t]) - begin) for t, begin in ends]
        units.append(sum(split * (1 + more / tiles[t]) if tiles[t] else more for t, split in splits))
    return units


@st.composite
def equal_tokens(draw):
    """CTAs, and tokens of a few times as many at most: often just fewer than fill a round."""
    ctas = draw(st.integers(1, 140))
    idle = draw(st.one_of(st.integers(0, ctas), st.integers(0, 8)))
    return max(draw(st.integers(1, 5)) * ctas - idle, 0), draw(st.integers(0, 3000)), ctas


@given(equal_tokens(), st.integers(0, 300), st.booleans())
def test_a_gpu_leaves_equal_tokens_whole_if_its_launch_says_so(problem, extra_topk, with_lengths):
    tokens, topk, ctas = problem
    lengths = torch.full((tokens,), topk, dtype=torch.int32) if with_lengths else None
    table = gpu_plan(tokens, topk, by_load(ctas, splits=1), topk_length=lengths, extra_topk=extra_topk)
    tiles = sum(tiles_of([topk, extra_topk], GPU_TILE_SLOTS))
    taken, rounds = table[:, 1] - table[:, 0], -(-tokens // ctas)
    assert walk(table, [tiles] * tokens, GPU_TILE_SLOTS) == [1] * tokens
    if tiles:
        assert taken.max() == rounds and (taken > 0).sum() == (-(-tokens // rounds) if rounds else 0)


@given(equal_tokens(), st.sampled_from([0, 1]), st.data())
def test_a_gpu_balances_unequal_tokens(problem, splits, data):
    tokens, topk, ctas = problem
    tokens, topk = max(tokens, 1), topk + GPU_TILE_SLOTS
    lengths = torch.full((tokens,), topk, dtype=torch.int32)
    lengths[data.draw(st.integers(0, tokens - 1))] -= GPU_TILE_SLOTS
    table = gpu_plan(tokens, topk, by_load(ctas, splits=splits), topk_length=lengths)
    tiles = tiles_of(lengths.tolist(), GPU_TILE_SLOTS)
    walk(table, tiles, GPU_TILE_SLOTS)
    busy = [n for n in units_of_ctas(table, tiles) if n]
    assert max(busy) - min(busy) <= 2 * (1 + units_of_token(tokens, ctas))


def test_a_gpu_counts_what_short_lists_cost_besides_their_tiles():
    """A prompt's first tokens have short lists, so a CTA takes many of them."""
    lengths = torch.arange(1, 4097, dtype=torch.int32).clamp(max=2048)
    tiles = tiles_of(lengths.tolist(), GPU_TILE_SLOTS)
    table = gpu_plan(4096, 2048, by_load(132), topk_length=lengths)
    walk(table, tiles, GPU_TILE_SLOTS)
    busy = units_of_ctas(table, tiles)
    assert max(busy) - min(busy) <= 2 * (1 + TOKEN_UNITS)


@pytest.mark.parametrize(
    ("tokens", "slots", "fmt"), [(192, 1024, "fp8_ds_mla"), (230, 2048, "bf16"), (200, 2048, "bf16")]
)
def test_two_rounds_of_whole_tokens_are_for_full_lists(tokens, slots, fmt):
    launch = gpu_launch(gpu(), tokens, 16, slots, fmt=fmt)
    assert launch.rounds == 2
    lengths = torch.full((tokens,), slots, dtype=torch.int32)
    full = gpu_plan(tokens, slots, launch, topk_length=lengths)
    assert not full[:, 2].any() and (full[:, 1] - full[:, 0]).max() == 2
    lengths[-1] = 0
    uneven = gpu_plan(tokens, slots, launch, topk_length=lengths)
    assert (uneven[:, 1] > uneven[:, 0]).all(), "no CTA idles"


def test_enormous_tokens_do_not_overflow():
    tokens = 2**16 - 2**14
    for splits in (0, 1):  # 2**26 tiles each
        table = gpu_plan(tokens, 2**31 - 1, by_load(2**16, splits=splits), extra_topk=2**31 - 1)
        assert bool((table[:, 2] == 0).all()) == bool(splits) and table[-1, 1] == tokens


@given(st.integers(1, 30), st.integers(2, 16), st.data())
def test_equal_splits_are_equal_in_number_whatever_the_lengths(tokens, splits, data):
    longest = 64 * 4 * splits  # no split is more than four tiles longer than the average then
    lengths = torch.tensor([data.draw(st.integers(0, longest)) for _ in range(tokens)], dtype=torch.int32)
    table = gpu_plan(tokens, longest, by_load(tokens * splits, splits, splits), topk_length=lengths)
    for number, (token_begin, token_end, tile_begin, _, _, count, *_) in enumerate(table.tolist()):
        if token_begin < token_end and lengths[token_begin] > 0:
            assert token_begin == number // splits and token_end == token_begin + 1, "a CTA is its token's alone"
            assert count <= splits and tile_begin <= -(-int(lengths[token_begin]) // 64)


WIDE = by_load(120, 8)
"""For few tokens, in a page table that has room for very long lists."""


@pytest.mark.parametrize(
    "lengths", [[1000], [2048], [600, 2000], [4096] * 8, [100] * 5, [2000, 1, 0, 1500, 10, 9, 4, 5]]
)
def test_short_lists_in_a_wide_table_are_split_for_one_cluster_each(lengths):
    table = gpu_plan(len(lengths), 131072, WIDE, topk_length=torch.tensor(lengths, dtype=torch.int32))
    assert max(walk(table, tiles_of(lengths, GPU_TILE_SLOTS), GPU_TILE_SLOTS)) <= WIDE.cluster
    for number, (token_begin, token_end, *_) in enumerate(table.tolist()):
        token = number // WIDE.cluster
        assert token_begin == token_end or (token_begin, token_end) == (token, token + 1)


@pytest.mark.parametrize("lengths", [[10_000], [131072], [2000, 30_000], [100_000] * 7])
def test_long_lists_in_a_wide_table_are_split_by_load(lengths):
    table = gpu_plan(len(lengths), 131072, WIDE, topk_length=torch.tensor(lengths, dtype=torch.int32))
    tiles = tiles_of(lengths, GPU_TILE_SLOTS)
    assert max(walk(table, tiles, GPU_TILE_SLOTS)) > WIDE.cluster
    busy = [n for n in units_of_ctas(table, tiles) if n]
    assert max(busy) - min(busy) <= 4


@pytest.mark.parametrize("splits", [0, 2, 1_000_000])
def test_a_plan_whose_idle_entry_claims_splits_is_replaced(splits):
    problem = random_problem(tokens=1, topk=100)
    good = planned(1, 100, ctas=1)
    idle = torch.tensor([[0, 0, 0, 0, 0, splits, 0, good.table[0, 7]]], dtype=torch.int32)
    problem.check(plan=Plan(torch.cat([idle, good.table]), good.launch._replace(ctas=2)))


def test_a_launch_of_another_table_is_refused():
    problem, good = random_problem(tokens=1, topk=100), planned(1, 100, ctas=3)
    for launch in (good.launch._replace(ctas=2), Launch("swap_ab", 16, 0, 17, 0, 3), Launch("cpu", 0, 0, 1, 0, 3)):
        with pytest.raises(ValueError, match="launch"):
            problem.solve(plan=Plan(good.table, launch))
