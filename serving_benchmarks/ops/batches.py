"""Batches in a few letters, and the cached tokens that their query tokens attend to.

`128q1s32k` is 128 requests with 1 query token each at the end of sequences of 32 * 1024 tokens; `q4k` is one request
whose 4096 query tokens are its whole sequence; `2q512s8k_32q1s1k` is both kinds of requests in one batch.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

RECENT = 20_000
"""Most of a realistic list lies within this many last tokens of the sequence."""
PATTERNS = {
    "random": "lists drawn evenly over what a token may see",
    "sliding": "the last tokens",
    "realistic": f"three quarters of a list within the last {RECENT} tokens, and neighbours with mostly the same list",
}
_CHUNK = 2**27
"""Scores that are drawn at once."""


@dataclass(frozen=True)
class Batch:
    """Requests: the query tokens of each, and the length of its sequence with them."""

    spec: str
    requests: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, spec: str) -> "Batch":
        requests: list[tuple[int, int]] = []
        for part in spec.split("_"):
            found = re.fullmatch(r"(\d*)q(\d+k?)(?:s(\d+k?))?", part)
            if not found:
                raise ValueError(f"{spec!r} is no batch: it takes parts like 128q1s32k, joined by _; got {part!r}")
            count, queries = int(found[1] or 1), _number(found[2])
            length = _number(found[3]) if found[3] else queries
            if not count or not 1 <= queries <= length:
                raise ValueError(
                    f"{spec!r} is no batch: at least 1 request, and sequences at least as long as their query tokens; "
                    f"got {part!r}"
                )
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


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def positions(batch: Batch, topk: int, pattern: str, device: torch.device | str = "cpu") -> Tensor:
    """int32 `[T, topk]`: different positions in the sequence of each query token, then -1 if it sees fewer."""
    longest = max(length for _, length in batch.requests)
    picked = torch.full((batch.tokens, topk), -1, dtype=torch.int32, device=device)
    requests, visible = batch.token_requests().to(device), batch.visible().to(device)
    everywhere = torch.arange(longest, device=device)
    shared = _gumbel(len(batch.requests), longest, device=device) if pattern == "realistic" else None
    for tokens in torch.arange(batch.tokens, device=device).split(max(1, _CHUNK // longest)):
        seen = visible[tokens].unsqueeze(1)
        if pattern == "sliding":
            scores = everywhere.float().expand(len(tokens), -1)
        elif pattern == "random":
            scores = torch.rand(len(tokens), longest, device=device)
        else:
            # Gumbel noise on the logarithm of weights draws without replacement by these weights
            recent, older = everywhere >= seen - RECENT, (seen - RECENT).clamp(min=1)
            weight = torch.where(recent, 0.75 / RECENT, 0.25 / older)
            noise = _gumbel(len(tokens), longest, device=device)
            scores = weight.log() + shared[requests[tokens].long()] + 0.3 * noise
        scores = torch.where(everywhere < seen, scores, -torch.inf)
        best, chosen = scores.topk(min(topk, longest), dim=1)
        picked[tokens, : chosen.shape[1]] = torch.where(best.isinf(), -1, chosen).int()
    return picked


def _gumbel(*shape: int, device: torch.device | str) -> Tensor:
    return -torch.empty(shape, device=device).exponential_().log()
