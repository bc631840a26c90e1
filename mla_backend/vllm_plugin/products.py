"""How cached rows are multiplied, as the user asks: `products` of our ops."""

from typing import Any

from mla_backend.formats import FORMATS
from mla_backend.plan import PRODUCTS
from mla_backend.vllm_plugin import versions

OPTION = "mla_products"
"""In vLLM's --additional-config: `exact`, the default, or `fp8` for FP8 rows."""


def asked(vllm_config: Any) -> Any:
    """What the user asked for."""
    return versions.additional_option(vllm_config, OPTION, "exact")


def of_rows(vllm_config: Any, cache_format: str) -> str:
    """Those of layers whose rows have this format; --kv-cache-dtype-skip-layers gives some layers 16-bit ones."""
    return asked(vllm_config) if FORMATS[cache_format].fp8 else "exact"


def why_not(vllm_config: Any, fp8_rows: bool) -> str | None:
    """Why what is asked for can't be, and what to do; None if it can."""
    given, option = asked(vllm_config), f"{OPTION} in --additional-config"
    if given not in PRODUCTS:
        return f"{option} must be one of {', '.join(PRODUCTS)}; got {given!r}."
    if given == "fp8" and not fp8_rows:
        return f"{option} is for FP8 rows, as others have one way. Use --kv-cache-dtype fp8, or leave it out."
    return None
