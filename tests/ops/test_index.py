"""The indexer's ops: scores of paged keys, and the positions of the largest of them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mla_backend
from mla_backend import reference
from mla_backend.keys import KEY_FORMATS, write_keys
from problems import IndexProblem

KINDS = tuple(KEY_FORMATS)
DTYPES = torch.float32, torch.bfloat16


class Problem(IndexProblem):
    def solve(self) -> Tensor:
        """Our answer, written over poisoned memory."""
        scores = torch.full((len(self.queries), self.positions), 12345.0)
        assert mla_backend.index_scores(*self.arguments(), scores=scores) is scores
        return scores

    def but(self, **changes) -> "Problem":
        return replace(self, **changes)

    def check(self) -> None:
        scores, seen = self.solve(), self.seen()
        want = reference.index_scores(**vars(self))
        assert (scores[~seen] == 12345.0).all()
        assert_scores(torch.where(seen, scores, -torch.inf), want, self)


def assert_scores(scores: Tensor, want: Tensor, problem: Problem) -> None:
    """The contract's tolerance: of the sum of the magnitudes of all products."""
    sizes = reference.index_scores(
        problem.queries.abs(),
        problem.weights.abs(),
        reference.dequantise_keys(problem.cache).abs(),
        *list(vars(problem).values())[3:],
    )
    infinite = want.isinf()
    assert torch.equal(scores[infinite], want[infinite])
    off = (scores - want)[~infinite].abs()
    assert (off <= 2.0**-16 * sizes[~infinite] + 1e-30).all(), off.max()


def keys_cache(kind: str, blocks: int, block_size: int, pad: int = 0) -> Tensor:
    """A cache of random keys; `pad` more tokens lie between its blocks."""
    fmt = KEY_FORMATS[kind]
    memory = torch.zeros(blocks, block_size + pad, fmt.width, dtype=fmt.dtype)
    cache = memory[:, :block_size]
    write_keys(torch.randn(blocks * block_size, 128) * 3, cache, torch.arange(blocks * block_size))
    return cache


