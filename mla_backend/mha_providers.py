"""The libraries that compute attention of many heads: what each can take, and how it is called.

A provider's function gets q, k, v and a `Call`. It returns out `[tokens, h_q, d_v]`, with gradients where they are
asked for, and lse fp32 `[h_q, tokens]`, the natural logarithm of the sum of exponentials.
"""

import functools
import importlib.metadata
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

CAUSAL_FROM_TOP_LEFT, CAUSAL_FROM_BOTTOM_RIGHT = 1, 2
"""The masks of torch's memory-efficient attention, as torch numbers them."""
CUDNN_TOKENS = 64
"""Shorter sequences go to torch's memory-efficient attention: cuDNN has no kernel for some of them."""
FLASHINFER_WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer recommends for parts of long sequences."""


class Problem(NamedTuple):
    """What decides who can take a call. The host knows all of it."""

    capability: tuple[int, int] | None
    """The compute capability of the GPU; None on a CPU."""
    backward: bool
    deterministic: bool


class Call(NamedTuple):
    """The arguments besides q, k and v."""

    cu_q: Tensor
    """int32 `[b + 1]`: where each sequence of q begins, and where the last one ends."""
    cu_k: Tensor
    max_q: int
    max_k: int
    scale: float
    causal: bool
    deterministic: bool
    is_varlen: bool

    @property
    def equal_lengths(self) -> bool:
        """Whether each sequence certainly has as many queries as keys."""
        return self.cu_q.data_ptr() == self.cu_k.data_ptr()


Attend = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]


class Provider(NamedTuple):
    package: str
    how_to_install: str
    refuses: Callable[[Problem], str | None]
    """Why it cannot take a problem, or None."""
    load: Callable[[], Attend]
    """Imports it."""


def why_missing(name: str) -> str | None:
    """Why a provider cannot be imported, or None."""
    loaded = _loaded(name)
    return loaded if isinstance(loaded, str) else None


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Calls a provider that can be imported."""
    return _loaded(name)(q, k, v, call)


