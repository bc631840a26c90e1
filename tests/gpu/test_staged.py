"""Staged rows on a GPU: the bits of the CPU's, and attention to them has the bits of attention to the cache."""

import pytest
import torch

import mla_backend
from gpu_checks import captured, chosen_kernel
from mla_backend.plan import new_workspace
from plans import WHOLE_TOKENS
from problems import CUDA_KERNEL, all_bytes, assert_accurate, copy_with_gaps, random_problem
from staged_problems import FINITE, SCALES, cache_with_scales, new_staged

pytestmark = pytest.mark.gpu
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9 or CUDA_KERNEL == "portable",
    reason="other GPUs convert staged rows otherwise",
)


@pytest.mark.parametrize("scales", FINITE)
@pytest.mark.parametrize("gap", [0, 16, 1])
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 17, 3), (40, 64, 2)])
def test_staging_has_the_bits_of_the_cpu(scales, gap, shape):
    blocks, block_size, requests = shape
    cache = cache_with_scales(scales, blocks, block_size, gap)
    table = torch.randint(-2, blocks + 2, (requests, blocks), dtype=torch.int32)
    lengths = torch.randint(-3, blocks * block_size + 9, (requests,), dtype=torch.int32)
    lengths[0] = blocks * block_size
    for staged_table in (None, (torch.randperm(table.numel()) - 1).int().view(table.shape)):
        want = new_staged(table.numel(), block_size, 128)
        got = copy_with_gaps(want, "cuda")
        mla_backend.stage_rows(cache, table, lengths, staged_table=staged_table, out=want)
        more = {"staged_table": None if staged_table is None else staged_table.cuda(), "out": got}
        mla_backend.stage_rows(copy_with_gaps(cache, "cuda"), table.cuda(), lengths.cuda(), **more)
        assert torch.equal(all_bytes(got).cpu(), all_bytes(want)), "gaps and rows that are not staged included"


def staged(problem):
    """The same problem on the GPU with its cache staged, slot by slot."""
    problem = problem.to("cuda")
    blocks, block_size = problem.cache.shape[:2]
    table = torch.arange(blocks, dtype=torch.int32, device="cuda").view(1, -1)
    lengths = torch.full((1,), blocks * block_size, dtype=torch.int32, device="cuda")
    out = copy_with_gaps(new_staged(blocks, block_size), "cuda")
    return problem.but(cache=mla_backend.stage_rows(problem.cache, table, lengths, out=out))


def assert_same_bits(problem, **options):
    """Of attention to the cache and to its staged rows, with and without largest scores."""
    other = staged(problem)
    for largest in (True, False):
        results = (x.solve(return_max_logits=largest, **options) for x in (problem.to("cuda"), other))
        for in_place, from_staged in zip(*results, strict=True):
            assert torch.equal(*(x.contiguous().view(torch.int16) for x in (in_place, from_staged)))


@hopper
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("heads", [33, 64, 100, 128, 256])
def test_attention_has_the_same_bits(scales, heads):
    problem = random_problem("fp8_ds_mla", tokens=9, heads=heads, topk=300, blocks=40, block_size=61)
    problem = problem.but(cache=cache_with_scales(scales, 40, 61))
    assert_same_bits(problem, batch_invariant=True)


@hopper
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("scales", ["usual", "small and large rows"])
def test_attention_of_many_tokens_has_the_same_bits(scales, heads):
    tokens = WHOLE_TOKENS + 37
    lengths = torch.randint(0, 600, (tokens,), dtype=torch.int32)
    problem = random_problem("fp8_ds_mla", tokens=tokens, heads=heads, topk=600, blocks=40, block_size=64)
    problem = problem.but(cache=cache_with_scales(scales, 40, 64), topk_length=lengths, sink=torch.randn(heads))
    assert_same_bits(problem)


@hopper
def test_rows_that_no_list_names_change_nothing():
    problem = random_problem("fp8_ds_mla", tokens=20, heads=64, topk=100, blocks=40)
    other = staged(problem)
    got = other.solve(batch_invariant=True)
    poisoned = problem.but(cache=copy_with_gaps(other.cache)).poisoned().to("cuda").solve(batch_invariant=True)
    assert all(torch.equal(a, b) for a, b in zip(got, poisoned, strict=True))


@pytest.mark.parametrize("kernel", ["auto", "portable"])
@pytest.mark.parametrize("heads", [1, 16, 32, 40, 128])
def test_attention_is_right_at_any_number_of_heads(heads, kernel):
    problem = random_problem("fp8_ds_mla", tokens=5, heads=heads, topk=300, blocks=30)
    with chosen_kernel(kernel):
        got = staged(problem).solve()
    assert_accurate(got, problem.oracle(), score_error=2.0**-6)


def test_a_second_cache_may_be_staged_too():
    problem = random_problem("fp8_ds_mla", tokens=5, heads=64, topk=300, blocks=30)
    other = staged(problem)
    lists = torch.randint(-9, 30 * 16, (5, 70), dtype=torch.int32)
    want = problem.but(extra_cache=problem.cache, extra_indices=lists).oracle()
    got = other.but(extra_cache=other.cache, extra_indices=lists.cuda()).solve()
    assert_accurate(got, want, score_error=2.0**-6)


def test_staging_and_attention_are_captured():
    problem = random_problem("fp8_ds_mla", tokens=40, heads=64, topk=300, blocks=30).to("cuda")
    table = torch.arange(30, dtype=torch.int32, device="cuda").view(1, -1)
    lengths = torch.full((1,), 480, dtype=torch.int32, device="cuda")
    room = copy_with_gaps(new_staged(30, 16), "cuda")
    other = problem.but(cache=room)
    plan = mla_backend.plan(40, 300, num_heads=64, device="cuda")
    workspace = new_workspace(plan.launch.ctas, 64, torch.device("cuda"))
    out, lse = torch.empty(40, 64, 512, dtype=torch.bfloat16, device="cuda"), torch.empty(40, 64, device="cuda")
    options = {"plan": plan, "workspace": workspace, "out": out, "lse": lse, "return_max_logits": False}

    def step():
        mla_backend.stage_rows(problem.cache, table, lengths, out=room)
        other.solve(**options)

    step()
    want = out.clone(), lse.clone()
    graph, _ = captured(step)
    room.fill_(0xFF), out.zero_(), lse.zero_()
    graph.replay()
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
