"""Which tokens of a prefill see everything before them: a new prompt's first ones, up to the indexer's top-k.

For them dense attention over keys and values of each head gives the same, and is cheaper: 2 (192 + 128) operations a
pair and head in DeepSeek-V3.2, in place of 2 (576 + 512).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch


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


def between(found: Sequence[Beginnings], first: int, end: int) -> list[slice]:
    """The tokens from `first` to `end` that are in no beginning."""
    edges = [first, *(edge for one in found for edge in (one.tokens.start, one.tokens.stop)), end]
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
