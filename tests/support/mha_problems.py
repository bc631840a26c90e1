"""Random problems of many heads over ragged sequences, and what answers are held to."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import mla_backend.flash_mla as flash_mla
from problems import Arguments

NAMES = ("out", "lse", "d_q", "d_k", "d_v")


def starts(lengths: tuple[int, ...], device: torch.device | str = "cpu") -> Tensor:
    """int32 `[b + 1]`: where each sequence begins, and where the last one ends."""
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


@dataclass
class MhaProblem(Arguments):
    """q, k and v of `flash_attn_varlen_func`, the gradient of out, and the rest of its arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    d_out: Tensor
    lengths: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    scale: float

    def arguments(self) -> dict:
        """All arguments of flash_attn_varlen_func."""
        found = {"q": self.q, "k": self.k, "v": self.v, "softmax_scale": self.scale, "causal": self.causal}
        for name, lengths in (("qo", self.lengths), ("kv", self.keys)):
            found[f"cu_seqlens_{name}"] = starts(lengths, self.q.device)
            found[f"max_seqlen_{name}"] = max(lengths, default=0)
        return found

    def solve(self, gradients: bool = True, **options) -> tuple[Tensor, ...]:
        """Our answer: out, lse, and the gradients of q, k and v."""
        leaves = [x.detach().requires_grad_(gradients) for x in (self.q, self.k, self.v)]
        arguments = self.arguments() | dict(zip("qkv", leaves, strict=True)) | options
        out, lse = flash_mla.flash_attn_varlen_func(**arguments)
        return (out, lse, *torch.autograd.grad(out, leaves, self.d_out)) if gradients else (out, lse)

    def oracle(self) -> tuple[Tensor, ...]:
        """The same in float64, and its gradients by autograd."""
        leaves = [x.detach().double().requires_grad_() for x in (self.q, self.k, self.v)]
        out, lse = attention(*leaves, self.lengths, self.keys, self.causal, self.scale)
        loss = (out * self.d_out).sum() + sum(x.sum() * 0 for x in leaves)  # which may all see nothing
        return (out.detach(), lse, *torch.autograd.grad(loss, leaves))

    def check(self, got: tuple[Tensor, ...] | None = None, **options) -> None:
        got = self.solve(**options) if got is None else got
        assert got[1].T.is_contiguous()
        assert_accurate(got, self.oracle())


def odd_layouts(x: Tensor) -> dict[str, Tensor]:
    """The numbers of x `[tokens, heads, width]` in other places of memory."""
    wider = torch.nn.functional.pad(x, (1, 2))
    return {
        "between others": torch.stack((x, x, x), dim=1)[:, 1],
        "at odd addresses": wider[..., 1:-2],
        "one element on": torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view_as(x),
        "heads first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "width first": x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    }


def attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], keys: tuple[int, ...], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Out `[tokens, h_q, 128]` and lse `[tokens, h_q]`, in the numbers that it is given."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    outs, lses = [q.new_zeros(0, q.shape[1], v.shape[2])], [q.new_zeros(0, q.shape[1])]
    for q_i, k_i, v_i in zip(q.split(lengths), k.split(keys), v.split(keys), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q_i, k_i) * scale
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
            scores = scores.masked_fill(hidden.triu(len(k_i) - len(q_i) + 1), -torch.inf)
        lse = scores.logsumexp(2) if len(k_i) else scores.new_full(scores.shape[:2], -torch.inf)
        lse = lse.detach()
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(2)).exp()
        weights = weights / weights.sum(2, keepdim=True).clamp(min=1e-30)  # the same, and autograd knows it
        outs.append(torch.einsum("hqk,khd->qhd", weights, v_i))
        lses.append(lse.T)
    return torch.cat(outs), torch.cat(lses)


def random_mha(
    lengths, keys=None, *, heads=2, kv_heads=None, dim=192, dtype=torch.bfloat16, causal=True, device="cpu"
) -> MhaProblem:
    """Scores spread by 1."""
    keys, kv_heads = lengths if keys is None else keys, kv_heads or heads
    shapes = (lengths, heads, dim), (keys, kv_heads, dim), (keys, kv_heads, 128), (lengths, heads, 128)
    made = [torch.randn(sum(count), *rest, dtype=dtype, device=device) for count, *rest in shapes]
    return MhaProblem(*made, tuple(lengths), tuple(keys), causal, dim**-0.5)


@st.composite
def mha_problems(draw, longest: int = 40, device: str = "cpu"):
    """Ragged and empty sequences, more queries than keys and fewer, groups of heads, both widths and dtypes."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    length = st.one_of(st.just(0), st.integers(0, longest))
    lengths = tuple(draw(st.lists(length, max_size=5)))
    keys = lengths if draw(st.booleans()) else tuple(draw(length) for _ in lengths)
    kv_heads = draw(st.integers(1, 3))
    heads, dim = kv_heads * draw(st.integers(1, 3)), draw(st.sampled_from([192, 128]))
    how = dict(dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])), causal=draw(st.booleans()), device=device)
    return random_mha(lengths, keys, heads=heads, kv_heads=kv_heads, dim=dim, **how)


def assert_accurate(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """The contract's bounds. Gradients may besides be off by what rounding leaves of parts that cancel."""
    for name, own, exact in zip(NAMES, got, want, strict=False):
        assert own.shape == exact.shape, f"{name} is {list(own.shape)}"
        own, exact = own.double(), exact.double()
        assert not own.isnan().any(), f"{name} has NaN"
        if own.numel() == 0:
            continue
        if name == "lse":
            infinite = exact.isinf()
            assert torch.equal(own[infinite], exact[infinite]), "lse differs where it should be infinite"
            own, exact = own[~infinite], exact[~infinite]
            assert ((own - exact).abs() <= 1e-4 + exact.abs() * 2.0**-13).all(), "lse is off"
            continue
        error, norms = (own - exact).square().sum(), (own.square() + exact.square()).sum()
        unit = 2.0**-9  # inputs are of size 1, and rounded so
        assert error <= 1e-5 * norms + own.numel() * unit**2, f"{name}'s error is {(error / norms).item():.3g}"
        allowed = exact.abs().amax(-1, keepdim=True) * 2.0**-6 + 2.0**-5
        assert ((own - exact).abs() <= allowed).all(), f"{name} has a number that is off"
