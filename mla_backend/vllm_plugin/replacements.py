"""What the plugin replaces inside vLLM, where vLLM has no hook for it.

A function is known by its arguments, which are checked before ours takes its place. Where a version of vLLM changed
them, vLLM's stays: the log says so once, and `mla-backend doctor` lists all of them.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_backend import signatures, tried_versions
from mla_backend.vllm_plugin import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

V4_MODEL, V41_MODEL = (f"vllm.models.deepseek_{name}.nvidia.model" for name in ("v4", "v41"))
V32_ATTENTION, V41_ATTENTION = (f"vllm.models.deepseek_{name}.attention" for name in ("v32", "v41"))
INDEXER_BUILDER = "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder"
FUSED_Q = (
    *("positions", "q_pe", "q_pe_cos_sin_cache", "index_q", "index_q_cos_sin_cache", "ql_nope", "q_scale"),
    *("index_weights", "index_weights_softmax_scale", "index_weights_head_scale"),
    *("has_indexer", "index_rope_interleave", "quantize_mqa"),
)
"""The arguments of vLLM's function that rotates queries."""


class Replacement(NamedTuple):
    name: str
    functions: dict[str, tuple[str, ...]]
    """By where vLLM has a function, "module:name", the arguments that ours takes, without self or cls."""
    cost: str
    """What is lost without it."""
    on: str = "a GPU"
    before_0_32: bool = False
    """Whether vLLM has had these functions since before 0.32."""


CONFIG = Replacement(
    "checks of the configuration",
    {"vllm.platforms.interface:Platform.check_and_update_config": ("vllm_config",)},
    "neither backend can be used",
    on="any device",
    before_0_32=True,
)
ROTATE = Replacement(
    "rotate_queries",
    {f"{V32_ATTENTION}:fused_q": FUSED_Q},
    "vLLM's slower kernel rotates the queries of DeepSeek-V3.2 and GLM-5, half of what this backend gains or more",
)
SPLIT = Replacement(
    "dense prefill of the first tokens",
    {f"{versions.MLA_ATTENTION}:MLAAttention._use_sparse_mha": ("attn_metadata",)},
    "prompts longer than the top-k attend sparsely from their first token on, which is slower",
)


def _v4_layers(name: str, model: str, more: dict[str, tuple[str, ...]]) -> Replacement:
    layer = f"{model.removesuffix('model')}flashmla:DeepseekV4FlashMLAAttention"
    functions = {"forward_mqa": ("q", "kv", "positions", "output"), "get_padded_num_q_heads": ("num_heads",)}
    known = more | {f"{model}:_select_dsv4_attn_cls": ("vllm_config",)}
    known |= {f"{layer}.{function}": arguments for function, arguments in functions.items()}
    return Replacement(f"layers of {name}", known, f"SPARSE_MLA refuses {name}")


