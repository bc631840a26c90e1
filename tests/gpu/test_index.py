"""The indexer's ops on a GPU, held to the reference in float64."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from gpu_checks import captured, on_either_device
from index_problems import DTYPES, KINDS, POISON, index_problems, random_index
from mla_backend import reference
from mla_backend.keys import KEY_FORMATS
from tests.ops.test_rotate_queries import assert_exact, random_queries

pytestmark = pytest.mark.gpu
globals().update(on_either_device("index", "rotate_queries"))
HEADS = [1, 16, 20, 32, 40, 64, 65, 128]
random_problem = functools.partial(random_index, device="cuda")


@pytest.mark.parametrize("fmt", KINDS)
@given(data=st.data())
def test_scores_agree_with_the_reference(fmt, data):
    data.draw(index_problems((fmt,), HEADS, "cuda")).check()


@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("chunks", [[64], [3, 130, 1, 9], [7]])
def test_prompts_agree_with_the_reference(fmt, heads, chunks):
    problem = random_problem(fmt, sum(chunks), heads, 700)
    problem.of_prompts(chunks).check()


@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("heads", [32, 64, 100])
def test_small_case(fmt, heads):
    problem = random_problem(fmt, 12, heads, 150)
    problem.check()
    prompt = problem.of_prompts([12])
    prompt.check()
    scores = prompt.solve()
    assert torch.equal(
        mla_backend.select_top(scores, prompt.lengths, 50), reference.select_top(scores, prompt.lengths, 50)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gap", [0, 1, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_small_case_of_queries(interleaved, gap, dtype):
    how = dict(interleaved=interleaved, gap=gap, cos_sin=dtype, index_cos_sin=dtype, device="cuda")
    assert_exact(random_queries(5, 3, 5, **how))  # a warp has heads of both kinds


@pytest.mark.parametrize("heads", [16, 128])
def test_many_queries_rotate_in_a_graph_too(heads):
    arguments = random_queries(3000, heads, 64, gap=8, device="cuda")
    outputs = mla_backend.rotate_queries(**arguments)
    written = dict(zip(("out", "index_out", "weights_out"), outputs, strict=True))
    graph, _ = captured(lambda: mla_backend.rotate_queries(**arguments, **written))
    fresh = random_queries(3000, heads, 64, gap=8, device="cuda")
    for name in ("queries", "index_queries", "weights", "positions", "cos_sin", "index_cos_sin"):
        arguments[name].copy_(fresh[name])
    graph.replay()
    for found, want in zip(outputs, reference.rotate_queries(**fresh), strict=True):
        assert torch.equal(found.float(), want.float())


def test_lengths_may_change_between_replays():
    problem = random_problem("fp8", 40, 64, 2000, requests=40)
    scores = torch.full((40, 2000), POISON, device="cuda")
    chosen = torch.full((40, 100), 7, dtype=torch.int32, device="cuda")

    def both() -> None:
        mla_backend.index_scores(*problem.arguments(), scores=scores)
        mla_backend.select_top(scores, problem.lengths, chosen=chosen)

    both()
    graph, _ = captured(both)
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


@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_may_have_any_magnitude(fmt, dtype):
    problem = random_problem(fmt, 30, 64, 256, requests=1, blocks=4, dtype=dtype)
    size = torch.exp2(torch.randint(-60, 40, (30, 64, 1), device="cuda").float())
    problem.queries = (problem.queries.float() * size).to(dtype)
    if fmt == "bf16":
        problem.cache *= torch.exp2(torch.randint(-60, 30, (4, 64, 1), device="cuda").float()).bfloat16()
    problem.check()


@pytest.mark.parametrize("fmt", KINDS)
def test_a_cache_may_be_larger_than_2_gib(fmt):
    kind = KEY_FORMATS[fmt]
    blocks = 2**31 // (64 * kind.token_bytes) + 100
    problem = random_problem(fmt, 6, 64, 256, blocks=60)
    large = torch.zeros(blocks, 64, kind.width, dtype=kind.dtype, device="cuda")
    large[-60:] = problem.cache
    want = problem.solve()
    moved = replace(problem, cache=large, block_table=problem.block_table + (blocks - 60)).solve()
    assert torch.equal(want, moved)


def test_many_tokens_choose_at_once():
    scores = torch.randn(5000, 3000, device="cuda")
    lengths = torch.arange(5000, dtype=torch.int32, device="cuda") % 3001
    chosen = mla_backend.select_top(scores, lengths, 512)
    seen = torch.arange(3000, device="cuda") < lengths.unsqueeze(1)
    best = scores.masked_fill(~seen, -torch.inf).topk(512).indices.int()
    best = best.masked_fill(torch.arange(512, device="cuda") >= lengths.unsqueeze(1), 2**30).sort().values
    assert torch.equal(chosen, torch.where(best == 2**30, -1, best))
