"""Index keys in MXFP4, for `indexer_kv_dtype` mxfp4. vLLM has them for DeepSeek-V4 on Blackwell alone. Here the cache
of keys of models like DeepSeek-V3.2 becomes 68 bytes a token, and our op writes it."""

import importlib
import sys
from typing import Any

import torch

from mla_backend.keys import KEY_FORMATS, write_keys
from mla_backend.vllm_plugin import replacements

KEYS = KEY_FORMATS["mxfp4_68"]
ARGUMENTS = "slot_mapping", "indexer_slot_mapping", "indexer_k_cache", "index_k_out"
"""What we ask of vLLM's fused kernel, whose others differ between versions."""


def asked(vllm_config: Any) -> bool:
    resolve = getattr(vllm_config.attention_config, "resolve_indexer_kv_dtype", None)  # 0.23 has none
    return resolve is not None and resolve("fp8") == "mxfp4"


def install() -> None:
    """Makes vLLM's models keep such keys where asked for, as a process may have several engines. Each process that
    builds a model calls it, some more than once."""
    from vllm.config import get_current_vllm_config

    cache = importlib.import_module("vllm.model_executor.models.deepseek_v2").DeepseekV32IndexerCache
    if replacements.is_ours(make_theirs := cache.__init__):
        return

    def make(self: Any, head_dim: int, *args: Any, **kwargs: Any) -> None:
        ours = head_dim == KEY_FORMATS["fp8"].width and asked(get_current_vllm_config())
        make_theirs(self, KEYS.width if ours else head_dim, *args, **kwargs)

    cache.__init__ = replacements.instead_of(make_theirs, make)
    builder = importlib.import_module("vllm.v1.attention.backends.mla.indexer")
    uses_fp4 = builder.dsa_indexer_uses_fp4
    # metadata are those of FP8 keys; it refuses Hopper
    builder.dsa_indexer_uses_fp4 = lambda vllm_config: not asked(vllm_config) and uses_fp4(vllm_config)
    if (model := sys.modules.get(replacements.V32_ATTENTION)) is not None:
        write_in(model)


def write_in(model: Any) -> None:
    """Has our op write the keys that the fused kernel of vLLM's DeepSeek-V3.2 would."""

    def keep_out(given: dict[str, Any]) -> dict[str, Any] | None:
        cache, keys = given["indexer_k_cache"], given["index_k"]
        if cache is None or cache.shape[-1] != KEYS.width:
            return None
        return {"indexer_k_cache": None, "index_k_out": torch.empty(keys.shape, dtype=keys.dtype, device=cache.device)}

    def write(given: dict[str, Any]) -> None:
        slots = given["slot_mapping"] if given["indexer_slot_mapping"] is None else given["indexer_slot_mapping"]
        write_keys(given["index_k_out"][: slots.numel()], given["indexer_k_cache"], slots.flatten())

    replacements.write_instead(model, "MXFP4 keys", {"index_k", *ARGUMENTS}, keep_out, write)
