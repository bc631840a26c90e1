"""What the plugin needs of SGLang. A version that lacks any of it, or has other arguments there, is refused."""

import importlib
import inspect
import logging
from typing import Any

from mla_backend.tried_versions import SGLANG, installed_sglang, warn_of_untried, what_to_install

_BACKEND = "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnBackend"
_STEPS = "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnMultiStepBackend"
_FACTORY = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
_HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"
NEEDED: dict[str, tuple[str, ...]] = {
    # what the plugin calls or extends
    "sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES": (),
    "sglang.srt.arg_groups.choices:add_attention_backend_choices": (),
    "sglang.srt.layers.attention.attention_registry:register_attention_backend": ("name",),
    f"{_HANDLERS}:AttentionBackendRegistry.register": ("backend_name", "handler_func"),
    f"{_HANDLERS}:handle_attention_dsa": ("attn", "forward_batch"),
    "sglang.srt.models.deepseek_common.utils:FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": (),
    "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type", "source"),
    "sglang.srt.plugins.hook_registry:HookType.AROUND": (),
    "sglang.srt.configs.model_config:is_deepseek_dsa": ("config",),
    "sglang.srt.runtime_context:attention_backends": (),
    "sglang.srt.runtime_context:get_parallel": (),
    # what the plugin wraps
    f"{_FACTORY}._create_backend": ("self", "backend_name", "backend_map", "error_template", "stamps_children"),
    f"{_FACTORY}._create_dsa_prefill_backend": ("self",),
    # what it overrides
    f"{_BACKEND}.__init__": (
        "self",
        "model_runner",
        "skip_prefill",
        "speculative_step_id",
        "topk",
        "speculative_num_steps",
        "seed_dsa_topk_from_draft_extend",
    ),
    f"{_BACKEND}.init_forward_metadata": ("self", "forward_batch"),
    f"{_BACKEND}.init_forward_metadata_in_graph": ("self", "forward_batch"),
    f"{_BACKEND}._forward_fa3": (
        "self",
        "q_rope",
        "kv_cache",
        "v_head_dim",
        "q_nope",
        "page_table",
        "cache_seqlens",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "sm_scale",
        "logit_cap",
        "page_size",
    ),
    f"{_STEPS}.__init__": (
        "self",
        "model_runner",
        "topk",
        "speculative_num_steps",
        "seed_dsa_topk_from_draft_extend",
    ),
}
"""By `module:name`, the arguments of each function; nothing for what has none, or none that matter."""


def logger() -> logging.Logger:
    """A logger of SGLang's, so that its lines appear among SGLang's."""
    return logging.getLogger("sglang.mla_backend")


def missing() -> str | None:
    """Which part of SGLang that the plugin needs is missing or different, and what to do about it; None if none is."""
    for where, arguments in NEEDED.items():
        cause: Exception | None = None
        try:
            reason = _difference(where, arguments)
        except (ImportError, AttributeError) as error:
            reason, cause = str(error), error
        if reason is not None:
            version = installed_sglang() or "(not installed)"
            return f"can't be used with SGLang {version}: {reason}. {what_to_install('sglang', SGLANG, cause)}"
    return None


def _difference(where: str, arguments: tuple[str, ...]) -> str | None:
    module, path = where.split(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    if not arguments:
        return None
    given = tuple(name for name in inspect.signature(inspect.unwrap(found)).parameters if name != "cls")
    if given == arguments:
        return None
    return f"{path} in {module} must take ({', '.join(arguments)}); it takes ({', '.join(given)})"


def warn_if_untried() -> None:
    """Warns that the plugin was never tried with this SGLang."""
    warn_of_untried(logger(), "SGLang", installed_sglang() or "unknown", SGLANG)
