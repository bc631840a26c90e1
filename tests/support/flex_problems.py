"""Random masks of blocks, problems of flex_mla, and what its answers are held to."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

import mla_backend
from mla_backend import reference
from problems import Arguments, assert_accurate
from training_problems import assert_gradients_accurate

MASKS = ("causal", "window", "documents", "prefix", "tree", "random", "rows and columns", "everything", "nothing")
BLOCKS = (1, 3, 16, 32, 33, 64, 128, (8, 40), (40, 8), (64, 1), (1, 64), (20, 100))


def mask_mod(kind: str, queries: int, positions: int, device: str = "cpu") -> Callable:
    """A mask_mod of this kind; of all but two kinds it differs between batch elements and heads, if it may."""
    documents = torch.randint(0, 4, (max(queries, positions),)).sort().values.to(device)
    tree = (torch.rand(queries, queries).tril() > 0.5).to(device)
    table = (torch.rand(3, 5, queries, positions) < 0.3).to(device)
    shift = positions - queries
    return {
        "causal": lambda b, h, i, j: j <= i + shift - b,
        "window": lambda b, h, i, j: (j <= i + shift + h) & (j > i + shift - 20),
        "documents": lambda b, h, i, j: (documents[i] == documents[j]) & (i + b >= j),
        "prefix": lambda b, h, i, j: (j <= i + shift) | (j < 10 + 3 * h),
        "tree": lambda b, h, i, j: (j < shift - b) | ((j >= shift) & tree[i, (j - shift).clamp(0, queries - 1)]),
        "random": lambda b, h, i, j: table[b % 3, h % 5, i, j],
        "rows and columns": lambda b, h, i, j: ((i + b) % 3 == 0) & ((j + h) % 7 < 4),
        "everything": lambda b, h, i, j: j >= 0,
        "nothing": lambda b, h, i, j: j < 0,
    }[kind]


@dataclass
class FlexProblem(Arguments):
    """The arguments of flex_mla, the dense mask, and the gradients with respect to the results."""

    q: Tensor
    kv: Tensor
    block_mask: BlockMask
    seen: Tensor
    d_out: Tensor
    d_lse: Tensor
    scale: float

    def solve(self, **options) -> tuple[Tensor, Tensor]:
        return mla_backend.flex_mla(self.q, self.kv, self.block_mask, scale=self.scale, return_lse=True, **options)

    def gradients(self, deterministic: bool | None = True, **options) -> tuple[Tensor, Tensor]:
        leaves = [x.detach().requires_grad_() for x in (self.q, self.kv)]
        out, lse = self.but(q=leaves[0], kv=leaves[1]).solve(deterministic=deterministic, **options)
        return torch.autograd.grad([out, lse], leaves, [self.d_out, self.d_lse])

    def oracle(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """out and lse, and the gradients of q and kv, in float64."""
        leaves = [x.detach().double().requires_grad_() for x in (self.q, self.kv)]
        out, lse = reference.flex_mla(*leaves, self.seen, scale=self.scale)
        loss = (out * self.d_out.double()).sum() + torch.where(lse == -torch.inf, 0.0, lse * self.d_lse).sum()
        gradients = torch.autograd.grad(loss, leaves)
        return (out.detach(), lse.detach()), gradients

    def check(self, backward: bool = True, cancels: bool = False, **options) -> None:
        """`cancels`: queries may see so few rows that gradients are differences of nearly equal numbers."""
        results, gradients = self.oracle()
        assert_accurate(self.solve(), results, magnitude=1.0)
        if backward:
            # of an entry's part of the gradient of q, before anything cancels; weights of two rows are rounded most
            size = 3 * self.scale * self.d_out.double().square().mean().sqrt().nan_to_num().item() * 512**0.5
            assert_gradients_accurate(self.gradients(**options), gradients, (size, size), cancels)

    def poisoned(self) -> "FlexProblem":
        """The same, but every row of kv that no query sees is NaN."""
        unseen = ~self.seen.expand(self.q.shape[0], -1, -1, -1).any(1).any(1)
        return self.but(kv=self.kv.masked_fill(unseen.unsqueeze(1).unsqueeze(-1), torch.nan))


def random_flex(
    kind: str | Callable = "causal",
    batch: int = 2,
    heads: int = 4,
    queries: int = 50,
    positions: int = 70,
    block: int | tuple[int, int] = 16,
    width: int = 576,
    mask_batch: int = 1,
    mask_heads: int = 1,
    device: str = "cpu",
) -> FlexProblem:
    mod = mask_mod(kind, queries, positions, device) if isinstance(kind, str) else kind
    shape = mask_batch, mask_heads, queries, positions
    q, kv = torch.randn(batch, queries, heads, width), torch.randn(batch, 1, positions, width)
    masks = create_block_mask(mod, *shape, device=device, BLOCK_SIZE=block), create_mask(mod, *shape, device=device)
    d_out, d_lse = torch.randn(batch, heads, queries, 512).bfloat16(), torch.randn(batch, heads, queries)
    q, kv = q.bfloat16().to(device).transpose(1, 2), kv.bfloat16().to(device)
    return FlexProblem(q, kv, *masks, d_out.to(device), d_lse.to(device), width**-0.5)


@st.composite
def flex_problems(draw, device: str = "cpu") -> FlexProblem:
    """Any kind of mask, of any block size, for all batch elements and heads or for each."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch, heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 5, 16, 64]))
    kind, few = draw(st.sampled_from(MASKS)), st.integers(1, 9)
    queries, positions = draw(st.one_of(few, st.integers(1, 100))), draw(st.one_of(few, st.integers(1, 150)))
    block, width = draw(st.sampled_from(BLOCKS)), draw(st.sampled_from([576, 512]))
    each = draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads if heads < 16 else 1]))
    problem = random_flex(kind, batch, heads, queries, positions, block, width, *each, device)
    if draw(st.booleans()):
        problem.q = problem.q.contiguous()
    return problem.poisoned()
