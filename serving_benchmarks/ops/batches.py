"""Batches in a few letters, and the cached tokens that they attend to.

`128q1s32k` is 128 requests with 1 query token each at the end of sequences of 32 * 1024 tokens. `q4k` is one request
whose 4096 query tokens are its whole sequence. `2q512s8k_32q1s1k` is both kinds of requests in one batch.
"""

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK, SETS = 64, 4  # slots of a cache's block, and sets of inputs that calls rotate
SMALLEST_CACHE = 2**20  # tokens. Input sets are spread over the whole cache, as requests are in a server's.
MOST_HEADS = 256
MOST_REQUESTS = 2**20
_CHUNK = 2**27  # scores that are drawn at once


@dataclass(frozen=True)
class RequestBatch:
    """Requests: the query tokens of each, and the length of its sequence with them."""

    spec: str
    requests: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, spec: str) -> "RequestBatch":
        requests: list[tuple[int, int]] = []
        for part in spec.split("_"):
            found = re.fullmatch(r"(\d*)q(\d+k?)(?:s(\d+k?))?", part)
            if not found:
                raise ValueError(f"{spec!r} is no batch: that is parts like 128q1s32k, joined by _; got {part!r}")
            texts = found[2], found[3] or found[2]
            queries, length = (int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1) for text in texts)
            if not 1 <= (count := int(found[1] or 1)) <= MOST_REQUESTS or not 1 <= queries <= length:
                told = f"1 to {MOST_REQUESTS} requests, and sequences at least as long as their query tokens"
                raise ValueError(f"{spec!r} is no batch: {told}; got {part!r}")
            requests += [(queries, length)] * count
        return cls(spec, tuple(requests))

    @property
    def tokens(self) -> int:
        return sum(queries for queries, _ in self.requests)

    @property
    def cached(self) -> int:
        """Tokens in the cache, over all requests."""
        return sum(length for _, length in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(length for _, length in self.requests)

    @property
    def queries(self) -> int | None:
        """Query tokens of each request, where all have equally many."""
        counts = {queries for queries, _ in self.requests}
        return counts.pop() if len(counts) == 1 else None

    def blocks(self, block_size: int) -> list[int]:
        """Blocks of the cache for each request."""
        return [-(-length // block_size) for _, length in self.requests]

    def token_requests(self) -> Tensor:
        """int32 `[T]`: the request of each query token."""
        counts = torch.tensor([queries for queries, _ in self.requests])
        return torch.arange(len(self.requests), dtype=torch.int32).repeat_interleave(counts)

    def visible(self) -> Tensor:
        """int32 `[T]`: tokens of its sequence that each query token may see, itself included."""
        return torch.cat([torch.arange(n - q + 1, n + 1, dtype=torch.int32) for q, n in self.requests])


def positions(visible: Tensor, topk: int) -> Tensor:
    """int32 `[T, topk]`: different ones of the first `visible[t]` positions, evenly drawn; -1 where they are fewer."""
    longest, device = int(visible.max()), visible.device
    picked = torch.full((len(visible), topk), -1, dtype=torch.int32, device=device)
    everywhere = torch.arange(longest, device=device)
    for tokens in torch.arange(len(visible), device=device).split(max(1, _CHUNK // longest)):
        scores = torch.rand(len(tokens), longest, device=device)
        scores = torch.where(everywhere < visible[tokens].unsqueeze(1), scores, -torch.inf)
        best, chosen = scores.topk(min(topk, longest), dim=1)
        picked[tokens, : chosen.shape[1]] = torch.where(best.isinf(), -1, chosen).int()
    return picked


class CaseOfBatch:
    """A dataclass whose field `batch` is a batch as it is written."""

    batch: str

    @property
    def requests(self) -> RequestBatch:
        return RequestBatch.parse(self.batch)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.requests.tokens}
