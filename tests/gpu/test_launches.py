"""Launches of sparse_attention on a GPU: plans, workspaces, streams, graphs."""

import random

import pytest
import torch

import mla_backend
from gpu_checks import check, chosen_kernel
from mla_backend import Plan, library
from mla_backend.plan import workspace_floats
from plans import planned
from problems import BASIC, WAYS, assert_accurate, random_problem, score_error
from tests.ops.test_hostile_ops import test_what_is_wrong_is_refused_or_harmless

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("fmt", "products"), WAYS)
def test_the_same_inputs_give_the_same_bits(fmt, products):
    problem = random_problem(fmt, tokens=30, heads=40, topk=2000, blocks=60, products=products).to("cuda")
    first = problem.solve()
    for _ in range(50):
        assert all(torch.equal(a, b) for a, b in zip(first, problem.solve(), strict=True))


@pytest.mark.parametrize("heads", [1, 16, 32, 64])
def test_a_plan_of_extreme_numbers_never_faults(heads):
    """Differences of such numbers are no numbers of tokens, and a token of tiles of one slot has too many of them."""
    ends = [-(2**31), -1, 0, 1, 2**31 - 1]
    problem = random_problem(tokens=4, heads=heads, topk=300).to("cuda")
    for begin in ends:
        for end in ends:
            row = [begin, end, *random.choices(ends, k=6)]
            table = torch.tensor([row, [0, 4, 0, 5, 0, 1, 0, 64], row], dtype=torch.int32, device="cuda")
            plan = Plan(
                table, planned(4, 300, ctas=3, num_heads=heads, cluster=random.choice([1, 2, 3]), device="cuda").launch
            )
            problem.solve(plan=plan)
    torch.cuda.synchronize()
    check(random_problem())


def test_a_workspace_that_is_not_aligned_is_refused():
    problem = random_problem().to("cuda")
    plan = mla_backend.plan(2, 100, num_heads=16, device="cuda")
    workspace = torch.zeros(workspace_floats(plan.launch.ctas, 16) + 1, device="cuda")[1:]
    with pytest.raises(ValueError, match="workspace must be aligned to 16 bytes"):
        problem.solve(plan=plan, workspace=workspace)


@pytest.mark.parametrize(("fmt", "products"), WAYS)
def test_a_captured_graph_follows_new_lengths_slots_and_values(fmt, products):
    shape = {"tokens": 6, "heads": 16 if products == "exact" else 64, "topk": 700, "blocks": 60}
    problem, heads = random_problem(fmt, **shape, products=products).to("cuda"), shape["heads"]
    problem.topk_length = torch.full((6,), 700, dtype=torch.int32, device="cuda")
    rows = {"cache_format": fmt, "products": products}
    plan = mla_backend.plan(6, 700, topk_length=problem.topk_length, num_heads=heads, **rows)
    workspace = torch.zeros(workspace_floats(plan.launch.ctas, heads), device="cuda")
    out, lse = torch.empty(6, heads, 512, dtype=problem.q.dtype, device="cuda"), torch.empty(6, heads, device="cuda")

    def step():
        mla_backend.plan(6, 700, topk_length=problem.topk_length, out=plan)
        mla_backend.sparse_attention(**vars(problem), plan=plan, workspace=workspace, out=out, lse=lse)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        step()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, "nothing is allocated under capture"
    for lengths in ([0, 700, 3, 65, 699, 1], [700, 0, 0, 0, 0, 0], [0] * 6):
        fresh = random_problem(fmt, **shape, products=products)
        fresh.topk_length = torch.tensor(lengths, dtype=torch.int32)
        for name in ("q", "cache", "indices", "topk_length"):
            getattr(problem, name).copy_(getattr(fresh, name))
        graph.replay()
        fresh.hold((out, lse))


