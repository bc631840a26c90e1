"""The indexer's two steps: scores of the cached keys for each token, and the positions of the best."""

import torch
from torch import Tensor

from mla_backend import library  # noqa: F401  (registers the ops)
from mla_backend.arguments import call, require_count, require_tensors


def index_scores(
    queries: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    positions: int | None = None,
    *,
    scores: Tensor | None = None,
) -> Tensor:
    """Scores the keys of each token's context: the sum over heads of weight * relu(query . key).

    Args:
        queries: fp32 or bf16 `[T, H, 128]`, of any strides whose last is 1. H is 1 to 128.
        weights: fp32 `[T, H]`, of each head.
        cache: the keys: bf16 `[blocks, block_size, 128]`, or uint8 `[blocks, block_size, 132]`, in each block first
            the e4m3 values of all its tokens and then an fp32 scale a token. A block lies in one piece.
        block_table: int32 `[R, max_blocks]`, each request's blocks.
        requests: int32 `[T]`, the row of the block table that a token uses.
        lengths: int32 `[T]`; a token sees the positions 0 to length - 1 of its request.
        positions: N, columns of the result: the longest length or more. A token sees no more than N positions.
        scores: where to write, in place of `positions`: fp32 `[T, N]`, of any strides whose last is 1.

    Returns:
        fp32 `[T, N]`. Columns that a token doesn't see are not written. A position scores -inf if its block is not in
        the cache, is not in the table, or the request is not.
    """
    require_tensors(queries=queries)
    if (positions is None) == (scores is None):
        raise ValueError(f"positions must be given where scores is not, and only there; got {positions}")
    if scores is None:
        require_count("positions", positions)
        scores = torch.empty((*queries.shape[:1], positions), dtype=torch.float32, device=queries.device)
    call(torch.ops.mla_backend.index_scores.default, queries, weights, cache, block_table, requests, lengths, scores)
    return scores


def select_top(scores: Tensor, lengths: Tensor, topk: int | None = None, *, chosen: Tensor | None = None) -> Tensor:
    """The positions of each token's largest scores, by rising position. Of equal scores the earlier positions are
    chosen, so that the choice depends on nothing else.

    Args:
        scores: fp32 `[T, N]`, of any strides whose last is 1. NaN counts as the largest, -inf is never chosen.
        lengths: int32 `[T]`; only the first n scores of a token count. Where they are no more than topk, all of them
            are chosen, and the scores are not read.
        topk: how many to choose.
        chosen: where to write, in place of `topk`: int32 `[T, topk]`, of any strides whose last is 1.

    Returns:
        int32 `[T, topk]`: the positions, and then -1.
    """
    require_tensors(scores=scores)
    if (topk is None) == (chosen is None):
        raise ValueError(f"topk must be given where chosen is not, and only there; got {topk}")
    if chosen is None:
        require_count("topk", topk)
        chosen = torch.empty((*scores.shape[:1], topk), dtype=torch.int32, device=scores.device)
    call(torch.ops.mla_backend.select_top.default, scores, lengths, chosen)
    return chosen
