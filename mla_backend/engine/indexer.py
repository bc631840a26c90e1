"""The indexer of DeepSeek sparse attention: which tokens of its context a token attends to."""

from itertools import repeat

import torch
from torch import Tensor, nn

from kv_cache.keys import gather_keys
from mla_backend.engine.config import INDEX_DIM, ModelConfig
from mla_backend.engine.rope import rotate
from mla_backend.engine.step import Selection, Step, all_up_to

MOST_SCORES = 1 << 25
"""fp32 numbers in a temporary, 128 MiB: many queries against long contexts are scored in pieces of that."""
KEY_TILE = 512
"""Keys that are scored at a time where bits must not depend on how long other contexts are."""


class Indexer(nn.Module):
    """Scores a query token against the keys of its context with a few small heads, and keeps the best top-k.

    The released models turn queries and keys by a Hadamard matrix before they round them to FP8. It changes no score
    but by that rounding, and is left out here, as in transformers and vLLM.

    Args:
        batch_invariant: score in products of one shape. For batches of a constant number of requests with one token
            each.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, batch_invariant: bool = False):
        super().__init__()
        self.batch_invariant = batch_invariant
        self.heads, self.topk, self.rope_dim = config.index_heads, config.index_topk, config.rope_dim
        self.interleaved = config.index_rope_interleaved
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * INDEX_DIM, bias=False, dtype=dtype)
        self.wk = nn.Linear(config.hidden_size, INDEX_DIM, bias=False, dtype=dtype)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=1e-6, dtype=dtype)
        # fp32 in every release: what it says decides between tokens
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False, dtype=torch.float32)

    def forward(self, hidden: Tensor, q_latent: Tensor, raw_keys: Tensor, step: Step, cache: Tensor) -> Selection:
        """Writes the tokens' keys and selects from their contexts.

        Args:
            hidden, q_latent: `[T, hidden_size]` and `[T, q_lora_rank]`.
            raw_keys: `[T, 128]`: hidden after `wk`, which whoever calls does along with other products.
            cache: the layer's keys.

        Returns:
            Slots, int32 `[T, topk or the longest context]`, by rising position and then -1, and how many there are of
            each token's, int32 `[T]`.
        """
        self._write(raw_keys, step, cache)
        if not step.scores:
            return step.everything
        queries = self.wq_b(q_latent).unflatten(-1, (self.heads, INDEX_DIM))
        queries = self._rotated(queries, step.turns.unsqueeze(1))
        weights = self.weights_proj(hidden.float()) * (self.heads * INDEX_DIM) ** -0.5
        return step.slots_of(self._select(queries, weights, step, cache))

    def _write(self, raw_keys: Tensor, step: Step, cache: Tensor) -> None:
        if cache.dtype == torch.float32:
            kept = step.batch.slots >= 0
            keys = self._rotated(self.k_norm(raw_keys), step.turns)
            cache.view(-1, INDEX_DIM)[step.batch.slots[kept]] = keys[kept]
            return
        places = step.key_places(cache)
        # the norm wants its rows in one piece; picking them is that copy
        keys = self.k_norm(raw_keys[places.source])
        places.write(self._rotated(keys, step.turns_of_keys(places)), cache)

    def _rotated(self, x: Tensor, turns: Tensor) -> Tensor:
        """fp32 `[..., 128]`, of which the first rope_dim are rotated."""
        return torch.cat(
            [
                rotate(x[..., : self.rope_dim], turns, torch.float32, interleaved=self.interleaved),
                x[..., self.rope_dim :],
            ],
            dim=-1,
        )

    def _select(self, queries: Tensor, weights: Tensor, step: Step, cache: Tensor) -> Tensor:
        """Positions int32 `[T, topk]`, rising, then -1. The order is that of the positions and not of the scores, so
        that attention adds up in one order however a prompt is cut into chunks."""
        batch, positions, longest = step.batch, step.positions, step.longest
        per_token = queries, weights, positions
        if batch.decodes_only:
            if self.batch_invariant:
                longest = -(-longest // KEY_TILE) * KEY_TILE
            return self._best_in_pieces(*per_token, batch.context_slots(slice(None), longest, cache.shape[1]), cache)
        chosen = torch.full((len(positions), self.topk), -1, dtype=torch.int32, device=positions.device)
        for rows, requests, context in batch.alike:
            mine = [x[rows] for x in per_token]
            if context <= self.topk:
                chosen[rows, :context] = all_up_to(mine[-1], context)
            else:
                slots = batch.context_slots(requests, context, cache.shape[1])
                chosen[rows] = self._best_in_pieces(*mine, slots, cache)
        return chosen

    def _best_in_pieces(
        self, queries: Tensor, weights: Tensor, positions: Tensor, slots: Tensor, cache: Tensor
    ) -> Tensor:
        """The top-k of each of n tokens, int32 `[n, topk]`: among slots `[n, context]`, or `[1, context]` for all."""
        piece = len(queries) if self.batch_invariant else max(1, MOST_SCORES // (self.heads * slots.shape[1]))
        parts = zip(*(x.split(piece) for x in (queries, weights, positions)), strict=True)
        each = slots.split(piece) if len(slots) > 1 else repeat(slots)
        return _joined([self._best(*part, own, cache) for part, own in zip(parts, each, strict=False)])

    def _best(self, queries: Tensor, weights: Tensor, positions: Tensor, slots: Tensor, cache: Tensor) -> Tensor:
        tiles = slots.split(KEY_TILE, dim=1) if self.batch_invariant else [slots]
        scores = _joined([scores_of(queries, weights, _gather(cache, tile)) for tile in tiles], dim=1)
        return best_of(scores, positions, self.topk)


def scores_of(queries: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """How well keys fit: fp32 `[N, keys]`.

    Args:
        queries, weights: fp32 `[N, heads, 128]` and `[N, heads]`.
        keys: fp32 `[N or 1, keys, 128]`.
    """
    if len(keys) == 1:
        keys = keys[0]
    scores = torch.relu(queries @ keys.transpose(-1, -2))  # [N, heads, keys]
    return (weights.unsqueeze(1) @ scores).squeeze(1)


def best_of(scores: Tensor, positions: Tensor, topk: int) -> Tensor:
    """The tokens of its context that each token attends to: int32 `[N, topk]`, positions by rising order, then -1.

    Args:
        scores: fp32 `[N, context]`, topk or more of them.
        positions: int64 `[N]`; a token sees those up to its own position.
    """
    places = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    scores = scores.masked_fill(places > positions.unsqueeze(1), -torch.inf)
    # of equal scores the earlier tokens, so that the choice depends on nothing else
    worst = scores.topk(topk).values[:, -1:]
    better, equal = scores > worst, (scores == worst) & (scores > -torch.inf)
    room = topk - better.sum(1, keepdim=True, dtype=torch.int32)
    keep = better | (equal & (equal.cumsum(1, dtype=torch.int32) <= room))
    column = torch.where(keep, keep.cumsum(1) - 1, topk)  # what isn't kept goes to a column too many
    chosen = torch.full((len(scores), topk + 1), -1, dtype=torch.int32, device=scores.device)
    return chosen.scatter_(1, column, places.expand_as(column))[:, :topk]


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    """What torch.cat would copy even if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """fp32 `[..., 128]` of slots `[...]`; what negative ones give means nothing."""
    if cache.dtype == torch.float32:
        return cache.view(-1, INDEX_DIM)[slots]
    return gather_keys(cache, slots.flatten()).unflatten(0, slots.shape)
