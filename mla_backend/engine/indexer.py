"""The indexer of DeepSeek sparse attention: which tokens of its context a token attends to."""

import torch
from torch import Tensor, nn

from kv_cache.keys import gather_keys, write_keys
from mla_backend.cache import convert_indices
from mla_backend.engine.batch import Batch
from mla_backend.engine.config import INDEX_DIM, ModelConfig
from mla_backend.engine.rope import rotate

MOST_SCORES = 1 << 25
"""fp32 numbers in a temporary, 128 MiB: a chunk of queries against a long context is scored in pieces of that."""


class Indexer(nn.Module):
    """Scores a query token against the keys of its context with a few small heads, and keeps the best top-k.

    The released models turn queries and keys by a Hadamard matrix before they round them to FP8. It changes no score
    but by that rounding, and is left out here, as in transformers and vLLM.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.heads, self.topk, self.rope_dim = config.index_heads, config.index_topk, config.rope_dim
        self.interleaved = config.index_rope_interleaved
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * INDEX_DIM, bias=False, dtype=dtype)
        self.wk = nn.Linear(config.hidden_size, INDEX_DIM, bias=False, dtype=dtype)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=1e-6, dtype=dtype)
        # fp32 in every release: what it says decides between tokens
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False, dtype=torch.float32)

    def forward(
        self,
        hidden: Tensor,
        q_latent: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: Batch,
        cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Writes the tokens' keys and selects from their contexts.

        Args:
            hidden, q_latent: `[T, hidden_size]` and `[T, q_lora_rank]`.
            positions: int64 `[T]`.
            rotation: cosines and sines, fp32 `[T, rope_dim / 2]`.
            cache: the layer's keys.

        Returns:
            Slots, int32 `[T, topk or the longest context]`, by rising position and then -1, and how many there are of
            each token's, int32 `[T]`.
        """
        cos, sin = rotation
        keys = self._rotated(self.k_norm(self.wk(hidden)), cos, sin)
        _write(keys, cache, batch.slots)
        queries = self.wq_b(q_latent).unflatten(-1, (self.heads, INDEX_DIM))
        queries = self._rotated(queries, cos.unsqueeze(1), sin.unsqueeze(1)).float()
        weights = self.weights_proj(hidden.float()) * (self.heads * INDEX_DIM) ** -0.5
        chosen = self._select(queries, weights, positions, batch, cache)
        return convert_indices(chosen, batch.block_table, batch.request_ids, cache.shape[1], compact=True)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rotated = rotate(x[..., : self.rope_dim], cos, sin, interleaved=self.interleaved)
        return torch.cat([rotated, x[..., self.rope_dim :]], dim=-1)

    def _select(self, queries: Tensor, weights: Tensor, positions: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """Positions int32 `[T, topk or the longest context]`, rising, then -1. The order is that of the positions and
        not of the scores, so that attention adds up in one order however a prompt is cut into chunks."""
        width = min(self.topk, max(batch.context_lengths, default=0))
        chosen = torch.full((len(positions), width), -1, dtype=torch.int32, device=positions.device)
        start = 0
        for request, (count, context) in enumerate(zip(batch.token_counts, batch.context_lengths, strict=True)):
            rows = slice(start, start + count)
            start += count
            if context <= self.topk:
                everything = torch.arange(context, dtype=torch.int32, device=positions.device)
                chosen[rows, :context] = torch.where(everything > positions[rows].unsqueeze(1), -1, everything)
                continue
            keys = _gather(cache, batch.context_slots(request, cache.shape[1]))
            piece = max(1, MOST_SCORES // (self.heads * context))
            parts = (x[rows].split(piece) for x in (queries, weights, positions))
            chosen[rows] = torch.cat([self._best(*part, keys) for part in zip(*parts, strict=True)])
        return chosen

    def _best(self, queries: Tensor, weights: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
        """The top-k among keys `[context, 128]`, int32 `[tokens, topk]`, of tokens of one request."""
        context = len(keys)
        scores = torch.relu(queries @ keys.T)  # [tokens, heads, context]
        scores = (weights.unsqueeze(1) @ scores).squeeze(1)
        later = torch.arange(context, device=keys.device) > positions.unsqueeze(1)
        best = scores.masked_fill(later, -torch.inf).topk(self.topk)
        found = torch.where(best.values == -torch.inf, context, best.indices).sort().values
        return torch.where(found == context, -1, found).int()


def _write(keys: Tensor, cache: Tensor, slots: Tensor) -> None:
    if cache.dtype != torch.float32:
        write_keys(keys, cache, slots)
        return
    kept = slots >= 0
    cache.view(-1, INDEX_DIM)[slots[kept]] = keys[kept].float()


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """fp32 `[N, 128]`."""
    return cache.view(-1, INDEX_DIM)[slots] if cache.dtype == torch.float32 else gather_keys(cache, slots)
