"""Whether tensor-parallel ranks share the indexer's selection. shared_indexer.py does so inside vLLM."""

from typing import TYPE_CHECKING, Any

from mla_backend.vllm_plugin import replacements, versions
from mla_backend.vllm_plugin.selection import WORKERS, why_not_indexer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "mla_shared_selection"
"""In vLLM's --additional-config: whether ranks share the steps that `rank_shares.pays` names. By default none."""


def asked(vllm_config: "VllmConfig") -> Any:
    """What the user asked for; None where nothing."""
    return versions.additional_option(vllm_config, OPTION)


def is_on(vllm_config: "VllmConfig") -> bool:
    """Whether ranks share selection where it pays. Each process comes to the same answer."""
    return asked(vllm_config) is True and why_not(vllm_config) is None


def why_not(vllm_config: "VllmConfig") -> str | None:
    """Why they can't share; None if they can."""
    from vllm.config import CUDAGraphMode
    from vllm.platforms import current_platform

    parallel, text_config = vllm_config.parallel_config, vllm_config.model_config.hf_text_config
    if parallel.tensor_parallel_size == 1:
        return "needs --tensor-parallel-size 2 or more"
    if (unknown := replacements.why_not(replacements.SHARE)) is not None:
        return f"does not fit: {unknown}"
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "is not for context parallelism, which divides the keys"
    if parallel.worker_cls not in WORKERS:
        return f"needs vLLM's own worker class, {WORKERS[0]}; got {parallel.worker_cls}"
    if parallel.use_ubatching:
        return "does not run two batches at a time; leave out --enable-dbo and --ubatch-size"
    capability = current_platform.get_device_capability()
    if capability is None or capability.major != 9:
        return "is for Hopper's kernels"
    if not hasattr(text_config, "index_topk"):
        return "is for models with an indexer"
    if (reason := why_not_indexer(vllm_config)) is not None:
        return reason
    draft = getattr(getattr(vllm_config.speculative_config, "draft_model_config", None), "hf_text_config", text_config)
    sizes = "index_n_heads", "index_topk"
    if hasattr(draft, "index_topk") and any(getattr(draft, x, None) != getattr(text_config, x) for x in sizes):
        return "is for draft models whose indexer has the model's index_n_heads and index_topk"
    if (vllm_config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE).mixed_mode() == CUDAGraphMode.FULL:
        return "does not run prefill in full CUDA graphs; leave out cudagraph_mode"
    return None
