"""The indexer's steps: its queries, scores of the cached keys for each token, and the positions of the best."""

from typing import Any

import torch
from torch import Tensor

from mla_backend import library
from mla_backend.arguments import (
    call,
    described,
    require_bools,
    require_count,
    require_device,
    require_optional_tensors,
    require_tensors,
)
from mla_backend.keys import VALUES

MAX_HEADS: int = library.about()["max_index_heads"]
"""Of the indexer."""
MAX_TOPK: int = library.about()["max_selected"]
"""Positions that `select_tokens` chooses for a token."""
MAX_POSITIONS: int = library.about()["max_select_positions"]
"""Of a request, that `select_tokens` takes."""
MAX_WORKSPACE: int = library.about()["max_select_workspace"]
"""Bytes that `select_tokens` works in at most."""


def wrong_sizes(config: Any) -> str | None:
    """Why `select_tokens` does not take the indexer of a model with this Hugging Face config: what it takes. None if it
    does."""
    dims, heads, topk = (getattr(config, f"index_{name}", 0) for name in ("head_dim", "n_heads", "topk"))
    if dims == VALUES and 1 <= heads <= MAX_HEADS and 1 <= topk <= MAX_TOPK:
        return None
    return (
        f"takes an index_head_dim of {VALUES}, up to {MAX_HEADS} index_n_heads and an index_topk of up to {MAX_TOPK}; "
        f"got {dims}, {heads} and {topk}"
    )


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
            the e4m3 values of all its tokens and then an fp32 scale a token, or `[blocks, block_size, 68]`, e2m1 pairs
            of all its tokens and then four powers of two a token (`mxfp4_68`). A block lies in one piece.
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


