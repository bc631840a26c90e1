"""Everything that differs between the versions of vLLM. Nothing else in the plugin looks at a version.

The plugin was tried with the versions in `tried_versions.VLLM`:
- 0.23: a backend can't add its own name to vLLM's list. Sparse layers have a class of their own. Each backend defines
  its metadata.
- 0.32: names can be added. Sparse layers and their metadata have a common base, which can also run short prefills as
  dense attention. A backend says how it wants its blocks laid out.
- 0.33: as 0.32, with one more argument of cache updates.
"""

import importlib
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from mla_backend import signatures, tried_versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SPARSE, DENSE = "SPARSE_MLA", "DENSE_MLA"
NVFP4 = "nvfp4_ds_mla"  # what vLLM calls nvfp4_352 rows
CLASS_PATHS = {
    SPARSE: "mla_backend.vllm_plugin.backend.SparseMLABackend",
    DENSE: "mla_backend.vllm_plugin.dense_backend.DenseMLABackend",
}
"""Our backends' names and classes. vLLM asks a class whether it is sparse before it knows the layer, so dense and
sparse attention can't share one."""
GPU_BLOCK_SIZE = 64
"""Tokens in a block of the cache, as the indexer of vLLM's GPU builds requires."""
_COMMON_BASES = "vllm.model_executor.layers.attention.sparse_mla_attention"
_SCRATCH = "vllm.v1.worker.workspace"
MLA_ATTENTION = "vllm.model_executor.layers.attention.mla_attention"


def logger() -> logging.Logger:
    """A logger of vLLM's, so that its lines appear among vLLM's."""
    from vllm.logger import init_logger

    return init_logger("vllm.mla_backend")


def missing() -> str | None:
    """Which interface that the plugin needs is missing in this vLLM, and what to do about it; None if none is."""
    return _first_missing(
        {
            "vllm.v1.attention.backend": ("AttentionBackend", "AttentionMetadataBuilder", "AttentionCGSupport"),
            "vllm.v1.attention.backends.registry": ("AttentionBackendEnum", "register_backend"),
        }
    )


def missing_bases(name: str) -> str | None:
    """The same for the bases of a backend's classes. Imports vLLM's layers."""
    if name == DENSE:
        names = "MLACommonBackend", "MLACommonImpl", "MLACommonMetadata", "MLACommonMetadataBuilder", "QueryLenSupport"
        return _first_missing({MLA_ATTENTION: names})
    if not since_0_32():
        return _first_missing({"vllm.v1.attention.backend": ("SparseMLAAttentionImpl",)})
    names = {"SparseMLACommonImpl", "SparseMLACommonMetadata", "SparseMLACommonMetadataBuilder._build_req_id_per_token"}
    return _first_missing({_COMMON_BASES: tuple(sorted(names))})


def _first_missing(needed: dict[str, tuple[str, ...]]) -> str | None:
    for module, names in needed.items():
        cause: Exception | None = None
        try:
            found = importlib.import_module(module)
            lacking = [name for name in names if not _has(found, name)]
        except ImportError as error:
            lacking, cause = [str(error)], error
        if lacking:
            _, version = tried_versions.installed_vllm() or ("", "unknown")
            return (
                f"mla-backend can't be used with vLLM {version}: {module} lacks {', '.join(lacking)}. "
                f"{tried_versions.what_to_install('vllm', tried_versions.VLLM, cause)}"
            )
    return None


def _has(found: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def warn_if_untried(on_cpu: bool) -> None:
    """Warns that the plugin was never tried with this vLLM."""
    _, version = tried_versions.installed_vllm() or ("", "unknown")
    tried, where = (tried_versions.VLLM_CPU, " on a CPU") if on_cpu else (tried_versions.VLLM, "")
    tried_versions.warn_of_untried(logger(), "vLLM", version, tried, where)


def since_0_32() -> bool:
    """Whether this is 0.32 or later, as the common base of sparse layers shows. From then on at the latest the indexer
    can select among tokens that are spread over several devices, and sleep mode gives a backend's buffers back as they
    were."""
    return _has_module(_COMMON_BASES)


def _has_module(name: str) -> bool:
    """Looks without importing."""
    return signatures.source_of(name) is not None


# --- the names --------------------------------------------------------------------------------------------------------


def add_backends() -> None:
    """Adds our backends' names to vLLM's list."""
    for name in CLASS_PATHS:
        add_backend(name)


def add_backend(name: str) -> Enum:
    """Adds a backend's name to vLLM's list, unless it is there already; returns its member of the list."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if name in AttentionBackendEnum.__members__:
        return AttentionBackendEnum[name]
    path = CLASS_PATHS[name]
    if hasattr(AttentionBackendEnum, "register"):
        register_backend(name, path)
    else:
        # 0.23 takes one outside backend, under the name CUSTOM. Our own names are added by hand, so that the same flags
        # work with every version.
        if name == SPARSE and not AttentionBackendEnum.CUSTOM.is_overridden():
            register_backend(AttentionBackendEnum.CUSTOM, path)
        _add_member(AttentionBackendEnum, name, path)
    member = AttentionBackendEnum[name]
    # Worker processes unpickle a config that names the backend before they load plugins. By default a member is looked
    # up by its value, which has not been added at that point.
    member.__reduce_ex__ = lambda protocol: (add_backend, (name,))
    return member


def _add_member(enum: type[Enum], name: str, value: str) -> None:
    member = object.__new__(enum)
    member._name_, member._value_, member._sort_order_ = name, value, len(enum.__members__)
    member.__objclass__ = enum
    setattr(enum, name, member)
    enum._member_names_.append(name)
    enum._member_map_[name] = member
    enum._value2member_map_[value] = member


def ours(backend: Enum | None) -> str | None:
    """Which of our backends a member of vLLM's list of backends is; None for all others."""
    if backend is None or backend.name in CLASS_PATHS:
        return backend and backend.name
    try:
        path = backend.get_path()
    except ValueError:  # some of vLLM's names have no class of their own
        return None
    return next((name for name, own_path in CLASS_PATHS.items() if path == own_path), None)


# --- the configuration ------------------------------------------------------------------------------------------------


def additional_option(vllm_config: "VllmConfig", name: str, default: Any = None) -> Any:
    """What --additional-config says of an option of this package."""
    options = getattr(vllm_config, "additional_config", None)
    return options.get(name, default) if isinstance(options, dict) else default


def captured_tokens(vllm_config: "VllmConfig") -> int:
    """The largest number of tokens of a step that runs as a CUDA graph."""
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes
    return max(sizes, default=0) if sizes else 0


def lengths_on_host(common: Any) -> Any:
    """The length of each request, or more, without waiting for the device; None before 0.32."""
    return getattr(common, "seq_lens_cpu_upper_bound", None)


def shared_memory(*specs: tuple[tuple[int, ...], Any], device: Any) -> list[Any]:
    """Tensors of the given shapes and dtypes in the scratch memory that vLLM's layers share, which it counts before it
    sizes the cache. Where this vLLM has none, they are allocated."""
    import torch

    if _has_module(_SCRATCH):
        scratch = importlib.import_module(_SCRATCH)
        if scratch.is_workspace_manager_initialized():
            return scratch.current_workspace_manager().get_simultaneous(*specs)
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]


