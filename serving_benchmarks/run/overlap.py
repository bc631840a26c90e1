"""A selection that repeats itself, in place of what the indexer of a model with random weights selects.

Of what a token selects, a share stays from the one before it, as with real weights, where it decides how many rows come
from the host. The indexer still runs, so that steps cost what they cost.
"""

from typing import Any

import torch
from torch import Tensor

STEP = 2654435761  # odd, so that multiples of it visit all positions of a power of two, here and there
CHUNK = 2048


def selected(first: int, last: int, width: int, overlap: float, device: Any = None) -> Tensor:
    """int32 `[last - first, width]`: what tokens at these positions select of those up to their own, -1 for none, which
    comes last. No position twice. The share of `overlap` was selected by the token before, and what is new, by none for
    as long as possible: half of the context's length or longer."""
    positions = torch.arange(first, last, device=device)[:, None]
    order, fresh = torch.arange(width, device=device), round((1 - overlap) * width)
    whole = 2 ** positions.clamp(min=1).double().log2().floor().long()
    window = (positions * fresh + order) * STEP % whole
    window[:, -1] = positions[:, 0]  # its own, which `whole` leaves out
    return torch.where(positions < width, torch.where(order <= positions, order, -1), window).int()


def install(model_config: Any, overlap: float, device: torch.device) -> None:
    """Has the layers of this process's model select so. CUDA graphs may capture it."""
    from vllm.compilation.breakable_cudagraph import eager_break_during_capture
    from vllm.models.deepseek_v32 import attention

    if attention.sparse_attn_indexer.__module__ == __name__:
        return  # for the model whose drafts these weights are for
    longest, width = model_config.max_model_len, getattr(model_config.hf_text_config, "index_topk", 0)
    if model_config.hf_text_config.model_type != "deepseek_v32" or width & (width - 1):
        raise ValueError("--overlap needs a model of DeepSeek-V3.2 whose top-k is a power of two")
    parts = (range(longest)[first : first + CHUNK] for first in range(0, longest, CHUNK))
    table = torch.cat([selected(part[0], part[-1] + 1, width, overlap, device) for part in parts])
    given: dict[str, Tensor] = {}
    attend, index = attention.DeepseekV32Attention._sparse_indexer_and_attn.__wrapped__, attention.sparse_attn_indexer

    @eager_break_during_capture
    def _sparse_indexer_and_attn(self: Any, positions: Tensor, *more: Any) -> None:
        given["positions"] = positions
        attend(self, positions, *more)

    def sparse_attn_indexer(*args: Any, **kwargs: Any) -> Tensor:
        found, positions = index(*args, **kwargs), given["positions"]
        torch.index_select(table, 0, positions, out=found[: len(positions)])
        return found

    attention.DeepseekV32Attention._sparse_indexer_and_attn = _sparse_indexer_and_attn
    attention.sparse_attn_indexer = sparse_attn_indexer
