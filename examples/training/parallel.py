"""Attention of one sequence on two processes, with the gradients of one process.

    python -m examples.training.parallel

Tensor parallel: each process has half of the heads and all rows of kv. Gradients of kv are added up.
Sequence parallel: each process has half of the queries and of the rows. Rows are gathered, and their gradients are
added up and cut again. With two GPUs each process has one, and they talk through NCCL; else they compute on the CPU and
talk through gloo.
"""

import argparse
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from mla_backend import sparse_mla

PROCESSES, QUERIES, HEADS, TOPK = 2, 32, 16, 24
SCALE = 576**-0.5


class Shared(torch.autograd.Function):
    """A tensor that all processes use: its gradient is the sum of theirs, added in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        total = gradient.float()
        dist.all_reduce(total)
        return total.to(gradient.dtype)


class Gathered(torch.autograd.Function):
    """All processes' rows, in their order. The gradient of a process's own is the sum of what all computed for them."""

    @staticmethod
    def forward(ctx, own: Tensor) -> Tensor:
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        total = gradient.float()
        dist.all_reduce(total)  # on GPUs: reduce_scatter, which leaves each process its own part alone
        return total.to(gradient.dtype).chunk(dist.get_world_size())[dist.get_rank()]


def device() -> str:
    return "cuda" if torch.cuda.device_count() >= PROCESSES else "cpu"


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, kv, causal lists and the gradient of the output; the same on every process."""
    torch.manual_seed(0)
    q, kv = torch.randn(QUERIES, HEADS, 576).bfloat16(), torch.randn(QUERIES, 576).bfloat16()
    indices = torch.randint(0, QUERIES, (QUERIES, TOPK), dtype=torch.int32)
    indices = torch.where(indices <= torch.arange(QUERIES).unsqueeze(1), indices, -1)
    d_out = torch.randn(QUERIES, HEADS, 512).bfloat16()
    q, kv, indices, d_out = (x.to(device()) for x in (q, kv, indices, d_out))
    return q, kv, indices, d_out


def one_process() -> tuple[Tensor, Tensor]:
    q, kv, indices, d_out = problem()
    out, _ = sparse_mla(q.requires_grad_(), kv.requires_grad_(), indices, scale=SCALE)
    return torch.autograd.grad(out, [q, kv], d_out)


def tensor_parallel(rank: int) -> tuple[Tensor, Tensor]:
    """This process's heads of q's gradient, and the gradient of kv."""
    q, kv, indices, d_out = problem()
    own = slice(rank * HEADS // PROCESSES, (rank + 1) * HEADS // PROCESSES)
    q, kv = q[:, own].clone().requires_grad_(), kv.requires_grad_()
    out, _ = sparse_mla(q, Shared.apply(kv), indices, scale=SCALE)
    return torch.autograd.grad(out, [q, kv], d_out[:, own])


def sequence_parallel(rank: int) -> tuple[Tensor, Tensor]:
    """This process's queries of q's gradient, and its rows of kv's."""
    q, kv, indices, d_out = problem()
    own = slice(rank * QUERIES // PROCESSES, (rank + 1) * QUERIES // PROCESSES)
    q, kv = q[own].clone().requires_grad_(), kv[own].clone().requires_grad_()
    out, _ = sparse_mla(q, Gathered.apply(kv), indices[own], scale=SCALE)
    return torch.autograd.grad(out, [q, kv], d_out[own])


def similarity_error(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return (1 - 2 * (got * want).sum() / (got.square() + want.square()).sum()).item()


def run(rank: int, port: int) -> None:
    backend = "gloo"
    if device() == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=rank, world_size=PROCESSES)
    d_q, d_kv = one_process()
    whole = {
        "tensor parallel": (tensor_parallel, d_q.chunk(PROCESSES, 1)[rank], d_kv),
        "sequence parallel": (sequence_parallel, d_q.chunk(PROCESSES)[rank], d_kv.chunk(PROCESSES)[rank]),
    }
    for name, (compute, want_q, want_kv) in whole.items():
        own_q, own_kv = compute(rank)
        assert torch.equal(own_q, want_q), f"{name}: process {rank}'s gradient of q has other bits"
        error = similarity_error(own_kv, want_kv)
        assert error < 1e-5, f"{name}: process {rank}'s gradient of kv has a similarity error of {error:.3g}"
        if rank == 0:
            within = f"{max(error, 0):.1e}, as parts are rounded before they are added"
            print(f"{name} on {device()}, {backend}: same bits for q; kv within {within}")
    dist.destroy_process_group()


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run, (port,), PROCESSES)


if __name__ == "__main__":
    main()
