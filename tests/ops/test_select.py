"""select_tokens: the best positions of each token's context, in one op. tests/gpu runs most of it again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mla_backend
from index_problems import (
    INF,
    KINDS,
    NAN,
    ORDERS,
    QUERY_DTYPES,
    TOPKS,
    IndexProblem,
    among,
    index_problems,
    orders,
    problem_of_scores,
    random_candidates,
    random_index,
    random_keys,
)
from mla_backend import reference
from mla_backend.index import MAX_WORKSPACE, select_workspace

NONE = slice(0)
E4M3 = torch.float8_e4m3fn


def assert_equal(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    """The same positions, and bits of their scores."""
    assert torch.equal(got[0], want[0]), "other positions"
    assert torch.equal(got[1].view(torch.int32), want[1].view(torch.int32)), "other scores"


@given(problem=index_problems(), topk=TOPKS)
def test_selections_are_those_of_the_two_ops(cpu_kernel, problem, topk):
    chosen, scores = problem.check_selection(topk)
    longest = max(1, int(problem.lengths.max()))
    every = mla_backend.index_scores(*problem.arguments(), longest)
    assert torch.equal(chosen, mla_backend.select_top(every, problem.lengths, topk))
    own = every.gather(1, chosen.clamp(min=0).long())
    assert torch.equal(scores, torch.where(chosen < 0, -torch.inf, own))


def best_of_few(problem: IndexProblem, **options) -> tuple[Tensor, Tensor]:
    """All scores of contexts of up to 4096 positions, as this op finds them, and their lengths."""
    return problem.select(4096, **options)[1], problem.lengths.clamp(min=0)


@pytest.mark.parametrize("heads", [1, 3, 32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_best_scores_are_chosen(device, cpu_kernel, kind, heads):
    """Of the scores that the op itself computes, whatever they are rounded to."""
    problem = random_index(kind, 30, heads, 3000, requests=2, dtype=torch.bfloat16, device=device)
    for some in problem, problem.of_prompts([20, 10]):
        scores, lengths = best_of_few(some)
        for topk in (1, 100, 1000):
            chosen, own = some.select(topk)
            assert torch.equal(chosen, reference.select_top(scores, lengths, topk))
            assert torch.equal(own[chosen >= 0], scores.gather(1, chosen.clamp(min=0).long())[chosen >= 0])


@pytest.mark.parametrize("topk", [1, 7, 512, 2048, 4096])
def test_scores_in_any_order_are_selected_from_exactly(device, topk):
    for positions in 4097, 5000, 20001:
        scores = torch.stack(list(orders(positions).values()))
        problem = problem_of_scores(scores, device=device)
        problem.lengths -= torch.arange(len(scores), dtype=torch.int32, device=device) % 3
        chosen, own = problem.select(topk)
        want = reference.select_top(scores, problem.lengths.cpu(), topk)
        for name, got, expected in zip(ORDERS, chosen.cpu(), want, strict=True):
            assert torch.equal(got, expected), f"{name}, {positions} positions"
        known = scores.gather(1, want.clamp(min=0).long())
        expected = torch.where(want < 0, -INF, known)
        assert torch.equal(own.cpu().nan_to_num(123.0, INF, -INF), expected.nan_to_num(123.0, INF, -INF))


@given(data=st.data())
def test_any_scores_are_selected_from_exactly(device, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    tokens, positions = data.draw(st.integers(1, 6)), data.draw(st.sampled_from([1, 2, 63, 64, 65, 700, 3000]))
    names = data.draw(st.lists(st.sampled_from(ORDERS), min_size=tokens, max_size=tokens))
    scores, topk = torch.stack([orders(positions)[name] for name in names]), data.draw(TOPKS)
    problem = problem_of_scores(scores, data.draw(st.sampled_from([1, 7, 16, 64, 100])), device)
    lengths = torch.randint(-2, positions + 1, (tokens,), dtype=torch.int32)
    problem.lengths = lengths.to(device)
    assert torch.equal(problem.select(topk)[0].cpu(), reference.select_top(scores, lengths, topk)), names
    candidates = random_candidates(problem, data.draw(st.sampled_from([1, 3, 8, 16, 50])), data.draw(st.floats(0, 1)))
    scores = among(candidates, scores, lengths, topk)
    found, _ = problem.select(topk, candidates=candidates)
    assert torch.equal(found.cpu(), reference.select_top(scores, lengths, topk)), names


@pytest.mark.parametrize(
    ("scores", "topk", "want"),
    [
        *(([3, 9, 1, 9, 2, 9], topk, want) for topk, want in ((1, [1]), (2, [1, 3]), (4, [0, 1, 3, 5]))),
        ([3, 9, 1, 9, 2, 9], 8, [0, 1, 2, 3, 4, 5, -1, -1]),
        *(([-INF, INF, NAN, -INF, -NAN, 5], topk, want) for topk, want in ((3, [1, 2, 4]), (5, [1, 2, 4, 5, -1]))),
        ([-INF, -INF, 1, -INF, -INF, -INF], 3, [2, -1, -1]),
        ([-0.0, 0.0, -0.0, 0.0], 2, [0, 1]),
        ([-1, -2, -1, -3], 3, [0, 1, 2]),
        ([-INF] * 4, 4, [0, 1, 2, 3]),
    ],
)
def test_the_largest_are_selected_by_rising_position(device, scores, topk, want):
    """NaN is the largest, -inf is never chosen, zeros are equal, and all of a short context are taken."""
    chosen, own = problem_of_scores(torch.tensor([scores], dtype=torch.float32), device=device).select(topk)
    assert chosen[0].tolist() == want
    expected = torch.tensor([scores[i] if i >= 0 else -INF for i in want])
    assert torch.equal(own[0].cpu().nan_to_num(99.0, INF, -INF), expected.nan_to_num(99.0, INF, -INF))


@pytest.mark.parametrize(("block_size", "size", "heads"), [(64, 8, 32), (16, 24, 100), (61, 8, 3), (64, 3, 40)])
@pytest.mark.parametrize("kind", KINDS)
def test_candidates_have_the_bits_that_they_have_among_all(device, cpu_kernel, kind, block_size, size, heads):
    problem = random_index(kind, 12, heads, 900, 2, block_size, 40, dtype=E4M3, device=device)
    problem.block_table[1, ::3] = -1
    for some in problem, problem.of_prompts([7, 5]):
        every = random_candidates(some, size, 1.0)
        # Hopper's own kernels round MXFP4 keys otherwise, and take no candidates
        scores, lengths = best_of_few(some, **(dict(candidates=every) if kind == "mxfp4_68" else {}))
        scores.masked_fill_(torch.arange(4096, device=device) >= lengths.unsqueeze(1), -INF)
        for topk, share in ((1, 0.1), (100, 1.0), (300, 0.1), (100, 0.5)):
            candidates = random_candidates(some, size, share)
            chosen, own = some.select(topk, candidates=candidates)
            want = among(candidates, scores, lengths, topk)
            assert torch.equal(chosen, reference.select_top(want, lengths, topk))
            known = want.gather(1, chosen.clamp(min=0).long())
            assert torch.equal(own, torch.where(chosen < 0, -INF, known))
    exact, _ = reference.select_tokens(*some.arguments(), topk, candidates=candidates)
    assert torch.equal(exact < 0, chosen < 0)


def test_candidates_may_be_anything(device):
    problem = random_index("fp8", 9, 16, 700, dtype=E4M3, device=device)
    garbage = torch.tensor([-1, 0, 3, 3, 80, 87, 88, 2**31 - 1, -(2**31)], dtype=torch.int32, device=device)
    lists = garbage[torch.randint(0, len(garbage), (9, 40), device=device)]
    table = torch.randint(0, 50, (3, 11), dtype=torch.int32, device=device)
    positions, _ = problem.select(30, candidates=(lists, 8))
    for token, length in enumerate(problem.lengths.tolist()):
        own = positions[token][positions[token] >= 0]
        assert (own < length).all() and (length <= 30 or (own.unsqueeze(1) // 8 == lists[token]).any(1).all())
    slots, _ = problem.select(30, candidates=(lists, 8), slots_of=(table, 64))
    assert torch.equal(slots, mla_backend.convert_indices(positions, table, problem.requests, 64)[0])
    none, _ = problem.select(30, candidates=(lists[:, :0], 8))
    assert ((none < 0) | (problem.lengths <= 30).unsqueeze(1)).all()


@pytest.mark.parametrize(
    ("heads", "dtype"), [(1, torch.float32), *((n, torch.bfloat16) for n in (3, 64)), *((n, E4M3) for n in (32, 128))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_selection_is_the_same_alone_in_a_batch_and_in_any_chunk(device, cpu_kernel, kind, heads, dtype):
    problem = random_index(kind, 150, heads, 900, dtype=dtype, device=device).of_prompts([100, 50])
    together = problem.select(200)
    assert_equal(problem.select(200), together)
    shuffled = torch.randperm(150, device=device)  # few neighbours share their keys any more
    assert_equal(problem.only(shuffled).select(200), tuple(x[shuffled] for x in together))
    for begin, end in ((0, 7), (7, 64), (90, 103), (100, 150), (0, 1), (99, 100), (149, 150)):
        some = torch.arange(begin, end, device=device)
        own = tuple(x[begin:end] for x in together)
        assert_equal(problem.only(some).select(200), own)
        wide = torch.cat([problem.block_table, torch.full_like(problem.block_table, 2**31 - 1)], dim=1)
        assert_equal(problem.only(some).but(block_table=wide).select(200), own)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_any_number_get_what_each_token_gets_alone(device, kind):
    for drafts in (1, 2, 3, 5):
        tokens = 6 * drafts
        problem = random_index(kind, tokens, 32, 2500, requests=6, dtype=torch.bfloat16, device=device)
        problem.requests = torch.arange(tokens, dtype=torch.int32, device=device) // drafts
        ends = torch.randint(300, 2500 - drafts, (6,), dtype=torch.int32, device=device).repeat_interleave(drafts)
        problem.lengths = ends + torch.arange(tokens, dtype=torch.int32, device=device) % drafts
        together = problem.select(512)
        for token in range(tokens):
            own = tuple(x[token : token + 1] for x in together)
            assert_equal(problem.only(torch.tensor([token], device=device)).select(512), own)


def test_scales_of_mxfp4_keys_may_lie_any_distance_apart(device, cpu_kernel):
    problem = random_index("mxfp4_68", 24, 40, 900, requests=2, dtype=E4M3, device=device)
    values, scales = problem.cache.view(40, -1).split([64 * 64, 64 * 4], dim=1)
    values, scales = values.view(40, 64, 4, 16), scales.view(40, 64, 4)
    scales[:] = torch.randint(60, 160, scales.shape, device=device)
    scales[::3] = torch.randint(113, 128, scales[::3].shape, device=device)  # one product takes these
    scales[1::3, :, 1], values[1::3, :, 1] = 200, 0
    scales[2, 5], scales[2, 7] = 0, torch.tensor([0, 20, 0, 0], device=device)
    for some in problem, problem.of_prompts([20, 4]):
        some.check()
        some.check_selection(100)
        few = some.only(torch.arange(3, device=device))  # and each has the bits that it has in a batch
        assert_equal(few.select(100), tuple(x[:3] for x in some.select(100)))


@pytest.mark.parametrize("dtype", QUERY_DTYPES)
def test_contiguous_keys_give_the_bits_of_a_paged_cache(device, cpu_kernel, dtype):
    positions = 1000
    keys = random_keys("bf16", positions, 1, device=device).view(positions, 128)
    lengths = torch.tensor([1000, 999, 700, 64, 1, 0], dtype=torch.int32, device=device)
    queries, weights = torch.randn(6, 32, 128, device=device).to(dtype), torch.randn(6, 32, device=device)
    requests = torch.zeros(6, dtype=torch.int32, device=device)
    got = mla_backend.select_tokens(queries, weights, keys, None, requests, lengths, 100, return_scores=True)
    for block_size in (1, 16, 100):
        blocks = -(-positions // block_size)
        cache = torch.full((blocks + 1, block_size, 128), torch.nan, dtype=torch.bfloat16, device=device)
        order = torch.randperm(blocks, device=device)
        cache[order] = torch.nn.functional.pad(keys, (0, 0, 0, blocks * block_size - positions)).view(blocks, -1, 128)
        paged = IndexProblem(queries, weights, cache, order.int().unsqueeze(0), requests, lengths, positions)
        assert_equal(got, paged.select(100))
    assert torch.equal(got[0][-1], torch.full((100,), -1, dtype=torch.int32, device=device))
    none = mla_backend.select_tokens(queries, weights, keys[:0], None, requests, lengths, 1)
    assert none.squeeze(1).tolist() == [-1, -1, -1, -1, 0, -1]  # a context of one position is taken as a whole
    other = mla_backend.select_tokens(queries, weights, keys, None, requests + 1, lengths, 1)
    assert torch.equal(other, none)


@pytest.mark.parametrize("topk", [4, 300])
@pytest.mark.parametrize("block_size", [1, 16, 61, 2**31 - 1])
def test_positions_become_slots_of_another_cache(device, block_size, topk):
    problem = random_index("fp8", 20, 16, 700, requests=4, device=device)
    for table in (
        torch.randint(-3, 60, (4, -(-700 // block_size)), dtype=torch.int32, device=device),
        torch.randint(2**31 - 9, 2**31 - 1, (3, 20), dtype=torch.int32, device=device),  # no room for all requests
        torch.zeros(0, 5, dtype=torch.int32, device=device),
    ):
        positions, scores = problem.select(topk)
        slots, own = problem.select(topk, slots_of=(table, block_size))
        want, _ = mla_backend.convert_indices(positions, table, problem.requests, block_size)
        assert_equal((slots, own), (want, scores))
        want, _ = reference.select_tokens(*problem.arguments(), topk, slots_of=(table, block_size))
        assert torch.equal(slots < 0, want < 0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_a_context_does_not_matter(device, kind):
    problem = random_index(kind, 12, 24, 500, requests=3, block_size=16, device=device)
    problem.requests = problem.requests.sort().values
    want = problem.select(50)
    longest = torch.zeros(3, dtype=torch.int64, device=device)
    longest.scatter_reduce_(0, problem.requests.long(), problem.lengths.long(), "amax")
    unused = torch.arange(problem.block_table.shape[1], device=device) * 16 >= longest.unsqueeze(1)
    garbage = torch.tensor([-1, 2**31 - 1, -(2**31), 40, 39], dtype=torch.int32, device=device)
    table = torch.where(unused, garbage[torch.randint(0, 5, unused.shape, device=device)], problem.block_table)
    assert_equal(problem.but(block_table=table).select(50), want)
    cache = problem.cache.clone()
    used = torch.unique(problem.block_table[~unused])
    spoiled = torch.ones(len(cache), dtype=torch.bool, device=device)
    spoiled[used.long()] = False
    cache.view(torch.uint8)[spoiled] = 0xFF
    assert_equal(problem.but(cache=cache).select(50), want)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_without_a_key_are_not_chosen_unless_all_are(device, kind):
    problem = random_index(kind, tokens=4, requests=2, positions=50, block_size=16, blocks=8, device=device)
    problem.block_table = torch.tensor([[2, -1, 8], [-(2**31), 2**31 - 1, 5]], dtype=torch.int32, device=device)
    problem.requests = torch.tensor([0, 1, 2, -1], dtype=torch.int32, device=device)
    for length in (49, 5000, 2**31 - 1):
        problem.lengths = torch.full((4,), length, dtype=torch.int32, device=device)
        chosen, scores = problem.select(40)
        found = [*range(16)], [*range(32, 48)], [], []
        assert chosen.tolist() == [own + [-1] * (40 - len(own)) for own in found]
        assert torch.equal(scores.isfinite(), chosen >= 0)
    problem.lengths = torch.full((4,), 60, dtype=torch.int32, device=device)
    chosen, scores = problem.select(100)
    assert torch.equal(chosen, torch.tensor([*range(60), *[-1] * 40], dtype=torch.int32, device=device).expand(4, -1))
    assert scores.isfinite().sum(1).tolist() == [16, 16, 0, 0]


def test_no_blocks_no_requests_and_no_tokens_are_ordinary(device):
    problem = random_index(device=device)
    without = dict(cache=problem.cache[:0]), *(dict(block_table=problem.block_table[i]) for i in (NONE, (..., NONE)))
    for empty in (problem.but(**change) for change in without):
        chosen, scores = empty.select(7)
        assert ((chosen == -1) | (empty.lengths <= 7).unsqueeze(1)).all() and (scores == -torch.inf).all()
    chosen, scores = problem.only(slice(0)).select(7)
    assert chosen.shape == scores.shape == (0, 7)


@pytest.mark.parametrize("dtype", QUERY_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_may_have_strides(device, cpu_kernel, kind, dtype):
    problem = random_index(kind, 9, 24, 200, gap=16, dtype=dtype, device=device)
    for gap in (1, 2, 4, 16):
        queries = torch.randn(9, 25, 128 + gap, device=device).to(dtype)[:, 1:, gap:]
        weights = torch.randn(9, 30, device=device)[:, 3:27]
        table = torch.cat([problem.block_table, problem.block_table], dim=1)[:, : problem.block_table.shape[1]]
        strided = problem.but(queries=queries, weights=weights, block_table=table)
        chosen = strided.check_selection(20)
        dense = strided.but(queries=queries.clone(memory_format=torch.contiguous_format), weights=weights.clone())
        assert_equal(dense.select(20), chosen)


def test_few_tokens_with_long_contexts_select_what_torch_does():
    """Their contexts are split."""
    problem = random_index("bf16", 3, 4, 131072, requests=3, blocks=300, dtype=torch.bfloat16)
    problem.lengths = torch.tensor([131072, 100000, 2049], dtype=torch.int32)
    scores = mla_backend.index_scores(*problem.arguments(), 131072)
    chosen, own = problem.select(2048)
    assert torch.equal(chosen, mla_backend.select_top(scores, problem.lengths, 2048))
    assert torch.equal(own, scores.gather(1, chosen.long()))


def test_the_number_of_threads_does_not_matter():
    problem = random_index("fp8", 20, 16, 6000, requests=7, dtype=torch.bfloat16)
    want = problem.select(700)
    for threads in (1, 5):
        torch.set_num_threads(threads)
        assert_equal(problem.select(700), want)


def test_a_workspace_is_small_and_follows_from_shapes():
    assert select_workspace(8192, 64, 131072, 2048, "cpu") == 0
    problem = random_index()
    got = mla_backend.select_tokens(*problem.arguments(), 5, workspace=torch.zeros(0, dtype=torch.uint8))
    assert torch.equal(got, mla_backend.select_tokens(*problem.arguments(), 5)) and MAX_WORKSPACE == 2**26
