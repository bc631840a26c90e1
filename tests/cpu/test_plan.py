"""The plan covers every token and tile exactly once, in order, and keeps the workers busy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import library
from plans import tiles_of, walk

MIN_PART = 8  # tiles of 16 slots


@given(st.data())
def test_every_tile_is_covered_exactly_once(data):
    topk, extra_topk = data.draw(st.integers(0, 3000)), data.draw(st.integers(0, 500))
    tokens = data.draw(st.integers(0, 40))
    lengths = data.draw(st.lists(st.integers(-5, topk + 5), min_size=tokens, max_size=tokens))
    extra = data.draw(st.lists(st.integers(0, extra_topk), min_size=tokens, max_size=tokens))
    workers = data.draw(st.integers(1, 140))
    whole = data.draw(st.booleans())
    table = mla_backend.plan(
        tokens,
        topk,
        topk_length=torch.tensor(lengths, dtype=torch.int32),
        extra_topk=extra_topk,
        extra_topk_length=torch.tensor(extra, dtype=torch.int32),
        workers=workers,
        batch_invariant=whole,
    )
    tiles = [a + b for a, b in zip(tiles_of([min(n, topk) for n in lengths]), tiles_of(extra), strict=True)]
    parts = walk(table, tiles)
    assert all(n >= 1 for n in parts), "every token has a worker, if only to write zeros"
    if whole:
        assert all(n == 1 for n in parts)


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=60), st.integers(1, 140))
def test_no_part_is_shorter_than_it_is_worth(lengths, workers):
    table = mla_backend.plan(len(lengths), 4000, topk_length=torch.tensor(lengths, dtype=torch.int32), workers=workers)
    tiles = tiles_of(lengths)
    for token_begin, token_end, tile_begin, tile_end, *_ in table.tolist():
        if token_begin < token_end and tile_begin > 0:
            own_end = tile_end if token_end == token_begin + 1 else tiles[token_begin]
            assert 2 * (own_end - tile_begin) >= MIN_PART and 2 * tile_begin >= MIN_PART


@pytest.mark.parametrize("lengths", [[20000], [20000] * 8, [100] * 500, [0] * 100 + [30000] + [10] * 100])
def test_work_is_shared_evenly(lengths):
    workers = 8
    table = mla_backend.plan(len(lengths), 30000, topk_length=torch.tensor(lengths, dtype=torch.int32), workers=workers)
    tiles = tiles_of(lengths)
    loads = []
    for token_begin, token_end, tile_begin, tile_end, *_ in table.tolist():
        inner = sum(tiles[token_begin:token_end]) + token_end - token_begin
        if token_end > token_begin:
            inner -= tile_begin + tiles[token_end - 1] - tile_end
        loads.append(inner)
    average = sum(loads) / workers
    assert max(loads) <= average + MIN_PART + 1


def test_enormous_plans_do_not_overflow():
    table = mla_backend.plan(100_000, 2**31 - 1, workers=100_000)
    begins = table[:, 0].long() * 2**28 + table[:, 2]
    assert (begins.diff() > 0).all()


def test_without_lengths_every_list_is_full():
    full = torch.full((7,), 500, dtype=torch.int32)
    assert torch.equal(mla_backend.plan(7, 500, workers=9), mla_backend.plan(7, 500, topk_length=full, workers=9))


def test_a_plan_is_written_into_a_given_table():
    table = torch.full((5, 8), -1, dtype=torch.int32)
    assert mla_backend.plan(3, 100, out=table) is table
    assert torch.equal(table, mla_backend.plan(3, 100, workers=5))


@pytest.mark.skipif(not library.about()["cuda_archs"], reason="the library was built without CUDA")
@pytest.mark.parametrize(
    ("capability", "heads", "workers"),
    [(9, 8, 132), (9, 16, 132), (9, 64, 132), (9, 65, 66), (8, 16, 264), (8, 128, 33)],
)
def test_a_gpu_gets_as_many_workers_as_it_can_run_at_once(capability, heads, workers):
    if capability == 9 and "90a" not in library.about()["cuda_archs"].split():
        workers = 264 // -(-heads // 16)  # there is only the portable kernel then
    assert library.cuda_workers(capability, 132, heads) == workers


@pytest.mark.skipif("90a" not in library.about()["cuda_archs"].split(), reason="the library has no Hopper kernels")
@pytest.mark.parametrize(
    ("tokens", "heads", "parts"),
    [(1, 16, 16), (7, 8, 16), (8, 16, 8), (15, 16, 8), (16, 16, 4), (30, 16, 4), (1, 128, 8), (3, 128, 4), (7, 64, 4)],
)
def test_on_hopper_few_tokens_are_cut_for_one_cluster_each(tokens, heads, parts):
    assert library.cuda_workers(9, 132, heads, tokens) == tokens * parts
    assert library.cuda_workers(9, 132, heads, 1000) == library.cuda_workers(9, 132, heads)
