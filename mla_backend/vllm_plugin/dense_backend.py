"""The attention backend of models with dense MLA, such as DeepSeek-V3 and Kimi-K2.

Decode, tokens under verification and short extends attend in our op, which reads a request's cache once for all of its
tokens. Longer prefills are vLLM's own: they expand keys and values for every head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

import mla_backend
from mla_backend.vllm_plugin import products, versions
from mla_backend.vllm_plugin.backend import Backend, attending_heads, leading_layers, refuse_features
from mla_backend.vllm_plugin.config import CACHE_DTYPES
from mla_backend.vllm_plugin.dense_step import DenseBuffers, DenseStep, groups_of
from mla_backend.vllm_plugin.models import LATENT, ROPE

SHORT_EXTEND = 64
"""A request with up to this many tokens in a step counts as decode; the op takes no more. From about 170 tokens on it
is less work to expand keys and values for every head."""
LEAST_BLOCK_SIZE, BLOCK_SIZE = 16, 64
"""Tokens in a block of the cache: divisor, and default on a GPU."""


class DenseMLABackend(Backend, MLACommonBackend):
    name = versions.DENSE
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(CACHE_DTYPES[versions.DENSE])

    @staticmethod
    def get_impl_cls() -> type["DenseMLALayer"]:
        return DenseMLALayer

    @staticmethod
    def get_builder_cls() -> type["DenseMLAMetadataBuilder"]:
        return DenseMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(LEAST_BLOCK_SIZE)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return BLOCK_SIZE

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [LATENT + ROPE]


@dataclass
class DenseMLAMetadata(MLACommonMetadata):
    """The metadata of one batch."""

    step: DenseStep | None = None


class DenseMLAMetadataBuilder(MLACommonMetadataBuilder):
    """Makes a batch's metadata from tensors on the device, without waiting for it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = SHORT_EXTEND

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device, **kwargs: Any
    ) -> None:
        super().__init__(
            kv_cache_spec, layer_names, vllm_config, device, **{"metadata_cls": DenseMLAMetadata, **kwargs}
        )
        model_config = vllm_config.model_config
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        cache_format = "fp8_tensor_576" if impl.kv_cache_dtype.startswith("fp8") else "bf16"
        self.buffers = DenseBuffers(
            most_queries=self.reorder_batch_threshold,
            slots=model_config.max_model_len,
            heads=attending_heads(vllm_config, impl),
            device=device,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            cache_format=cache_format,
            products=products.of_rows(vllm_config, cache_format),
        )
        self.leaders = leading_layers(layer_names, model_config.hf_text_config.num_hidden_layers)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> DenseMLAMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.num_decodes:
            starts = common_attn_metadata.query_start_loc_cpu[: metadata.num_decodes + 1].tolist()
            groups = groups_of(starts, metadata.num_decode_tokens)
            metadata.step = DenseStep(self.buffers, groups, self.leaders)
        return metadata


class DenseMLALayer(MLACommonImpl):
    """The attention of one layer."""

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what the base takes."""
        refuse_features(versions.DENSE, super().__init__, *args, **kwargs)
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        *more: Any,
        **kwargs: Any,
    ) -> None:
        """Writes tokens, kv_c_normed `[N or more, 512]` and k_pe `[N or more, 1, 64]`, into slots `[N]`. On a GPU that
        is vLLM's own op, which reads the scale there."""
        if not current_platform.is_cpu():
            given = kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *more
            super().do_kv_cache_update(*given, **kwargs)
        elif kv_cache.numel():
            slots = slot_mapping.flatten()
            scale = k_scale.item() if kv_cache_dtype.startswith("fp8") else 1.0
            mla_backend.cache_write(kv_c_normed[: len(slots)], k_pe[: len(slots)], kv_cache, slots, scale=scale)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: DenseMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends with the step's decode tokens.

        Args:
            q: `[T, H, 576]` or `([T, H, 512], [T, H, 64])`.

        Returns:
            `[T, H, 512]`, and with decode context parallelism the lse, fp32 `[T, H]`.
        """
        decode = attn_metadata.decode
        out, lse = attn_metadata.step.attend(
            layer.layer_name,
            q,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            scale=self.scale,
            cache_scale=layer._k_scale_float if self.kv_cache_dtype.startswith("fp8") else 1.0,
        )
        return out.to(q[0].dtype), lse if self.dcp_world_size > 1 else None
