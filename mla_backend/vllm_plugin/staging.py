"""Which requests of a step attend to staged rows: those whose tokens read each row of their contexts often."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_backend.kernel_heads import M64_HEADS, SWAP_AB_HEADS
from mla_backend.vllm_plugin import products, versions

OPTION = "mla_staged_rows"
"""In vLLM's --additional-config: how many rows there is room for, at most. 0 stages nothing."""
ROWS = 1 << 18
"""The default: 303 MB."""
VISITS = 32
"""A row is staged if tokens attend to it so often. By the times below staging one takes as long as 30 visits save with
64 heads, and 16 with 128."""
TOKENS = 256
"""With fewer tokens some other kernel may be faster, and it reads the cache only."""
ONE_CTA_ROWS = 49152
"""With heads for one CTA or fewer, no more rows are staged: beyond them L2 does not hold them.
4096 tokens with 2048 slots each on an H100, staging included, us (in place):

| rows | 32768 | 49152 | 65536 | 131072 |
|---|---|---|---|---|
| 64 heads | 2465 (2653) | 2429 (2526) | 2585 (2591) | 3095 (2641) |
| 128 heads | 4726 (5108) | | | 5048 (5447) |
"""


@dataclass(frozen=True)
class StagedRequests:
    """The last requests of a batch, from one on."""

    request: int
    token: int
    """The first token of theirs."""
    rows: int
    """Of the longest of them."""

    def table(self, seq_lens: Tensor, block_size: int) -> Tensor:
        """The block table of the staged rows, int32 `[R, blocks]`: each request has consecutive blocks. `seq_lens` is
        int32 `[R]`; requests that are not staged have no blocks."""
        blocks = -(-self.rows // block_size)
        owned = (seq_lens[self.request :] + (block_size - 1)) // block_size
        table = seq_lens.new_full((len(seq_lens), blocks), -1)
        steps = torch.arange(blocks, dtype=torch.int32, device=seq_lens.device)
        torch.add((owned.cumsum(0, dtype=torch.int32) - owned).unsqueeze(1), steps, out=table[self.request :])
        return table


def requests_to_stage(
    starts: Sequence[int], seq_lens: Sequence[int], reading: Sequence[int], topk: int, rows: int, block_size: int
) -> StagedRequests | None:
    """Which requests are worth it, from the last one backwards, while there is room.

    Args:
        starts: the first token of each request, and the end of the last one's.
        seq_lens: the length of each request's context, with its tokens of this step.
        reading: how many of each request's tokens attend to rows that may be staged.
        topk: rows that a token attends to, at most.
        rows: that there is room for.
        block_size: rows of a block.
    """
    first, room, most = len(seq_lens), rows // block_size, 0
    for request in reversed(range(len(seq_lens))):
        length = seq_lens[request]
        blocks = -(-length // block_size)
        if reading[request] * min(topk, length) < VISITS * length or blocks > room:
            break
        first, room, most = request, room - blocks, max(most, length)
    if most == 0 or sum(reading[first:]) < TOKENS:
        return None
    return StagedRequests(first, starts[first], most)


def room_for_rows(vllm_config: Any, heads: int, topk: int, cache_dtype: str, off_gpu: bool) -> int:
    """How many rows a step may stage: none where no kernel reads them faster than the cache, as m64 does, none for FP8
    products, as staged rows are 16-bit ones, and none of a cache that is `off_gpu`, used by a CPU or on the host."""
    parallel, tokens = vllm_config.parallel_config, vllm_config.scheduler_config.max_num_batched_tokens
    useful = heads > SWAP_AB_HEADS and cache_dtype == "fp8_ds_mla" and parallel.decode_context_parallel_size == 1
    useful = useful and products.asked(vllm_config) == "exact"
    if off_gpu or not useful or torch.cuda.get_device_capability()[0] != 9:
        return 0
    rows = min(asked_rows(vllm_config), tokens * topk // VISITS)
    return min(rows, ONE_CTA_ROWS) if heads <= M64_HEADS else rows


def asked_rows(vllm_config: Any) -> int:
    """What the user asked for."""
    return versions.additional_option(vllm_config, OPTION, ROWS)
