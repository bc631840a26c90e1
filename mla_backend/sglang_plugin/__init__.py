"""The plugin for SGLang: `sglang serve --model-path MODEL --attention-backend sparse_mla`.

SGLang finds the function here through the package's entry points and calls it once in each of its processes. Nothing
here imports SGLang before SGLang calls it. docs/sglang.md tells how to serve with it.

    versions.py  what the plugin needs of SGLang, checked before anything is registered
    backend.py   the attention backend, and the one that drafts use
    selection.py `select_tokens` in place of the indexer's scores and top-k
"""

import os
from typing import Any

NAME = "sparse_mla"
"""What `--attention-backend` calls it."""
PRODUCTS_VARIABLE = "MLA_PRODUCTS"
"""How FP8 rows are multiplied: `exact`, the default, or `fp8`; see `products` of `mla_backend.sparse_attention`."""
_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Entry point `sglang.srt.plugins`: adds the backend to SGLang's lists. It is used only where asked for."""
    from mla_backend.sglang_plugin import selection, versions

    missing = versions.missing() or _wrong_products()
    if missing is not None:
        versions.logger().error("mla-backend: %s", missing)
        return
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in choices.ATTENTION_BACKEND_CHOICES:
        return
    versions.warn_if_untried()
    choices.add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_new_backend)
    # The model looks its backend's name up in these two, to know which form of attention to run.
    handler = attention_backend_handler.AttentionBackendRegistry
    handler.register(NAME, attention_backend_handler.handle_attention_dsa)
    utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(NAME)
    HookRegistry.register(_FACTORY, _with_our_draft_backend, HookType.AROUND)
    selection.install()


def products() -> str:
    """What the user asked for."""
    return os.environ.get(PRODUCTS_VARIABLE) or "exact"


def _wrong_products() -> str | None:
    from mla_backend.plan import PRODUCTS

    known = products() in PRODUCTS
    return None if known else f"{PRODUCTS_VARIABLE} must be one of {', '.join(PRODUCTS)}; got {products()!r}"


def _new_backend(runner: Any) -> Any:
    from mla_backend.sglang_plugin import versions
    from mla_backend.sglang_plugin.backend import SparseMLABackend

    backend = SparseMLABackend(runner)
    if backend.cache_format == "fp8_ds_mla":
        versions.logger().info("%s multiplies FP8 rows with %s products (%s).", NAME, products(), PRODUCTS_VARIABLE)
    return backend


def _with_our_draft_backend(
    create: Any, factory: Any, backend_name: str, backend_map: dict[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Around the function that looks up, by the backend's name, how drafts get theirs. Its table is a local variable of
    the two functions that call it: one for a draft model's decode steps, one for what follows verification."""

    def ours() -> tuple[str, Any]:
        from mla_backend.sglang_plugin.backend import SparseMLABackend, SparseMLADraftBackend

        runner, seed = factory.draft_model_runner, factory.seed_dsa_topk_from_draft_extend
        if backend_map["dsa"] == factory._create_dsa_prefill_backend:
            return NAME, SparseMLABackend(runner, seed_dsa_topk_from_draft_extend=seed)
        steps = factory.speculative_num_steps
        return NAME, SparseMLADraftBackend(runner, factory.topk, steps, seed_dsa_topk_from_draft_extend=seed)

    return create(factory, backend_name, {**backend_map, NAME: ours}, *args, **kwargs)
