"""The plan covers every token and tile exactly once, in order, and keeps the workers busy."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import library
from mla_backend.attention import FEW_TOKENS
from mla_backend.formats import format_number
from plans import CUT_FOR_CLUSTERS, SIXTHS, TOKEN_UNITS, UNCUT_TOKENS, gpu, gpu_choice, gpu_plan, tiles_of, walk
from problems import random_problem

MIN_PART = 8  # tiles of 16 slots
GPU_TILE_SLOTS = 64
CUT_TILES = 8  # what a cut costs each worker of a GPU


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


def stays_whole(tokens, tiles, workers):
    """Whether a GPU had better not cut tokens of so many tiles each."""
    idle = -tokens % workers * tiles
    return tiles > 0 and 2 * tokens > workers and idle <= CUT_TILES * workers


def units_of_token(tokens, workers):
    return TOKEN_UNITS if 2 * tokens > workers else 1


def units_of_workers(table, tiles):
    """Tiles that each worker of a GPU has, with some more for each token, which those that share it share."""
    more, units = units_of_token(len(tiles), len(table)), []
    for token_begin, token_end, tile_begin, tile_end, *_ in table.tolist():
        ends = [(t, tile_begin if t == token_begin else 0) for t in range(token_begin, token_end)]
        parts = [(t, (tile_end if t == token_end - 1 else tiles[t]) - begin) for t, begin in ends]
        units.append(sum(part * (1 + more / tiles[t]) if tiles[t] else more for t, part in parts))
    return units


@st.composite
def equal_tokens(draw):
    """Workers, and tokens of a few times as many at most: often just fewer than fill a round."""
    workers = draw(st.integers(1, 140))
    idle = draw(st.one_of(st.integers(0, workers), st.integers(0, 8)))
    return max(draw(st.integers(1, 5)) * workers - idle, 0), draw(st.integers(0, 3000)), workers


@given(equal_tokens(), st.integers(0, 300), st.booleans())
def test_a_gpu_leaves_equal_tokens_whole_where_cuts_cost_more_than_they_bring(problem, extra_topk, with_lengths):
    tokens, topk, workers = problem
    lengths = torch.full((tokens,), topk, dtype=torch.int32) if with_lengths else None
    table = gpu_plan(tokens, topk, workers, topk_length=lengths, extra_topk=extra_topk)
    (tiles,) = {
        a + b for a, b in zip(tiles_of([topk], GPU_TILE_SLOTS), tiles_of([extra_topk], GPU_TILE_SLOTS), strict=True)
    }
    parts = walk(table, [tiles] * tokens, GPU_TILE_SLOTS)
    taken, rounds = table[:, 1] - table[:, 0], -(-tokens // workers)
    if stays_whole(tokens, tiles, workers):
        assert parts == [1] * tokens
        assert taken.max() == rounds and (taken > 0).sum() == -(-tokens // rounds)
    elif tiles == 0:
        assert parts == [1] * tokens and taken.max() == rounds
    else:
        busy = [n for n in units_of_workers(table, [tiles] * tokens) if n] or [0]
        assert max(busy) - min(busy) <= 2 * (1 + units_of_token(tokens, workers))


@given(equal_tokens(), st.data())
def test_a_gpu_cuts_unequal_tokens_evenly(problem, data):
    tokens, topk, workers = problem
    tokens, topk = max(tokens, 1), topk + GPU_TILE_SLOTS
    lengths = torch.full((tokens,), topk, dtype=torch.int32)
    lengths[data.draw(st.integers(0, tokens - 1))] -= GPU_TILE_SLOTS
    table = gpu_plan(tokens, topk, workers, topk_length=lengths)
    tiles = tiles_of(lengths.tolist(), GPU_TILE_SLOTS)
    walk(table, tiles, GPU_TILE_SLOTS)
    busy = [n for n in units_of_workers(table, tiles) if n]
    assert max(busy) - min(busy) <= 2 * (1 + units_of_token(tokens, workers))


def test_a_gpu_counts_what_short_lists_cost_besides_their_tiles():
    """A prompt's first tokens have short lists, so a worker takes many of them."""
    lengths = torch.arange(1, 4097, dtype=torch.int32).clamp(max=2048)
    tiles = tiles_of(lengths.tolist(), GPU_TILE_SLOTS)
    table = gpu_plan(4096, 2048, 132, topk_length=lengths)
    walk(table, tiles, GPU_TILE_SLOTS)
    busy = units_of_workers(table, tiles)
    assert max(busy) - min(busy) <= 2 * (1 + TOKEN_UNITS)