def find_requests(starts: Any, requests: Any, tokens: int) -> None:
    """Writes each token's request, as vLLM has it, in a captured graph too (0.33)."""
    from vllm.v1.attention.ops.metadata import compute_token_to_req_indices

    compute_token_to_req_indices(starts, requests, tokens, tokens)


def register_warmup() -> None:
    """Called by each layer: has vLLM compile its indexer's Triton kernels before the first request, as it does for
    backends that it knows by name (0.33)."""
    from vllm.config import get_current_vllm_config

    if getattr(get_current_vllm_config().kernel_config, "enable_jit_warmup", False):
        indexer = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
        for name in ("_PREPARE_UNIFORM_DECODE_KERNEL", "_BUILD_PREFILL_CHUNK_METADATA_KERNEL"):
            if (kernel := getattr(indexer, name, None)) is not None:
                kernel.register_warmup()


# --- the bases of the backend's classes -------------------------------------------------------------------------------


def block_sizes(on_cpu: bool) -> list[Any]:
    """Tokens in a block of the cache. Our kernels take any number; the indexer of vLLM's GPU builds doesn't."""
    from vllm.v1.attention.backend import MultipleOf

    if on_cpu:
        return [MultipleOf(1)]
    return [MultipleOf(GPU_BLOCK_SIZE)] if since_0_32() else [GPU_BLOCK_SIZE]


def bases() -> tuple[type, type, type]:
    """The base classes of the backend's metadata, metadata builder and layer.

    The metadata has num_actual_tokens, block_table and block_size; from 0.32 on also num_decode_tokens and prefill.
    The builder asks `_build_req_id_per_token` for the row of the block table that each token belongs to. The layer
    has scale and topk_indices_buffer, into which the indexer writes.
    """
    if not since_0_32():
        return _bases_before_0_32()
    common = importlib.import_module(_COMMON_BASES)
    return common.SparseMLACommonMetadata, common.SparseMLACommonMetadataBuilder, common.SparseMLACommonImpl


def _bases_before_0_32() -> tuple[type, type, type]:
    from dataclasses import dataclass

    from torch import Tensor
    from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, SparseMLAAttentionImpl

    @dataclass(kw_only=True)
    class Metadata(AttentionMetadata):
        num_reqs: int
        max_query_len: int
        max_seq_len: int
        num_actual_tokens: int
        query_start_loc: Tensor
        slot_mapping: Tensor
        block_table: Tensor
        req_id_per_token: Tensor
        block_size: int
        cp_kv_cache_interleave_size: int
        prefill: None = None

    class Builder(AttentionMetadataBuilder):
        metadata_cls: type

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            batch = common_attn_metadata
            return self.metadata_cls(
                num_reqs=batch.num_reqs,
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
                num_actual_tokens=batch.num_actual_tokens,
                query_start_loc=batch.query_start_loc,
                slot_mapping=batch.slot_mapping,
                block_table=batch.block_table_tensor,
                req_id_per_token=self._build_req_id_per_token(batch),
                block_size=self.kv_cache_spec.block_size,
                cp_kv_cache_interleave_size=self.vllm_config.parallel_config.cp_kv_cache_interleave_size,
            )

    class Layer(SparseMLAAttentionImpl):
        def __init__(  # the arguments that vLLM gives every backend
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int,
            alibi_slopes: list[float] | None,
            sliding_window: int | None,
            kv_cache_dtype: str,
            logits_soft_cap: float | None,
            attn_type: str,
            kv_sharing_target_layer_name: str | None,
            *,
            indexer: Any = None,
            topk_indices_buffer: Tensor | None = None,
            **mla_args: Any,
        ) -> None:
            self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
            self.num_kv_heads, self.kv_cache_dtype = num_kv_heads, kv_cache_dtype
            self._indexer, self._topk_indices_buffer = indexer, topk_indices_buffer

        @property
        def topk_indices_buffer(self) -> Tensor | None:
            # looked up each time: a draft model's indexer gets the main model's buffer after this layer was made
            return self._topk_indices_buffer if self._indexer is None else self._indexer.topk_indices_buffer

        def record_logical_topk_ready(self) -> None:
            """Called when the indexer has written; there is nothing to prepare."""

    return Metadata, Builder, Layer
