"""The contract of dense_attention, as properties, against the oracle. tests/gpu runs those with a `device` again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from dense_problems import DenseProblem, dense_problems, random_dense
from mla_backend import Plan
from plans import planned
from problems import BASIC, BASIC_WAYS, FORMATS, WAYS, apart, assert_accurate, random_cache, with_row_gaps, write_part


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@given(problem=dense_problems(), invariant=st.booleans())
def test_any_problem_agrees_with_the_oracle(cpu_kernel, problem, invariant):
    problem.check(batch_invariant=invariant)


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("block_size", [1, 2, 61, 64, 69, 256])
@pytest.mark.parametrize("heads", [5, 70])
def test_every_block_size(device, fmt, products, block_size, heads):
    for causal in (True, False):
        problem = random_dense(fmt, (300, 129, 5), 2, heads, block_size, gap=16, causal=causal, products=products)
        problem.poisoned().check(device)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries", range(1, 9))
@pytest.mark.parametrize("heads", [1, 2, 8, 16, 17, 64, 128])
def test_every_number_of_queries_and_heads(device, queries, heads, causal):
    for fmt, products in BASIC_WAYS:
        problem = random_dense(fmt, (150, 131, 3), queries, heads, causal=causal, products=products)
        problem.poisoned().check(device)


@pytest.mark.parametrize("heads", [100, 127, 128, 129, 200, 256])
def test_many_heads(cpu_kernel, heads):
    random_dense("bf16", (140, 20), 2, heads).check()


@pytest.mark.parametrize("length", [30, 2000])
def test_the_most_queries_of_the_most_heads(length):
    """2000 tokens are split, and the results have to be combined."""
    random_dense("bf16", (length,), 64, 256 if length < 100 else 33, 64).check()


@pytest.mark.parametrize("fmt", BASIC)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 2048, 5000])
def test_every_length(cpu_kernel, fmt, length):
    random_dense(fmt, (length, length - 1), 3, 4, 64).poisoned().check()


@pytest.mark.parametrize("length", [0, -1, -(2**31)])
@pytest.mark.parametrize("queries", [1, 3])
def test_an_empty_sequence_gives_zero_and_minus_infinity(cpu_kernel, length, queries):
    problem = random_dense("bf16", (40, length, 7), queries, 5)
    out, lse = problem.solve()
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    assert_accurate((out, lse), problem.oracle())


def test_a_sequence_ends_where_its_page_table_does(cpu_kernel):
    problem = random_dense("bf16", (64, 20), 2, 3, max_blocks=4)
    longer = problem.but(lengths=torch.tensor([2**31 - 1, 20], dtype=torch.int32))
    assert same(longer.solve(), problem.solve())


def test_page_tables_are_not_read_beyond_a_sequence(cpu_kernel):
    problem = random_dense("bf16", (64, 33, 1), 1, 3)
    tidy = problem.but(block_table=problem.block_table.clone())
    for row, length in zip(tidy.block_table, (64, 33, 1), strict=True):
        row[-(-length // 16) :] = 0
    assert same(problem.solve(), tidy.solve())


@pytest.mark.parametrize("bad", [-1, -(2**31), 8, 2**31 - 1])
@pytest.mark.parametrize("heads", [3, 64])
@pytest.mark.parametrize("fmt", BASIC)
def test_blocks_outside_the_cache_are_skipped(device, cpu_kernel, fmt, heads, bad):
    """With them go their positions: a query sees the same positions as if the blocks were there."""
    problem = random_dense(fmt, (90,), 4, heads)
    problem.cache = random_cache(fmt, 8, 16)
    problem.block_table = torch.tensor([[3, bad, 5, 1, bad, bad]], dtype=torch.int32)
    problem.poisoned().check(device)
    nothing = problem.but(block_table=torch.full((1, 6), bad, dtype=torch.int32)).to(device).solve()
    assert (nothing[0] == 0).all() and (nothing[1] == -torch.inf).all()


@pytest.mark.parametrize("empty", ["no requests", "no queries", "no blocks a request", "no cache"])
def test_nothing_to_do_is_an_ordinary_input(empty):
    problem = random_dense("bf16", (40, 3), 2, 5)
    if empty == "no requests":
        problem = random_dense("bf16", (), 2, 5)
    elif empty == "no queries":
        problem.q = problem.q[:, :0]
    elif empty == "no blocks a request":
        problem.block_table = problem.block_table[:, :0]
    else:
        problem.cache = problem.cache[:0]
    out, lse = problem.solve()
    assert (out == 0).all() and (lse == -torch.inf).all()
    assert out.shape[:3] == problem.q.shape[:3] and lse.shape == (len(out), 5, out.shape[1])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [5, 64])
@pytest.mark.parametrize("requests", [2, 20])
def test_a_nan_reaches_only_its_request(device, cpu_kernel, requests, heads, causal):
    problem = random_dense("bf16", (100,) * requests, 3, heads, causal=causal)
    write_part(problem.cache, "bf16", int(problem.slots(0)[40]), "latent", torch.full((2,), 0xFF))
    out, lse = problem.to(device).solve()
    assert out[0].isnan().any(-1).all() and lse[0].isnan().all()
    assert_accurate((out[1:], lse[1:]), [x[1:] for x in problem.to(device).oracle()])


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("gap", [32, 33])
@pytest.mark.parametrize("heads", [5, 64])
def test_strided_inputs_and_outputs(device, cpu_kernel, fmt, products, gap, heads):
    problem = random_dense(fmt, (150, 33, 7), 2, heads, products=products).to(device)
    form = mla_backend.FORMATS[fmt]
    q = apart(problem.q.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3), fmt, gap)  # head-major
    cache = with_row_gaps(problem.cache, fmt, gap)
    columns = problem.block_table.shape[1]
    table = torch.full((3, columns + 9), 10**6, dtype=torch.int32, device=device)[:, :columns]
    table[:] = problem.block_table
    whole = torch.full((heads, 2, 3, 568 + gap), torch.nan, device=device).to(form.number).permute(2, 1, 0, 3)
    lse = torch.full((2, heads, 3), torch.nan, device=device).permute(2, 1, 0)
    got = problem.but(q=q, cache=cache, block_table=table).solve(out=whole[..., gap : gap + 512], lse=lse)
    problem.hold(got)
    assert whole[..., :gap].isnan().all() and whole[..., gap + 512 :].isnan().all()


def plan_of(problem: DenseProblem, make=mla_backend.plan, **more):
    requests, queries, heads, _ = problem.q.shape
    slots = problem.block_table.shape[1] * problem.cache.shape[1]
    return make(requests, slots, num_heads=queries * heads, **more)


def test_a_plan_is_followed(cpu_kernel):
    problem = random_dense("bf16", (2000, 900, 5), 2, 5, 64)
    plan = plan_of(problem, topk_length=problem.lengths)
    assert same(problem.solve(plan=plan), problem.solve())
    problem.check(plan=plan_of(problem, planned, topk_length=problem.lengths, ctas=7))


@pytest.mark.parametrize("lengths", [None, [10, 2000, 0], [2000, 900, 0]])
def test_a_plan_for_other_lengths_is_replaced(cpu_kernel, lengths):
    problem = random_dense("bf16", (2000, 900, 5), 2, 5, 64)
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    problem.check(plan=plan_of(problem, topk_length=lengths))
    problem.check(plan=Plan(torch.full((3, 8), 7, dtype=torch.int32), plan_of(problem, planned, ctas=3).launch))


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("heads", [3, 16, 24, 128])
@pytest.mark.parametrize("queries", [1, 4])
def test_batch_invariance_gives_a_request_the_same_bits_alone_and_in_a_batch(
    device, cpu_kernel, fmt, products, heads, queries
):
    lengths = (400, 1, 1500, 0, 130, 400, 64, 300, 5)
    problem = random_dense(fmt, lengths, queries, heads, 64, products=products).to(device)
    together = problem.solve(batch_invariant=True)
    for begin, end in ((0, 1), (1, 3), (3, 9), (4, 5)):
        alone = problem.but(
            q=problem.q[begin:end], block_table=problem.block_table[begin:end], lengths=problem.lengths[begin:end]
        ).solve(batch_invariant=True)
        assert same(alone, [x[begin:end] for x in together])


def test_same_inputs_give_the_same_bits(cpu_kernel):
    problem = random_dense("fp8_ds_mla", (900, 100), 3, 30)
    assert same(problem.solve(), problem.solve())


def test_a_dimension_of_one_for_the_kv_head_is_accepted():
    problem = random_dense()
    assert same(problem.solve(), problem.but(cache=problem.cache.unsqueeze(2)).solve())


@pytest.mark.parametrize("fmt", FORMATS)
def test_it_compiles_without_a_graph_break(fmt):
    torch._dynamo.reset()

    def step(q, cache, block_table, lengths):
        out, lse = mla_backend.dense_attention(q * 1, cache, block_table, lengths, scale=0.05)
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for lengths in ((20, 3), (40, 41, 2), (9,)):
        problem = random_dense(fmt, lengths, 2, 3)
        arguments = problem.q, problem.cache, problem.block_table, problem.lengths
        assert same(compiled(*arguments), step(*arguments))