V4 = _v4_layers("DeepSeek-V4", V4_MODEL, {})
SHARED_CACHE = f"{V41_ATTENTION}:DeepseekV4Attention._compressed_kv_cache"
V41 = _v4_layers("DeepSeek-V4.1", V41_MODEL, {SHARED_CACHE: ()})
NATIVE_ROWS = Replacement(
    "native rows of DeepSeek-V4.1",
    {
        f"{V41_ATTENTION}:_use_v41_mxfp8_kv_record": (),
        "vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache:rope_quant_insert": (
            *("latent", "positions", "cos_sin_cache", "kv_cache", "slot_mapping", "compress_ratio", "fp8_scale"),
        ),
        # vLLM 0.32 puts the scales of a block's rows behind them
        "vllm.v1.attention.backends.mla.sparse_swa:DeepseekV4SWACache.__init__": (
            *("head_dim", "window_size", "dtype", "prefix", "cache_config", "backend_cls", "block_size"),
            *("packed_bytes_per_token", "packed_page_alignment", "packed_block_stride_alignment", "bounded_replay"),
        ),
    },
    "mla_v41_rows is refused; Hopper's rows have 584 bytes in place of 528",
)
QUANTISE = "per_token_group_quant_fp8"
CPU_INDEXER = Replacement(
    "indexer on a CPU",
    {
        "vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache.get_attn_backend": (),
        **dict.fromkeys(
            ("vllm.model_executor.models.deepseek_v2:" + QUANTISE, "vllm.models.hy_v4.nvidia.attention:" + QUANTISE),
            ("x", "group_size", "eps", "dtype", "column_major_scales", "tma_aligned_scales", "out_q", "use_ue8m0"),
        ),
    },
    "SPARSE_MLA refuses to run on a CPU",
    on="a CPU",
)
_INDEXER = {
    f"{V32_ATTENTION}:sparse_attn_indexer": (
        *("hidden_states", "k_cache_prefix", "kv_cache", "q_quant", "q_scale", "k", "weights", "quant_block_size"),
        *("scale_fmt", "topk_tokens", "head_dim", "max_model_len", "total_seq_lens", "topk_indices_buffer"),
        *("skip_k_cache_insert", "use_pcp", "pcp_shard_decode_requests", "dense_mha_metadata_layer_name"),
        *("use_fp4_cache", "dcp_rank", "dcp_world_size", "cp_kv_cache_interleave_size", "skip_topk_buffer_clear"),
        *("candidate_blocks", "candidate_block_size", "candidate_write", "topk_backend"),
    ),
    f"{INDEXER_BUILDER}.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
    f"{INDEXER_BUILDER}.update_draft_decode_metadata": ("metadata",),
}
SELECT = Replacement(
    "select_tokens",
    _INDEXER
    | {
        "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.forward_cuda": (
            *("hidden_states", "q_quant", "k", "weights"),
        ),
    },
    "mla_selection is refused; DeepGEMM's scores and vLLM's top-k select",
)
CANDIDATES = Replacement(
    "candidates of select_tokens",
    {
        "vllm.model_executor.layers.sparse_attn_indexer:SparseAttnIndexer.__init__": (
            *("k_cache", "quant_block_size", "scale_fmt", "topk_tokens", "head_dim", "max_model_len"),
            *("max_total_seq_len", "topk_indices_buffer", "skip_k_cache_insert", "use_fp4_cache", "compress_ratio"),
            *("candidate_blocks", "candidate_block_size", "candidate_write"),
        ),
        "vllm.model_executor.kernels.attention.dsa.candidate_blocks:select_candidate_blocks": (
            *("logits", "row_ks", "row_ke", "topk_blocks", "block_size", "out", "row_repeat"),
        ),
    },
    "mla_selection is refused for DeepSeek-V4.1, whose layers all score whole contexts",
)
SHARE = Replacement(
    "shared selection",
    _INDEXER
    | {
        f"{INDEXER_BUILDER}._split_indexer_prefill_chunks": (
            *("compressed_seq_lens_cpu", "prefill_query_lens_cpu", "workspace_size", "max_logits_bytes"),
            "request_offset",
        ),
    },
    "mla_shared_selection is refused; each tensor-parallel GPU selects for all tokens",
)
MXFP4_KEYS = Replacement(
    "MXFP4 keys",
    {
        "vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache.__init__": (
            *("head_dim", "dtype", "prefix", "cache_config"),
        ),
        "vllm.v1.attention.backends.mla.indexer:dsa_indexer_uses_fp4": ("vllm_config",),
    },
    "indexer_kv_dtype mxfp4 is vLLM's own, which needs Blackwell",
    on="any device",
)
ALL = (CONFIG, ROTATE, SPLIT, V4, V41, NATIVE_ROWS, SELECT, CANDIDATES, SHARE, MXFP4_KEYS, CPU_INDEXER)


def why_not(replacement: Replacement) -> str | None:
    """Why a replacement doesn't fit this vLLM; None if it does."""
    _, version = tried_versions.installed_vllm() or ("", "unknown")
    if _is_too_new(replacement):
        return f"vLLM {version} is older than 0.32"
    return signatures.change(replacement.functions, f"vLLM {version}")


