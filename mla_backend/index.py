"""The indexer's steps: its queries, scores of the cached keys for each token, and the positions of the best."""

import torch
from torch import Tensor

from mla_backend import library, reference  # noqa: F401  (the library registers the ops)
from mla_backend.arguments import call, require_count, require_tensors

MOST_SCORES = 1 << 25
"""fp32 scores in one piece, 128 MiB: `select` scores many tokens with long contexts in several."""


def rotate_queries(
    queries: Tensor,
    index_queries: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    index_cos_sin: Tensor | None = None,
    weight_scale: float = 1.0,
    *,
    interleaved: bool = False,
    out: Tensor | None = None,
    index_out: Tensor | None = None,
    weights_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates queries of attention and of the indexer to their positions, and rounds the indexer's to FP8.

    A head's index query is divided by a power of two, with which its weight is multiplied.

    Args:
        queries: bf16 `[T, H, 64]`, the part of attention's queries that is rotated: the pairs (2i, 2i + 1).
        index_queries: bf16 `[T, I, 128]`. Their first 64 values are rotated.
        weights: fp32 or bf16 `[T, I]`, of each head of the indexer.
        positions: int64 `[T]`. One before or past `cos_sin` counts as the nearest in it.
        cos_sin: fp32 or bf16 `[N, 64]`: of each position the cosines of 32 pairs, and then their sines.
        index_cos_sin: the indexer's; by default the same.
        weight_scale: what weights are multiplied with.
        interleaved: pairs of index queries are (2i, 2i + 1), too; otherwise (i, i + 32).
        out, index_out, weights_out: where to write; `index_out` may be uint8, too.

    All but positions may have any strides whose last is 1.

    Returns:
        The rotated queries, bf16 `[T, H, 64]`; those of the indexer, e4m3 `[T, I, 128]`; weights, fp32 `[T, I]`.
    """
    require_tensors(queries=queries, index_queries=index_queries)
    device = queries.device
    if out is None:
        out = torch.empty(queries.shape, dtype=torch.bfloat16, device=device)
    if index_out is None:
        index_out = torch.empty(index_queries.shape, dtype=torch.float8_e4m3fn, device=device)
    if weights_out is None:
        weights_out = torch.empty(index_queries.shape[:2], dtype=torch.float32, device=device)
    tables = cos_sin, cos_sin if index_cos_sin is None else index_cos_sin
    outputs = out, index_out, weights_out
    op = torch.ops.mla_backend.rotate_queries.default
    call(op, queries, index_queries, weights, positions, *tables, weight_scale, interleaved, *outputs)
    return outputs


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


def select(
    queries: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    scored: Tensor,
    longest: int,
    topk: int,
) -> Tensor:
    """The positions that tokens attend to, int32 `[T, topk]`, rising, then -1.

    They are sorted by position, not by score. So attention adds up in the same order however a prompt is cut into
    chunks.

    Args:
        queries, weights, cache, block_table, requests: as for `index_scores`. A cache of exact fp32 keys
            goes to the reference.
        lengths: int32 `[T]`: how many positions of its request each token sees.
        scored: the same, or 0 where that is no more than topk.
        longest: the largest of the lengths, or more.
    """
    exact = cache.dtype == torch.float32
    score, best = (reference.index_scores, reference.select_top) if exact else (index_scores, select_top)
    piece = max(1, MOST_SCORES // longest)
    parts = zip(*(x.split(piece) for x in (queries, weights, requests, lengths, scored)), strict=True)
    chosen = [
        best(score(some, their, cache, block_table, who, count, longest), length, topk)
        for some, their, who, length, count in parts
    ]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)
