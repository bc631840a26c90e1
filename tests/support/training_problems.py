"""Random problems for the backward, and what its gradients are held to."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import mla_backend
from mla_backend import reference
from problems import Arguments


@dataclass
class TrainingProblem(Arguments):
    """The arguments of sparse_mla, and the gradients with respect to its results."""

    q: Tensor
    kv: Tensor
    indices: Tensor
    d_out: Tensor
    scale: float
    topk_length: Tensor | None = None
    sink: Tensor | None = None
    d_lse: Tensor | None = None

    def gradients(self, deterministic: bool | None = True, **options) -> tuple[Tensor, ...]:
        """Our answer through autograd: of q, kv and (if there is one) the sink."""
        given = {"q": self.q, "kv": self.kv} | ({} if self.sink is None else {"sink": self.sink})
        leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
        options |= {"indices": self.indices, "scale": self.scale, "topk_length": self.topk_length}
        out, lse = mla_backend.sparse_mla(**leaves, deterministic=deterministic, **options)
        if self.d_lse is None:
            return torch.autograd.grad([out], list(leaves.values()), [self.d_out])
        return torch.autograd.grad([out, lse], list(leaves.values()), [self.d_out, self.d_lse])

    def oracle(self) -> tuple[Tensor, ...]:
        """The same by autograd of the reference, in float64 on the CPU."""
        on_cpu = self.to("cpu")
        given = {"q": on_cpu.q, "kv": on_cpu.kv} | ({} if self.sink is None else {"sink": on_cpu.sink})
        leaves = {name: x.double().requires_grad_() for name, x in given.items()}
        more = {"scale": self.scale, "topk_length": on_cpu.topk_length}
        out, lse = reference.sparse_mla(**leaves, indices=on_cpu.indices, **more)
        loss = (out * on_cpu.d_out.double()).sum()
        if on_cpu.d_lse is not None:
            loss = loss + torch.where(lse == -torch.inf, 0.0, lse * on_cpu.d_lse.double()).sum()
        return torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)

    def check(self, cancels: bool = False, **options) -> None:
        """`cancels`: lists may be so short or alike that gradients are differences of nearly equal numbers."""
        assert_gradients_accurate(self.gradients(**options), self.oracle(), self.typical_sizes(), cancels)

    def typical_sizes(self) -> tuple[float, ...]:
        """Of an entry's part of the gradients of q, kv and the sink, if its weight is 1, before anything cancels."""
        rows, valid = reference._named_rows(self.kv, self.indices, self.topk_length)
        d_out, named = (x.double().square().mean().sqrt().nan_to_num().item() for x in (self.d_out, rows[valid]))
        d_score = 512**0.5 * d_out * named
        return d_score * self.scale * named, d_score * self.scale * named, d_score

    def poisoned(self) -> "TrainingProblem":
        """The same, but every row of kv that no list names is NaN."""
        on_cpu = self.to("cpu")
        _, valid = reference._named_rows(on_cpu.kv, on_cpu.indices, on_cpu.topk_length)
        poison = torch.full_like(on_cpu.kv, torch.nan)
        listed = on_cpu.indices[valid].long()
        poison[listed] = on_cpu.kv[listed]
        return self.but(kv=poison.to(self.kv.device))


def random_training_problem(
    queries=3, heads=16, rows=100, topk=70, width=576, magnitude=1.0, device="cpu", sink=False, d_lse=False, **more
) -> TrainingProblem:
    """Random lists with duplicates, most entries valid, some below 0 and some past the end. Scores spread by 1."""
    indices = torch.randint(-rows // 8 - 1, rows + rows // 8 + 1, (queries, topk), dtype=torch.int32)
    q, kv = torch.randn(queries, heads, width) / magnitude, torch.randn(rows, width) * magnitude
    given = q.bfloat16(), kv.bfloat16(), indices, torch.randn(queries, heads, 512).bfloat16(), width**-0.5
    more["sink"] = torch.randn(heads) if sink else None
    more["d_lse"] = torch.randn(queries, heads) if d_lse else None
    return TrainingProblem(*given, **more).to(device)


@st.composite
def training_problems(draw, max_queries: int = 4, max_topk: int = 100, device: str = "cpu"):
    """Problems of any shape and with any of the optional arguments."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    queries, topk = draw(st.integers(0, max_queries)), draw(st.integers(0, max_topk))
    heads, rows = draw(st.integers(1, 128)), draw(st.one_of(st.integers(0, 20), st.integers(20, 500)))
    width, magnitude = draw(st.sampled_from([576, 512])), draw(st.sampled_from([0.1, 1.0]))
    optional = dict(sink=draw(st.booleans()), d_lse=draw(st.booleans()))
    problem = random_training_problem(queries, heads, rows, topk, width, magnitude, **optional)
    if draw(st.booleans()):
        problem.topk_length = torch.randint(-3, topk + 4, (queries,), dtype=torch.int32)
    if problem.sink is not None and problem.d_lse is None:
        problem.sink[0] = draw(st.sampled_from([torch.inf, -torch.inf, 0.0]))
    if queries:
        problem.indices[0] = draw(st.sampled_from([problem.indices[0], -torch.ones(topk, dtype=torch.int32)]))
    return problem.poisoned().to(device)


def similarity_error(got: Tensor, want: Tensor) -> float:
    """1 - 2xy / (x^2 + y^2), in float64; 0 for two tensors of zeros."""
    got, want = got.double().cpu(), want.double().cpu()
    norms = (got * got + want * want).sum()
    return 0.0 if norms == 0 else (1 - 2 * (got * want).sum() / norms).item()


def assert_gradients_accurate(
    got: tuple[Tensor, ...], want: tuple[Tensor, ...], sizes: tuple[float, ...] = (0.0,) * 3, cancels: bool = False
) -> None:
    """The contract's bounds; `sizes` are a problem's typical_sizes(). Where parts cancel, theirs count, too."""
    bounds = {"d_q": 1e-5, "d_kv": 1e-5, "d_sink": 1e-4}
    for (name, bound), own, exact, size in zip(bounds.items(), got, want, sizes, strict=False):
        assert own.shape == exact.shape, f"{name} is {list(own.shape)}"
        own, exact = own.double().cpu(), exact.double().cpu()
        assert not own.isnan().any(), f"{name} has NaN"
        if own.numel() == 0:
            continue
        error = (own - exact).square().sum()
        allowed = bound * (own.square() + exact.square()).sum()
        if cancels:
            allowed += bound * own.numel() * size**2
        assert error <= allowed, f"{name}'s similarity error is {similarity_error(own, exact):.3g}"
        if name != "d_sink":
            worst = (own - exact).abs() - exact.abs().amax(-1, keepdim=True) * 2.0**-7 - size * 2.0**-5
            assert worst.max() <= 0, f"{name} is off by {worst.max():.3g} more than is allowed"
