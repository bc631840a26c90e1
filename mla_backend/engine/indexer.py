"""The indexer of DeepSeek sparse attention: which tokens of its context a token attends to."""

import torch
from torch import Tensor, nn

from mla_backend import reference
from mla_backend.engine.config import INDEX_DIM, ModelConfig
from mla_backend.engine.rope import rotate
from mla_backend.engine.step import EngineStep, Selection
from mla_backend.index import select_tokens


class Indexer(nn.Module):
    """Scores a query token against the keys of its context with a few small heads, and keeps the best top-k.

    The released models multiply queries and keys by a Hadamard matrix before they round them to FP8. Only the rounding
    makes a difference to the scores, so it is left out here, as in transformers and vLLM.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.heads, self.topk, self.rope_dim = config.index_heads, config.index_topk, config.rope_dim
        self.interleaved = config.index_rope_interleaved
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * INDEX_DIM, bias=False, dtype=dtype)
        self.wk = nn.Linear(config.hidden_size, INDEX_DIM, bias=False, dtype=dtype)
        self.k_norm = nn.LayerNorm(INDEX_DIM, eps=1e-6, dtype=dtype)
        # fp32 in every release, as it decides between tokens
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False, dtype=torch.float32)

    def forward(self, hidden: Tensor, q_latent: Tensor, raw_keys: Tensor, step: EngineStep, cache: Tensor) -> Selection:
        """Writes the tokens' keys and selects from their contexts.

        Args:
            hidden, q_latent: `[T, hidden_size]` and `[T, q_lora_rank]`.
            raw_keys: `[T, 128]`: hidden after `wk`, which whoever calls does along with other products.
            cache: the layer's keys.

        Returns:
            Slots, int32 `[T, topk or the longest context]`, by rising position and then -1, and each token's number of
            them, int32 `[T]`.
        """
        self._write(raw_keys, step, cache)
        if not step.scores:
            return step.everything
        queries = self.wq_b(q_latent).unflatten(-1, (self.heads, INDEX_DIM))
        queries = self._rotated(queries, step.rotations.unsqueeze(1), hidden.dtype)
        weights = self.weights_proj(hidden.float()) * (self.heads * INDEX_DIM) ** -0.5
        table = step.batch.block_table[:, : -(-step.longest // step.block_size)]  # a GPU works in what it has room for
        arguments = queries, weights, cache, table, step.batch.request_ids, step.lengths, self.topk
        if cache.dtype == torch.float32:  # exact keys, which only the reference takes
            return step.slots_of(reference.select_tokens(*arguments)[0])
        return step.slots_of(select_tokens(*arguments))

    def _write(self, raw_keys: Tensor, step: EngineStep, cache: Tensor) -> None:
        if cache.dtype == torch.float32:
            kept = step.batch.slots >= 0
            keys = self._rotated(self.k_norm(raw_keys), step.rotations, torch.float32)
            cache.view(-1, INDEX_DIM)[step.batch.slots[kept]] = keys[kept]
            return
        addresses = step.key_addresses(cache)
        # the norm needs contiguous rows; indexing makes that copy
        keys = self.k_norm(raw_keys[addresses.source])
        addresses.write(self._rotated(keys, step.key_rotations(addresses), torch.float32), cache)

    def _rotated(self, x: Tensor, rotations: Tensor, dtype: torch.dtype) -> Tensor:
        """x `[..., 128]` in this dtype, with its first rope_dim dims rotated."""
        rotated = rotate(x[..., : self.rope_dim], rotations, dtype, interleaved=self.interleaved)
        return torch.cat([rotated, x[..., self.rope_dim :]], dim=-1)