def missing(replacement: Replacement) -> str | None:
    """Why a replacement that the plugin can't do without doesn't fit, and what to do about it; None if it does."""
    why = why_not(replacement)
    return why and f"{why}. {tried_versions.what_to_install('vllm', tried_versions.VLLM)}"


def warn(asked: Iterable[Replacement]) -> None:
    """Says in the log which of these are not in use though this vLLM should have them, one line each. Once: not again
    in processes that this one starts."""
    for each in asked:
        why = None if _is_too_new(each) else why_not(each)
        if why is not None and tried_versions.is_first(each.name, why):
            versions.logger().warning("mla-backend: %s is not in use, as %s: %s.", each.name, why, each.cost)


def _is_too_new(replacement: Replacement) -> bool:
    return not (replacement.before_0_32 or versions.since_0_32())


def report(on_cpu: bool, blackwell: bool) -> list[dict[str, Any]]:
    """What `mla-backend doctor` says of them all."""
    found = []
    for each in ALL:
        why = why_not(each)
        if each.on not in ("any device", "a CPU" if on_cpu else "a GPU"):
            why = f"it is for {each.on}"
        elif each is ROTATE and blackwell:
            why = "vLLM has a faster kernel for Blackwell"
        elif why is not None:
            why = f"{why}: {each.cost}"
        elif each in (SELECT, CANDIDATES):
            why = "DeepGEMM is faster; mla_selection turns it on"
        elif each is NATIVE_ROWS:
            why = "mla_v41_rows turns it on"
        elif each is MXFP4_KEYS:
            why = "indexer_kv_dtype turns it on"
        elif each is SHARE:
            why = "it is new; mla_shared_selection turns it on"
        found.append({"name": each.name, "in_use": why is None, "why": why})
    return found


# --- functions of vLLM ------------------------------------------------------------------------------------------------


