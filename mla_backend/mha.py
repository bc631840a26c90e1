"""Attention of many heads over ragged sequences, 192/128 and 128/128: FlashMLA's functions over other libraries.

MLA models use it where they don't absorb the latent projection: in training, and for prompts. There are good kernels
for it, so none are here. `mha_providers` calls them; this file checks arguments and chooses.
"""

import contextlib
import os
from typing import Any

import torch
from torch import Tensor

from mla_backend.arguments import (
    described,
    dtype_name,
    named,
    require_bools,
    require_count,
    require_number,
    require_tensors,
)
from mla_backend.mha_providers import PROVIDERS, Call, attend, nothing, why_not

DTYPES = (torch.bfloat16, torch.float16)
ENVIRONMENT = "MLA_BACKEND_MHA"


def choose(capability: tuple[int, int] | None, deterministic_gradients: bool, provider: str | None = None) -> str:
    """The provider that takes a call: the one that is asked for, else the first of `PROVIDERS` that can.

    Args:
        capability: the compute capability of the GPU; None on a CPU.
        deterministic_gradients: whether gradients must have the same bits every time.
        provider: its name, or "auto" for the first that can. What the environment asks for if left out.
    """
    if provider is None:
        if asked := os.environ.get(ENVIRONMENT):
            with named(provider=f"the environment variable {ENVIRONMENT}: provider"):
                return choose(capability, deterministic_gradients, asked)
        provider = "auto"
    if provider != "auto" and provider not in PROVIDERS:
        raise ValueError(f"provider must be auto, {', '.join(PROVIDERS)}; got {provider!r}")
    reasons = []
    for name in PROVIDERS if provider == "auto" else (provider,):
        why = why_not(name, capability, deterministic_gradients)
        if why is None:
            return name
        reasons.append(f"{name}: {why}")
    if provider == "auto":
        raise ValueError(f"deterministic must be False with what is installed here; got True. {'; '.join(reasons)}")
    raise ValueError(f"provider must be one that can do this; got {provider!r}. {reasons[0]}")


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    provider: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over sequences that lie end to end, with gradients for q, k and v.

    Args:
        q: bf16 or fp16 `[T_q, h_q, 192 or 128]`.
        k: `[T_k, h_k, 192 or 128]`, as wide as q; h_k divides h_q, and each of its heads serves a group of q's.
        v: `[T_k, h_k, 128]`.
        cu_seqlens_qo, cu_seqlens_kv: int32 `[b + 1]`, where each sequence begins and where the last one ends.
            Sequences may be empty.
        max_seqlen_qo, max_seqlen_kv: the longest sequence's length, or more.
        dropout_p: 0, as in the package.
        softmax_scale: what scores are multiplied with; the head dimension ** -0.5 if left out.
        causal: the last query of a sequence sees all its keys, the one before it one key less, and so on.
        deterministic: give the gradients the same bits every time. Also on where
            `torch.use_deterministic_algorithms` is. Refused where neither provider keeps it.
        is_varlen: False says that all sequences are equally long.
        provider: a name in `mha_providers.PROVIDERS`, or "auto" for the first that can. The environment variable
            MLA_BACKEND_MHA if left out.

    Returns:
        out `[T_q, h_q, 128]` and lse fp32 `[T_q, h_q]`, the natural logarithm of the sum of exponentials, whose
        first dimension is contiguous. A query that sees no key gives 0 and -inf. lse has no gradient.
    """
    require_tensors(q=q, k=k, v=v, cu_seqlens_qo=cu_seqlens_qo, cu_seqlens_kv=cu_seqlens_kv)
    require_bools(causal=causal, deterministic=deterministic, is_varlen=is_varlen)
    _require_heads(q, k, v)
    _require_sequences("qo", cu_seqlens_qo, max_seqlen_qo, "q", q, is_varlen)
    _require_sequences("kv", cu_seqlens_kv, max_seqlen_kv, "k", k, is_varlen)
    if len(cu_seqlens_qo) != len(cu_seqlens_kv):
        raise ValueError(
            f"cu_seqlens_kv must have as many numbers as cu_seqlens_qo ({len(cu_seqlens_qo)}); got {len(cu_seqlens_kv)}"
        )
    require_number("dropout_p", dropout_p)
    if dropout_p != 0:
        raise ValueError(f"dropout_p must be 0, as in FlashMLA; got {dropout_p}")
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    require_number("softmax_scale", scale)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    backward = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    call = Call(
        cu_seqlens_qo.contiguous(),
        cu_seqlens_kv.contiguous(),
        max_seqlen_qo,
        max_seqlen_kv,
        float(scale),
        causal,
        backward,
        deterministic,
        is_varlen,
    )
    compute = _compute_untraced if torch.compiler.is_compiling() else _compute
    out, lse = compute(provider, q, k, v, call)
    return out, lse.T


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    *options: Any,
    **named_options: Any,
) -> tuple[Tensor, Tensor]:
    """The same with q, k and v in one tensor.

    Args:
        qkv: bf16 or fp16 `[T, h, 2 * head_dim_qk + 128]`: each head's query, its key and its value.
        cu_seqlens, max_seqlen: as for q and k.
        head_dim_qk: 192 or 128.
        options, named_options: those of `flash_attn_varlen_func`, from dropout_p on.
    """
    require_tensors(qkv=qkv)
    q, k, v = _unpacked("qkv", qkv, (head_dim_qk, head_dim_qk), qkv.dtype)
    with named(q="qkv", cu_seqlens_qo="cu_seqlens", max_seqlen_qo="max_seqlen"):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, **named_options
        )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    *options: Any,
    **named_options: Any,
) -> tuple[Tensor, Tensor]:
    """The same with k and v in one tensor.

    Args:
        kv: bf16 or fp16 `[T_k, h_k, head_dim_qk + 128]`: each head's key and its value.
        head_dim_qk: 192 or 128.
        options, named_options: those of `flash_attn_varlen_func`, from dropout_p on.
    """
    require_tensors(q=q, kv=kv)
    k, v = _unpacked("kv", kv, (head_dim_qk,), q.dtype)
    with named(k="kv"):
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, *options, **named_options
        )


def _compute(provider: str | None, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """out and lse `[h_q, T_q]`, by the provider that takes this."""
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    name = choose(capability, call.backward and call.deterministic, provider)
    if q.numel() == 0 or k.numel() == 0:
        return nothing(q, k, v)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        out, lse = attend(name, q, k, v, call)
    return out, lse.detach().contiguous()


_compute_untraced = torch.compiler.disable(_compute)
"""For torch.compile, which cannot look into other libraries' kernels. It costs 13 us a call, so not always."""


