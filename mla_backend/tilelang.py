"""The functions of TileLang's sparse MLA examples (`examples/deepseek_v32`), as post-training frameworks call them.

    from mla_backend.tilelang import SparseMLA
    out, lse = SparseMLA.apply(q, kv, indices, scaling)

Tensors have a batch dimension, as in the examples: then a query sees no row after its own position, whatever its list
says. Or they have none, as in frameworks that pack sequences: then the lists alone say what is seen. lse is to base 2.
Heads, topk and lengths may be any that `mla_backend.training` takes; nothing is padded.
"""

import math

import torch
from torch import Tensor

from mla_backend import attention, training
from mla_backend.arguments import described, named, require_tensors

LOG2_E = math.log2(math.e)


def sparse_mla_fwd_interface(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float | None = None,
    return_p_sum: bool = False,
    d_v: int = 512,
    block_I: int = 64,
    num_stages: int = 2,
    threads: int = 256,
) -> tuple[Tensor, Tensor]:
    """Attention of every query to the rows in its list; autograd follows it.

    Args:
        q: bf16 `[B, S, H, 576]` or `[S, H, 576]`, or 512 wide as kv.
        kv: bf16 `[B, S_kv, 1, 576]` or `[S_kv, 1, 576]`.
        indices: int32 `[B, S, 1, topk]` or `[S, 1, topk]`, rows of kv (of the same sequence of the batch).
        sm_scale: width ** -0.5 if left out.
        return_p_sum: False, as there.
        block_I, num_stages, threads: how TileLang's kernel is tuned; not looked at.

    Returns:
        out bf16 `[..., H, 512]` and lse fp32 `[..., H]`, to base 2.
    """
    if return_p_sum:
        raise ValueError("return_p_sum must be False; got True")
    attention.require_value_dim("d_v", d_v)
    rows, lists, flat_q = _flat(q, kv, indices, causal=True)
    with named(scale="sm_scale"):
        out, lse = training.sparse_mla(flat_q, rows, lists, scale=_scale(sm_scale, q))
    return out.view(*q.shape[:-1], d_v), (lse * LOG2_E).view(q.shape[:-1])


def sparse_mla_bwd(
    q: Tensor,
    kv: Tensor,
    o: Tensor,
    do: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    is_casual: bool = True,
    return_kernel: bool = False,
    delta: None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of `sparse_mla_fwd_interface` with respect to q and kv, in their shapes.

    Args:
        q, kv, indices, sm_scale: as there.
        o, lse: what it returned. do: the gradient with respect to o.
        is_casual: whether a batched query sees no row after its own position.
        return_kernel, delta: False and None: there is no kernel to return, and delta is made here.

    kv's gradient has the same bits every time where `torch.use_deterministic_algorithms` is on.
    """
    require_tensors(o=o, do=do, lse=lse)
    if return_kernel:
        raise ValueError("return_kernel must be False; got True")
    if delta is not None:
        raise ValueError("delta must be None, as it is made from o and do; got a tensor")
    rows, lists, flat_q = _flat(q, kv, indices, causal=is_casual)
    heads = q.shape[-2]
    for name, given, last in (("o", o, [512]), ("do", do, [512]), ("lse", lse, [])):
        if list(given.shape) != (wanted := [*q.shape[:-1], *last]):
            raise ValueError(f"{name} must be {wanted}; got {list(given.shape)}")
    with named(scale="sm_scale", out="o", d_out="do"), torch.no_grad():
        d_q, d_kv, _ = training.sparse_mla_backward(
            flat_q,
            rows,
            lists,
            o.reshape(-1, heads, o.shape[-1]),
            lse.reshape(-1, heads) / LOG2_E,
            do.reshape(-1, heads, do.shape[-1]),
            scale=_scale(sm_scale, q),
        )
    return d_q.view(q.shape), d_kv.view(kv.shape)


class SparseMLA:
    """Stands in for the `torch.autograd.Function` of that name."""

    @staticmethod
    def apply(q: Tensor, kv: Tensor, indices: Tensor, scaling: float | None, d_v: int = 512) -> tuple[Tensor, Tensor]:
        """out and lse of `sparse_mla_fwd_interface`. Both have gradients."""
        with named(sm_scale="scaling"):
            return sparse_mla_fwd_interface(q, kv, indices, scaling, d_v=d_v)


def _scale(sm_scale: float | None, q: Tensor) -> float:
    return attention.default_scale(q) if sm_scale is None else sm_scale


def _flat(q: Tensor, kv: Tensor, indices: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """kv `[rows, width]`, indices `[queries, topk]` into it and q `[queries, H, width]`, of all sequences together."""
    require_tensors(q=q, kv=kv, indices=indices)
    if q.dim() not in (3, 4):
        raise ValueError(f"q must be bfloat16 [B, S, H, width] or [S, H, width]; got {list(q.shape)}")
    batch = q.shape[:-3]
    if kv.dim() != q.dim() or kv.shape[:-3] != batch or kv.shape[-2] != 1:
        raise ValueError(f"kv must be bfloat16 {_shape(*batch, 'S_kv', 1, 'width')}; got {list(kv.shape)}")
    if indices.dtype != torch.int32 or indices.dim() != q.dim() or indices.shape[:-1] != (*q.shape[:-2], 1):
        raise ValueError(f"indices must be int32 {_shape(*q.shape[:-2], 1, 'topk')}; got {described(indices)}")
    lists = indices.squeeze(-2)
    if batch:
        lists = _in_batch(lists, kv.shape[1], causal)
    return kv.flatten(0, -2), lists, q.flatten(0, -3)


def _shape(*sizes: int | str) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _in_batch(lists: Tensor, length: int, causal: bool) -> Tensor:
    """Lists `[B, S, topk]` into sequences of `length` rows as lists `[B * S, topk]` into all rows, -1 for none."""
    sequences, queries, _ = lists.shape
    named_rows = (lists >= 0) & (lists < length)
    if causal:
        named_rows &= lists <= torch.arange(queries, device=lists.device).view(-1, 1)
    first = torch.arange(sequences, device=lists.device, dtype=lists.dtype).view(-1, 1, 1) * length
    return torch.where(named_rows, lists + first, -1).flatten(0, 1)