def instead_of(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Our function, which keeps the name and the signature of vLLM's that it takes the place of."""
    ours = functools.wraps(theirs)(ours)
    ours.of_mla_backend = True
    return ours


def by_name(theirs: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """A function of the arguments of a call that returns them by name, with vLLM's defaults."""
    parameters = inspect.signature(theirs).parameters
    defaults = {name: it.default for name, it in parameters.items() if it.default is not it.empty}
    return lambda *args, **kwargs: defaults | dict(zip(parameters, args, strict=False)) | kwargs


def write_instead(
    model: Any,
    what: str,
    needed: set[str],
    keep_out: Callable[[dict[str, Any]], dict[str, Any] | None],
    write: Callable[[dict[str, Any]], None],
) -> None:
    """Has `write` write what the fused kernel of vLLM's DeepSeek-V3.2 would. `keep_out` returns the arguments that keep
    the kernel from it, or None where it is to write. Once for each `what`. Raises ValueError if the kernel has not all
    arguments that are needed."""
    theirs = model.fused_norm_rope
    written = getattr(theirs, "written_by_us", frozenset())
    if what in written:
        return
    if missing := needed - inspect.signature(theirs).parameters.keys():
        raise ValueError(
            f"fused_norm_rope of this vLLM has no {', '.join(sorted(missing))}, so no {what} can be written"
        )
    named = by_name(theirs)

    def fused_norm_rope(*args: Any, **kwargs: Any) -> Any:
        given = named(*args, **kwargs)
        if (others := keep_out(given)) is None:
            return theirs(*args, **kwargs)
        q = theirs(**given | others)
        write(given | {name: other for name, other in others.items() if other is not None})
        return q

    model.fused_norm_rope = instead_of(theirs, fused_norm_rope)
    model.fused_norm_rope.written_by_us = written | {what}


def is_ours(function: Any) -> bool:
    return getattr(function, "of_mla_backend", False)


# --- what takes their place -------------------------------------------------------------------------------------------


def call_with_config(settle: Callable[["VllmConfig"], None]) -> None:
    """Makes vLLM call a function on every configuration that it has completed.

    vLLM offers backends no hook for that. Without one, `--kv-cache-dtype fp8` means something else for a backend that
    vLLM doesn't know, and what isn't supported fails late or without a reason. vLLM asks its platform to check every
    configuration, so the platform in use is made to pass it on.
    """
    from vllm.platforms import current_platform

    platform = type(current_platform)
    if is_ours(platform.check_and_update_config):
        return
    inherited = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: "VllmConfig") -> None:
        inherited(cls, vllm_config)
        settle(vllm_config)

    ours = instead_of(inherited, check_and_update_config)
    platform.check_and_update_config = classmethod(ours)


def split_prompts_if_possible(vllm_config: "VllmConfig") -> bool:
    """Has vLLM's layers give a step's prefill to `forward_mha` where its metadata say that a part of it is `dense`, too
    (0.32 on); returns whether they will. They have no other way to learn that: `use_dense_mha` would keep the indexer
    from selecting."""
    layer, attention = importlib.import_module(versions.MLA_ATTENTION).MLAAttention, vllm_config.attention_config
    if why_not(SPLIT) is not None:
        return False
    if attention.sparse_mla_force_mqa:
        return False
    inherited = layer._use_sparse_mha
    if not is_ours(inherited):

        def use_sparse_mha(self: Any, attn_metadata: Any) -> bool:
            return bool(getattr(attn_metadata, "dense", ())) or inherited(self, attn_metadata)

        layer._use_sparse_mha = instead_of(inherited, use_sparse_mha)
    return True


def rotate_queries_if_possible() -> None:
    """Called by each layer: has vLLM's model of DeepSeek-V3.2 rotate the queries of layers with an indexer with our op
    (0.32 on). vLLM's kernel for GPUs before Blackwell runs three blocks for each token and head of the indexer, and
    most of them find nothing to do."""
    import torch
    from vllm.platforms import current_platform

    from mla_backend.index import rotate_queries

    model = sys.modules.get(V32_ATTENTION)
    if model is None or current_platform.has_device_capability(100) or why_not(ROTATE):
        return
    inherited = model.fused_q
    if is_ours(inherited):
        return
    named = by_name(inherited)

    def fused_q(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        given = named(*args, **kwargs)
        queries, index_queries = given["q_pe"], given["index_q"]
        ours = given["has_indexer"] and not given["quantize_mqa"] and queries.dtype == torch.bfloat16
        if not ours or (queries.shape[-1], index_queries.shape[-1]) != (64, 128):
            return inherited(*args, **kwargs)
        rotated, index_rotated, weights = rotate_queries(
            queries,
            index_queries,
            given["index_weights"],
            given["positions"],
            given["q_pe_cos_sin_cache"],
            given["index_q_cos_sin_cache"],
            given["index_weights_softmax_scale"] * given["index_weights_head_scale"],
            interleaved=bool(given["index_rope_interleave"]),
        )
        return index_rotated, weights, rotated

    model.fused_q = instead_of(inherited, fused_q)


def write_nvfp4_rows() -> None:
    """Called by each layer with such rows: has our op write them in vLLM's model of DeepSeek-V3.2, whose own kernel has
    an instruction of Blackwell's for that."""
    from mla_backend.cache import cache_write

    def keep_out(given: dict[str, Any]) -> dict[str, Any] | None:
        if given["mla_kv_cache"] is None or given["mla_kv_cache_dtype"] != versions.NVFP4:
            return None
        return {"mla_kv_cache": None, "mla_kv_cache_dtype": "auto"}

    def write(given: dict[str, Any]) -> None:
        slots = given["slot_mapping"].flatten()
        cache_write(given["kv_c_out"][: len(slots)], given["k_pe_out"][: len(slots)], given["mla_kv_cache"], slots)

    if (model := sys.modules.get(V32_ATTENTION)) is not None:
        needed = {"slot_mapping", "mla_kv_cache", "mla_kv_cache_dtype", "kv_c_out", "k_pe_out"}
        write_instead(model, "nvfp4_ds_mla rows", needed, keep_out, write)
