"""Which tokens of a new prompt attend densely, over keys and values of each head: 2 (192 + 128) operations a pair and
head in DeepSeek-V3.2, in place of 2 (576 + 512).

Its first tokens, up to the indexer's top-k, see everything before them. With few heads those that follow are cheaper
with a mask of what the indexer picked, too, while their context is short.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla_backend.vllm_plugin import versions
from mla_backend.vllm_plugin.models import ROPE

MASKED = 1024
"""Tokens that share a mask."""
MASKED_WIDTHS, MASKED_CONTEXT = (192, 128), {16: 8192, 32: 4096}
"""Which keys and values attend with masks, and with up to so many heads in how long a context, on Hopper."""


@dataclass(frozen=True)
class Beginnings:
    """Beginnings of consecutive requests, with no other tokens between them."""

    tokens: slice
    """Of the batch."""
    lengths: tuple[int, ...]

    def metadata_for(self, metadata: Any, backend: Any) -> Any:
        """A batch's metadata for these tokens alone. `backend` is what vLLM has for dense prefill, and keeps theirs."""
        device = metadata.query_start_loc.device
        starts = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
        prefill = replace(
            metadata.prefill,
            query_start_loc=starts.to(device, non_blocking=True),
            query_lens_cpu=torch.tensor(self.lengths, dtype=torch.int32),
            max_query_len=max(self.lengths),
            chunked_context=None,
            prefill_backend=backend,
        )
        backend.prepare_metadata(prefill)
        return replace(metadata, prefill=prefill, prefill_max_seq_len=prefill.max_query_len)


@dataclass(frozen=True)
class Masked:
    """Tokens of a new prompt that attend with masks."""

    prompt: int
    """Its first token, in the batch."""
    blocks: range
    """Where they begin in the prompt."""

    @property
    def tokens(self) -> slice:
        """Of the batch."""
        return slice(self.prompt + self.blocks.start, self.prompt + self.blocks.stop)


def dense_tokens(query_lens: Sequence[int], seq_lens: Sequence[int], first: int, topk: int) -> list[int]:
    """How many tokens of each request are its beginning: none if it began in an earlier step.

    Args:
        query_lens: each request's tokens of this step.
        seq_lens: the length of each request's context, with its tokens of this step.
        first: the first request that counts.
        topk: tokens of a prompt that see everything before them.
    """
    new = (query == length and i >= first for i, (query, length) in enumerate(zip(query_lens, seq_lens, strict=True)))
    return [min(query, topk) if is_new else 0 for query, is_new in zip(query_lens, new, strict=True)]


def beginnings(starts: Sequence[int], dense: Sequence[int]) -> list[Beginnings]:
    """Where prompts begin.

    Args:
        starts: the first token of each request, and the end of the last one's.
        dense: how many of each request's tokens are its beginning.
    """
    found: list[Beginnings] = []
    for start, length in zip(starts, dense, strict=False):
        if found and length and found[-1].tokens.stop == start:
            before = found.pop()
            found.append(Beginnings(slice(before.tokens.start, start + length), (*before.lengths, length)))
        elif length:
            found.append(Beginnings(slice(start, start + length), (length,)))
    return found


def masked(
    starts: Sequence[int], query_lens: Sequence[int], dense: Sequence[int], topk: int, longest: int
) -> list[Masked]:
    """Which tokens follow beginnings and attend with masks.

    Args:
        starts: the first token of each request, and the end of the last one's.
        query_lens: each request's tokens of this step.
        dense: how many of them are its beginning.
        topk: tokens of a prompt that see everything before them.
        longest: the longest context of a masked token.
    """
    found = []
    for start, query, begins in zip(starts, query_lens, dense, strict=False):
        blocks = (min(query, longest) - topk) // MASKED
        if begins == topk and blocks > 0:
            found.append(Masked(start, range(topk, topk + blocks * MASKED, MASKED)))
    return found


@cache
def longest_masked(heads: int, widths: tuple[int, int], topk: int, device: torch.device) -> int:
    """The longest context of masked tokens, 0 without masks. The first call has cuDNN plan each shape there may be, so
    that no request waits for it, and vLLM knows the memory.

    Args:
        heads: of this device.
        widths: of a head's keys and values.
        topk: tokens of a prompt that see everything before them.
        device: theirs.
    """
    longest = next((context for most, context in MASKED_CONTEXT.items() if heads <= most), 0)
    if widths != MASKED_WIDTHS or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    like = dict(dtype=torch.bfloat16, device=device)
    q, picked = torch.zeros(MASKED, heads, widths[0], **like), torch.zeros(MASKED, 1, dtype=torch.int32, device=device)
    try:
        for context in range(topk + MASKED, longest + 1, MASKED):
            keys, values = (
                torch.zeros(context, heads, widths[0], **like),
                torch.zeros(context, heads, sum(widths) - ROPE, **like),
            )
            attend_to_picked(q, keys, values[..., -widths[1] :], picked, 1.0)
    except RuntimeError as error:  # another cuDNN
        versions.logger().warning("Prompts attend sparsely from their token %d on: %s", topk, error)
        return 0
    return longest


def between(apart: Sequence[slice], first: int, end: int) -> list[slice]:
    """The tokens from `first` to `end` that are in none of the given slices, which are in order."""
    edges = [first, *(edge for one in apart for edge in (one.start, one.stop)), end]
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def attend_to_picked(q: Tensor, k: Tensor, v: Tensor, picked: Tensor, scale: float) -> Tensor:
    """Dense attention with a mask.

    Args:
        q: `[N, H, D]`.
        k: `[C, H, D]`.
        v: `[C, H, V]`.
        picked: int32 `[N, K]`, the rows of k that each token attends to, some at least; -1 is none.
        scale: of the scores.

    Returns:
        `[N, H, V]`.
    """
    context, width = len(k), len(k) + 8  # -1 goes to the last column
    mask = q.new_full((len(q), width), -1e30)  # no infinity: tiles where nothing was picked would give NaN
    mask.scatter_(1, picked.long().remainder_(width), 0.0)
    mask = mask[None, None, :, :context]
    queries, keys, values = (one.transpose(0, 1).unsqueeze(0) for one in (q, k, v))
    if q.is_cuda:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out = cudnn(queries, keys, values, mask, False, 0.0, False, False, scale=scale)[0]
    else:
        out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1)