def select_tokens(
    queries: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor | None,
    requests: Tensor,
    lengths: Tensor,
    topk: int | None = None,
    *,
    candidates: tuple[Tensor, int] | None = None,
    slots_of: tuple[Tensor, int] | None = None,
    return_scores: bool = False,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
    scores: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scores the keys of each token's context and chooses the best: `index_scores` and `select_top` in one op, without
    memory for all scores.

    Args:
        queries: e4m3, bf16 or fp32 `[T, H, 128]`, of any strides whose last is 1. H is 1 to 128.
        weights: fp32 `[T, H]`, of each head.
        cache: the keys, as in `index_scores`; or, without a block table, the bf16 keys `[N, 128]` of one sequence.
        block_table: int32 `[R, max_blocks]`, each request's blocks, of up to `MAX_POSITIONS` positions. None: `cache`
            is the only sequence, and requests are 0.
        requests: int32 `[T]`, the row of the block table that a token uses.
        lengths: int32 `[T]`; a token sees the positions 0 to length - 1 of its request.
        topk: how many to choose, 1 to 4096.
        candidates: lists of blocks, int32 `[T, B]`, and how many positions a block has: a token that sees more than
            topk positions chooses from its list alone, by rising position, -1 behind the last block. Work is that of
            these positions.
        slots_of: a block table of the same requests, int32 `[R, max_blocks]`, and its block size: the result is slots
            of that cache in place of positions, -1 where a position has none.
        return_scores: also return the scores of the chosen.
        workspace: memory to work in, uint8 of `select_workspace(...)` bytes, whatever it holds. By default the call
            allocates it.
        out: where to write, in place of `topk`: int32 `[T, topk]`, of any strides whose last is 1.
        scores: where to write their scores: fp32 `[T, topk]`.

    Returns:
        int32 `[T, topk]`: the positions by rising position, and then -1. Of equal scores the earlier positions are
        chosen. NaN counts as the largest; a position without a key scores -inf and is never chosen. A token that sees
        no more than topk positions gets all of them. With `return_scores` or `scores` also fp32 `[T, topk]`: the score
        of each, -inf behind the last.
    """
    require_bools(return_scores=return_scores)
    require_tensors(queries=queries, cache=cache)
    require_optional_tensors(block_table=block_table)
    if (topk is None) == (out is None):
        raise ValueError(f"topk must be given where out is not, and only there; got {topk}")
    if block_table is None:
        cache, block_table = _one_sequence(cache, queries.device)
    candidate_blocks, candidate_size = _blocks("candidates", candidates, MAX_POSITIONS)
    slot_table, slot_block_size = _blocks("slots_of", slots_of, 2**31 - 1)
    tokens = queries.shape[:1]
    if out is None:
        require_count("topk", topk, at_least=1)
        out = torch.empty((*tokens, topk), dtype=torch.int32, device=queries.device)
    if scores is None and return_scores:
        scores = torch.empty_like(out, dtype=torch.float32, memory_format=torch.contiguous_format)
    if workspace is None and queries.is_cuda:
        needed = _workspace_bytes(queries, cache, block_table, candidate_blocks, candidate_size, out)
        workspace = torch.empty(needed, dtype=torch.uint8, device=queries.device)
    call(
        torch.ops.mla_backend.select_tokens.default,
        queries,
        weights,
        cache,
        block_table,
        requests,
        lengths,
        slot_table,
        slot_block_size,
        candidate_blocks,
        candidate_size,
        workspace,
        out,
        scores,
    )
    return out if scores is None else (out, scores)


def select_workspace(
    num_tokens: int, num_heads: int, positions: int, topk: int, device: torch.device | str = "cuda"
) -> int:
    """Bytes that `select_tokens` works in: never more than `MAX_WORKSPACE`, and none on a CPU.

    Args:
        num_tokens, num_heads: T and H.
        positions: of a request's row of the block table, max_blocks * block_size; or of a token's list of candidates.
        topk: how many are chosen.
        device: where.
    """
    for name, number in dict(num_tokens=num_tokens, num_heads=num_heads, positions=positions, topk=topk).items():
        require_count(name, number)
    if positions > MAX_POSITIONS:
        raise ValueError(f"positions must be at most {MAX_POSITIONS}; got {positions}")
    require_device("device", device)
    return library.select_workspace_bytes(torch.device(device), num_tokens, num_heads, positions, topk)


def _workspace_bytes(
    queries: Tensor, cache: Tensor, block_table: Tensor, candidates: Tensor | None, candidate_size: int, out: Tensor
) -> int:
    """What `select_tokens` needs. Where shapes may be symbols it is the most that any call needs; shapes that are wrong
    the op refuses before it looks at its workspace."""
    if torch.compiler.is_compiling():
        return MAX_WORKSPACE
    if (queries.dim(), cache.dim(), block_table.dim(), out.dim()) != (3, 3, 2, 2):
        return 0
    if candidates is not None and candidates.dim() != 2:
        return 0
    positions = block_table.shape[1] * cache.shape[1]
    if candidates is not None:
        positions = candidates.shape[-1] * candidate_size
    return library.select_workspace_bytes(queries.device, *queries.shape[:2], positions, out.shape[1])


def _one_sequence(keys: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys `[N, 128]` as a cache of one block, and its block table."""
    if keys.dim() != 2 or keys.dtype != torch.bfloat16:
        raise ValueError(f"cache must be bfloat16 [N, 128] without a block_table; got {described(keys)}")
    blocks = min(len(keys), 1)  # none without keys, as no block is empty
    cache = keys.unsqueeze(0) if blocks else keys.new_empty(0, 1, keys.shape[1])
    return cache, torch.zeros(1, blocks, dtype=torch.int32, device=device)


def _blocks(name: str, pair: tuple[Tensor, int] | None, most: int) -> tuple[Tensor | None, int]:
    """Blocks, and how many positions each of them has."""
    if pair is None:
        return None, 1
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{name} must be a pair of blocks and their block size; got {type(pair).__name__}")
    blocks, block_size = pair
    require_tensors(**{name: blocks})
    if isinstance(block_size, bool) or not isinstance(block_size, (int, torch.SymInt)):
        raise TypeError(f"{name} must have an int as its block size; got {type(block_size).__name__}")
    if not 1 <= block_size <= most:
        raise ValueError(f"{name} must have a block size of 1 to {most}; got {block_size}")
    return blocks, block_size
