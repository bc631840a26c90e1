"""The indexer of DeepSeek sparse attention on a CPU: vLLM has one for GPUs alone.

vLLM's model computes queries, keys and weights, and this writes the keys, scores and selects. Keys are cached in FP8,
as on a GPU; queries, which a GPU rounds to FP8 for its tensor cores, stay as they are.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models import deepseek_v2
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder, MultipleOf

from kv_cache.keys import KEY_FORMATS, gather_keys, write_keys
from mla_backend.engine.indexer import MOST_SCORES, best_of, scores_of


def install() -> None:
    """Has vLLM's model use it. Each process that builds a model does this, some more than once."""
    if "SparseAttnIndexer" not in op_registry_oot:
        SparseAttnIndexer.register_oot(name="SparseAttnIndexer")(CpuIndexer)
    # These two have no such hook: the cache of the keys names a backend whose metadata takes Triton to make, and the
    # model quantises queries with Triton.
    deepseek_v2.DeepseekV32IndexerCache.get_attn_backend = lambda self: CpuIndexerBackend
    deepseek_v2.per_token_group_quant_fp8 = _keep_queries


def _keep_queries(queries: Tensor, group_size: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Stands in for quantising queries `[N, 128]`: themselves, and scales `[N, 1]` of one."""
    return queries, queries.new_ones(queries.shape[0], queries.shape[1] // group_size, dtype=torch.float32)


@dataclass
class CpuIndexerMetadata(AttentionMetadata):
    """Of one batch of R requests."""

    token_starts: list[int]
    """R + 1: where each request's tokens begin."""
    context_lengths: list[int]
    """R: of each request, its tokens of this step included."""
    block_table: Tensor
    """int32 `[R, most blocks]`."""
    slot_mapping: Tensor
    """int64 `[T]`."""


class CpuIndexerMetadataBuilder(AttentionMetadataBuilder):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CpuIndexerMetadata:
        batch = common_attn_metadata
        return CpuIndexerMetadata(
            token_starts=batch.query_start_loc.tolist(),
            context_lengths=batch.seq_lens.tolist(),
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
        )


class CpuIndexerBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "SPARSE_MLA_CPU_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the indexer is no attention")

    @staticmethod
    def get_builder_cls() -> type[CpuIndexerMetadataBuilder]:
        return CpuIndexerMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [KEY_FORMATS["fp8"].width]


class CpuIndexer(SparseAttnIndexer):
    def forward_cpu(self, hidden_states: Tensor, q_quant: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """Writes the keys k `[T, 128]` and selects for queries `[T, heads, 128]` whose heads weigh `[T, heads]`.

        Returns the buffer of the selection, int32 `[most tokens, topk]`: each token's positions, rising, then -1.
        """
        batches = get_forward_context().attn_metadata
        if not isinstance(batches, dict):  # a run that measures memory
            return self.topk_indices_buffer
        batch, cache = batches[self.k_cache.prefix], self.k_cache.kv_cache
        slots = batch.slot_mapping
        write_keys(k[: len(slots)].contiguous(), cache, slots)
        selected = self.topk_indices_buffer[: len(hidden_states)]
        selected.fill_(-1)
        for request, context in enumerate(batch.context_lengths):
            start, end = batch.token_starts[request : request + 2]
            if start == end:
                continue
            blocks = batch.block_table[request, : -(-context // cache.shape[1])]
            positions = torch.arange(context - (end - start), context)
            if context <= self.topk_tokens:
                everything = torch.arange(context, dtype=torch.int32)
                chosen = torch.where(everything > positions.unsqueeze(1), -1, everything)
            else:
                keys = _keys(cache, blocks, context)
                chosen = select(q_quant[start:end], weights[start:end], positions, keys, self.topk_tokens)
            selected[start:end, : chosen.shape[1]] = chosen
        return self.topk_indices_buffer


def _keys(cache: Tensor, blocks: Tensor, context: int) -> Tensor:
    """The keys of a request's first so many tokens, fp32 `[context, 128]`."""
    block_size = cache.shape[1]
    slots = blocks.long().unsqueeze(1) * block_size + torch.arange(block_size)
    return gather_keys(cache, slots.flatten()[:context])


def select(queries: Tensor, weights: Tensor, positions: Tensor, keys: Tensor, topk: int) -> Tensor:
    """Which tokens of its context each token attends to.

    Args:
        queries, weights: `[N, heads, 128]` and `[N, heads]`.
        positions: int64 `[N]`; a token sees those up to its own position.
        keys: fp32 `[context, 128]`, more than topk.

    Returns:
        int32 `[N, topk]`, positions by rising order, then -1, as the engine selects them.
    """
    piece = max(1, MOST_SCORES // (queries.shape[1] * len(keys)))
    parts = zip(queries.split(piece), weights.split(piece), positions.split(piece), strict=True)
    return torch.cat(
        [
            best_of(scores_of(some.float(), their.float(), keys.unsqueeze(0)), places, topk)
            for some, their, places in parts
        ]
    )
