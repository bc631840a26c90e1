"""Tensor-parallel GPUs share a selection: whether that pays, and who selects for which tokens.

Without sharing each GPU scores all keys for all tokens of a step. With it each selects for an equal share of the
tokens, and all of them exchange the positions.
"""

import torch
from torch import Tensor

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