def _unpacked(name: str, packed: Tensor, widths: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The parts of a packed tensor, whose last is 128 wide."""
    require_count("head_dim_qk", widths[0])
    if widths[0] not in (192, 128):
        raise ValueError(f"head_dim_qk must be 192 or 128; got {widths[0]}")
    width = sum(widths) + 128
    if packed.dim() != 3 or packed.shape[2] != width or packed.dtype != dtype:
        raise ValueError(f"{name} must be {dtype_name(dtype)} [tokens, heads, {width}]; got {described(packed)}")
    return packed.split((*widths, 128), dim=2)


def _require_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or q.dtype not in DTYPES or q.shape[1] == 0 or q.shape[2] not in (192, 128):
        raise ValueError(f"q must be bfloat16 or float16 [T_q, h_q, 192 or 128]; got {described(q)}")
    for name, x, width in (("k", k, q.shape[2]), ("v", v, 128)):
        heads = "h_k" if name == "k" else f"h_k={k.shape[1]}"
        tokens = "T_k" if name == "k" else f"T_k={k.shape[0]}"
        if x.dim() != 3 or x.dtype != q.dtype or x.shape[2] != width or (name == "v" and x.shape[:2] != k.shape[:2]):
            raise ValueError(f"{name} must be {dtype_name(q.dtype)} [{tokens}, {heads}, {width}]; got {described(x)}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}; got {x.device}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"k must have heads that divide q's {q.shape[1]}; got {k.shape[1]}")


def _require_sequences(which: str, cu: Tensor, longest: int, of: str, x: Tensor, is_varlen: bool) -> None:
    if cu.dtype != torch.int32 or cu.dim() != 1 or len(cu) == 0 or cu.device != x.device:
        raise ValueError(f"cu_seqlens_{which} must be int32 [b + 1] on {x.device}; got {described(cu)} on {cu.device}")
    require_count(f"max_seqlen_{which}", longest)
    sequences = len(cu) - 1
    if longest * sequences < len(x):
        raise ValueError(
            f"max_seqlen_{which} must be at least the longest sequence's: {of} has {len(x)} tokens in {sequences}; "
            f"got {longest}"
        )
    if not is_varlen and len(x) % max(sequences, 1):
        raise ValueError(
            f"is_varlen must be True where sequences differ: {of} has {len(x)} tokens in {sequences}; got False"
        )
