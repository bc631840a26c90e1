"""Selection by our `select_tokens` in place of the scores and the top-k of SGLang's indexer.

SGLang's model computes queries, keys and weights, and writes the keys. A backend that selects says so in the metadata
of its batches; for others SGLang's own functions run.
"""

import os
from typing import Any

import torch
from torch import Tensor

from mla_backend import signatures
from mla_backend.index import MAX_WORKSPACE, select_tokens, wrong_sizes
from mla_backend.keys import KEY_FORMATS
from mla_backend.sglang_plugin import versions
from mla_backend.tried_versions import installed_sglang, is_first

VARIABLE = "MLA_SELECTION"
"""1 or 0: whether our op selects. By default where SGLang is told to do without DeepGEMM."""
WITHOUT_DEEP_GEMM = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
COST = "SGLang's own scores and top-k select"
_DSA = "sglang.srt.layers.attention.dsa"
_INDEXER = f"{_DSA}.dsa_indexer:Indexer"
_METADATA = f"{_DSA}.dsa_indexer_metadata:DSAIndexerMetadata"
FUNCTIONS: dict[str, tuple[str, ...]] = {
    # what ours take the place of
    f"{_INDEXER}._get_topk_paged": ("forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
    f"{_INDEXER}._get_topk_ragged": (
        *("enable_dual_stream", "forward_batch", "layer_id", "q_fp8", "weights", "metadata", "topk_result"),
    ),
    "sglang.srt.layers.attention.dsa_backend:DeepseekSparseAttnBackend.get_indexer_metadata": (
        *("layer_id", "forward_batch"),
    ),
    # what they call
    f"{_METADATA}.get_page_table_64": (),
    f"{_METADATA}.get_seqlens_int32": (),
    f"{_METADATA}.get_seqlens_expanded": (),
    f"{_METADATA}.get_token_to_batch_idx": (),
    "sglang.srt.mem_cache.memory_pool:DSATokenToKVPool.get_index_k_with_scale_buffer": ("layer_id",),
}


# --- whether ----------------------------------------------------------------------------------------------------------


def install() -> None:
    """Puts our functions around SGLang's, if they are wanted and SGLang's are the known ones."""
    if not _wanted():
        return
    if (changed := _changed()) is not None:
        if is_first("select_tokens", changed):
            versions.logger().warning("mla-backend: select_tokens is not in use, as %s: %s.", changed, COST)
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    indexer = _INDEXER.replace(":", ".")
    HookRegistry.register(f"{indexer}._get_topk_paged", _get_topk_paged, HookType.AROUND)
    HookRegistry.register(f"{indexer}._get_topk_ragged", _get_topk_ragged, HookType.AROUND)


def is_on(model_runner: Any) -> bool:
    """Whether a backend selects."""
    return _wanted() and _changed() is None and _why_not(model_runner) is None


def why_refused(model_runner: Any) -> str | None:
    """Why what the user asked for can't be had, and what to do; None if it can, or if the user asked for nothing."""
    asked = os.environ.get(VARIABLE)
    if asked not in (None, "0", "1"):
        return f"{VARIABLE} must be 0 or 1; got {asked!r}."
    reason = _why_not(model_runner) if asked == "1" else None
    return reason and f"{VARIABLE}=1 {reason}. Leave it out, and SGLang's own indexer selects."


def _wanted() -> bool:
    without = os.environ.get(WITHOUT_DEEP_GEMM, "").lower() in ("1", "true")
    return os.environ.get(VARIABLE, "1" if without else "0") == "1"


def _changed() -> str | None:
    return signatures.change(FUNCTIONS, f"SGLang {installed_sglang() or 'unknown'}")


def _why_not(model_runner: Any) -> str | None:
    from sglang.srt.runtime_context import get_parallel

    config, pool = model_runner.model_config.hf_config, model_runner.token_to_kv_pool
    if get_parallel().attn_cp_size > 1:
        return "does not merge what GPUs select; leave out --attn-cp-size"
    if getattr(config, "index_kpool", 1) > 1:
        return "does not take pooled keys"
    if getattr(config, "index_init_tokens", 0) or getattr(config, "index_local_tokens", 0):
        return "chooses by scores alone, and this model always takes its first or last tokens"
    if (sizes := wrong_sizes(config)) is not None:
        return sizes
    known = torch.uint8, pool.index_page_size * KEY_FORMATS["fp8"].token_bytes
    if any((keys.dtype, keys.shape[1]) != known for keys in getattr(pool, "index_k_with_scale_buffer", ())):
        return "takes keys in FP8 alone"
    return None


# --- in place of SGLang's functions -----------------------------------------------------------------------------------


def _get_topk_paged(
    theirs: Any, indexer: Any, forward_batch: Any, layer_id: int, q_fp8: Tensor, weights: Tensor, metadata: Any
) -> Tensor:
    """Decode and drafts, whose block table has a row for each token."""
    if (selector := getattr(metadata, "selector", None)) is None:
        return theirs(indexer, forward_batch, layer_id, q_fp8, weights, metadata)
    tokens, requests = len(metadata.get_seqlens_expanded()), len(metadata.get_seqlens_int32())
    first_tokens = selector.first_tokens(tokens, requests, q_fp8.device)
    out = q_fp8.new_empty(len(q_fp8), indexer.index_topk, dtype=torch.int32)
    return selector.select(layer_id, q_fp8, weights, metadata, first_tokens, out)


def _get_topk_ragged(
    theirs: Any,
    indexer: Any,
    enable_dual_stream: bool,
    forward_batch: Any,
    layer_id: int,
    q_fp8: Tensor,
    weights: Tensor,
    metadata: Any,
    topk_result: Tensor | None = None,
) -> Tensor:
    """Prompts, whose block table has a row for each request."""
    if (selector := getattr(metadata, "selector", None)) is None:
        return theirs(indexer, enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata, topk_result)
    if topk_result is None:
        topk_result = q_fp8.new_empty(len(q_fp8), indexer.index_topk, dtype=torch.int32)
    requests = metadata.get_token_to_batch_idx()
    return selector.select(layer_id, q_fp8, weights, metadata, requests, topk_result)


class Selector:
    """Selects for a backend's layers, or for those of several that run one after the other."""

    def __init__(self, pool: Any, device: torch.device | str) -> None:
        self.pool = pool
        on_gpu = torch.device(device).type == "cuda"
        self.workspace = torch.empty(MAX_WORKSPACE, dtype=torch.uint8, device=device) if on_gpu else None
        self.begin()

    def begin(self) -> None:
        """At the start of each pass. A captured one must not use what another made."""
        self._first_tokens: Tensor | None = None

    def first_tokens(self, tokens: int, requests: int, device: torch.device) -> Tensor:
        """int32 `[tokens]`: the first token of each token's request, all of which have as many. In a table with a row
        for each token it names the request's row, so that the op sees whose tokens share keys."""
        if self._first_tokens is None or len(self._first_tokens) != tokens:
            drafted = tokens // max(requests, 1)
            first = torch.arange(0, tokens, max(drafted, 1), dtype=torch.int32, device=device)
            self._first_tokens = first.unsqueeze(1).expand(-1, drafted).reshape(-1)
        return self._first_tokens

    def select(
        self, layer_id: int, queries: Tensor, weights: Tensor, metadata: Any, requests: Tensor, out: Tensor
    ) -> Tensor:
        """Writes, for each token that the metadata knows, slots, or positions where SGLang finds slots itself; and -1
        for tokens that pad."""
        table, lengths = metadata.get_page_table_64(), metadata.get_seqlens_expanded()
        tokens, page_size = len(lengths), self.pool.index_page_size
        out[tokens:] = -1
        if tokens:
            select_tokens(
                queries[:tokens],
                weights[:tokens].squeeze(-1).float(),
                self.pool.get_index_k_with_scale_buffer(layer_id=layer_id).unflatten(1, (page_size, -1)),
                table,
                requests,
                lengths,
                slots_of=None if metadata.force_unfused_topk else (table, page_size),
                workspace=self.workspace,
                out=out[:tokens],
            )
        return out
