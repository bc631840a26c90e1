"""The attention backend of models with dense MLA, such as DeepSeek-V3 and Kimi-K2.

Decode, tokens under verification and short extends attend in our op, which reads a request's cache once for all of its
tokens. Longer prefills are vLLM's own: they expand keys and values for every head.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
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
from mla_backend.attention import PLAN_COLUMNS, VALUE_DIM, default_workers, workspace_floats
from mla_backend.vllm_plugin import versions
from mla_backend.vllm_plugin.backend import leading_layers, refuse_features
from mla_backend.vllm_plugin.config import DENSE_CACHE_DTYPES
from mla_backend.vllm_plugin.models import LATENT, ROPE
from mla_backend.vllm_plugin.step import FEW_TOKENS

SHORT_EXTEND = 64
"""A request with up to this many tokens in a step counts as decode; the op takes no more. From about 170 tokens on it
is less work to expand keys and values for every head."""
LEAST_BLOCK_SIZE, BLOCK_SIZE = 16, 64
"""Tokens in a block of the cache: divisor, and default on a GPU."""


class DenseMLABackend(MLACommonBackend):
    """What vLLM asks a backend before it uses it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(DENSE_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        return versions.DENSE

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

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8


@dataclass(frozen=True)
class Group:
    """Neighbouring requests with the same number of query tokens. The op takes one group at a time."""

    first: int
    """The number of the first request."""
    requests: int
    start: int
    """The number of the first token."""
    queries: int
    """Tokens of each request."""

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.requests)

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + self.requests * self.queries)


def groups_of(starts: Sequence[int], tokens: int) -> list[Group]:
    """The groups of a step's decode requests.

    Args:
        starts: the first token of each request, and the end of the last one.
        tokens: those of the step. In a captured graph that is more than starts say: requests are added as padding, with
            no tokens in starts and no context, which get as many tokens as each of the others.
    """
    counts = [end - start for start, end in pairwise(starts)]
    if tokens == len(counts) * max(counts):
        return [Group(0, len(counts), 0, max(counts))]
    groups = []
    for queries, numbers in groupby(range(len(counts)), counts.__getitem__):
        first, *more = numbers
        if queries:
            groups.append(Group(first, 1 + len(more), starts[first], queries))
    return groups


