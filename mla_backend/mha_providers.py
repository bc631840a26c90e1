"""Who computes attention of many heads: flash-attn-4 and torch. What each can take, and how it is called.

Both get q, k, v and a `Call`. They return out `[tokens, h_q, d_v]`, with gradients where they are asked for, and lse
fp32 `[h_q, tokens]`, the natural logarithm of the sum of exponentials.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

PROVIDERS = {"flash_attn_4": "flash-attn-4", "sdpa": "torch"}
"""The package of each, in the order in which they are tried."""
INSTALL = "pip install 'flash-attn-4>=4.0.0b36'"
"""A pre-release; naming one lets pip take it."""
FLASH_ATTN_4_ARGUMENTS = {"cu_seqlens_q", "max_seqlen_k", "deterministic", "return_lse"}
"""Those that other versions may not have."""
CAUSAL_FROM_TOP_LEFT, CAUSAL_FROM_BOTTOM_RIGHT = 1, 2
"""The masks of torch's memory-efficient attention, as torch numbers them."""
CUDNN_TOKENS = 64
"""Shorter sequences go to torch's memory-efficient attention: cuDNN has no kernel for some of them."""


class Call(NamedTuple):
    """The arguments besides q, k and v."""

    cu_q: Tensor
    """int32 `[b + 1]`: where each sequence of q begins, and where the last one ends."""
    cu_k: Tensor
    max_q: int
    max_k: int
    scale: float
    causal: bool
    backward: bool
    """Whether gradients may be asked for."""
    deterministic: bool
    is_varlen: bool