@pytest.mark.parametrize("own_workspaces", [False, True])
def test_two_streams_at_once(own_workspaces):
    tokens, heads = 5, 16
    both = [random_problem(tokens=tokens, heads=heads, topk=2048, blocks=60).to("cuda") for _ in range(2)]
    plan = mla_backend.plan(tokens, 2048, num_heads=heads, device="cuda")
    workspaces = [torch.zeros(workspace_floats(plan.launch.ctas, heads), device="cuda") for _ in range(2)]
    how = [{"plan": plan, "workspace": one} if own_workspaces else {} for one in workspaces]
    want = [p.solve(**more) for p, more in zip(both, how, strict=True)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    got = []
    for _ in range(50):
        for problem, stream, more in zip(both, streams, how, strict=True):
            with torch.cuda.stream(stream):
                got.append(problem.solve(**more))
    torch.cuda.synchronize()
    for i, results in enumerate(got):
        assert all(torch.equal(a, b) for a, b in zip(results, want[i % 2], strict=True))
    assert not any(counters_of(w, plan.launch.ctas, heads).any() for w in workspaces)


def counters_of(workspace, ctas, heads):
    return workspace[-ctas * heads * library.about()["workspace_counters"] :].view(torch.int32)


@pytest.mark.parametrize("fmt", (*BASIC, "fp16", "fp8_model1"))
def test_one_workspace_serves_launches_of_any_shape(fmt):
    floats = workspace_floats(300, 20)
    workspace = torch.zeros(floats, device="cuda")
    for seed in range(60):
        torch.manual_seed(seed)
        tokens, heads, ctas = (int(torch.randint(1, n, ())) for n in (12, 21, 301))
        problem = random_problem(fmt, tokens=tokens, heads=heads, topk=1500, blocks=40)
        problem.topk_length = torch.randint(0, 1501, (tokens,), dtype=torch.int32)
        on_gpu = problem.to("cuda")
        # every other plan is for other lengths: it still computes what it covers, and still leaves zeros
        planned_for = on_gpu.topk_length if seed % 2 else torch.randint_like(on_gpu.topk_length, 1501)
        plan = planned(
            tokens, 1500, topk_length=planned_for, ctas=ctas, num_heads=heads, cluster=1 + seed % 8, cache_format=fmt
        )
        got = on_gpu.solve(plan=plan, workspace=workspace)
        assert not counters_of(workspace, 300, 20).any()
        if seed % 2:
            assert_accurate(got, problem.oracle(), score_error=score_error(problem.cache))


def test_missing_or_small_workspaces_are_refused_by_the_op():
    problem = random_problem().to("cuda")
    with pytest.raises(ValueError, match="workspace must be of .* floats or more"):
        problem.solve(workspace=torch.empty(3, device="cuda"))


def test_a_plan_of_too_many_rows_is_refused():
    problem = random_problem().to("cuda")
    launch = planned(2, 100, ctas=65536, device="cuda").launch
    plan = Plan(torch.zeros(65536, 8, dtype=torch.int32, device="cuda"), launch)
    with pytest.raises(ValueError, match="plan must be a table of 65535 entries or fewer on a GPU"):
        problem.solve(plan=plan, workspace=torch.zeros(1, device="cuda"))


@pytest.mark.parametrize("heads", [1, 16, 32, 64, 128])
def test_ten_thousand_random_launches_agree_with_the_portable_kernel(heads):
    generator = torch.Generator().manual_seed(heads)
    problem = random_problem(tokens=40, heads=heads, topk=512, blocks=60).to("cuda")
    with chosen_kernel("portable"):
        want = problem.solve()
    for _ in range(2500):
        begin = int(torch.randint(0, 39, (), generator=generator))
        end = int(torch.randint(begin + 1, 41, (), generator=generator))
        ctas = int(torch.randint(1, 300, (), generator=generator))
        part = problem.but(q=problem.q[begin:end], indices=problem.indices[begin:end])
        cluster = int(torch.randint(1, 17, (), generator=generator))
        plan = planned(end - begin, 512, ctas=ctas, num_heads=heads, cluster=cluster, device="cuda")
        got = part.solve(plan=plan, return_max_logits=ctas % 2 == 0)
        # split differently, so not the same bits; but nothing is far off
        assert (got[0].float() - want[0][begin:end].float()).abs().max() < 4e-3
        assert (got[1] - want[1][begin:end]).abs().max() < 1e-4 + score_error(problem.cache)
