"""What the plugin needs of SGLang. A version that lacks any of it, or has other arguments there, is refused."""

import functools
import importlib
import logging
from typing import Any

from mla_backend import signatures
from mla_backend.tried_versions import SGLANG, installed_sglang, warn_of_untried, what_to_install

_BACKEND = "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnBackend"
_STEPS = "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnMultiStepBackend"
_FACTORY = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
_HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"
NEEDED: dict[str, tuple[str, ...] | None] = {
    # what the plugin calls or extends
    "sglang.srt.arg_groups.choices:ATTENTION_BACKEND_CHOICES": None,
    "sglang.srt.arg_groups.choices:add_attention_backend_choices": None,
    "sglang.srt.layers.attention.attention_registry:register_attention_backend": ("name",),
    f"{_HANDLERS}:AttentionBackendRegistry.register": ("backend_name", "handler_func"),
    f"{_HANDLERS}:handle_attention_dsa": ("attn", "forward_batch"),
    "sglang.srt.models.deepseek_common.utils:FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": None,
    "sglang.srt.plugins.hook_registry:HookRegistry.register": ("target", "hook", "hook_type", "source"),
    "sglang.srt.plugins.hook_registry:HookType.AROUND": None,
    "sglang.srt.configs.model_config:is_deepseek_dsa": ("config",),
    "sglang.srt.runtime_context:attention_backends": None,
    "sglang.srt.runtime_context:get_parallel": None,
    # what the plugin wraps
    f"{_FACTORY}._create_backend": ("backend_name", "backend_map", "error_template", "stamps_children"),
    f"{_FACTORY}._create_dsa_prefill_backend": (),
    # what it overrides
    f"{_BACKEND}.__init__": (
        "model_runner",
        "skip_prefill",
        "speculative_step_id",
        "topk",
        "speculative_num_steps",
        "seed_dsa_topk_from_draft_extend",
    ),
    f"{_BACKEND}.init_forward_metadata": ("forward_batch",),
    f"{_BACKEND}.init_forward_metadata_in_graph": ("forward_batch",),
    f"{_BACKEND}._forward_fa3": (
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
        "model_runner",
        "topk",
        "speculative_num_steps",
        "seed_dsa_topk_from_draft_extend",
    ),
}
"""By `module:name`, the arguments of each function, without self; None for what has none, or none that matter."""


def logger() -> logging.Logger:
    """A logger of SGLang's, so that its lines appear among SGLang's."""
    return logging.getLogger("sglang.mla_backend")


def missing() -> str | None:
    """Which part of SGLang that the plugin needs is missing or different, and what to do about it; None if none is."""
    engine, cause = f"SGLang {installed_sglang() or '(not installed)'}", None
    try:
        for where in NEEDED:
            _find(where)
        reason = signatures.change({where: known for where, known in NEEDED.items() if known is not None}, engine)
    except (ImportError, AttributeError) as error:
        reason, cause = str(error), error
    return reason and f"can't be used with {engine}: {reason}. {what_to_install('sglang', SGLANG, cause)}"


def _find(where: str) -> Any:
    module, _, path = where.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def warn_if_untried() -> None:
    """Warns that the plugin was never tried with this SGLang."""
    warn_of_untried(logger(), "SGLang", installed_sglang() or "unknown", SGLANG)