class DenseBuffers:
    """The plan and the workspace, at addresses that captured CUDA graphs keep; one for all layers.

    Args:
        most_requests, most_queries: requests of a step, and decode tokens of a request.
        slots: tokens of a sequence, at most.
        heads: query heads that attention sees on this device.
        batch_invariant: give a token the same bits whatever else is in the batch.
    """

    def __init__(
        self,
        *,
        most_requests: int,
        most_queries: int,
        slots: int,
        heads: int,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        self.slots, self.heads, self.device, self.batch_invariant = slots, heads, device, batch_invariant
        sizes = [
            (self._workers(requests, queries), queries * heads)
            for queries in range(1, most_queries + 1)
            for requests in {*range(1, min(FEW_TOKENS, most_requests + 1)), most_requests}
        ]
        most_workers = max(workers for workers, _ in sizes)
        self.plan = torch.empty(most_workers, PLAN_COLUMNS, dtype=torch.int32, device=device)
        self.workspace = None
        if device.type == "cuda":
            self.workspace = torch.zeros(max(workspace_floats(*size) for size in sizes), device=device)

    def _workers(self, requests: int, queries: int) -> int:
        any_number = self.batch_invariant
        return default_workers(
            self.device, queries * self.heads, None if any_number else requests, None if any_number else self.slots
        )

    def make_plan(self, lengths: Tensor, queries: int, slots: int, *, alone: bool) -> Tensor:
        """The plan of a group whose block table has room for so many slots. If it is alone in its step, the plan is in
        the buffer."""
        plan = self.plan[: self._workers(len(lengths), queries)]
        return mla_backend.plan(
            len(lengths),
            slots,
            topk_length=lengths,
            batch_invariant=self.batch_invariant,
            out=plan if alone else torch.empty_like(plan),
        )


@dataclass
class DenseMLAMetadata(MLACommonMetadata):
    """The metadata of one batch."""

    buffers: DenseBuffers | None = None
    leaders: Collection[str] = ()
    """Names of the layers that make the plans anew: the first of each pass. In a captured graph that is part of the
    graph, and a step costs the host nothing."""
    groups: Sequence[Group] = ()
    plans: Sequence[Tensor] = ()
    """Of each group."""


class DenseMLAMetadataBuilder(MLACommonMetadataBuilder):
    """Makes a batch's metadata from tensors on the device, without waiting for it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    reorder_batch_threshold: int = SHORT_EXTEND

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, DenseMLAMetadata)
        model_config, parallel_config = vllm_config.model_config, vllm_config.parallel_config
        # with decode context parallelism a device attends with all heads of its group, to a part of the tokens
        heads = model_config.get_num_attention_heads(parallel_config) * parallel_config.decode_context_parallel_size
        self.buffers = DenseBuffers(
            most_requests=vllm_config.scheduler_config.max_num_seqs,
            most_queries=self.reorder_batch_threshold,
            slots=model_config.max_model_len,
            heads=heads,
            device=device,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        self.leaders = leading_layers(layer_names, model_config.hf_text_config.num_hidden_layers)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> DenseMLAMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if metadata.num_decodes:
            starts = common_attn_metadata.query_start_loc_cpu[: metadata.num_decodes + 1].tolist()
            metadata.buffers, metadata.leaders = self.buffers, self.leaders
            metadata.groups = groups_of(starts, metadata.num_decode_tokens)
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
        **kwargs: Any,
    ) -> None:
        """Writes tokens, kv_c_normed `[N or more, 512]` and k_pe `[N or more, 1, 64]`, into slots `[N]`. On a GPU that
        is vLLM's own op, which reads the scale there."""
        if not current_platform.is_cpu():
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, **kwargs)
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
        parts = q if isinstance(q, tuple) else (q,)
        tokens, heads = parts[0].shape[:2]
        decode, buffers, cache = attn_metadata.decode, attn_metadata.buffers, kv_c_and_k_pe_cache
        if not attn_metadata.plans or layer.layer_name in attn_metadata.leaders:
            attn_metadata.plans = self._plans(attn_metadata, cache.shape[1])
        room = torch.empty if len(attn_metadata.groups) == 1 else torch.zeros  # there may be padding behind several
        out = room(tokens, heads, VALUE_DIM, dtype=torch.bfloat16, device=cache.device)
        lse = room(tokens, heads, dtype=torch.float32, device=cache.device)
        for group, plan in zip(attn_metadata.groups, attn_metadata.plans, strict=True):

            def of(tensor: Tensor, group: Group = group) -> Tensor:
                return tensor[group.tokens].unflatten(0, (group.requests, group.queries))

            queries = tuple(of(part).bfloat16() for part in parts)
            mla_backend.dense_attention(
                queries if len(queries) == 2 else queries[0],
                cache,
                decode.block_table[group.rows],
                decode.seq_lens[group.rows],
                scale=self.scale,
                cache_scale=layer._k_scale_float if self.kv_cache_dtype.startswith("fp8") else 1.0,
                plan=plan,
                workspace=buffers.workspace,
                batch_invariant=buffers.batch_invariant,
                out=of(out),
                lse=of(lse).transpose(1, 2),
            )
        return out.to(parts[0].dtype), lse if self.dcp_world_size > 1 else None

    def _plans(self, metadata: DenseMLAMetadata, block_size: int) -> list[Tensor]:
        slots = metadata.decode.block_table.shape[1] * block_size
        alone = len(metadata.groups) == 1
        return [
            metadata.buffers.make_plan(metadata.decode.seq_lens[group.rows], group.queries, slots, alone=alone)
            for group in metadata.groups
        ]
