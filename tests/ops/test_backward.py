"""The contract of the gradients of sparse attention, against autograd of the reference in float64. tests/gpu runs most
of these again."""

import pytest
import torch
from hypothesis import given

import mla_backend
from mla_backend import library, reference, training
from training_problems import random_training_problem, training_problems

HEADS = [1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 96, 97, 127, 128]


@given(problem=training_problems())
def test_any_problem_agrees_with_autograd_of_the_reference(cpu_kernel, problem):
    problem.check(cancels=True)


@pytest.mark.parametrize("sink", [False, True])
def test_the_reference_in_closed_form_is_its_autograd(sink):
    problem = random_training_problem(5, 3, 20, 30, sink=sink, d_lse=not sink)
    problem.topk_length = torch.tensor([30, 0, 4, 30, 30], dtype=torch.int32)
    closed = reference.sparse_mla_backward(**vars(problem))
    for own, autograd in zip(closed, problem.oracle(), strict=False):
        torch.testing.assert_close(own, autograd, rtol=1e-12, atol=1e-12)


def test_the_reference_passes_gradcheck(monkeypatch):
    """Of tiny rows, with a duplicate, a -1, an empty list and sinks."""
    monkeypatch.setattr(reference, "LATENT", 3)
    q, kv, sink = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 5), (4, 5), (2,)))
    indices = torch.tensor([[0, 0, -1], [3, 1, 9], [-1, -1, -1]], dtype=torch.int32)

    def outputs(q, kv, *sink):
        out, lse = reference.sparse_mla(q, kv, indices, scale=0.6, sink=sink[0] if sink else None)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(outputs, (q, kv))
    assert torch.autograd.gradcheck(outputs, (q, kv, sink))


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count(device, heads, width):
    random_training_problem(2, heads, 60, 80, width, device=device, sink=True).poisoned().check()


@pytest.mark.parametrize("topk", [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 200, 2048])
def test_every_list_length(device, topk):
    random_training_problem(2, 9, 300, topk, device=device).check(cancels=topk < 10)


def test_lists_that_name_one_row_again_and_again(device):
    problem = random_training_problem(4, 16, 5, 100, device=device)
    problem.indices.fill_(3)
    problem.check(cancels=True)


@pytest.mark.parametrize(("queries", "rows", "topk"), [(0, 10, 5), (3, 0, 5), (3, 10, 0)])
def test_nothing_to_attend_to_gives_zeros(device, queries, rows, topk):
    d_q, d_kv, d_sink = random_training_problem(queries, 4, rows, topk, device=device, sink=True).gradients()
    assert d_q.shape == (queries, 4, 576) and d_kv.shape == (rows, 576)
    assert not any(x.any() for x in (d_q, d_kv, d_sink))


def test_infinite_sinks(device):
    """One of +inf takes all the weight, one of -inf none."""
    problem = random_training_problem(3, 3, 40, 30, device=device)
    without = problem.gradients()
    d_q, _, d_sink = problem.but(sink=torch.tensor([torch.inf, -torch.inf, -200.0], device=device)).gradients()
    assert not d_q[:, 0].any() and torch.equal(d_q[:, 1:], without[0][:, 1:])
    assert not d_sink.any()


def test_the_gradient_of_lse_with_a_sink(device):
    problem = random_training_problem(4, 8, 60, 50, device=device, sink=True, d_lse=True)
    problem.sink[:3] = torch.tensor([-20.0, 10.0, 30.0])
    problem.check()


def test_a_row_with_nan_reaches_the_queries_that_name_it_and_no_others(device):
    problem = random_training_problem(3, 4, 30, 10, device=device)
    problem.indices[:] = torch.arange(30, dtype=torch.int32).view(3, 10)
    problem.kv[12, 100] = torch.nan
    d_q, d_kv = problem.gradients()
    assert d_q[1].isnan().any() and not d_q[[0, 2]].isnan().any()
    assert d_kv[12].isnan().any() and not d_kv[:10].isnan().any() and not d_kv[20:].isnan().any()


def small_integers(*shape):
    return torch.randint(-2, 3, shape).bfloat16()


@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_weights_of_1_give_exact_bits(device, heads):
    """A list of one row weighs it with 1, so that its gradient is the sum of d_out and that of q is 0."""
    problem = random_training_problem(6, heads, 4, 1).but(
        q=small_integers(6, heads, 576), kv=small_integers(4, 576), d_out=(torch.rand(6, heads, 512) < 0.3).bfloat16()
    )
    problem.indices[:, 0] = torch.tensor([0, 1, 1, 3, -1, 0])
    d_q, d_kv = problem.to(device).gradients()
    exact = torch.zeros(4, 576)
    for query, row in enumerate([0, 1, 1, 3, None, 0]):
        if row is not None:
            exact[row, :512] += problem.d_out[query].float().sum(0)
    assert not d_q.any()
    assert torch.equal(d_kv.cpu(), exact.bfloat16())


