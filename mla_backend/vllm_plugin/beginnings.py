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

    def of(self, metadata: Any, backend: Any) -> Any:
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


def beginnings(starts: Sequence[int], seq_lens: Sequence[int], first: int, topk: int) -> list[Beginnings]:
    """Where new prompts begin.

    Args:
        starts: the first token of each request, and the end of the last one's.
        seq_lens: the length of each request's context, with its tokens of this step.
        first: the first request that counts.
        topk: tokens of a prompt that see everything before them.
    """
    found: list[Beginnings] = []
    for request in range(first, len(seq_lens)):
        start, end = starts[request], starts[request + 1]
        if end - start < seq_lens[request] or start == end:
            continue  # the prompt began in an earlier step
        length = min(end - start, topk)
        if found and found[-1].tokens.stop == start:
            before = found.pop()
            found.append(Beginnings(slice(before.tokens.start, start + length), (*before.lengths, length)))
        else:
            found.append(Beginnings(slice(start, start + length), (length,)))
    return found


def between(found: Sequence[Beginnings], first: int, end: int) -> list[slice]:
    """The tokens from `first` to `end` that are in no beginning."""
    edges = [first, *(edge for one in found for edge in (one.tokens.start, one.tokens.stop)), end]
    return [slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
