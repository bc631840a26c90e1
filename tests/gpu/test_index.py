"""The indexer's ops on a GPU, held to the reference in float64."""

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

pytestmark = pytest.mark.gpu
POISON = 12345.0
HEADS = [1, 16, 20, 32, 40, 64, 65, 128]
ERROR = {torch.float32: 2.0**-11, torch.bfloat16: 2.0**-16}
"""Of the sum over heads of |weight| |query| |key|: what rounding queries to f16, and sums in fp32, may cost."""


class Problem(IndexProblem):
    """On the GPU."""

    def solve(self) -> Tensor:
        """Scores, written into a part of poisoned memory; what is around it has to keep its poison."""
        memory = torch.full((len(self.queries), self.positions + 5), POISON, device="cuda")
        scores = memory[:, 2:-3]
        mla_backend.index_scores(*self.arguments(), scores=scores)
        assert (memory[:, :2] == POISON).all() and (memory[:, -3:] == POISON).all(), "written beside the scores"
        return scores

    def check(self, error: float | None = None) -> None:
        got, seen = self.solve(), self.seen()
        want = reference.index_scores(*self.arguments(), self.positions)
        assert (got[~seen] == POISON).all(), "written where a token sees nothing"
        nothing = seen & (want == -torch.inf)
        assert (got[nothing] == -torch.inf).all(), "a score where there is no key"
        known = seen & ~nothing
        norms = replace(self, queries=self.queries.double().norm(dim=-1, keepdim=True), weights=self.weights.abs())
        allowed = norms.largest_scores() * (error or ERROR[self.queries.dtype])
        off = (got.double() - want.double()).abs() - want.double().abs() * 2.0**-23  # the reference is rounded itself
        assert not got[known].isnan().any(), "NaN"
        assert (off[known] <= allowed[known]).all(), f"off by {(off / allowed)[known].max():.3g} of what is allowed"

    def largest_scores(self) -> Tensor:
        """float64 `[T, N]`: what scores could be, of `[T, H, 1]` queries' norms: sum of weight * norm * norm."""
        keys = reference.dequantise_keys(self.cache).double().norm(dim=-1)
        size, columns = self.cache.shape[1], torch.arange(self.positions, device="cuda")
        table = self.block_table.long().clamp(0, len(keys) - 1)
        place = (columns // size).clamp(max=table.shape[1] - 1)
        norms = keys[table[self.requests.long().clamp(0, len(table) - 1)][:, place], columns % size]
        return (self.weights.double() * self.queries.squeeze(-1)).sum(1, keepdim=True) * norms

    def only(self, tokens: Tensor) -> "Problem":
        """The same for some of the tokens, in another order."""
        parts = {name: getattr(self, name)[tokens] for name in ("queries", "weights", "requests", "lengths")}
        return replace(self, **parts)


def random_cache(fmt: str, blocks: int, block_size: int, gap: int = 0) -> Tensor:
    """Keys of unequal size in every slot; `gap` bytes between blocks."""
    kind = KEY_FORMATS[fmt]
    memory = torch.zeros(blocks, block_size * kind.token_bytes + gap, dtype=torch.uint8, device="cuda")
    cache = memory[:, : block_size * kind.token_bytes].view(kind.dtype).unflatten(1, (block_size, kind.width))
    keys = torch.randn(blocks * block_size, 128, device="cuda")
    keys *= torch.randn(blocks * block_size, 1, device="cuda").exp()
    whole = torch.zeros(blocks, block_size, kind.width, dtype=kind.dtype, device="cuda")
    write_keys(keys, whole, torch.arange(blocks * block_size, device="cuda"))
    return cache.copy_(whole)


def random_problem(
    fmt: str = "fp8",
    tokens: int = 8,
    heads: int = 64,
    positions: int = 300,
    requests: int = 3,
    block_size: int = 64,
    blocks: int = 40,
    gap: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Problem:
    """Decoding requests of random lengths and blocks."""
    width = -(-positions // block_size)
    return Problem(
        torch.randn(tokens, heads, 128, device="cuda").to(dtype),
        torch.randn(tokens, heads, device="cuda"),
        random_cache(fmt, blocks, block_size, gap),
        torch.randint(0, blocks, (requests, width), dtype=torch.int32, device="cuda"),
        torch.randint(0, requests, (tokens,), dtype=torch.int32, device="cuda"),
        torch.randint(0, positions + 1, (tokens,), dtype=torch.int32, device="cuda"),
        positions,
    )


def prompts(problem: Problem, chunks: list[int]) -> Problem:
    """The same as chunks of prompts: neighbours are of one request, and each sees one key more than the one before."""
    requests = torch.repeat_interleave(torch.tensor(chunks))
    lengths = torch.cat([torch.arange(problem.positions - n, problem.positions) + 1 for n in chunks])
    return replace(
        problem,
        requests=requests.to("cuda", torch.int32) % len(problem.block_table),
        lengths=lengths.clamp(min=0).to("cuda", torch.int32),
    )


@pytest.mark.parametrize("fmt", KEY_FORMATS)
@given(st.data())
def test_scores_agree_with_the_reference(fmt, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    problem = random_problem(
        fmt,
        tokens=data.draw(st.integers(1, 20)),
        heads=data.draw(st.sampled_from(HEADS)),
        positions=data.draw(st.sampled_from([1, 63, 64, 65, 300, 1000])),
        requests=data.draw(st.integers(1, 4)),
        block_size=data.draw(st.sampled_from([1, 7, 16, 61, 64, 1000])),
        blocks=data.draw(st.integers(1, 50)),
        gap=data.draw(st.sampled_from([0, 4, 16, 64])),
        dtype=data.draw(st.sampled_from(list(ERROR))),
    )
    if data.draw(st.booleans()):  # blocks that are none, a table that is too short, requests and lengths out of range
        problem.block_table[torch.rand(problem.block_table.shape, device="cuda") < 0.2] = -1
        problem.block_table[torch.rand(problem.block_table.shape, device="cuda") < 0.1] = len(problem.cache)
        problem.block_table = problem.block_table[:, : max(1, problem.block_table.shape[1] - 1)]
        problem.requests += torch.randint(-1, 2, problem.requests.shape, dtype=torch.int32, device="cuda")
        problem.lengths += torch.randint(-9, 10, problem.lengths.shape, dtype=torch.int32, device="cuda")
    problem.check()


@pytest.mark.parametrize("fmt", KEY_FORMATS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("chunks", [[64], [3, 130, 1, 9], [7]])
def test_prompts_agree_with_the_reference(fmt, heads, chunks):
    problem = random_problem(fmt, sum(chunks), heads, 700)
    prompts(problem, chunks).check()


@pytest.mark.parametrize("fmt", KEY_FORMATS)
@pytest.mark.parametrize("heads", [32, 64, 100])
def test_small_case(fmt, heads):
    problem = random_problem(fmt, 12, heads, 150)
    problem.check()
    prompt = prompts(problem, [12])
    prompt.check()
    scores = prompt.solve()
    assert torch.equal(
        mla_backend.select_top(scores, prompt.lengths, 50), reference.select_top(scores, prompt.lengths, 50)
    )


@pytest.mark.parametrize("fmt", KEY_FORMATS)
@pytest.mark.parametrize("dtype", ERROR)
def test_tensors_may_have_strides(fmt, dtype):
    problem = random_problem(fmt, 9, 24, 200, gap=16)
    for gap in 1, 2, 4:  # 1 and 2 leave no row where 16 bytes could be read at once
        queries = torch.randn(9, 25, 128 + gap, device="cuda").to(dtype)[:, 1:, gap:]
        weights = torch.randn(9, 30, device="cuda")[:, 3:27]
        table = torch.cat([problem.block_table, problem.block_table], dim=1)[:, : problem.block_table.shape[1]]
        replace(problem, queries=queries, weights=weights, block_table=table).check()


@pytest.mark.parametrize("fmt", KEY_FORMATS)
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_bits_do_not_depend_on_the_other_tokens(fmt, heads):
    problem = prompts(random_problem(fmt, 150, heads, 900), [100, 50])
    together, seen = problem.solve(), problem.seen()
    again = problem.solve()
    assert torch.equal(together, again), "not the same bits twice"
    shuffled = torch.randperm(150, device="cuda")  # no two neighbours share their keys any more, or few
    apart = torch.empty_like(together)
    apart[shuffled] = problem.only(shuffled).solve()
    assert torch.equal(together[seen], apart[seen])
    for token in 0, 99, 100, 149:
        alone = problem.only(torch.tensor([token], device="cuda")).solve()
        assert torch.equal(together[token][seen[token]], alone[0][seen[token]])


def test_lengths_may_change_between_replays():
    problem = random_problem("fp8", 40, 64, 2000, requests=40)
    scores = torch.full((40, 2000), POISON, device="cuda")
    chosen = torch.full((40, 100), 7, dtype=torch.int32, device="cuda")

    def both() -> None:
        mla_backend.index_scores(*problem.arguments(), scores=scores)
        mla_backend.select_top(scores, problem.lengths, chosen=chosen)

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for longest in 0, 50, 2000, 700:
        problem.lengths.copy_(torch.randint(0, longest + 1, (40,)))
        problem.queries.normal_()
        scores.fill_(POISON)
        chosen.fill_(7)
        graph.replay()
        want = problem.solve()
        assert torch.equal(scores, torch.where(problem.seen(), want, POISON))
        assert torch.equal(chosen, reference.select_top(want, problem.lengths, 100))


def test_a_scale_may_be_any_number():
    problem = random_problem("fp8", 6, 64, 256, requests=1, blocks=4)
    problem.block_table = torch.arange(4, dtype=torch.int32, device="cuda").unsqueeze(0)
    problem = replace(problem, requests=problem.requests * 0, lengths=problem.lengths * 0 + 256)
    scales = problem.cache.view(4, -1)[:, 64 * 128 :].view(torch.float32)
    scales[0] = -scales[0]
    scales[1] = torch.randn(64, device="cuda") * torch.exp2(torch.randint(-100, 60, (64,), device="cuda"))
    scales[2] = 0.0
    problem.check()
    scales[3, 5] = torch.nan
    got = problem.solve()
    assert got[:, 3 * 64 + 5].isnan().all() and not got[:, : 3 * 64 + 5].isnan().any()


def test_every_code_has_its_value():
    problem = random_problem("fp8", 256, 1, 4, requests=1, block_size=4, blocks=1)
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").view(2, 128)
    problem.cache.view(-1)[: 4 * 128].view(2, 2, 128)[:] = torch.stack([codes, codes ^ 0x80], dim=1)
    problem.cache.view(-1)[4 * 128 :].view(torch.float32)[:] = 0.5
    values = codes.view(torch.float8_e4m3fn).float()
    for part in range(2):
        finite = ~values[part].isnan()
        queries = torch.diag(torch.ones(128, device="cuda"))[finite].unsqueeze(1)
        count = int(finite.sum())
        asked = problem.only(torch.arange(count, device="cuda"))
        asked = replace(asked, queries=queries, weights=asked.weights * 0 + 1, lengths=asked.lengths * 0 + 4)
        problem.cache.view(-1)[127 + 128 * torch.arange(4, device="cuda")] = 0  # NaN is in every sum
        problem.cache.view(-1)[: 4 * 128].view(4, 128)[2 * part, :127] = codes[part, :127]
        got = asked.solve()[:, 2 * part : 2 * part + 2]
        kept = values[part][finite]
        assert torch.equal(got[:, 0], (kept / 2).relu()) and torch.equal(got[:, 1], (-kept / 2).relu())
    problem.cache.view(-1)[5] = 0x7F
    got = replace(problem, lengths=problem.lengths * 0 + 4, requests=problem.requests * 0).solve()
    assert got[:, 0].isnan().all() and not got[:, 1:].isnan().any()


@pytest.mark.parametrize("fmt", KEY_FORMATS)
@pytest.mark.parametrize("dtype", ERROR)
def test_queries_and_keys_may_have_any_magnitude(fmt, dtype):
    problem = random_problem(fmt, 30, 64, 256, requests=1, blocks=4, dtype=dtype)
    size = torch.exp2(torch.randint(-60, 40, (30, 64, 1), device="cuda").float())
    problem.queries = (problem.queries.float() * size).to(dtype)
    if fmt == "bf16":
        problem.cache *= torch.exp2(torch.randint(-60, 30, (4, 64, 1), device="cuda").float()).bfloat16()
    problem.check()


@pytest.mark.parametrize("fmt", KEY_FORMATS)
def test_a_cache_may_be_larger_than_2_gib(fmt):
    kind = KEY_FORMATS[fmt]
    blocks = 2**31 // (64 * kind.token_bytes) + 100
    problem = random_problem(fmt, 6, 64, 256, blocks=60)
    large = torch.zeros(blocks, 64, kind.width, dtype=kind.dtype, device="cuda")
    large[-60:] = problem.cache
    want = problem.solve()
    moved = replace(problem, cache=large, block_table=problem.block_table + (blocks - 60)).solve()
    assert torch.equal(want, moved)


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-42, -1e-42]


@given(st.data())
def test_the_best_are_chosen(data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    tokens, topk = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([0, 1, 5, 64, 1000, 2048, 3000]))
    positions = data.draw(st.sampled_from([1, 100, 4096, 4097, 16385, 40000, 131072]))
    scores = torch.randn(tokens, positions + data.draw(st.sampled_from([0, 1, 4])), device="cuda")
    kind = data.draw(st.sampled_from(["any", "alike", "equal", "special", "few"]))
    if kind == "alike":
        scores = 5 + scores * 1e-4
    elif kind == "equal":
        scores = (scores * 2).round() * data.draw(st.sampled_from([1.0, -0.0]))
    elif kind == "special":
        pick = torch.randint(0, len(SPECIAL), scores.shape, device="cuda")
        special = torch.tensor(SPECIAL, device="cuda")[pick]
        scores = torch.where(torch.rand(scores.shape, device="cuda") < 0.5, special, scores)
    elif kind == "few":
        scores[torch.rand(scores.shape, device="cuda") < 0.99] = -torch.inf
    scores = scores[:, :positions]
    lengths = torch.randint(-2, positions + 3, (tokens,), dtype=torch.int32, device="cuda")
    lengths[0] = positions
    want = reference.select_top(scores, lengths, topk)
    scores[torch.arange(positions, device="cuda") >= lengths.unsqueeze(1)] = torch.nan  # seen by nobody
    memory = torch.full((tokens, topk + 3), 7, dtype=torch.int32, device="cuda")
    mla_backend.select_top(scores, lengths, chosen=memory[:, 1:-2])
    assert torch.equal(memory[:, 1:-2], want)
    assert (memory[:, 0] == 7).all() and (memory[:, -2:] == 7).all()


def test_many_tokens_choose_at_once():
    scores = torch.randn(5000, 3000, device="cuda")
    lengths = torch.arange(5000, dtype=torch.int32, device="cuda") % 3001
    chosen = mla_backend.select_top(scores, lengths, 512)
    seen = torch.arange(3000, device="cuda") < lengths.unsqueeze(1)
    best = scores.masked_fill(~seen, -torch.inf).topk(512).indices.int()
    best = best.masked_fill(torch.arange(512, device="cuda") >= lengths.unsqueeze(1), 2**30).sort().values
    assert torch.equal(chosen, torch.where(best == 2**30, -1, best))


def test_no_tokens_and_no_positions_are_no_error():
    problem = random_problem(tokens=0)
    mla_backend.index_scores(*problem.arguments(), problem.positions)
    problem = random_problem(tokens=3)
    scores = mla_backend.index_scores(*problem.arguments(), 0)
    assert (mla_backend.select_top(scores, problem.lengths, 4) == -1).all()