def random_problem(
    kind: str = "fp8",
    tokens: int = 5,
    heads: int = 32,
    requests: int = 3,
    positions: int = 150,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    pad: int = 0,
) -> Problem:
    """Tokens of random requests and lengths, some of them too large or negative, as are some blocks."""
    blocks = 8
    return Problem(
        torch.randn(tokens, heads, 128).to(dtype),
        torch.randn(tokens, heads),
        keys_cache(kind, blocks, block_size, pad),
        torch.randint(-1, blocks + 1, (requests, max(1, positions // block_size)), dtype=torch.int32),
        torch.randint(-1, requests + 1, (tokens,), dtype=torch.int32),
        torch.randint(-3, positions + 10, (tokens,), dtype=torch.int32),
        positions,
    )


def prefill_problem(kind: str, dtype: torch.dtype, tokens: int = 40, context: int = 700, heads: int = 32) -> Problem:
    """The last tokens of two requests, whose blocks lie anywhere."""
    blocks = -(-context // 64)
    return Problem(
        torch.randn(2 * tokens, heads, 128).to(dtype),
        torch.randn(2 * tokens, heads),
        keys_cache(kind, 2 * blocks, 64),
        torch.randperm(2 * blocks).int().view(2, blocks),
        torch.arange(2, dtype=torch.int32).repeat_interleave(tokens),
        torch.arange(context - tokens + 1, context + 1, dtype=torch.int32).repeat(2),
        context,
    )


@st.composite
def problems(draw):
    torch.manual_seed(draw(st.integers(0, 2**31)))
    problem = random_problem(
        draw(st.sampled_from(KINDS)),
        draw(st.integers(0, 20)),
        draw(st.one_of(st.sampled_from([1, 32, 64, 128]), st.integers(1, 128))),
        draw(st.integers(0, 4)),
        draw(st.one_of(st.just(0), st.integers(1, 200))),
        draw(st.sampled_from([1, 3, 16, 64])),
        draw(st.sampled_from(DTYPES)),
        draw(st.integers(0, 3)),
    )
    if draw(st.booleans()):  # neighbours of one request
        problem.requests = problem.requests.sort().values
    if draw(st.booleans()):  # strides
        tokens, heads = problem.weights.shape
        problem.queries = torch.stack([problem.queries] * 2, 1).transpose(1, 2)[:, :, 1]
        problem.weights = torch.cat([problem.weights] * 2, 1)[:, heads:]
        problem.block_table = torch.cat([problem.block_table] * 2, 1)[:, : problem.block_table.shape[1]]
    return problem


@given(problem=problems())
def test_scores_are_those_of_the_oracle(cpu_kernel, problem):
    problem.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_a_prefill_are_those_of_the_oracle(cpu_kernel, kind, dtype):
    prefill_problem(kind, dtype).check()


@pytest.mark.parametrize("kind", KINDS)
def test_positions_without_a_key_have_minus_infinity(kind):
    problem = random_problem(kind, tokens=4, requests=2, positions=50)
    problem.block_table = torch.tensor([[2, -1, 8], [-(2**31), 2**31 - 1, 5]], dtype=torch.int32)
    problem.requests = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    problem.lengths = torch.full((4,), 2**31 - 1, dtype=torch.int32)
    scores = problem.solve()
    found = torch.zeros(4, 50, dtype=torch.bool)
    found[0, :16] = found[1, 32:48] = True
    assert torch.equal(scores.isfinite(), found) and (scores[~found] == -torch.inf).all()


def test_no_blocks_no_requests_no_tokens_and_no_positions_are_ordinary():
    problem = random_problem()
    nothing = problem.but(cache=problem.cache[:0])
    assert (nothing.solve()[nothing.seen()] == -torch.inf).all()
    for empty in (
        problem.but(block_table=problem.block_table[:0]),
        problem.but(block_table=problem.block_table[:, :0]),
    ):
        assert (empty.solve()[empty.seen()] == -torch.inf).all()
    assert problem.but(positions=0).solve().shape == (5, 0)
    none = {name: getattr(problem, name)[:0] for name in ("queries", "weights", "requests", "lengths")}
    assert problem.but(**none).solve().shape == (0, 150)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_not_a_number_spoils_its_own_score_alone(cpu_kernel, kind):
    problem = random_problem(kind, tokens=1, requests=1, positions=64, heads=20)
    problem.block_table[:], problem.requests[:], problem.lengths[:] = torch.arange(4), 0, 64
    # all bits set is no number in either format, and both begin a block with the values of its tokens in their order
    value_bytes = 1 if kind == "fp8" else 2
    problem.cache.view(torch.uint8).view(len(problem.cache), -1)[1, 3 * 128 * value_bytes :][:2] = 0xFF
    scores = problem.solve()[0]
    assert scores[16 + 3].isnan() and scores.isnan().sum() == 1


def test_infinite_keys_give_infinite_scores_for_any_number_of_heads(cpu_kernel):
    for heads in (1, 15, 16, 17, 33):
        problem = random_problem("bf16", tokens=1, requests=1, positions=16, heads=heads)
        problem.queries, problem.weights = torch.ones(1, heads, 128), torch.ones(1, heads)
        problem.block_table[:], problem.requests[:], problem.lengths[:] = 2, 0, 16
        problem.cache[2, 5] = torch.inf
        assert problem.solve()[0, 5] == torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_token_depend_on_nothing_else_in_the_batch(cpu_kernel, kind, dtype):
    problem = prefill_problem(kind, dtype)
    together, seen = problem.solve(), problem.seen()
    shuffled = torch.randperm(len(together))
    per_token = ("queries", "weights", "requests", "lengths")

    def some(rows: Tensor) -> Problem:
        return problem.but(**{name: getattr(problem, name)[rows] for name in per_token})

    assert torch.equal(some(shuffled).solve(), together[shuffled])
    for t in range(0, len(together), 7):
        rows = torch.tensor([t])
        longer = some(rows).but(positions=problem.positions + 300)  # as in a batch with a longer context
        for alone in (some(rows).solve(), longer.solve()[:, : problem.positions]):
            assert torch.equal(alone[seen[rows]], together[t][seen[t]])


def scores_with_ties(tokens: int, positions: int) -> Tensor:
    """Few different values, among them both zeros, infinities and NaN."""
    values = torch.tensor([-torch.inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 7.0, torch.inf, torch.nan])
    return values[torch.randint(0, len(values), (tokens, positions))]


@given(data=st.data())
def test_selections_are_those_of_the_oracle(data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    tokens, positions = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 400))
    topk = data.draw(st.one_of(st.integers(0, 5), st.integers(0, 300)))
    kind = data.draw(st.sampled_from(["random", "ties", "one value", "close"]))
    scores = {
        "random": lambda: torch.randn(tokens, positions) * 100,
        "ties": lambda: scores_with_ties(tokens, positions),
        "one value": lambda: torch.full((tokens, positions), data.draw(st.sampled_from([2.0, torch.nan, -torch.inf]))),
        "close": lambda: 1 + torch.randint(0, 50, (tokens, positions)) * 2.0**-23,
    }[kind]()
    lengths = torch.randint(-2, positions + 3, (tokens,), dtype=torch.int32)
    want = reference.select_top(scores, lengths, topk)
    assert torch.equal(mla_backend.select_top(scores, lengths, topk), want)
    wide = torch.cat([scores, scores], 1)[:, positions:]  # strides, and a place to write into
    chosen = torch.full((tokens, topk + 4), 77, dtype=torch.int32)
    mla_backend.select_top(wide, lengths, chosen=chosen[:, :topk])
    assert torch.equal(chosen[:, :topk], want) and (chosen[:, topk:] == 77).all()


def test_the_largest_scores_are_selected_by_rising_position():
    scores = torch.tensor([[3.0, 9.0, 1.0, 9.0, 2.0, 9.0, 100.0]])
    length = torch.tensor([6], dtype=torch.int32)
    for topk, want in (
        (1, [1]),
        (2, [1, 3]),
        (4, [0, 1, 3, 5]),
        (6, [0, 1, 2, 3, 4, 5]),
        (8, [0, 1, 2, 3, 4, 5, -1, -1]),
    ):
        assert mla_backend.select_top(scores, length, topk).tolist() == [want]


def test_not_a_number_is_the_largest_and_minus_infinity_never_chosen():
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[-inf, inf, nan, -inf, -nan, 5.0], [-inf, -inf, 1.0, -inf, -inf, -inf]])
    lengths = torch.tensor([6, 6], dtype=torch.int32)
    assert mla_backend.select_top(scores, lengths, 3).tolist() == [[1, 2, 4], [2, -1, -1]]
    assert mla_backend.select_top(scores, lengths, 5).tolist() == [[1, 2, 4, 5, -1], [2, -1, -1, -1, -1]]


def test_zeros_of_both_signs_are_equal():
    scores = torch.tensor([[-0.0, 0.0, -0.0, 0.0]])
    assert mla_backend.select_top(scores, torch.tensor([4], dtype=torch.int32), 2).tolist() == [[0, 1]]


def test_a_context_no_longer_than_topk_is_taken_without_reading_its_scores():
    scores = torch.full((1, 5), -torch.inf)
    assert mla_backend.select_top(scores, torch.tensor([4], dtype=torch.int32), 4).tolist() == [[0, 1, 2, 3]]


def test_long_contexts_select_what_torch_does():
    scores = torch.randn(3, 131072)
    lengths = torch.tensor([131072, 100000, 2049], dtype=torch.int32)
    for row, own, length in zip(mla_backend.select_top(scores, lengths, 2048), scores, lengths.tolist(), strict=True):
        assert torch.equal(row.long(), own[:length].topk(2048).indices.sort().values)