@pytest.mark.parametrize(
    ("tokens", "workers", "most", "busy"),
    [(128, 66, 2, 64), (512, 132, 4, 128), (66, 66, 1, 66), (50, 66, 1, 50), (132 * 3 - 33, 132, 3, 121)],
)
def test_tokens_that_a_gpu_leaves_whole_are_shared_out_equally(tokens, workers, most, busy):
    table = gpu_plan(tokens, 2048, workers)
    taken = table[:, 1] - table[:, 0]
    assert (walk(table, [32] * tokens, GPU_TILE_SLOTS), taken.max(), (taken > 0).sum()) == ([1] * tokens, most, busy)


@pytest.mark.parametrize(("tokens", "workers"), [(49, 66), (33, 66), (8, 128), (133, 132), (132 * 3 - 34, 132)])
def test_a_gpu_cuts_tokens_that_would_leave_many_idle_or_that_clusters_take(tokens, workers):
    table = gpu_plan(tokens, 2048, workers)
    assert max(walk(table, [32] * tokens, GPU_TILE_SLOTS)) > 1


@pytest.mark.parametrize(
    ("tokens", "slots", "fmt"), [(133, 1024, "bf16"), (192, 1024, "fp8_ds_mla"), (230, 2048, "bf16")]
)
def test_two_rounds_of_whole_tokens_are_for_full_lists(tokens, slots, fmt):
    workers = library.cuda_workers(gpu(), 16, tokens, slots, format_number(fmt, "fmt"))
    assert workers == 131
    lengths = torch.full((tokens,), slots, dtype=torch.int32)
    full = gpu_plan(tokens, slots, workers, topk_length=lengths, device=gpu())
    assert not full[:, 2].any() and (full[:, 1] - full[:, 0]).max() == 2
    lengths[-1] = 0
    cut = gpu_plan(tokens, slots, workers, topk_length=lengths, device=gpu())
    assert (cut[:, 1] > cut[:, 0]).all(), "no worker idles"


def test_rows_that_are_converted_are_not_taken_in_two_rounds():
    assert library.cuda_workers(gpu(), 16, 192, 1152, format_number("fp8_model1", "fmt")) == 132


def test_a_cpu_cuts_them_all_the_same_since_its_threads_take_turns():
    assert stays_whole(110, 32, 60) and max(walk(mla_backend.plan(110, 512, workers=60), [32] * 110)) > 1


@pytest.mark.parametrize(("tokens", "whole"), [(2**16, True), (2**16 - 2**14, False)])
def test_what_enormous_tokens_would_leave_idle_does_not_overflow(tokens, whole):
    table = gpu_plan(tokens, 2**31 - 1, 2**16, extra_topk=2**31 - 1)  # 2**26 tiles each
    assert bool((table[:, 2] == 0).all()) == whole and table[-1, 1] == tokens


@pytest.mark.parametrize(
    ("hopper", "heads", "workers"),
    [
        *((True, 8, 132), (True, 16, 132), (True, 32, 132), (True, 64, 132), (True, 65, 66), (True, 256, 33)),
        *((False, 16, 264), (False, 17, 132), (False, 128, 33), (False, 256, 16)),
    ],
)
def test_a_gpu_gets_as_many_workers_as_it_can_run_at_once(hopper, heads, workers):
    assert library.cuda_workers(gpu(hopper_kernels=hopper), heads) == workers


@pytest.mark.parametrize(
    ("tokens", "heads", "parts"),
    [
        *((1, 16, 16), (7, 8, 16), (8, 16, 8), (15, 16, 8), (17, 16, 4), (30, 16, 4), (31, 16, 3), (39, 16, 3)),
        *((40, 16, 2), (66, 16, 2), (1, 128, 8), (3, 128, 4), (7, 64, 4), (8, 64, 3), (5, 128, 2), (8, 128, 2)),
    ],
)
def test_on_hopper_few_tokens_are_cut_for_one_cluster_each(tokens, heads, parts):
    assert library.cuda_workers(gpu(), heads, tokens, 2048) == tokens * parts
    assert library.cuda_workers(gpu(), heads, 1000) == library.cuda_workers(gpu(), heads)


@pytest.mark.parametrize(
    ("slots", "parts"), [(0, 1), (64 * 3, 1), (64 * 7, 4), (64 * 8, 8), (64 * 16, 8), (64 * 17, 16), (2**40, 16)]
)
def test_short_lists_are_cut_into_fewer_parts_or_none(slots, parts):
    assert library.cuda_workers(gpu(), 8, 4, slots) == 4 * parts