def why_not(name: str, capability: tuple[int, int] | None, deterministic_gradients: bool) -> str | None:
    """Why a provider cannot take a call, or None.

    Args:
        capability: the compute capability of the GPU; None on a CPU.
        deterministic_gradients: whether gradients must have the same bits every time.
    """
    if name == "sdpa":
        if capability is None or not deterministic_gradients:
            return None
        return f"its gradients have other bits each time on a GPU; drop deterministic=True, or {INSTALL}"
    if capability is None:
        return "runs on GPUs only"
    if capability[0] not in (9, 10, 11):
        return "needs a GPU of sm_90, sm_100 or sm_110"
    found = _flash_attn_4()
    return found if isinstance(found, str) else None


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Calls a provider that can take this."""
    return (_sdpa if name == "sdpa" else _attend_with_flash_attn_4)(q, k, v, call)


def version(name: str) -> str:
    """The version of a provider's package; "unknown" if it was installed without one."""
    try:
        return importlib.metadata.version(PROVIDERS[name])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def nothing(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result where no query sees a key: 0 and -inf, and gradients of 0."""
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float32, device=q.device)
    return _Nothing.apply(q, k, v), lse


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_zeros((*q.shape[:2], v.shape[2]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(x) for x in ctx.saved_tensors)


def _for_each_head(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """k and v with as many heads as q: each one repeated for its group."""
    if k.shape[-2] == heads:
        return k, v
    return tuple(x.repeat_interleave(heads // x.shape[-2], dim=-2) for x in (k, v))


# flash-attn-4


@functools.cache
def _flash_attn_4() -> Callable[..., Any] | str:
    """Its function, or why it cannot be used."""
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed ({INSTALL})"
    except Exception as error:  # it fails in ways of its own where it doesn't fit torch or the driver
        return f"flash-attn-4 does not import: {error}"
    if lacking := FLASH_ATTN_4_ARGUMENTS - set(inspect.signature(flash_attn_varlen_func).parameters):
        return f"flash-attn-4 {version('flash_attn_4')} has no arguments {', '.join(sorted(lacking))}"
    return flash_attn_varlen_func


def _attend_with_flash_attn_4(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    if call.backward and q.shape[2] != v.shape[2]:
        # on Hopper its backward takes groups of heads only if keys are as wide as values
        k, v = _for_each_head(k, v, q.shape[1])
    return _flash_attn_4()(
        q,
        k,
        v,
        cu_seqlens_q=call.cu_q,
        cu_seqlens_k=call.cu_k,
        max_seqlen_q=call.max_q,
        max_seqlen_k=call.max_k,
        softmax_scale=call.scale,
        causal=call.causal,
        deterministic=call.deterministic,
        return_lse=True,
    )


# torch


def _sdpa(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """One sequence after the other, whose lengths have to be on the host; all at once if they are equally long."""
    if not call.is_varlen:
        batch = len(call.cu_q) - 1
        out, lse = _sdpa_of_equals(*(x.unflatten(0, (batch, -1)) for x in (q, k, v)), call)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    lengths = host_lengths(call.cu_q, len(q), call.max_q, "cu_seqlens_qo", "max_seqlen_qo", "q")
    keys = host_lengths(call.cu_k, len(k), call.max_k, "cu_seqlens_kv", "max_seqlen_kv", "k")
    if not any(queries and seen for queries, seen in zip(lengths, keys, strict=True)):
        return nothing(q, k, v)
    outs, lses = [], []
    for q_i, k_i, v_i in zip(q.split(lengths), k.split(keys), v.split(keys), strict=True):
        if len(q_i) and len(k_i):
            out, lse = _sdpa_of_equals(q_i[None], k_i[None], v_i[None], call)
            out, lse = out.squeeze(0), lse.squeeze(0)
        else:
            out, lse = nothing(q_i, k_i, v_i)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1)


def host_lengths(cu: Tensor, tokens: int, longest: int, cu_name: str, longest_name: str, name: str) -> list[int]:
    """The lengths of sequences. On a GPU this waits for all that runs there."""
    begins = cu.tolist()
    lengths = [end - begin for begin, end in zip(begins, begins[1:], strict=False)]
    if begins[0] != 0 or begins[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"{cu_name} must rise from 0 to {name}.shape[0] = {tokens}; got {begins}")
    if max(lengths, default=0) > longest:
        raise ValueError(f"{longest_name} must be at least the longest sequence's {max(lengths)}; got {longest}")
    return lengths


def _sdpa_of_equals(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Sequences of equal lengths: q `[b, s_q, h_q, d]`, k and v `[b, s_k, h_k, d]`, none of them empty.

    Returns out `[b, s_q, h_q, d_v]` and lse `[b, h_q, s_q]`.
    """
    unseeing = max(q.shape[1] - k.shape[1], 0) if call.causal else 0
    q = q[:, unseeing:]
    k, v = _for_each_head(k, v, q.shape[2])
    q, k, v = (_aligned(x) for x in (q, k, v))
    out, lse = (_sdpa_on_gpu if q.is_cuda else _sdpa_on_cpu)(q, k, v, call.scale, call.causal)
    if out.requires_grad:
        # torch reuses cuDNN's backward for the same q, k and v, whatever the strides of the gradient are
        out.register_hook(lambda d_out: _aligned(d_out.contiguous()))
    if unseeing:
        out = functional.pad(out, (0, 0, 0, 0, unseeing, 0))
        lse = functional.pad(lse, (unseeing, 0), value=-torch.inf)
    return out, lse


def _sdpa_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    width, (s_q, s_k) = v.shape[3], (q.shape[1], k.shape[1])
    v = functional.pad(v, (0, k.shape[3] - width))  # this op wants values as wide as keys
    mask = None
    if causal and s_q < s_k:  # its own causal mask is aligned to the first key
        seen = torch.ones(s_q, s_k, dtype=torch.bool).tril(s_k - s_q)
        mask = torch.zeros(s_q, s_k, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        0.0,
        causal and mask is None,
        attn_mask=mask,
        scale=scale,
    )
    return out[..., :width].transpose(1, 2), lse


def _sdpa_on_gpu(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    shorter, few = q.shape[1] < k.shape[1], min(q.shape[1], k.shape[1]) < CUDNN_TOKENS
    if (causal and shorter) or few or torch.cuda.get_device_capability(q.device)[0] < 9:
        mask = 0 if not causal else CAUSAL_FROM_BOTTOM_RIGHT if shorter else CAUSAL_FROM_TOP_LEFT
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            q, k, v, None, None, None, None, None, 0.0, mask, True, scale=scale
        )
        return out, lse[..., : q.shape[1]]
    # cuDNN is the fastest of torch's own on Hopper, but its causal mask is aligned to the first key
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse.reshape(lse.shape[:3])


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy of it if its rows are not contiguous or begin elsewhere than at multiples of 16 bytes."""
    begins = (x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1]))
    if x.stride(-1) == 1 and not any(begin % 16 for begin in begins):
        return x
    return x.clone(memory_format=torch.contiguous_format)
