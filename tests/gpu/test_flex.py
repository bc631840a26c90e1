"""Masks of blocks on a GPU: the CPU's tests with the `device` of this folder, and what only a GPU has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import mla_backend
from flex_problems import BLOCKS, MASKS, flex_problems, mask_mod, random_flex
from gpu_checks import captured, chosen_kernel, nothing_waits, on_either_device
from problems import CUDA_KERNEL

pytestmark = pytest.mark.gpu
globals().update(on_either_device("flex"))
KERNELS = ("auto", "portable")


@pytest.mark.parametrize("kernel", KERNELS)
@given(problem=flex_problems(device="cuda"))
def test_any_mask_agrees_with_eager_attention_in_float64(kernel, problem):
    with chosen_kernel(kernel):
        problem.check(cancels=True)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
def test_long_sequences(kind, heads):
    """Of a length that is no multiple of the block's, and more parts than one."""
    torch.manual_seed(heads)
    problem = random_flex(kind, 1, heads, 1111, 1301, 128, device="cuda").poisoned()
    problem.check()
    problem.check(deterministic=False)


@pytest.mark.parametrize("heads", [8, 64])
def test_few_queries_of_a_long_context(heads):
    random_flex("prefix", 1, heads, 65, 100_000, 128, device="cuda").poisoned().check()


@pytest.mark.parametrize("heads", [16, 128])
def test_same_bits_over_20_runs(heads):
    problem = random_flex("window", 2, heads, 300, 900, 64, device="cuda", mask_batch=2)
    results, gradients = problem.solve(), problem.gradients()
    for _ in range(20):
        again = (*problem.solve(), *problem.gradients())
        assert all(torch.equal(a, b) for a, b in zip(again, (*results, *gradients), strict=True))


@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(MASKS),
    sizes=st.tuples(st.integers(1, 200), st.one_of(st.integers(1, 100), st.integers(1, 5_000))),
    block=st.sampled_from(BLOCKS),
)
def test_a_gpu_reads_a_mask_as_a_cpu_does(seed, kind, sizes, block):
    prepared = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(seed)
        mod = mask_mod(kind, *sizes, device)
        prepared.append(mla_backend.flex_mask(create_block_mask(mod, 1, 2, *sizes, device=device, BLOCK_SIZE=block)))
    for name, own in vars(prepared[0]).items():
        there = getattr(prepared[1], name)
        assert torch.equal(own, there.cpu()) if isinstance(own, torch.Tensor) else own == there
    tokens, topk = 2 * sizes[0], sizes[1]
    ours, theirs = (mask.lists(0, tokens, topk) for mask in prepared)
    assert torch.equal(ours[1], theirs[1].cpu())
    named = torch.arange(topk) < ours[1].unsqueeze(1)
    assert torch.equal(ours[0][named], theirs[0].cpu()[named])


@pytest.mark.parametrize("heads", [16, 128])
def test_a_captured_graph_follows_new_values(heads):
    problem = random_flex("causal", 1, heads, 200, 300, 64, device="cuda")
    other = random_flex("causal", 1, heads, 200, 300, 64, device="cuda")
    prepared = mla_backend.flex_mask(problem.block_mask)
    q, kv = problem.q.clone(), problem.kv.clone()

    def step():
        return mla_backend.flex_mla(q, kv, prepared, scale=problem.scale, return_lse=True)

    step()
    graph, got = captured(step)
    q.copy_(other.q), kv.copy_(other.kv)
    graph.replay()
    want = other.but(block_mask=prepared).solve()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_call_does_not_wait_for_the_gpu():
    problem = random_flex("causal", 2, 16, 100, 100, device="cuda")
    problem.gradients()
    with nothing_waits():
        problem.solve()
        problem.gradients()


def test_what_only_a_cpu_does_and_two_devices_are_refused():
    problem, there = random_flex(), random_flex(device="cuda")
    with pytest.raises(ValueError, match="score_mod must be None on cuda"):
        there.solve(score_mod=lambda score, b, h, i, j: score)
    with pytest.raises(ValueError, match="block_mask must be on cuda:0 like q"):
        there.but(block_mask=problem.block_mask).solve()
    with pytest.raises(ValueError, match="kv must be on cuda:0 like q"):
        there.but(kv=problem.kv).solve()


@pytest.mark.parametrize("heads", [3, 16, 64])
@pytest.mark.parametrize("kernel", [CUDA_KERNEL, "portable"])
def test_small_case_of_a_mask(kernel, heads):
    """For compute-sanitizer."""
    with chosen_kernel(kernel):
        random_flex("prefix", 1, heads, 20, 70, 16, device="cuda").poisoned().check()
        random_flex("random", 2, heads, 5, 90, (8, 40), device="cuda", mask_batch=2).poisoned().check()
