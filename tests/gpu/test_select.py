"""select_tokens on a GPU, held to the reference in float64, and to itself: what a batch is has no influence."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from gpu_checks import captured, nothing_waits, on_either_device
from index_problems import KINDS, QUERY_DTYPES, TOPKS, index_problems, random_index
from mla_backend.index import MAX_POSITIONS, MAX_WORKSPACE, select_workspace
from tests.ops.test_select import assert_equal

pytestmark = pytest.mark.gpu
globals().update(on_either_device("select"))
HEADS = [1, 3, 16, 20, 32, 40, 64, 65, 128]
random_problem = functools.partial(random_index, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_selections_agree_with_the_reference(kind, data):
    data.draw(index_problems((kind,), HEADS, "cuda")).check_selection(data.draw(TOPKS))


@pytest.mark.parametrize("dtype", QUERY_DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [[64], [3, 130, 1, 9], [7]])
def test_prompts_agree_with_the_reference(kind, heads, dtype, chunks):
    problem = random_problem(kind, sum(chunks), heads, 700, dtype=dtype)
    problem.of_prompts(chunks).check_selection(100)


@pytest.mark.parametrize("topk", [512, 2048])
@pytest.mark.parametrize("block_size", [1, 16, 64, 100])
@pytest.mark.parametrize(
    ("tokens", "longest", "heads"), [(1, 40000, 64), (2, 4096, 64), (7, 33000, 32), (16, 12000, 64), (70, 20000, 8)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_long_contexts_agree_with_the_reference(kind, tokens, longest, heads, block_size, topk):
    """Ragged, some of them short; and each token gets the same alone, and in a second run."""
    problem = random_problem(
        *(kind, tokens, heads, longest, min(tokens, 9), block_size, 40000 // block_size), dtype=torch.float8_e4m3fn
    )
    problem.lengths[0] = longest
    together = problem.check_selection(topk)
    assert_equal(problem.select(topk), together)
    for token in {0, tokens // 2, tokens - 1}:
        own = tuple(x[token : token + 1] for x in together)
        assert_equal(problem.only(torch.tensor([token], device="cuda")).select(topk), own)
    prompt = problem.of_prompts([tokens])
    together = prompt.check_selection(topk)
    for begin in range(0, tokens, 13):
        some = torch.arange(begin, min(tokens, begin + 13), device="cuda")
        assert_equal(prompt.only(some).select(topk), tuple(x[some] for x in together))


@pytest.mark.parametrize(("tokens", "longest", "heads"), [(1, 130000, 32), (7, 33000, 64), (300, 20000, 32)])
def test_candidates_with_the_best_of_long_contexts_give_these(tokens, longest, heads):
    problem = random_problem("fp8", tokens, heads, longest, min(tokens, 9), blocks=700, dtype=torch.float8_e4m3fn)
    problem.lengths[0] = longest
    for some in problem, problem.of_prompts([tokens]):
        want = some.select(512)
        for size in 8, 64:
            every = torch.arange(-(-longest // size), dtype=torch.int32, device="cuda").expand(tokens, -1)
            kept = torch.rand(every.shape, device="cuda") < 0.1
            kept.scatter_(1, want[0].clamp(min=0).long() // size, True)
            lists = torch.where(kept, every, 2**31 - 1).sort(1).values[:, : int(kept.sum(1).max())]
            for candidates in (every, size), (lists, size), (torch.where(lists == 2**31 - 1, -1, lists), size):
                assert_equal(some.select(512, candidates=candidates), want)
            own = torch.tensor([tokens - 1], device="cuda")
            got = some.only(own).select(512, candidates=(lists[own], size))
            assert_equal(got, tuple(x[own] for x in want))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [32, 64, 100])
def test_small_case(kind, heads):
    problem = random_problem(kind, 12, heads, 150, dtype=torch.float8_e4m3fn)
    for some in problem, problem.of_prompts([12]):
        some.check_selection(50)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4_68"])
def test_a_table_with_room_for_more_changes_nothing(kind):
    """Its width sets how many tokens' scores the workspace holds at once."""
    problem = random_problem(kind, 70, 32, 9000, requests=3, dtype=torch.float8_e4m3fn)
    want = problem.select(512)
    for positions in (2**18, 2**20, MAX_POSITIONS):
        wide = torch.full((3, positions // 64), -1, dtype=torch.int32, device="cuda")
        wide[:, : problem.block_table.shape[1]] = problem.block_table
        assert_equal(problem.but(block_table=wide).select(512), want)


def test_a_workspace_follows_from_shapes_and_may_hold_anything():
    for tokens, heads, positions, topk in ((8192, 64, 131072, 2048), (1, 64, MAX_POSITIONS, 4096), (0, 1, 0, 1)):
        assert select_workspace(tokens, heads, positions, topk) <= MAX_WORKSPACE
    problem = random_problem("fp8", 40, 64, 5000, dtype=torch.float8_e4m3fn)
    needed = select_workspace(40, 64, problem.block_table.shape[1] * 64, 500)
    want = problem.select(500)
    for byte in (0, 0x7F, 0xFF):
        workspace = torch.full((needed,), byte, dtype=torch.uint8, device="cuda")
        assert_equal(problem.select(500, workspace=workspace), want)
    if needed:
        with pytest.raises(
            ValueError, match=rf"^workspace must be uint8 \[{needed}\] or more .*; got uint8 \[{needed - 1}\]"
        ):
            problem.select(500, workspace=workspace[:-1])
        with pytest.raises(ValueError, match="^workspace must be at a multiple of 16 bytes"):
            problem.select(500, workspace=torch.zeros(needed + 1, dtype=torch.uint8, device="cuda")[1:])


@pytest.mark.parametrize("kind", ["fp8", "mxfp4_68"])
def test_lengths_may_change_between_replays_and_nothing_waits(kind):
    problem = random_problem(kind, 40, 64, 6000, requests=40, dtype=torch.float8_e4m3fn)
    table = torch.randint(0, 99, (40, 100), dtype=torch.int32, device="cuda")
    out = torch.full((40, 512), 7, dtype=torch.int32, device="cuda")
    scores = torch.full((40, 512), 7.0, device="cuda")
    needed = select_workspace(40, 64, problem.block_table.shape[1] * 64, 512)
    options = {"out": out, "scores": scores, "slots_of": (table, 64)}
    options["workspace"] = torch.empty(needed, dtype=torch.uint8, device="cuda")
    call = functools.partial(mla_backend.select_tokens, *problem.arguments(), **options)
    call()
    with nothing_waits():
        call()
    graph, _ = captured(call)
    for longest in (0, 600, 6000, 3000, 512):
        problem.lengths.copy_(torch.randint(0, longest + 1, (40,)))
        problem.queries.copy_(torch.randn(40, 64, 128, device="cuda"))
        options["workspace"].fill_(0xA5)
        graph.replay()
        assert_equal((out, scores), problem.select(512, slots_of=(table, 64)))
