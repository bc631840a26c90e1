"""DeepSeek-V4.1's own rows where vLLM would write V4's: 528 bytes in place of 584.

vLLM asks one function, which knows that FlashMLA reads them on sm_100 alone. By its answer vLLM sizes pages and writes
rows, on any GPU. Our attention reads both.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mla_backend.vllm_plugin import replacements, versions
from mla_backend.vllm_plugin.models import V41, v4_family

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION, NATIVE = "mla_v41_rows", "native"
"""In vLLM's --additional-config: `native`. By default rows are those that vLLM chooses for the GPU."""


def asked(vllm_config: "VllmConfig") -> Any:
    """What the user asked for; None where nothing."""
    return versions.additional_option(vllm_config, OPTION)


def why_not(vllm_config: "VllmConfig") -> str | None:
    """Why these rows can't be, asked for or vLLM's own choice, and what to do; None if they can."""
    from vllm.platforms import current_platform

    given, option = asked(vllm_config), f"{OPTION} in --additional-config"
    if given not in (None, NATIVE):
        return f"{option} must be {NATIVE}; got {given!r}."
    is_v41, capability = v4_family(vllm_config.model_config) is V41, current_platform.get_device_capability()
    if given and not is_v41:
        return f"{option} is for {V41.models}. Leave it out."
    anyway = is_v41 and capability is not None and capability.major == 10
    unknown = replacements.why_not(replacements.NATIVE_ROWS) if given or anyway else None
    if unknown is not None and anyway:
        return f"needs vllm 0.33 for {V41.models} on sm_100: {unknown}. Install that one."
    return unknown and f"{option} does not fit: {unknown}. Leave it out."


def install() -> None:
    """Makes vLLM write these rows. Each process that builds a model calls it, some more than once."""
    attention = importlib.import_module(replacements.V41_ATTENTION)
    theirs = attention._use_v41_mxfp8_kv_record
    if not replacements.is_ours(theirs):
        attention._use_v41_mxfp8_kv_record = replacements.instead_of(theirs, lambda: True)
