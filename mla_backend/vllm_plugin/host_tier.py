"""Rows that vLLM's HiSparse keeps on the host: whether it is on, and where on the GPU a step's tokens find theirs.

vLLM writes rows, mirrors them to the host and decides which ones stay. A layer asks its index group, which layers with
the same selection share:

- Decode attends to a pool that all layers share, of hot rows and of pages that are still there. The group brings what
  is missing, and says where each selected position is.
- So does prefill, if whole contexts are still on the GPU. Else the group gathers them for one layer at a time.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import mla_backend
from mla_backend import signatures
from mla_backend.vllm_plugin import versions
from mla_backend.vllm_plugin.models import has_v4_attention, v4_family

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from mla_backend.vllm_plugin.step import Room

KNOWN = {
    "vllm.v1.attention.backends.mla.index_group:SparseMLAIndexGroup._convert_once": (
        *("layer_index", "logical_topk_indices", "req_id_per_token", "block_table", "block_size"),
        *("block_stride_rows", "return_valid_counts", "idx_mapping"),
    ),
    "vllm.v1.attention.backends.mla.index_group:HiSparseMLAIndexGroup.physical_kv_cache": ("layer_index",),
    "vllm.v1.attention.backends.mla.index_group:HiSparseMLAIndexGroup.stage_prefill_rows": (
        *("layer_index", "kv_cache", "attn_metadata"),
    ),
    "vllm.v1.hisparse.runtime:check_hisparse_host_memory": ("pool_bytes",),
    "vllm.v1.hisparse.runtime:ResolvedHiSparseConfig.from_vllm_config": ("vllm_config", "model_top_k", "block_size"),
    "vllm.v1.hisparse.layout:get_hisparse_host_pool_bytes": ("vllm_config",),
}
"""What is used of vLLM, which had another HiSparse before 0.33."""
ONE_BLOCK = 2**31 - 1
"""With blocks so long a slot is a position of block 0."""
TABLE_ROOM = 200 << 10
"""Bytes of a processor's shared memory for vLLM's table and its lists of hot rows."""


def is_on(vllm_config: "VllmConfig") -> bool:
    attention = getattr(vllm_config, "attention_config", None)
    return getattr(attention, "hisparse_config", None) is not None


def why_not(vllm_config: "VllmConfig") -> str | None:
    """Why it can't be, and what to do; None if it can. vLLM itself refuses much before it asks this. What it would say
    after it has loaded weights, this says in its words before."""
    if not is_on(vllm_config):
        return None
    if has_v4_attention(vllm_config.model_config):
        family = v4_family(vllm_config.model_config)
        return f"vLLM keeps no rows of {family.models} on the host. Leave out HiSparseConnector."
    if vllm_config.cache_config.cache_dtype == versions.NVFP4:
        return "HiSparse of vLLM has no nvfp4_ds_mla rows. Use --kv-cache-dtype fp8, or leave out HiSparseConnector."
    if (change := signatures.change(KNOWN, "this vLLM")) is not None:
        return f"HiSparse of another vLLM is supported: {change}. Install vllm 0.33, or leave out HiSparseConnector."
    from vllm.v1.hisparse.layout import get_hisparse_host_pool_bytes
    from vllm.v1.hisparse.runtime import ResolvedHiSparseConfig, check_hisparse_host_memory

    text = vllm_config.model_config.hf_text_config
    pooled = getattr(text, "index_kpool", None) or 1  # GLM-5.3-Flash selects whole pools, in rows of a multiple of 128
    selected = text.index_topk if pooled == 1 else -(-(text.index_topk + pooled - 1) // 128) * 128
    try:
        ResolvedHiSparseConfig.from_vllm_config(vllm_config, selected)
        check_hisparse_host_memory(get_hisparse_host_pool_bytes(vllm_config))
    except ValueError as error:
        return str(error)
    return None


def widen_table(runtime: Any) -> None:
    """Halves the load of the hash table in which vLLM's kernel looks for rows, where a processor has room for it.

    It has an entry for each row that a request may select in a step, and one more. Once the context has left the GPU
    nearly all are taken, and each of the thousands of hot rows that weren't selected is compared with many. The kernel
    takes as many entries as there are hot rows, at most.
    """
    hot = runtime.region_stride
    rows = min(2 * runtime.max_union_rows, hot)
    if 8 * rows + 3 * hot <= TABLE_ROOM:  # bytes of an entry, and of a hot row in the lists
        runtime.max_union_rows = rows


class Place(NamedTuple):
    """Where some tokens of a step attend."""

    tokens: slice
    slots: Tensor
    """int32 `[tokens, topk]`; -1 is none."""
    rows: Tensor
    """A cache."""


class HostTier(NamedTuple):
    """A layer's part in its index group."""

    group: Any
    layer: int
    """Its number in the group."""
    gaps: bool
    """Whether valid positions may follow others, as those of unfinished pools do in GLM-5.3-Flash."""

    def places(
        self, picked: Tensor, cache: Tensor, metadata: Any, tokens: slice, room: "Room", known: bool
    ) -> Iterator[Place]:
        """Where a step's tokens attend.

        Args:
            picked: int32 `[T, topk]`, positions in the requests' sequences.
            cache: the layer's, on the host.
            tokens: which of the step's.
            room: where slots of staged rows are written.
            known: whether they are there.
        """
        step, decode, end = metadata.step, metadata.num_decode_tokens, tokens.stop
        in_pool = decode >= end or self.group.cache(self.layer).all_context_pages_resident
        middle = end if in_pool else max(decode, tokens.start)
        if tokens.start < middle:
            found, counts = self.group.convert_logical_to_physical_topk(
                self.layer, picked[:middle], metadata, block_stride_rows=None, return_valid_counts=True
            )
            pool = self.group.physical_kv_cache(self.layer).view(cache.dtype)
            if self.gaps:
                found = self._closed(found, counts)
            for part, _ in step.parts(middle, tokens.start):
                yield Place(part, found[part], pool)
        if middle < end:
            staged, table, requests = self.group.stage_prefill_rows(self.layer, cache, metadata)
            for part, _ in step.parts(end, middle):
                if not known:
                    mla_backend.convert_indices(
                        picked[part],
                        table,
                        requests[part.start - decode : part.stop - decode],
                        staged.shape[1],
                        compact=True,
                        slots=room.slots[part],
                        counts=room.counts[part],
                    )
                yield Place(part, room.slots[part], staged)

    def _closed(self, slots: Tensor, counts: Tensor) -> Tensor:
        """The same slots, valid ones first."""
        one_block = slots.new_zeros(1, 1)
        return mla_backend.convert_indices(slots, one_block, torch.zeros_like(counts), ONE_BLOCK, compact=True)[0]


def keep_plans(spans: list[slice] | None, metadata: Any) -> list[slice] | None:
    """Which tokens of a step attend sparsely, None for all. Steps with prefill say it, as they are never part of a
    captured graph: then all layers use the same plans, of decode and of prefill."""
    if spans is None and metadata.num_decode_tokens < metadata.num_actual_tokens:
        return [slice(0, metadata.num_actual_tokens)]
    return spans
