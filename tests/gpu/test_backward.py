"""The gradients of sparse attention on a GPU: the CPU's tests with the `device` of this folder, and what only a GPU
has."""

import pytest
import torch
from hypothesis import given

import mla_backend
from gpu_checks import captured, chosen_kernel, on_either_device
from mla_backend import library
from problems import CUDA_KERNEL
from training_problems import random_training_problem, training_problems

pytestmark = pytest.mark.gpu
globals().update(on_either_device("backward", "training", "training_examples"))
KERNELS = ("auto", "portable")


@pytest.fixture(autouse=True)
def _the_same_bits():
    """Where a test has no preference, as most compare bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernel", KERNELS)
@given(problem=training_problems(device="cuda"))
def test_any_problem_agrees_with_autograd_of_the_reference(kernel, problem):
    with chosen_kernel(kernel):
        problem.check(cancels=True)


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("heads", range(1, 129))
def test_the_portable_kernel_at_every_head_count(heads, width):
    with chosen_kernel("portable"):
        random_training_problem(2, heads, 60, 80, width, device="cuda", sink=True).poisoned().check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64, 128])
def test_long_lists_in_a_long_context(kernel, heads):
    with chosen_kernel(kernel):
        random_training_problem(6, heads, 100_000, 2048, device="cuda", sink=True).poisoned().check()


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("heads", [1, 5, 8, 16, 24, 31, 32, 64, 65, 100, 128])
def test_one_query_after_another_with_lists_of_any_length(heads, width):
    """More queries than a GPU has processors, so that each takes several: with no tile, one, an odd or an even number,
    and some without a valid entry."""
    problem = random_training_problem(300, heads, 5_000, 200, width, device="cuda", sink=True)
    problem.topk_length = (torch.arange(300, dtype=torch.int32) * 7 % 211 - 5).cuda()
    problem.indices[30] = -1
    problem.indices[40, 64:128] = 5_000
    problem.indices[50] = 3
    problem.poisoned().check(cancels=True)
    problem.poisoned().check(cancels=True, deterministic=False)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("heads", [8, 16, 24, 32, 64, 128])
def test_same_bits_over_50_runs_and_on_another_stream(kernel, heads):
    with chosen_kernel(kernel):
        problem = random_training_problem(300, heads, 1000, 256, device="cuda", sink=True)
        first = problem.gradients()
        for run in range(50):
            with torch.cuda.stream(torch.cuda.Stream()) if run % 2 else torch.cuda.stream(None):
                torch.cuda.synchronize()
                again = problem.gradients(workspace_bytes=[2**30, 2**26, 2**24][run % 3])
                torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_without_a_preference_torchs_flag_decides():
    problem = random_training_problem(300, 64, 1000, 256, device="cuda", sink=True).poisoned()
    gradients = problem.gradients(deterministic=None)
    assert all(torch.equal(a, b) for a, b in zip(gradients, problem.gradients(), strict=True))
    torch.use_deterministic_algorithms(False)
    problem.check(deterministic=None)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_captured_graph_follows_new_values_and_lists(deterministic):
    problem = random_training_problem(20, 16, 90, 60, device="cuda", sink=True)
    other = random_training_problem(20, 16, 90, 60, device="cuda", sink=True)
    arguments = problem.q, problem.kv, problem.indices
    out, lse = mla_backend.sparse_mla(*arguments, scale=problem.scale, sink=problem.sink)
    d_q, d_kv = torch.empty_like(problem.q), torch.empty_like(problem.kv)
    workspace = torch.empty(7 * 60 * 576 * 2, dtype=torch.uint8, device="cuda")

    def step():
        how = {"scale": problem.scale, "sink": problem.sink, "workspace": workspace, "deterministic": deterministic}
        return mla_backend.sparse_mla_backward(*arguments, out, lse, problem.d_out, **how, d_q=d_q, d_kv=d_kv)

    step()
    graph, (_, _, d_sink) = captured(step)
    for name in ("q", "kv", "indices", "d_out", "sink"):
        getattr(problem, name).copy_(getattr(other, name))
    new_out, new_lse = mla_backend.sparse_mla(*arguments, scale=problem.scale, sink=problem.sink)
    out.copy_(new_out), lse.copy_(new_lse)
    graph.replay()
    for got, want in zip((d_q, d_kv, d_sink), other.gradients(), strict=True):
        assert (
            torch.equal(got, want) if deterministic else torch.allclose(got.float(), want.float(), atol=0.02, rtol=0.02)
        )


def test_tensors_on_two_devices_are_refused():
    problem = random_training_problem(2, 3, 20, 10, device="cuda")
    with pytest.raises(ValueError, match="kv must be on cuda:0 like q; got a tensor on cpu"):
        problem.but(kv=problem.kv.cpu()).gradients()
    with pytest.raises(ValueError, match="indices must be on cuda:0"):
        problem.but(indices=problem.indices.cpu()).gradients()


def test_rows_between_16_bytes_are_refused_by_the_op_and_copied_by_the_function():
    problem = random_training_problem(2, 3, 20, 10, device="cuda")
    shifted = torch.nn.functional.pad(problem.kv, (1, 7))[:, 1:-7]
    assert shifted.data_ptr() % 16 == 2
    assert all(torch.equal(a, b) for a, b in zip(problem.but(kv=shifted).gradients(), problem.gradients(), strict=True))
    contributions = torch.empty(1, 20, 576, dtype=torch.bfloat16, device="cuda")
    small = torch.zeros(2, 3, device="cuda")
    with pytest.raises(ValueError, match="kv must be of rows at multiples of 16 bytes"):
        torch.ops.mla_backend.sparse_backward(
            *(problem.q, shifted, problem.indices, None, 0.1, problem.d_out, small, small, 0, 2),
            *(torch.empty_like(problem.q), contributions, None, None),
        )


@pytest.mark.parametrize("heads", [3, 16, 20, 32, 40, 100])
@pytest.mark.parametrize("kernel", [CUDA_KERNEL, "portable"])
def test_small_case_of_the_backward(kernel, heads):
    """For compute-sanitizer."""
    with chosen_kernel(kernel):
        problem = random_training_problem(3, heads, 40, 70, device="cuda", sink=True).poisoned()
        groups = -(-heads // library.backward_group_heads(torch.device("cuda")))
        problem.check(workspace_bytes=2 * groups * 70 * 576 * 2)
        problem.check(deterministic=False)