def test_same_bits_every_time_in_any_workspace_and_with_an_order_of_ones_own(device):
    problem = random_training_problem(40, 33, 90, 60, device=device, sink=True, d_lse=True)
    first = problem.gradients()
    groups = -(-33 // library.backward_group_heads(torch.device(device)))
    query = groups * 60 * 576 * 2
    order = mla_backend.backward_order(problem.indices, 90)
    runs = [problem.gradients(workspace_bytes=n * query + 17) for n in (1, 2, 3, 7, 39, 40, 1000)]
    runs += [problem.gradients(order=order) for _ in range(3)]
    runs += [problem.gradients() for _ in range(10)]
    for run in runs:
        assert all(torch.equal(a, b) for a, b in zip(run, first, strict=True))


def test_bits_do_not_depend_on_the_number_of_threads():
    problem = random_training_problem(9, 5, 200, 3000)
    arguments = problem.q, problem.kv, problem.indices
    out, lse = mla_backend.sparse_mla(*arguments, scale=problem.scale)
    runs = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        runs.append(mla_backend.sparse_mla_backward(*arguments, out, lse, problem.d_out, scale=problem.scale)[:2])
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("with_lengths", [False, True])
def test_the_order_of_many_pairs_is_a_stable_sort(device, with_lengths):
    indices = torch.randint(-5, 1005, (300, 700), dtype=torch.int32, device=device)
    lengths = torch.randint(-1, 702, (300,), dtype=torch.int32, device=device) if with_lengths else None
    begin, pairs = mla_backend.backward_order(indices, 1000, topk_length=lengths)
    seen = torch.arange(700, device=device) < (700 if lengths is None else lengths.unsqueeze(1))
    flat = torch.where(seen, indices, -1).flatten()
    valid = ((flat >= 0) & (flat < 1000)).nonzero().squeeze(1)
    want = valid[flat[valid].sort(stable=True).indices]
    assert torch.equal(pairs[: len(want)].long(), want)
    counts = torch.bincount(flat[valid], minlength=1000)
    assert torch.equal(begin.long(), torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


def test_an_order_of_other_lists_is_harmless(device, monkeypatch):
    problem = random_training_problem(5, 4, 30, 20, device=device)
    wrong = mla_backend.BackwardOrder(
        torch.randint(-(2**31), 2**31 - 1, (31,), dtype=torch.int32, device=device),
        torch.randint(-(2**31), 2**31 - 1, (100,), dtype=torch.int32, device=device),
    )
    monkeypatch.setattr(training, "_require_same_order", lambda *_: None)  # what a CPU refuses, a GPU does not see
    for workspace_bytes in (2**30, 2 * 20 * 576 * 2):
        d_q, d_kv = problem.gradients(order=wrong, workspace_bytes=workspace_bytes)
        assert torch.equal(d_q, problem.gradients()[0]) and d_kv.shape == (30, 576)


def test_a_cpu_refuses_the_order_of_other_lists_of_the_same_shape():
    problem = random_training_problem(5, 4, 30, 20)
    lengths = torch.full((5,), 19, dtype=torch.int32)
    for lists, topk_length in ((problem.indices.roll(1, 0), None), (problem.indices, lengths)):
        order = mla_backend.backward_order(lists, 30, topk_length=topk_length)
        with pytest.raises(ValueError, match="^order must be of these lists"):
            problem.gradients(order=order)


def test_delta(device):
    problem = random_training_problem(7, 5, 30, 20, device=device)
    out, lse = mla_backend.sparse_mla(problem.q, problem.kv, problem.indices, scale=problem.scale)
    sink = torch.tensor([0.5, torch.inf, -torch.inf, 3.0, -1.0], device=device)
    lse[2] = -torch.inf
    lse[3] = torch.inf
    delta, lse2, d_sink = mla_backend.sparse_delta(out, problem.d_out, lse, sink=sink)
    exact = (out.double() * problem.d_out.double()).sum(-1)
    torch.testing.assert_close(delta.double(), exact, rtol=1e-4, atol=1e-4)
    total = torch.logaddexp(lse.double(), sink.double())
    total[2:4], total[:, 1] = torch.inf, torch.inf
    torch.testing.assert_close(lse2.double(), total * 1.4426950408889634, rtol=1e-6, atol=1e-6)
    weight = torch.exp(sink.double() - total)
    weight[:, 1], weight[2:4] = 1.0, 1.0
    torch.testing.assert_close(d_sink.double(), -weight * exact, rtol=1e-4, atol=1e-4)


def test_outputs_and_workspace_of_ones_own(device):
    problem = random_training_problem(6, 20, 50, 40, device=device)
    arguments = problem.q, problem.kv, problem.indices
    out, lse = mla_backend.sparse_mla(*arguments, scale=problem.scale)
    d_q = torch.full((6, 30, 576), torch.nan, device=device).bfloat16()[:, 5:25]
    d_kv = torch.full((50, 600), torch.nan, device=device).bfloat16()[:, 8:584]
    workspace = torch.full((2 * 40 * 576 * 2 + 16,), 0xFF, dtype=torch.uint8, device=device)
    got = mla_backend.sparse_mla_backward(
        *arguments, out, lse, problem.d_out, scale=problem.scale, workspace=workspace, d_q=d_q, d_kv=d_kv
    )
    assert got[0] is d_q and got[1] is d_kv and got[2] is None
    assert all(torch.equal(a, b) for a, b in zip(got[:2], problem.gradients(), strict=True))


def test_inputs_of_any_strides(device):
    problem = random_training_problem(4, 6, 40, 30, device=device)
    want = problem.gradients()
    strided = problem.but(
        q=problem.q.transpose(0, 1).contiguous().transpose(0, 1),
        kv=torch.stack([problem.kv, problem.kv], 2)[..., 0],
        d_out=torch.nn.functional.pad(problem.d_out, (3, 4))[..., 3:-4],
        indices=torch.nn.functional.pad(problem.indices, (1, 2))[:, 1:-2],
    )
    assert all(torch.equal(a, b) for a, b in zip(strided.gradients(), want, strict=True))
    constant = problem.but(d_out=torch.ones((), device=device).bfloat16().expand(4, 6, 512))
    constant.check()
