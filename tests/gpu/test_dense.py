"""The contract of dense_attention on a GPU, against the oracle: the CPU's tests with the `device` of this folder, and
what only a GPU has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from dense_problems import DenseProblem, dense_problems, random_dense
from gpu_checks import captured, chosen_kernel, on_either_device
from mla_backend import Plan
from mla_backend.plan import workspace_floats
from plans import planned
from problems import BASIC, BASIC_WAYS, FORMATS, WAYS, all_bytes, assert_accurate, score_error
from tests.ops.test_dense import same
from tests.ops.test_flash_mla import test_attention_over_whole_sequences

pytestmark = pytest.mark.gpu
globals().update(on_either_device("dense"))
HEADS = [1, 2, 8, 9, 16, 17, 32, 33, 64, 100, 128]
BATCHES = [(700, 64, 130), tuple(range(1, 41)), tuple(range(120, 160))]
"""Lengths of sequences: few requests, which are split, and many short or longer ones."""


def check(problem: DenseProblem, **options) -> None:
    problem.check("cuda", **options)


@pytest.mark.parametrize("fmt", FORMATS)
@given(problem=st.data())
def test_any_problem_agrees_with_the_oracle(fmt, problem):
    drawn = problem.draw(dense_problems(formats=(fmt,)))
    check(drawn, batch_invariant=problem.draw(st.booleans()))


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count(fmt, products, heads):
    for lengths in BATCHES if fmt in BASIC else BATCHES[:1]:
        check(random_dense(fmt, lengths, 2, heads, 64, products=products).poisoned())


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("gap", [16, 8, 1])
@pytest.mark.parametrize("heads", [8, 64])
def test_pages_at_any_distance(fmt, products, gap, heads):
    """A gap of 8 bytes or of 1 leaves rows that no 16-byte access may touch."""
    check(random_dense(fmt, (300, 129, 5), 2, heads, 7, gap=gap, products=products).poisoned())


@pytest.mark.parametrize("queries", [8, 64])
@pytest.mark.parametrize("length", [3, 500])
def test_many_queries(queries, length):
    for fmt, products in BASIC_WAYS:
        check(random_dense(fmt, (length, length + 70), queries, 16, 64, products=products).poisoned())


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("lengths", [(1,), (63, 65), (64, 128, 127, 129), (20000,), (9000, 5, 0, 4000)])
def test_every_length(fmt, products, heads, lengths):
    check(random_dense(fmt, lengths, 2, heads, 64, products=products))


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("heads", [8, 16, 128])
@pytest.mark.parametrize("lengths", [(1000,), (2048, 5), (4096,) * 8, (3000, 1, 0, 700), (16384, 16384), (90, 20000)])
def test_any_lengths_in_a_wide_page_table(fmt, products, heads, lengths):
    check(random_dense(fmt, lengths, 1, heads, 64, max_blocks=2048, products=products).poisoned())


@pytest.mark.parametrize("heads", [5, 16, 64, 128])
@pytest.mark.parametrize("queries", [1, 5])
def test_an_empty_sequence_gives_zero_and_minus_infinity(heads, queries):
    for fmt, products in BASIC_WAYS:
        for lengths in ((40, 0, 7), (0,), (-1, -(2**31)), (0, 3) * 30):
            check(random_dense(fmt, lengths, queries, heads, products=products).poisoned())


@pytest.mark.parametrize("heads", [3, 64])
@pytest.mark.parametrize("kernel", ["auto", "portable", "unclustered"])
def test_every_kernel(kernel, heads):
    with chosen_kernel(kernel):
        for fmt, products in WAYS:
            check(random_dense(fmt, (1300, 129, 30), 3, heads, 64, products=products).poisoned())


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("heads", [16, 64])
def test_a_captured_graph_follows_new_lengths_and_tables(fmt, products, heads):
    requests, queries, block_size, max_blocks = 5, 2, 64, 12
    problems = [
        random_dense(fmt, tuple(lengths), queries, heads, block_size, max_blocks=max_blocks, products=products)
        for lengths in ((700, 64, 130, 0, 1), (3, 768, 5, 6, 7), (0,) * 5, (768,) * 5, (64, 65, 66, 1, 300))
    ]
    form = mla_backend.FORMATS[fmt]
    cache = form.new_cache(5 * max_blocks + 2, block_size, device="cuda")
    first = problems[0].to("cuda")
    rows = {"num_heads": queries * heads, "cache_format": fmt, "products": products}
    plan = mla_backend.plan(requests, 768, topk_length=first.lengths, **rows)
    workspace = torch.zeros(workspace_floats(plan.launch.ctas, queries * heads), device="cuda")
    table, lengths = torch.zeros_like(first.block_table), torch.zeros_like(first.lengths)
    static = first.but(cache=cache, block_table=table, lengths=lengths, q=torch.zeros_like(first.q))
    out = torch.empty(requests, queries, heads, 512, dtype=form.number, device="cuda")
    lse = torch.empty(requests, heads, queries, device="cuda")

    def step():
        mla_backend.plan(requests, 768, topk_length=lengths, out=plan)
        static.solve(plan=plan, workspace=workspace, out=out, lse=lse)

    step()
    graph, _ = captured(step)
    for problem in problems:
        all_bytes(cache).fill_(0xFF)
        cache[: len(problem.cache)] = problem.poisoned().cache.cuda()
        table.copy_(problem.block_table), lengths.copy_(problem.lengths), static.q.copy_(problem.q)
        out.fill_(torch.nan), lse.fill_(torch.nan)
        graph.replay()
        problem.hold((out, lse))


@pytest.mark.parametrize("fmt", BASIC)
@pytest.mark.parametrize("heads", [5, 16, 64])
def test_a_plan_is_followed_and_its_ctas_do_not_matter(fmt, heads):
    problem = random_dense(fmt, (2000, 900, 5), 2, heads, 64)
    there, want = problem.to("cuda"), problem.oracle()
    slots = there.block_table.shape[1] * 64
    for ctas in (1, 2, 7, 132, 264):
        plan = planned(3, slots, topk_length=there.lengths, ctas=ctas, num_heads=2 * heads)
        assert_accurate(there.solve(plan=plan), want, score_error=score_error(problem.cache))


@pytest.mark.parametrize("heads", [5, 64])
def test_a_stale_plan_harms_nothing_else(heads):
    problem = random_dense("bf16", (2000, 900, 5), 2, heads, 64).to("cuda")
    slots = problem.block_table.shape[1] * 64
    want = problem.solve()
    for lengths in (None, [10, 2000, 0], [2000, 900, 2**31 - 1]):
        lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
        problem.solve(plan=mla_backend.plan(3, slots, topk_length=lengths, num_heads=2 * heads, device="cuda"))
    launch = planned(3, slots, ctas=3, num_heads=2 * heads, device="cuda").launch
    problem.solve(plan=Plan(torch.full((3, 8), 7, dtype=torch.int32, device="cuda"), launch))
    assert same(problem.solve(), want)


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("heads", [8, 64])
def test_same_inputs_give_the_same_bits(fmt, products, heads):
    problem = random_dense(fmt, (5000, 900, 100), 2, heads, 64, products=products).to("cuda")
    want = problem.solve()
    assert all(same(problem.solve(), want) for _ in range(20))


def test_a_cache_of_more_than_2_to_the_31_elements():
    blocks = 2**31 // (64 * 576) + 100
    problem = random_dense("bf16", (190, 64), 2, 16, 64)
    cache = mla_backend.FORMATS["bf16"].new_cache(blocks, 64, device="cuda")
    all_bytes(cache).fill_(0xFF)
    places = torch.tensor([blocks - 1, 0, blocks // 2, blocks - 2, 1, 2][: len(problem.cache)])
    cache[places.cuda()] = problem.cache.cuda()
    there = problem.to("cuda").but(cache=cache)
    used = (problem.block_table >= 0) & (problem.block_table < len(problem.cache))
    moved = torch.where(used, places[problem.block_table.clamp(0, len(problem.cache) - 1).long()], -5)
    assert_accurate(there.but(block_table=moved.int().cuda()).solve(), problem.oracle())
