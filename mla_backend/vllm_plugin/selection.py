"""Selection by our `select_tokens` in place of vLLM's: whether it runs on a GPU, and what the tokens of a step see."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_backend.index import select_tokens, wrong_sizes
from mla_backend.vllm_plugin import mxfp4_keys, replacements, versions
from mla_backend.vllm_plugin.models import has_v4_attention

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "mla_selection"
"""In vLLM's --additional-config: whether our op selects on a GPU. By default only where `why_by_default` says so."""
WORKERS = ("vllm.v1.worker.gpu_worker.Worker", "mla_backend.vllm_plugin.gpu_worker.SparseMLAWorker")
"""vLLM's, and ours, which puts our indexer into its models."""
ORDERED_AT_ONCE = 1024
"""Tokens whose candidate blocks are sorted together: sorting takes five times their memory."""
THEIR_OP, OP = "vllm::sparse_attn_indexer", "vllm::mla_backend_select"


# --- whether ----------------------------------------------------------------------------------------------------------


def asked(vllm_config: "VllmConfig") -> Any:
    """What the user asked for; None where nothing."""
    return versions.additional_option(vllm_config, OPTION)


def is_on(vllm_config: "VllmConfig") -> bool:
    """Whether our op selects on this GPU. Each process comes to the same answer."""
    choice = asked(vllm_config)
    return bool(choice if choice is not None else why_by_default(vllm_config)) and why_not(vllm_config) is None


def why_by_default(vllm_config: "VllmConfig") -> str | None:
    """Why it is on where the user asks for nothing: vLLM's selection can't run."""
    from vllm.utils.deep_gemm import has_deep_gemm

    if mxfp4_keys.asked(vllm_config):
        return "vLLM has no kernels for MXFP4 keys here"
    return None if has_deep_gemm() else "DeepGEMM is not installed"


def why_not(vllm_config: "VllmConfig") -> str | None:
    """Why it can't run here; None if it can."""
    from vllm.platforms import current_platform

    if not versions.since_0_32():
        return "needs vllm 0.32 or 0.33"
    if (unknown := replacements.why_not(replacements.SELECT)) is not None:
        return f"does not fit: {unknown}"
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1:
        return "does not merge what GPUs select; leave out --decode-context-parallel-size"
    if parallel.worker_cls not in WORKERS:
        return f"needs vLLM's own worker class, {WORKERS[0]}; got {parallel.worker_cls}"
    capability = current_platform.get_device_capability()
    if capability is not None and capability.major == 10:
        return "does not know the scales of keys on sm_100"
    if mxfp4_keys.asked(vllm_config):
        if has_v4_attention(vllm_config.model_config):
            return "has MXFP4 keys for models like DeepSeek-V3.2 alone; leave out indexer_kv_dtype"
        if (unknown := replacements.why_not(replacements.MXFP4_KEYS)) is not None:
            return f"does not fit: {unknown}; leave out indexer_kv_dtype"
    if has_candidates(vllm_config.model_config.hf_text_config):
        from vllm.utils.deep_gemm import has_deep_gemm

        if (unknown := replacements.why_not(replacements.CANDIDATES)) is not None:
            return f"does not fit: {unknown}"
        if not has_deep_gemm():
            return "leaves the choice of candidate blocks to vLLM, which needs DeepGEMM for it"
    return why_not_indexer(vllm_config, ("fp8", "mxfp4"), candidates=True)


def has_candidates(text_config: Any) -> bool:
    """Whether layers choose among blocks that an earlier one kept, as in DeepSeek-V4.1."""
    return getattr(text_config, "candidate_source_layer_id", -1) >= 0


def why_not_indexer(
    vllm_config: "VllmConfig", keys: tuple[str, ...] = ("fp8",), *, candidates: bool = False
) -> str | None:
    """Why a model's indexer is not one of scores of such keys alone, or of candidates' keys; None if it is."""
    text_config = vllm_config.model_config.hf_text_config
    if getattr(text_config, "index_kpool", None):
        return "does not take pooled keys"
    if has_candidates(text_config) and not candidates:
        return "does not keep to the blocks that an earlier layer picked"
    if (sizes := wrong_sizes(text_config)) is not None:
        return sizes
    if vllm_config.attention_config.resolve_indexer_kv_dtype("fp8") not in keys:
        return f"takes keys in {' or '.join(keys)} alone; leave out indexer_kv_dtype"
    return None


def split_graphs(compilation_config: Any) -> None:
    """Has vLLM leave our op out of piecewise CUDA graphs, as it does its own."""
    for ops in (compilation_config._attention_ops, compilation_config.splitting_ops):
        if ops and THEIR_OP in ops and OP not in ops:
            ops.append(OP)


# --- what tokens see --------------------------------------------------------------------------------------------------


def seen_by_tokens(
    starts: Tensor, seq_lens: Tensor, tokens: Tensor, ratio: int = 1, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Of each of T tokens: its request, and how many positions of it the token sees, up to its own. On the device.

    Args:
        starts: int32 `[R + 1]`, the first token of each request, and the end of the last one's. Tokens from there on
            pad a CUDA graph: they have request R and see nothing.
        seq_lens: int32 `[R]`, each request's context, with its tokens of this step.
        tokens: int32 `[T]`, 0 to T - 1.
        ratio: positions that share a key, as in DeepSeek-V4. Keys are counted.
        out: int32 `[2, T or more]`, where to write.

    Returns:
        Requests and lengths, int32 `[T]`. What sees nothing has a length of 0 or less.
    """
    if out is None:
        out = torch.empty(2, len(tokens), dtype=torch.int32, device=tokens.device)
    requests, lengths = out[:, : len(tokens)]
    ends = starts[1:]
    torch.searchsorted(ends, tokens, right=True, out_int32=True, out=requests)
    before = torch.nn.functional.pad(seq_lens - ends + 1, (0, 1), value=-(2**30))
    torch.index_select(before, 0, requests, out=lengths)
    lengths += tokens
    if ratio > 1:
        lengths.div_(ratio, rounding_mode="floor")
    return requests, lengths


def order(blocks: Tensor) -> None:
    """Sorts each token's candidate blocks, int32 `[T, B]`, -1 last. vLLM keeps them in any order."""
    for some in blocks.split(ORDERED_AT_ONCE):
        flipped = some ^ 0x7FFFFFFF  # -1 becomes the smallest
        some.copy_(flipped.sort(1, descending=True).values ^ 0x7FFFFFFF)


def select_into(
    buffer: Tensor,
    rows: int,
    topk: int,
    queries: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    workspace: Tensor | None = None,
    candidates: tuple[Tensor, int] | None = None,
) -> None:
    """Selects for the first T tokens, whose requests and lengths are given. The first rows of the buffer get each
    token's positions, rising, and -1 everywhere else. `candidates` are those of `select_tokens`, of T tokens or more.
    """
    tokens = len(lengths)
    if tokens:
        select_tokens(
            queries[:tokens],
            weights[:tokens].float(),
            cache,
            block_table,
            requests,
            lengths,
            candidates=candidates and (candidates[0][:tokens], candidates[1]),
            workspace=workspace,
            out=buffer[:tokens, :topk],
        )
    buffer[:tokens, topk:] = -1
    buffer[tokens:rows] = -1
