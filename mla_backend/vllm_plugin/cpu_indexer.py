"""The indexer of DeepSeek sparse attention on a CPU. vLLM has one for GPUs only.

vLLM's model computes queries, keys and weights; this writes the keys, scores them and selects. Keys are cached in FP8
or MXFP4, as on a GPU. Queries, which a GPU rounds to FP8 for its tensor cores, stay as they are.
"""

import importlib
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

from mla_backend.keys import KEY_FORMATS, write_keys
from mla_backend.vllm_plugin.selection import seen_by_tokens, select_into

HY_V4 = "vllm.models.hy_v4.nvidia.attention"


def install(model_config: Any) -> None:
    """Makes vLLM's model use this indexer. Each process that builds a model calls it, some more than once."""
    if "SparseAttnIndexer" not in op_registry_oot:
        SparseAttnIndexer.register_oot(name="SparseAttnIndexer")(CpuIndexer)
    # There is no hook for these two: the cache of the keys names a backend that needs Triton for its metadata, and the
    # model quantises queries with Triton.
    deepseek_v2.DeepseekV32IndexerCache.get_attn_backend = lambda self: CpuIndexerBackend
    is_hy_v4 = any(name.startswith("HYV4") for name in model_config.architectures)
    model = importlib.import_module(HY_V4) if is_hy_v4 else deepseek_v2
    model.per_token_group_quant_fp8 = _keep_queries


def _keep_queries(queries: Tensor, group_size: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Instead of quantised queries `[N, 128]` and their scales: the queries themselves, and scales `[N, 1]` of 1."""
    return queries, queries.new_ones(queries.shape[0], queries.shape[1] // group_size, dtype=torch.float32)


@dataclass
class CpuIndexerMetadata(AttentionMetadata):
    """The metadata of a batch of T tokens of R requests."""

    requests: Tensor
    """int32 `[T]`: each token's row of the block table."""
    lengths: Tensor
    """int32 `[T]`: how many positions of its request each token sees, up to its own."""
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
        tokens = torch.arange(batch.num_actual_tokens, dtype=torch.int32)
        requests, lengths = seen_by_tokens(batch.query_start_loc, batch.seq_lens.int(), tokens)
        return CpuIndexerMetadata(
            requests=requests,
            lengths=lengths,
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
        return [KEY_FORMATS[name].width for name in ("fp8", "mxfp4_68")]


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
        what = q_quant, weights, cache, batch.block_table, batch.requests, batch.lengths
        select_into(self.topk_indices_buffer, len(hidden_states), self.topk_tokens, *what)
        return self.topk_indices_buffer
