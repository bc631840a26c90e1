"""Tensor-parallel ranks share the indexer's selection: whether they do, and who selects for which tokens.

Without sharing each rank scores all keys for all tokens of a step. With it each rank selects for an equal share of the
tokens, and all of them exchange the positions. shared_indexer.py does so inside vLLM.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mla_backend.vllm_plugin import replacements, versions
from mla_backend.vllm_plugin.selection import WORKERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION = "mla_shared_selection"
"""In vLLM's --additional-config: whether ranks share each step, or none. By default those that `pays` names."""
DECODE_KEY_US, PREFILL_KEY_US = 35 / 2**20, 18 / 2**20
"""What a token's score of one key and its part of the top-k take, by these times of one layer on an H200, us (vLLM
0.33: DeepGEMM, then its top-k; 64 heads):

| tokens x context | 16 x 32K | 64 x 32K | 16 x 128K | 64 x 128K | prefill 4096 x 32K | 4096 x 128K |
|---|---|---|---|---|---|---|
| scores and top-k | 35.6 | 94.9 | 97.1 | 308 | 2325 | 9530 |
"""
PREFILL_WAVE = 264
"""Tokens that DeepGEMM scores at once in prefill: two per SM. Fewer take as long."""
EXCHANGE_US, EXCHANGE_ROW_US = 12.0, 0.04
"""What sharing adds, by the times of NCCL's all-gather of [tokens, 2048] over two H200s in a CUDA graph, us, and 4 us
for the two kernels around it:

| tokens | 8 | 16 | 64 | 128 | 256 |
|---|---|---|---|---|---|
| all-gather | 8.3 | 8.7 | 10.3 | 12.6 | 17.8 |
"""
HOST_GPUS = 8
"""Those of one host, at most. Exchanges between hosts were not measured."""
PIECE = 4096
"""Tokens that are exchanged at once, at most: buffers of 51 MB for two ranks, 2048 positions and 64 heads."""


# --- whether ----------------------------------------------------------------------------------------------------------


def asked(vllm_config: "VllmConfig") -> Any:
    """What the user asked for; None where nothing."""
    return versions.additional_option(vllm_config, OPTION)


def is_on(vllm_config: "VllmConfig") -> bool:
    """Whether ranks share selection where it pays, by default those of one host. Each process comes to the same
    answer."""
    choice, near = asked(vllm_config), vllm_config.parallel_config.tensor_parallel_size <= HOST_GPUS
    return bool(near if choice is None else choice) and why_not(vllm_config) is None


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
    if getattr(parallel, "enable_dbo", False):
        return "does not run two batches at a time; leave out --enable-dbo"
    capability = current_platform.get_device_capability()
    if capability is None or capability.major != 9:
        return "is for Hopper's kernels"
    if getattr(text_config, "index_kpool", None) or getattr(text_config, "candidate_source_layer_id", -1) >= 0:
        return "knows neither pooled keys nor candidate blocks"
    if not hasattr(text_config, "index_topk"):
        return "is for models with an indexer"
    if vllm_config.attention_config.resolve_indexer_kv_dtype("fp8") != "fp8":
        return "takes keys in FP8 alone; leave out indexer_kv_dtype"
    if (vllm_config.compilation_config.cudagraph_mode or CUDAGraphMode.NONE).mixed_mode() == CUDAGraphMode.FULL:
        return "does not run prefill in full CUDA graphs; leave out cudagraph_mode"
    return None


def pays(decode_keys: float, prefill_keys: float, tokens: int, prefill_tokens: int, ranks: int) -> bool:
    """Whether a step gets faster.

    Args:
        decode_keys, prefill_keys: how many scores are needed.
        tokens, prefill_tokens: for how many tokens, and how many of them are prefill's.
        ranks: how many GPUs share them.
    """
    left = max(1 / ranks, PREFILL_WAVE / max(1, prefill_tokens))
    saved = DECODE_KEY_US * decode_keys * (1 - 1 / ranks) + PREFILL_KEY_US * prefill_keys * max(0, 1 - left)
    return saved > EXCHANGE_US * -(-tokens // PIECE) + EXCHANGE_ROW_US * tokens


# --- who selects for what ---------------------------------------------------------------------------------------------


@cache
def _hands(count: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Snake order: rows that fall in length go to ranks 0, 1, 1, 0, 0, 1, and so on. `[ranks, n]`: which of the `count`
    rows each rank gets, where the last row fills what is left; `[count]`: where each row lies among `[ranks * n]`."""
    each = -(-count // ranks)
    rows = torch.arange(each * ranks).view(each, ranks)
    rows[1::2] = rows[1::2].flip(1)
    places = torch.empty(each * ranks, dtype=torch.int64)
    places[rows.T.flatten()] = torch.arange(each * ranks)
    return rows.T.clamp(max=count - 1).contiguous().to(device), places[:count].to(device)


def deal(lengths: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """Shares rows of these lengths, int `[R]`, so that ranks get as many rows, and about as many keys. On the device:
    the host knows neither lengths nor shares, so that a CUDA graph can follow them.

    Returns:
        int64 `[ranks, n]`, the rows of each rank; a row may be there twice. int64 `[R]`, where each row is among them.
    """
    hands, slots = _hands(len(lengths), ranks, lengths.device)
    order = lengths.sort(descending=True, stable=True).indices
    return order[hands], torch.empty_like(slots).scatter_(0, order, slots)


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
