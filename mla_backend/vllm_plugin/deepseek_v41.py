"""DeepSeek-V4.1's attention. Its layers compress nothing (ratio 0), single tokens (1) or pairs (2). Few keep compressed
tokens and few select: the others attend to the cache and the selection of a layer before them."""

from typing import Any

from torch import Tensor
from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekV4FlashMLAAttention

from mla_backend.vllm_plugin import replacements
from mla_backend.vllm_plugin.deepseek_v4 import FORMAT, V4Attention, choose_in


def install() -> None:
    """Makes vLLM's model of DeepSeek-V4.1 choose this layer where the backend is asked for."""
    choose_in(replacements.V41_MODEL, SparseMLAV41Attention)


class SparseMLAV41Attention(V4Attention, DeepseekV4FlashMLAAttention):
    """A layer of DeepSeek-V4.1."""

    @property
    def row_format(self) -> str:
        return "fp8_528" if self.kv_mxfp8 else FORMAT  # the former on sm_100, and by native_rows

    @property
    def selection(self) -> int | None:
        return self.index_source_layer_id

    def second_cache(self, batches: dict[str, Any]) -> tuple[Tensor, Any] | None:
        if self.compress_ratio == 0:
            return None
        return self._compressed_kv_cache(), batches[self.compressed_cache_prefix]
