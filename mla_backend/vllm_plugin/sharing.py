"""Tensor-parallel ranks share the indexer's selection: whether they do, and who selects for which tokens.

Without sharing each rank scores all keys for all tokens of a step. With it each rank selects for an equal share of the
tokens, and all of them exchange the positions. shared_indexer.py does so inside vLLM.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_backend.vllm_plugin import replacements, versions
from mla_backend.vllm_plugin.selection import WORKERS, why_not_indexer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "mla_shared_selection"
"""In vLLM's --additional-config: whether ranks share the steps that `pays` names. By default they share none."""
DECODE_KEY_US, PREFILL_KEY_US = 30 / 2**20, 19 / 2**20
"""What a token's score of one key and its part of the top-k take, by these times of one layer on two H200s, us (vLLM
0.33: DeepGEMM, then its top-k; 64 heads):

| tokens x context | 64 x 32K | 64 x 128K | 16 x 128K | prefill 8192 x 32K | 8192 x 128K |
|---|---|---|---|---|---|
| unshared | 91.7 | 317.9 | 94.9 | 4679 | 21075 |
| shared | 72.2 | 193.9 | 65.8 | 2665 | 10918 |
"""
PREFILL_WAVE = 264
"""Tokens that DeepGEMM scores at once in prefill: two per SM. Fewer take as long."""
EXCHANGE_US, EXCHANGE_ROW_US = 9.0, 0.027
"""What sharing adds for 2048 positions, by the times of take, exchange and place on two H200s, us:

| tokens | 8 | 16 | 64 | 128 | 256 | 1024 | 4096 |
|---|---|---|---|---|---|---|---|
| all three | 9.0 | 9.2 | 9.8 | 11.5 | 14.6 | 39.2 | 115 |
"""
PIECE = 4096
"""Tokens that are exchanged at once, at most: buffers of 51 MB for two ranks, 2048 positions and 64 heads."""


# --- whether ----------------------------------------------------------------------------------------------------------


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


def pays(
    decode_keys: float,
    prefill_keys: float,
    tokens: int,
    prefill_tokens: int,
    ranks: int,
    heads: int = 64,
    topk: int = 2048,
) -> bool:
    """Whether a step gets faster.

    Args:
        decode_keys, prefill_keys: how many scores are needed.
        tokens, prefill_tokens: for how many tokens, and how many of them are prefill's.
        ranks: how many GPUs share them.
        heads, topk: of the indexer.
    """
    left = max(1 / ranks, PREFILL_WAVE / max(1, prefill_tokens))
    saved = DECODE_KEY_US * decode_keys * (1 - 1 / ranks) + PREFILL_KEY_US * prefill_keys * max(0, 1 - left)
    row = EXCHANGE_ROW_US * 2 * (1 - 1 / ranks) * topk / 2048
    return saved * heads / 64 > EXCHANGE_US * -(-tokens // PIECE) + row * tokens


# --- who selects for what ---------------------------------------------------------------------------------------------


def snake(most: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that fall in length go to ranks 0, 1, 1, 0, 0, 1, and so on. Made once, for up to `most` rows.

    Returns:
        int64 `[rounds, ranks]`: which row each rank gets in a round. `[rounds * ranks]`: each row's rank. Its round.
    """
    rows = torch.arange(-(-most // ranks) * ranks, device=device).view(-1, ranks)
    rows[1::2] = rows[1::2].flip(1)
    flat = rows.flatten()  # in a round, rows of ranks are ranks of rows, too
    return rows, flat % ranks, flat // ranks


def deal(lengths: Tensor, by: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Shares rows of these lengths, int `[R]`, so that ranks get as many rows, and about as many keys. On the device:
    the host knows neither lengths nor shares, so that a CUDA graph can follow them.

    Args:
        by: the `snake` of R rows or more.

    Returns:
        int64 `[ranks, n]`, the rows of each rank; a row may be there twice. int64 `[R]`, where each row is among them.
    """
    rows, takers, rounds = by
    count = len(lengths)
    each = -(-count // rows.shape[1])
    slots = torch.add(rounds[:count], takers[:count], alpha=each)
    order = lengths.sort(descending=True, stable=True).indices
    return order[rows[:each].T.clamp(max=count - 1)], torch.empty_like(slots).scatter_(0, order, slots)


def deal_in_turn(index: Tensor, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The same of prefill, for one rank: neighbours, whose lengths differ by one, go to ranks 0, 1, 0, 1, and so on.

    Args:
        index: 0 to R - 1.
    """
    count, each = len(index), -(-len(index) // ranks)
    return (index[:each] * ranks + rank).clamp(max=count - 1), index % ranks * each + index // ranks


def rows_of(requests: Tensor, width: int) -> Tensor:
    """The tokens of requests that have `width` each."""
    if width == 1:
        return requests
    return (requests.unsqueeze(-1) * width + torch.arange(width, device=requests.device)).flatten(-2)