def version(name: str) -> str:
    """The version of a provider's package; "unknown" if it was installed without one."""
    try:
        return importlib.metadata.version(PROVIDERS[name].package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


@functools.cache
def _loaded(name: str) -> Attend | str:
    provider = PROVIDERS[name]
    try:
        return provider.load()
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed ({provider.how_to_install})"
    except Exception as error:  # libraries that don't fit this torch or driver fail in ways of their own
        return f"{provider.package} does not import: {error}"


def _require_arguments(function: Callable[..., Any], *names: str) -> None:
    if lacking := set(names) - set(inspect.signature(function).parameters):
        raise ImportError(f"another version is needed, whose {function.__name__} takes {', '.join(sorted(lacking))}")


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


# flash-attn-4


def _load_flash_attn_4() -> Attend:
    from flash_attn.cute import flash_attn_varlen_func

    _require_arguments(flash_attn_varlen_func, "cu_seqlens_q", "max_seqlen_k", "deterministic", "return_lse")

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(
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

    return attend


def _data_centre_gpu(problem: Problem) -> str | None:
    if problem.capability is None:
        return "runs on GPUs only"
    return None if problem.capability[0] in (9, 10, 11) else "needs a GPU of sm_90, sm_100 or sm_110"


# flash-attn-3


def _load_flash_attn_3() -> Attend:
    from flash_attn_interface import flash_attn_varlen_func

    _require_arguments(flash_attn_varlen_func, "cu_seqlens_q", "max_seqlen_k", "deterministic", "return_attn_probs")

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return flash_attn_varlen_func(
            q,
            k,
            v,
            call.cu_q,
            call.cu_k,
            call.max_q,
            call.max_k,
            softmax_scale=call.scale,
            causal=call.causal,
            deterministic=call.deterministic,
            return_attn_probs=True,  # in this package: the lse
        )

    return attend


def _hopper_gpu(problem: Problem) -> str | None:
    if problem.capability is None:
        return "runs on GPUs only"
    return None if problem.capability[0] == 9 else "needs a GPU of sm_90"


# cuDNN's front end


def _load_cudnn() -> Attend:
    import cudnn
    from cudnn.sdpa.fwd import torch_op  # registers torch.ops.cudnn.sdpa_fwd and sdpa_bwd

    cudnn.backend_version()  # raises where there is no cuDNN
    repad = torch_op.thd_lse_to_padded

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        return _Cudnn.apply(q, k, v, call, repad)

    return attend


class _Cudnn(torch.autograd.Function):
    """cuDNN's own autograd takes determinism from torch's global setting, and leaves rows that see no key unsaid."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call, repad: Callable[..., Tensor]) -> tuple:
        out, stats = torch.ops.cudnn.sdpa_fwd(q, k, v, call.scale, return_lse=True, **_cudnn_options(call))
        lse = stats.squeeze(-1)  # [tokens, h_q]
        if not call.equal_lengths:
            unseeing = _unseeing_queries(call, len(q)).unsqueeze(1)
            out.masked_fill_(unseeing.unsqueeze(2), 0)
            lse.masked_fill_(unseeing, -torch.inf)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call, ctx.repad = call, repad
        lse_of_heads = lse.T.contiguous()
        ctx.mark_non_differentiable(lse_of_heads)
        return out, lse_of_heads

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        call = ctx.call
        if not call.equal_lengths:  # e^(-inf - lse) has to be 0
            lse = lse.masked_fill(lse == -torch.inf, 0)
        padded = ctx.repad(lse, call.cu_q, call.max_q)
        d_q, d_k, d_v = torch.ops.cudnn.sdpa_bwd(
            d_out, q, k, v, out, padded, call.scale, is_deterministic=call.deterministic, **_cudnn_options(call)
        )
        if not call.equal_lengths:
            d_q.masked_fill_(_unseeing_queries(call, len(q)).view(-1, 1, 1), 0)
            unseen = _unseen_keys(call, len(k)).view(-1, 1, 1)
            d_k.masked_fill_(unseen, 0)
            d_v.masked_fill_(unseen, 0)
        return d_q, d_k, d_v, None, None


def _cudnn_options(call: Call) -> dict[str, Any]:
    return {
        "is_causal": call.causal,
        "causal_bottom_right": call.causal and not call.equal_lengths,
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_kv": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_kv": call.max_k,
    }


def _unseeing_queries(call: Call, queries: int) -> Tensor:
    """bool `[queries]`: the queries that see no key. They are the first ones of their sequence."""
    lengths, keys = call.cu_q.diff(), call.cu_k.diff()
    unseeing = (lengths - keys).clamp(min=0) if call.causal else lengths * (keys == 0)
    ends = torch.repeat_interleave(call.cu_q[:-1] + unseeing, lengths, output_size=queries)
    return torch.arange(queries, device=ends.device) < ends


def _unseen_keys(call: Call, keys: int) -> Tensor:
    """bool `[keys]`: the keys of sequences without queries. The last query of a sequence sees all its keys."""
    return torch.repeat_interleave(call.cu_q.diff() == 0, call.cu_k.diff(), output_size=keys)


# FlashInfer


def _load_flashinfer() -> Attend:
    from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

    @functools.cache
    def wrapper(device: torch.device, stream: int) -> Any:
        workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")

    def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        planned = wrapper(q.device, torch.cuda.current_stream(q.device).cuda_stream)
        planned.plan(
            call.cu_q,
            call.cu_k,
            q.shape[1],
            k.shape[1],
            q.shape[2],
            v.shape[2],
            causal=call.causal,
            sm_scale=call.scale,
            q_data_type=q.dtype,
        )
        out, lse = planned.run(q.contiguous(), k.contiguous(), v.contiguous(), return_lse=True)
        return out, lse.T.contiguous().mul_(math.log(2))  # its lse is to base 2

    return attend


def _forward_on_a_gpu(problem: Problem) -> str | None:
    if problem.capability is None:
        return "runs on GPUs only"
    if problem.capability[0] < 8:
        return "needs a GPU of sm_80 or later"
    return "has no backward: call under torch.no_grad()" if problem.backward else None


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
    if q.shape[2] != k.shape[2]:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    out, lse = (_sdpa_on_gpu if q.is_cuda else _sdpa_on_cpu)(q, k, v, call.scale, call.causal)
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


def _no_deterministic_backward_on_a_gpu(problem: Problem) -> str | None:
    if problem.capability is None or not (problem.backward and problem.deterministic):
        return None
    return "its backward gives other bits each time on a GPU; drop deterministic=True, or pip install flash-attn-4"


PROVIDERS = {
    "flash_attn_4": Provider(
        "flash-attn-4", "pip install 'flash-attn-4>=4.0.0b36'", _data_centre_gpu, _load_flash_attn_4
    ),
    "flash_attn_3": Provider("flash-attn-3", "build flash-attention's folder hopper", _hopper_gpu, _load_flash_attn_3),
    "cudnn": Provider(
        "nvidia-cudnn-frontend", "pip install 'nvidia-cudnn-frontend>=1.32'", _data_centre_gpu, _load_cudnn
    ),
    "flashinfer": Provider("flashinfer-python", "pip install flashinfer-python", _forward_on_a_gpu, _load_flashinfer),
    "sdpa": Provider("torch", "pip install torch", _no_deterministic_backward_on_a_gpu, lambda: _sdpa),
}
"""In the order in which they are tried."""