@given(st.integers(1, 30), st.integers(2, 16), st.data())
def test_few_tokens_are_cut_alike_whatever_their_lengths(tokens, parts, data):
    longest = 64 * 4 * parts  # no part of a token is more than four tiles longer than the average then
    lengths = torch.tensor([data.draw(st.integers(0, longest)) for _ in range(tokens)], dtype=torch.int32)
    table = gpu_plan(tokens, longest, tokens * parts, topk_length=lengths)
    for number, (token_begin, token_end, tile_begin, _, _, cut, *_) in enumerate(table.tolist()):
        if token_begin < token_end and lengths[token_begin] > 0:
            assert token_begin == number // parts and token_end == token_begin + 1, "a worker is its token's alone"
            assert cut <= parts and tile_begin <= -(-int(lengths[token_begin]) // 64)


@pytest.mark.parametrize(
    "lengths", [[1000], [2048], [600, 2000], [4096] * 8, [100] * 5, [3000, 1, 0, 1500, 10, 9, 4, 5]]
)
def test_short_lists_in_a_wide_table_are_cut_for_one_cluster_each(lengths):
    table, cluster = _plan_of_a_wide_table(lengths)
    assert max(walk(table, tiles_of(lengths, GPU_TILE_SLOTS), GPU_TILE_SLOTS)) <= cluster
    for number, (token_begin, token_end, *_) in enumerate(table.tolist()):
        assert token_begin == token_end or (token_begin, token_end) == (number // cluster, number // cluster + 1)


@pytest.mark.parametrize("lengths", [[10_000], [131072], [2000, 30_000], [100_000] * 7])
def test_long_lists_in_a_wide_table_are_cut_by_load(lengths):
    table, cluster = _plan_of_a_wide_table(lengths)
    tiles = tiles_of(lengths, GPU_TILE_SLOTS)
    assert max(walk(table, tiles, GPU_TILE_SLOTS)) > cluster
    busy = [n for n in units_of_workers(table, tiles) if n]
    assert max(busy) - min(busy) <= 4


def _plan_of_a_wide_table(lengths):
    device, tokens, width = gpu(), len(lengths), 131072
    choice = gpu_choice(device, tokens, 16, fmt="bf16", token_tiles=width // GPU_TILE_SLOTS)
    assert choice.parts == 0, "it is a plan for long lists"
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return gpu_plan(tokens, width, choice.workers, topk_length=lengths, device=device), choice.cluster


def test_gpu_tests_have_the_shapes_that_they_are_about():
    parts = {gpu_choice(gpu(), tokens, heads).parts for tokens, heads in CUT_FOR_CLUSTERS}
    assert parts == {16, 8, 4, 3, 2}
    assert gpu_choice(gpu(), *SIXTHS, fmt="bf16", token_tiles=18).parts == 6
    for heads, tiles in itertools.product(range(17, 257), (2, 4)):
        kernel = "few_heads_wide" if heads <= 32 else "many_heads"
        assert gpu_choice(gpu(), UNCUT_TOKENS, heads, token_tiles=tiles).kernel == kernel


@pytest.mark.parametrize("heads", [1, 16])
def test_one_token_more_than_clusters_have_room_for_is_not_cut(heads):
    assert [library.cuda_workers(gpu(), heads, tokens, 2048) for tokens in (66, 67)] == [2 * 66, 67]


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_a_gpu_that_holds_no_clusters_cuts_no_tokens_for_them(heads):
    device = gpu()
    device.clusters[:] = [0] * len(device.clusters)
    for tokens in (1, 8, 66):
        choice = gpu_choice(device, tokens, heads)
        assert (choice.parts, choice.cluster) == (0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
def test_asking_a_gpu_that_is_not_there_says_why():
    with pytest.raises(RuntimeError, match="^mla_backend: .*(device|driver|without CUDA)"):
        library.describe_device(0)


@pytest.mark.parametrize("processors", [16, 78, 114, 132])
@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 64, 128])
def test_plans_for_more_than_few_tokens_are_of_one_size(processors, heads):
    device = gpu(processors)
    for fmt, slots in itertools.product(mla_backend.FORMATS, (64, 512, 2048, None)):
        number, many = format_number(fmt, "fmt"), range(FEW_TOKENS, 4 * FEW_TOKENS)
        sizes = {library.cuda_workers(device, heads, tokens, slots, number) for tokens in many}
        any_list = slots if fmt == "fp8_tensor_576" else None  # of these rows the length chooses the kernel
        assert sizes == {library.cuda_workers(device, heads, None, any_list, number)}


@pytest.mark.parametrize("parts", [0, 2, 1_000_000])
def test_a_plan_whose_idle_row_claims_parts_is_replaced(parts):
    problem = random_problem(tokens=1, topk=100)
    good = mla_backend.plan(1, 100, num_heads=16, workers=1)
    idle = torch.tensor([[0, 0, 0, 0, 0, parts, 0, good[0, 7]]], dtype=torch.int32)
    problem.check(plan=torch.cat([idle, good]))
