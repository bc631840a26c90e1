"""Training through sparse attention: autograd, torch.compile, and the interfaces of others."""

import math

import pytest
import torch

import mla_backend
from mla_backend import flash_mla, flash_mla_fork, reference, tilelang
from training_problems import assert_gradients_accurate, random_training_problem

OPS = torch.ops.mla_backend


def sparse_mla(problem, **changes):
    names = ("q", "kv", "indices", "scale", "topk_length", "sink")
    return mla_backend.sparse_mla(**{name: getattr(problem, name) for name in names} | changes)


@pytest.mark.parametrize("width", [576, 512])
def test_the_forward_is_sparse_attention(device, width):
    problem = random_training_problem(5, 17, 60, 40, width, device=device, sink=True)
    out, lse = sparse_mla(problem)
    want, want_lse = mla_backend.sparse_attention(
        problem.q, problem.kv.unsqueeze(1), problem.indices, scale=problem.scale, sink=problem.sink
    )
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("width", [576, 512])
@pytest.mark.parametrize("heads", [1, 16, 40, 128])
def test_a_rollout_from_a_paged_cache_gives_the_bits_of_training(device, width, heads):
    """Whatever else is in the batch, and however the cache is paged."""
    problem = random_training_problem(9, heads, 128, 70, width, device=device)
    out, lse = sparse_mla(problem, batch_invariant=True)
    blocks = torch.randperm(8, device=device)
    cache = torch.empty(8, 16, width, dtype=torch.bfloat16, device=device)
    cache[blocks] = problem.kv.view(8, 16, width)
    slots = blocks[(problem.indices.clamp(0, 127) // 16).long()].int() * 16 + problem.indices.clamp(0, 127) % 16
    slots = torch.where((problem.indices < 0) | (problem.indices > 127), -1, slots)
    for tokens in ([4], [8, 0], list(range(9))):
        rollout, rollout_lse = mla_backend.sparse_attention(
            problem.q[tokens], cache, slots[tokens], scale=problem.scale, batch_invariant=True
        )
        assert torch.equal(rollout, out[tokens]) and torch.equal(rollout_lse, lse[tokens])


def test_only_gradients_that_are_asked_for(device):
    problem = random_training_problem(3, 4, 30, 20, device=device, sink=True)
    want = problem.gradients()
    kv = problem.kv.clone().unsqueeze(1).requires_grad_()
    out, lse = sparse_mla(problem, kv=kv)
    out.backward(problem.d_out)
    assert kv.grad.shape == (30, 1, 576) and torch.equal(kv.grad.squeeze(1), want[1])
    assert not sparse_mla(problem)[0].requires_grad
    with torch.no_grad():
        assert not sparse_mla(problem, kv=kv)[0].requires_grad


def test_the_gradient_of_lse_alone(device):
    problem = random_training_problem(3, 8, 50, 40, device=device, d_lse=True)
    problem.d_out.zero_()
    q, kv = problem.q.clone().requires_grad_(), problem.kv.clone().requires_grad_()
    _, lse = sparse_mla(problem, q=q, kv=kv)
    lse.backward(problem.d_lse)
    assert_gradients_accurate((q.grad, kv.grad), problem.oracle(), problem.typical_sizes())


def test_a_second_derivative_is_refused(device):
    problem = random_training_problem(2, 3, 20, 10, device=device)
    q = problem.q.clone().requires_grad_()
    (d_q,) = torch.autograd.grad(sparse_mla(problem, q=q)[0].float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        d_q.float().sum().backward()


@pytest.mark.parametrize("sink", [False, True])
def test_training_compiles_without_a_graph_break(device, sink):
    problem = random_training_problem(6, 8, 40, 30, device=device, sink=sink, d_lse=not sink)
    lengths = torch.tensor([30, 0, 3, 30, 30, 7], dtype=torch.int32, device=device)

    def loss(q, kv, sinks):
        out, lse = mla_backend.sparse_mla(
            q * 1, kv, problem.indices, scale=problem.scale, topk_length=lengths, sink=sinks
        )
        total = (out.float() * problem.d_out.float()).sum()
        return total if sink else total + (lse.clamp(min=-100) * problem.d_lse).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    gradients = []
    for function in (loss, compiled):
        leaves = [x.clone().requires_grad_() for x in (problem.q, problem.kv) + ((problem.sink,) if sink else ())]
        function(leaves[0], leaves[1], leaves[2] if sink else None).backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_opcheck_of_the_autograd_ops():
    problem = random_training_problem(2, 3, 20, 10, sink=True)
    q, kv, sink = (x.requires_grad_() for x in (problem.q, problem.kv, problem.sink))
    for lists in ((None, None), tuple(mla_backend.backward_order(problem.indices, 20))):
        arguments = (q, kv, problem.indices, 0.04, None, sink, *lists, None, 2**30, False)
        torch.library.opcheck(OPS.sparse_mla.default, arguments)
    out, lse = sparse_mla(problem)
    out, lse = out.detach(), lse.detach()
    arguments = (q.detach(), kv.detach(), problem.indices, 0.04, None, sink.detach(), None, None, True, 2**30)
    torch.library.opcheck(OPS.sparse_mla_backward.default, (*arguments, out, lse, problem.d_out, None))


def test_flash_mla_sparse_bwd(device):
    problem = random_training_problem(7, 12, 40, 30, device=device)
    kv, lists = problem.kv.unsqueeze(1), problem.indices.unsqueeze(1)
    lengths = torch.tensor([30, 0, 3, 30, 30, 7, 1], dtype=torch.int32, device=device)
    problem.topk_length = lengths
    out, _, lse = flash_mla.flash_mla_sparse_fwd(problem.q, kv, lists, problem.scale, topk_length=lengths)
    assert lse[1].isinf().all()
    rest = kv, out, problem.d_out, lists
    d_q, d_kv = flash_mla.flash_mla_sparse_bwd(problem.q.clone().requires_grad_(), *rest, lse, topk_length=lengths)
    assert d_kv.shape == (40, 1, 576)
    want = problem.gradients()
    assert torch.equal(d_q, want[0]) and torch.equal(d_kv.squeeze(1), want[1])
    base2 = lse * math.log2(math.e), problem.scale
    base2 = flash_mla.flash_mla_sparse_bwd(problem.q, *rest, *base2, topk_length=lengths, base2_lse=True)
    oracle = [w.view(x.shape) for w, x in zip(problem.oracle(), base2, strict=True)]
    assert_gradients_accurate(base2, oracle, problem.typical_sizes())


@pytest.mark.parametrize("first", [0, 10])
def test_rows_after_a_querys_position_are_skipped_if_it_is_given(device, first):
    """In the interface of FlashMLA's forks from any position on, in FlashMLA's own if there is anything before."""
    problem = random_training_problem(5, 4, 40, 30, device=device)
    seen = problem.indices <= torch.arange(first, first + 5, device=device).unsqueeze(1)
    causal = problem.but(indices=torch.where(seen, problem.indices, -1))
    q, kv = problem.q.clone().requires_grad_(), problem.kv.clone().unsqueeze(1).requires_grad_()
    lists, how = problem.indices.unsqueeze(1), dict(sm_scale=problem.scale, q_start_index_s=first)
    out, _, lse, scores = flash_mla_fork.flash_mla_sparse_fwd(q, kv, lists, problem.scale, q_start_index_s=first)
    assert scores is None and torch.equal(out, sparse_mla(causal)[0])
    want = causal.gradients()
    for interface in (flash_mla_fork, flash_mla) if first else (flash_mla_fork,):
        d_q, d_kv = interface.flash_mla_sparse_bwd(q, kv, out, problem.d_out, lists, lse, **how)
        assert torch.equal(d_q, want[0]) and torch.equal(d_kv.squeeze(1), want[1])


def test_tilelangs_interface_without_a_batch(device):
    problem = random_training_problem(5, 4, 40, 30, device=device, d_lse=True)
    q, kv = problem.q.clone().requires_grad_(), problem.kv.clone().unsqueeze(1).requires_grad_()
    out, lse = tilelang.SparseMLA.apply(q, kv, problem.indices.unsqueeze(1), problem.scale)
    want, want_lse = sparse_mla(problem)
    assert torch.equal(out, want)
    torch.testing.assert_close(lse, want_lse * math.log2(math.e))
    torch.autograd.backward([out, lse], [problem.d_out, problem.d_lse / math.log2(math.e)])
    assert_gradients_accurate((q.grad, kv.grad.squeeze(1)), problem.oracle(), problem.typical_sizes())
    d_q, d_kv = tilelang.sparse_mla_bwd(
        q, kv, out.detach(), problem.d_out, problem.indices.unsqueeze(1), lse.detach(), problem.scale
    )
    assert_gradients_accurate((d_q, d_kv.squeeze(1)), problem.but(d_lse=None).oracle(), problem.typical_sizes())


@pytest.mark.parametrize("causal", [True, False])
def test_tilelangs_interface_with_a_batch(device, causal):
    """The examples mask rows after a query's position, and fill lists up with the number of rows."""
    batch, queries, rows, heads = 2, 6, 9, 3
    q = torch.randn(batch, queries, heads, 576, device=device).bfloat16()
    kv = torch.randn(batch, rows, 1, 576, device=device).bfloat16()
    do = torch.randn(batch, queries, heads, 512, device=device).bfloat16()
    indices = torch.randint(0, rows + 1, (batch, queries, 1, 8), dtype=torch.int32, device=device)
    lists = indices.squeeze(2)
    if causal:
        lists = torch.where(lists <= torch.arange(queries, device=device).view(-1, 1), lists, -1)
        out, lse = tilelang.sparse_mla_fwd_interface(q, kv, indices)
    else:
        results = [mla_backend.sparse_mla(q[b], kv[b], lists[b], scale=576**-0.5) for b in range(batch)]
        out, lse = (torch.stack(r) for r in zip(*results, strict=True))
        lse = lse * math.log2(math.e)
    d_q, d_kv = tilelang.sparse_mla_bwd(q, kv, out, do, indices, lse, is_casual=causal)
    for b in range(batch):
        want = reference.sparse_mla_backward(q[b], kv[b, :, 0], lists[b], do[b], scale=576**-0.5)
        assert_gradients_accurate((d_q[b], d_kv[b].squeeze(1)), want[:2], sizes=(1.0, 1.0), cancels=True)
        out_want, lse_want = reference.sparse_mla(q[b].double(), kv[b, :, 0].double(), lists[b], scale=576**-0.5)
        torch.testing.assert_close(out[b].double(), out_want, rtol=0.02, atol=0.01)
        torch.testing.assert_close(lse[b].double(), lse_want * math.log2(math.e), rtol=1e-4, atol=1e-4)
