"""A drop-in for forks of `flash_mla` that have a sparse backward: `import mla_backend.flash_mla_fork as flash_mla`.

Both sparse functions are causal: a query sees no row after its own position, whatever its list says. The forward
returns four results. As in those forks autograd doesn't follow it: the backward is called by hand. Everything else is
that of `mla_backend.flash_mla`.
"""

import torch
from torch import Tensor

from mla_backend import flash_mla
from mla_backend.arguments import require_bools
from mla_backend.flash_mla import flash_attn_varlen_func as flash_attn_varlen_func
from mla_backend.flash_mla import flash_attn_varlen_kvpacked_func as flash_attn_varlen_kvpacked_func
from mla_backend.flash_mla import flash_attn_varlen_qkvpacked_func as flash_attn_varlen_qkvpacked_func
from mla_backend.flash_mla import flash_mla_with_kvcache as flash_mla_with_kvcache
from mla_backend.flash_mla import get_mla_metadata as get_mla_metadata


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    q_start_index_s: int = 0,
    write_p_out: bool = False,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """`flash_mla.flash_mla_sparse_fwd` of queries from position q_start_index_s on.

    Args:
        q_start_index_s: the position of the first query; that of a row is its number in kv.
        write_p_out: False: no kernel here writes scores.
        The others are as there.

    Returns:
        out, max_logits and lse, as there, and None.
    """
    require_bools(write_p_out=write_p_out)
    if write_p_out:
        raise ValueError("write_p_out must be False, as the kernels write no scores; got True")
    seen = flash_mla.up_to_own_position(kv, indices, q_start_index_s)
    with torch.no_grad():
        return *flash_mla.flash_mla_sparse_fwd(q, kv, seen, sm_scale, d_v, attn_sink, topk_length), None


def flash_mla_sparse_bwd(
    q: Tensor,
    kv: Tensor,
    o: Tensor,
    dO: Tensor,
    indices: Tensor,
    lse: Tensor,
    sm_scale: float | None = None,
    d_v: int = 512,
    topk_length: Tensor | None = None,
    q_start_index_s: int = 0,
) -> tuple[Tensor, Tensor]:
    """`flash_mla.flash_mla_sparse_bwd` of the same queries: the gradients with respect to q and kv, without sinks."""
    seen = flash_mla.up_to_own_position(kv, indices, q_start_index_s)
    return flash_mla.flash_mla_sparse_bwd(q, kv, o, dO, seen, lse, sm_scale, d_v, topk_length)
