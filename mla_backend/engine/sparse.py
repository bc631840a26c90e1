"""The attention of a model: the library's ops, or the same computed exactly.

With exact attention the rest of the model can be compared with other implementations.
"""

from typing import Protocol

import torch
from torch import Tensor

import mla_backend
from mla_backend.plan import Plan, workspace_floats

Query = tuple[Tensor, Tensor]
"""The part for the latent values, `[T, H, 512]`, and the rotated part, `[T, H, 64]`."""


class SparseAttention(Protocol):
    """The interface of a model's attention."""

    def plan(self, lengths: Tensor, topk: int, heads: int) -> Plan | None:
        """The plan for index lists of these lengths, int32 `[T]`, in rows of topk. All layers of a pass share it."""

    def write(self, kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Writes tokens' latent `[T, 512]` and rope values `[T, 64]` into a cache."""

    def attend(
        self, q: Query, cache: Tensor, indices: Tensor, lengths: Tensor, scale: float, plan: Plan | None
    ) -> Tensor:
        """Attention of q over the first lengths `[T]` of indices `[T, topk]`: `[T, H, 512]` in q's dtype."""


class KernelAttention:
    """The library's ops, on any device, over a cache of any of its formats.

    Args:
        batch_invariant: give a token the same bits whatever else is in the batch.
    """

    def __init__(self, batch_invariant: bool = False):
        self.batch_invariant = batch_invariant
        self._workspaces: dict[tuple[torch.device, int], Tensor] = {}

    def plan(self, lengths: Tensor, topk: int, heads: int) -> Plan:
        return mla_backend.plan(
            len(lengths), topk, topk_length=lengths, num_heads=heads, batch_invariant=self.batch_invariant
        )

    def write(self, kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
        mla_backend.cache_write(kv_c, k_pe, cache, slots)

    def attend(
        self, q: Query, cache: Tensor, indices: Tensor, lengths: Tensor, scale: float, plan: Plan | None
    ) -> Tensor:
        tokens, heads, dim = q[0].shape
        # head-major, as the batched product after this needs it
        out = torch.empty(heads, tokens, dim, dtype=torch.bfloat16, device=q[0].device).transpose(0, 1)
        mla_backend.sparse_attention(
            tuple(part.to(torch.bfloat16) for part in q),
            cache,
            indices,
            scale=scale,
            topk_length=lengths,
            plan=plan,
            workspace=self._workspace(q[0], plan),
            batch_invariant=self.batch_invariant,
            out=out,
        )
        return out.to(q[0].dtype)

    def _workspace(self, q: Tensor, plan: Plan | None) -> Tensor | None:
        """One of each size, never freed, as captured graphs write into it. Every launch leaves the zeros that the next
        one needs, and a model's launches do not overlap."""
        if not q.is_cuda or plan is None:
            return None
        size = workspace_floats(plan.launch.ctas, q.shape[1])
        if (q.device, size) not in self._workspaces:
            self._workspaces[q.device, size] = torch.zeros(size, dtype=torch.float32, device=q.device)
        return self._workspaces[q.device, size]


class ExactAttention:
    """The reference in float64, over any cache that it reads; one of fp32 rows loses nothing. Slow: an oracle."""

    def plan(self, lengths: Tensor, topk: int, heads: int) -> None:
        return None

    def write(self, kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
        mla_backend.reference.cache_write(kv_c, k_pe, cache, slots)

    def attend(
        self, q: Query, cache: Tensor, indices: Tensor, lengths: Tensor, scale: float, plan: Plan | None
    ) -> Tensor:
        out, _, _ = mla_backend.reference.sparse_attention(
            torch.cat(q, dim=-1), cache, indices, scale=scale, topk_length=lengths
        )
        return out.to(q[0].dtype)
