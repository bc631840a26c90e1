"""Selection by our `select_tokens` in place of the scores and the top-k of SGLang's indexer.

SGLang's model computes queries, keys and weights, and writes the keys. A backend that selects says so in the metadata
of its batches; for others SGLang's own functions run.
"""

import os
from typing import Any

import torch
from torch import Tensor

from mla_backend import rank_shares, signatures
from mla_backend.index import MAX_WORKSPACE, select_tokens, wrong_sizes
from mla_backend.keys import KEY_FORMATS
from mla_backend.sglang_plugin import versions
from mla_backend.tried_versions import installed_sglang, is_first

VARIABLE = "MLA_SELECTION"
"""1 or 0: whether our op selects. By default where SGLang is told to do without DeepGEMM. "shared": it does, and each
tensor-parallel GPU selects for a share of the tokens."""
SHARED = "shared"
WITHOUT_DEEP_GEMM = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
COST = "SGLang's own scores and top-k select"
_DSA = "sglang.srt.layers.attention.dsa"
_INDEXER = f"{_DSA}.dsa_indexer:Indexer"
_PARALLEL = "sglang.srt.distributed.parallel_state"
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
SHARED_FUNCTIONS: dict[str, tuple[str, ...]] = {
    f"{_PARALLEL}:get_attn_tp_group": (),
    f"{_PARALLEL}:GroupCoordinator.all_gather_into_tensor": ("output", "input"),
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
    if asked not in (None, "0", "1", SHARED):
        return f"{VARIABLE} must be 0, 1 or {SHARED}; got {asked!r}."
    reason = _why_not(model_runner) if asked in ("1", SHARED) else None
    return reason and f"{VARIABLE}={asked} {reason}. Leave it out, and SGLang's own indexer selects."


def _wanted() -> bool:
    without = os.environ.get(WITHOUT_DEEP_GEMM, "").lower() in ("1", "true")
    return os.environ.get(VARIABLE, "1" if without else "0") in ("1", SHARED)


def _shared() -> bool:
    return os.environ.get(VARIABLE) == SHARED


def _changed() -> str | None:
    known = FUNCTIONS | SHARED_FUNCTIONS if _shared() else FUNCTIONS
    return signatures.change(known, f"SGLang {installed_sglang() or 'unknown'}")


def _why_not(model_runner: Any) -> str | None:
    from sglang.srt.runtime_context import get_parallel

    config, pool = model_runner.model_config.hf_config, model_runner.token_to_kv_pool
    if get_parallel().attn_cp_size > 1:
        return "does not merge what GPUs select; leave out --attn-cp-size"
    if _shared() and get_parallel().attn_tp_size == 1:
        return "needs attention on several GPUs, --tp 2 or more and fewer with --dp"
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
    drafted = tokens // max(requests, 1)
    return selector.select(layer_id, q_fp8, weights, metadata, first_tokens, out, drafted)


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
        self.shares = Shares(_group()) if _shared() else None
        on_gpu = torch.device(device).type == "cuda"
        self.workspace = torch.empty(MAX_WORKSPACE, dtype=torch.uint8, device=device) if on_gpu else None
        self.begin()

    def begin(self) -> None:
        """At the start of each pass. A captured one must not use what another made."""
        self._first_tokens: Tensor | None = None
        if self.shares is not None:
            self.shares.begin()

    def first_tokens(self, tokens: int, requests: int, device: torch.device) -> Tensor:
        """int32 `[tokens]`: the first token of each token's request, all of which have as many. In a table with a row
        for each token it names the request's row, so that the op sees whose tokens share keys."""
        if self._first_tokens is None or len(self._first_tokens) != tokens:
            drafted = tokens // max(requests, 1)
            first = torch.arange(0, tokens, max(drafted, 1), dtype=torch.int32, device=device)
            self._first_tokens = first.unsqueeze(1).expand(-1, drafted).reshape(-1)
        return self._first_tokens

    def select(
        self,
        layer_id: int,
        queries: Tensor,
        weights: Tensor,
        metadata: Any,
        requests: Tensor,
        out: Tensor,
        drafted: int | None = None,
    ) -> Tensor:
        """Writes, for each token that the metadata knows, slots, or positions where SGLang finds slots itself; and -1
        for tokens that pad. In decode each request has `drafted` tokens."""
        table, lengths = metadata.get_page_table_64(), metadata.get_seqlens_expanded()
        tokens, page_size, shares = len(lengths), self.pool.index_page_size, self.shares
        keys = self.pool.get_index_k_with_scale_buffer(layer_id=layer_id).unflatten(1, (page_size, -1))
        slots_of = None if metadata.force_unfused_topk else (table, page_size)
        of_tokens = queries[:tokens], weights[:tokens].squeeze(-1).float(), requests, lengths

        def select_for(of_tokens: tuple[Tensor, ...], out: Tensor) -> None:
            queries, weights, requests, lengths = of_tokens
            given = queries, weights, keys, table, requests, lengths
            select_tokens(*given, slots_of=slots_of, workspace=self.workspace, out=out)

        out[tokens:] = -1
        if shares is not None and shares.pays(
            tokens, table.shape[1] * page_size, queries.shape[1], out.shape[1], drafted
        ):
            shares.select(select_for, of_tokens, out[:tokens], drafted)
        elif tokens:
            select_for(of_tokens, out[:tokens])
        return out


# --- shares -----------------------------------------------------------------------------------------------------------


def _group() -> Any:
    """The GPUs that attend to the same tokens."""
    from sglang.srt.distributed.parallel_state import get_attn_tp_group

    group = get_attn_tp_group()
    if is_first("shared selection", str(group.world_size)):
        versions.logger().info("mla-backend: %d GPUs share the indexer's selection.", group.world_size)
    return group


class Shares:
    """A GPU's part in a selection. All of them call the same functions, in the same order, with equal arguments."""

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.ranks = group, group.rank_in_group, group.world_size
        self.begin()

    def begin(self) -> None:
        """At the start of each pass."""
        self._dealt: tuple[tuple[int, int | None], tuple[Tensor, Tensor]] | None = None

    def pays(self, tokens: int, positions: int, heads: int, topk: int, drafted: int | None) -> bool:
        """Whether sharing makes a layer faster, as the host knows it: by the width of the block table. In a graph that
        is the longest context that may be, and an eighth of it counts."""
        in_graph = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        keys, decodes = tokens * positions / (8 if in_graph else 1), drafted is not None
        by_kind = (keys, 0.0, tokens, 0) if decodes else (0.0, keys, tokens, tokens)
        return tokens > 0 and rank_shares.pays(*by_kind, self.ranks, heads, topk)

    def deal(self, lengths: Tensor, drafted: int | None) -> tuple[Tensor, Tensor]:
        """Which tokens are this GPU's, and where each token's selection is among those of all GPUs. Tokens of a request
        stay together in decode, as they share keys."""
        tokens = len(lengths)
        if self._dealt is None or self._dealt[0] != (tokens, drafted):
            if drafted is None:
                index = torch.arange(tokens, device=lengths.device)
                dealt = rank_shares.deal_in_turn(index, self.rank, self.ranks)
            else:
                by = rank_shares.snake(tokens // drafted, self.ranks, lengths.device)
                requests, places = rank_shares.deal(lengths[drafted - 1 :: drafted], by)
                own = requests[self.rank]
                dealt = rank_shares.rows_of(own, drafted), rank_shares.rows_of(places, drafted)
            self._dealt = (tokens, drafted), dealt
        return self._dealt[1]

    def select(self, select_for: Any, of_tokens: tuple[Tensor, ...], out: Tensor, drafted: int | None) -> None:
        """Has `select_for(of_tokens, out)` select for this GPU's tokens, and writes what all GPUs selected."""
        queries, *others, lengths = of_tokens
        rows, places = self.deal(lengths, drafted)
        own_queries = queries.view(torch.uint8)[rows].view(queries.dtype)  # e4m3 numbers have no index
        own = out.new_empty(len(rows), out.shape[1])
        select_for((own_queries, *(one[rows] for one in others), lengths[rows]), own)
        found = out.new_empty(self.ranks * len(rows), out.shape[1])
        self.group.all_gather_into_tensor(found, own)
        torch.index_select(found, 0, places, out=out)
