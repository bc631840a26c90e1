"""The indexer of DeepSeek sparse attention on a GPU, with our `select_tokens` in place of DeepGEMM and vLLM's top-k.

vLLM's model computes queries, keys and weights, and writes the keys. What the tokens of a step see is computed once,
with vLLM's own metadata, into buffers that stay where they are: CUDA graphs read them.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import sparse_attn_indexer as indexer
from vllm.models.deepseek_v32 import attention as deepseek_v32
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

from mla_backend.index import MAX_WORKSPACE
from mla_backend.keys import write_keys
from mla_backend.vllm_plugin import mxfp4_keys, versions
from mla_backend.vllm_plugin.replacements import by_name, instead_of
from mla_backend.vllm_plugin.selection import OP, order, seen_by_tokens, select_into


def install(share: Callable[..., Any] | None = None) -> None:
    """Makes vLLM's models use this indexer, each function as `share` returns it. Each process that builds a model calls
    it, some more than once."""
    if "SparseAttnIndexer" in op_registry_oot:
        return
    direct_register_custom_op(
        op_name=OP.partition("::")[2],
        op_func=share(select) if share else select,
        mutates_args=["topk_indices_buffer"],
        fake_impl=lambda *args: None,
    )
    indexer.SparseAttnIndexer.register_oot(name="SparseAttnIndexer")(GpuIndexer)
    indexer.has_deep_gemm = lambda: True  # vLLM's class refuses to be made without it
    ours = in_place_of(deepseek_v32.sparse_attn_indexer)
    deepseek_v32.sparse_attn_indexer = share(ours) if share else ours  # called by its name there
    add_tokens_to_metadata_of(DeepseekV32IndexerMetadataBuilder)


def add_tokens_to_metadata_of(builder: type) -> None:
    """Has the metadata that it builds say of each token what it sees."""
    build_theirs, update_theirs = builder.build, builder.update_draft_decode_metadata

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata = build_theirs(self, common_prefix_len, common_attn_metadata, fast_build)
        add_tokens(self, metadata, common_attn_metadata)
        return metadata

    def update_draft_decode_metadata(self: Any, metadata: Any) -> None:
        update_theirs(self, metadata)
        if metadata.decode is not None:  # a token per request, whose lengths have grown
            metadata.lengths.copy_(metadata.decode.seq_lens.reshape(-1)[: len(metadata.lengths)])

    builder.build = instead_of(build_theirs, build)
    builder.update_draft_decode_metadata = instead_of(update_theirs, update_draft_decode_metadata)


def add_tokens(builder: Any, metadata: Any, common: Any) -> None:
    if not hasattr(builder, "seen"):
        room = builder.arange_buffer
        with torch.inference_mode(False):  # else it could be written in that mode alone
            builder.seen = torch.empty(2, len(room), dtype=torch.int32, device=room.device)
    tokens = builder.arange_buffer[: common.num_actual_tokens]
    starts, seq_lens = common.query_start_loc, common.seq_lens
    found = seen_by_tokens(starts, seq_lens, tokens, builder.compress_ratio, builder.seen)
    metadata.requests, metadata.lengths = found


@eager_break_during_capture
def select(
    hidden_states: Tensor,
    k_cache_prefix: LayerNameType,
    kv_cache: Tensor,
    q_quant: Tensor,
    k: Tensor | None,
    weights: Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    topk_indices_buffer: Tensor,
    dense_mha_metadata_layer_name: LayerNameType,
    candidate_blocks: Tensor | None = None,
    candidate_block_size: int = 0,
) -> None:
    """Writes the keys k, unless they are None, and selects into the buffer. Arguments are those of vLLM's function."""
    context = get_forward_context()
    batches = context.attn_metadata
    workspace = None
    if q_quant.is_cuda:
        (workspace,) = versions.shared_memory(((MAX_WORKSPACE,), torch.uint8), device=q_quant.device)
    if not isinstance(batches, dict):  # a run that measures memory
        return
    batch = batches[_resolve_layer_name(k_cache_prefix)]
    if k is not None:
        insert(k, kv_cache, batch.slot_mapping, quant_block_size, scale_fmt)
    if is_dense(context, _resolve_layer_name(dense_mha_metadata_layer_name)):
        return
    what = q_quant, weights, kv_cache, batch.block_table, batch.requests, batch.lengths
    candidates = None if candidate_blocks is None else (candidate_blocks, candidate_block_size)
    given = dict(workspace=workspace, candidates=candidates)
    select_into(topk_indices_buffer, len(hidden_states), topk_tokens, *what, **given)


def insert(keys: Tensor, cache: Tensor, slots: Tensor, quant_block_size: int, scale_fmt: str | None) -> None:
    """Writes keys. A graph's padding has no slots."""
    if cache.shape[-1] == mxfp4_keys.KEYS.width:
        write_keys(keys[: len(slots)], cache, slots)
    else:
        _custom_ops.indexer_k_quant_and_cache(keys[: len(slots)], cache, slots, quant_block_size, scale_fmt)


def is_dense(context: Any, layer: str) -> bool:
    """Whether no token of a step attends to what is selected, by vLLM's own rule."""
    if not layer or context.cudagraph_runtime_mode == CUDAGraphMode.FULL:
        return False
    step = context.attn_metadata.get(layer)
    dense = getattr(getattr(step, "prefill", None), "use_dense_mha", False) and step.num_decode_tokens == 0
    return dense and not torch.cuda.is_current_stream_capturing()


def in_place_of(theirs: Any) -> Any:
    """vLLM's function of an indexer, with our selection."""
    arguments, ours = by_name(theirs), tuple(inspect.signature(select).parameters)

    def sparse_attn_indexer(*args: Any, **kwargs: Any) -> Tensor:
        given = arguments(*args, **kwargs)
        if given["skip_k_cache_insert"]:
            given["k"] = None
        select(*(given[name] for name in ours))
        return given["topk_indices_buffer"]

    return instead_of(theirs, sparse_attn_indexer)


class GpuIndexer(indexer.SparseAttnIndexer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.use_fp4_cache:
            raise ValueError("mla_selection: has no FP4 queries. Leave it out.")

    def forward_cuda(self, hidden_states: Tensor, q_quant: Tensor, k: Tensor | None, weights: Tensor) -> Tensor:
        if self.candidate_write:  # whose blocks follow from all scores, which ours doesn't keep
            super().forward_cuda(hidden_states, q_quant, k, weights)
            if self.candidate_blocks is not None:
                order(self.candidate_blocks[: len(hidden_states)])
            return self.topk_indices_buffer
        getattr(torch.ops.vllm, OP.partition("::")[2])(
            hidden_states,
            _encode_layer_name(self.k_cache.prefix),
            self.k_cache.kv_cache,
            q_quant,
            None if self.skip_k_cache_insert else k,
            weights,
            self.quant_block_size,
            self.scale_fmt,
            self.topk_tokens,
            self.topk_indices_buffer,
            _encode_layer_name(self.dense_mha_metadata_layer_name),
            self.candidate_blocks,
            self.candidate_block_size,
        )
        return self.topk_indices_buffer
