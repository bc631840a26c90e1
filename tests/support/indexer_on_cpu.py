"""vLLM's own indexer on a CPU: its metadata, and its function with kernels that choose by made-up scores.

A token's score of a slot follows from the token's query and weights and from the slot alone.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops
from vllm.model_executor.layers import sparse_attn_indexer as layer
from vllm.v1.attention.backends.mla import indexer

from serving_benchmarks.ops.batches import BLOCK


def on_cpu() -> None:
    """Puts what runs on a CPU in place of vLLM's kernels."""
    indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL = _chunk_metadata
    indexer._PREPARE_UNIFORM_DECODE_KERNEL = _uniform_decode
    indexer._supports_native_decode = lambda rows: rows in (1, 2, 4)
    indexer.num_compute_units = lambda device: 8
    layer.fp8_fp4_mqa_logits = _gathered_scores
    layer.fp8_fp4_paged_mqa_logits = _paged_scores
    layer.get_indexer_topk = lambda backend: _decode_topk
    layer.current_workspace_manager = lambda: SimpleNamespace(get_simultaneous=_workspace)
    _custom_ops.cp_gather_indexer_k_quant_cache = _gather
    _custom_ops.top_k_per_row_prefill = _prefill_topk


def _scores(queries: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """`[T, N]`, for slots `[T or 1, N]`."""
    first, last = (queries[:, at, at].float() for at in (0, -1))
    seed = first + last * 3 + weights[:, 0] * 5 + weights[:, -1] * 7
    return torch.sin(seed.double().unsqueeze(1) * (slots.double() + 1)).float()


def _best(scores: Tensor, begin: Tensor, end: Tensor, out: Tensor, topk: int) -> None:
    columns = torch.arange(scores.shape[1])
    seen = (columns >= begin.unsqueeze(1)) & (columns < end.unsqueeze(1))
    best = torch.where(seen, scores, -torch.inf).topk(min(topk, scores.shape[1]))
    chosen = torch.where(best.values > -torch.inf, best.indices - begin.unsqueeze(1), -1)
    out[:, : chosen.shape[1]] = chosen


def _gathered_scores(q: Any, kv: Any, weights: Tensor, begin: Tensor, end: Tensor, *_: Any, **__: Any) -> Tensor:
    return _scores(q[0], weights, kv[1].view(torch.int32).unsqueeze(0))


def _paged_scores(q: Any, cache: Tensor, weights: Tensor, lengths: Tensor, table: Tensor, *_: Any, **__: Any) -> Tensor:
    slots = (table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten(1).repeat_interleave(lengths.shape[1], dim=0)
    return _scores(q[0].flatten(0, 1), weights, slots)


def _decode_topk(scores: Tensor, lengths: Tensor, rows: int, out: Tensor, topk: int, longest: int) -> None:
    _workspace(((2**16,), torch.uint8))[0].fill_(77)  # the kernel works there, too
    _best(scores, torch.zeros(len(scores)).int(), lengths.flatten(), out, topk)


def _prefill_topk(scores: Tensor, begin: Tensor, end: Tensor, out: Tensor, rows: int, *strides_and_topk: int) -> None:
    _best(scores, begin, end, out, strides_and_topk[-1])


_scratch = torch.zeros(2**20, dtype=torch.uint8)


def _workspace(*specs: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    found, at = [], 0
    for shape, dtype in specs:
        size = dtype.itemsize * int(torch.tensor(shape).prod())
        found.append(_scratch[at : at + size].view(dtype).view(shape))
        at += size + -size % 256
    return found


def _gather(cache: Tensor, values: Tensor, scales: Tensor, table: Tensor, starts: Tensor) -> None:
    """In place of scales the keys' slots."""
    for row, first, end in zip(table, starts, starts[1:], strict=False):
        at = torch.arange(int(end - first))
        slots = row[at // BLOCK] * BLOCK + at % BLOCK
        scales[first:end] = slots.int().view(torch.uint8).view(-1, 4)


def _chunk_metadata(starts, lengths, _, rows, of_tokens, begin, end, first, stop, *__, num_reqs, COMPRESS_RATIO):  # noqa: N803
    for request in range(num_reqs):
        for token in range(max(int(starts[request]), first), min(int(starts[request + 1]), stop)):
            begin[token - first] = rows[request]
            end[token - first] = rows[request] + lengths[request] - (starts[request + 1] - token) + 1


def _uniform_decode(lengths, of_tokens, table, tables, ones, tokens, width):
    for token in range(tokens):
        of_tokens[token] = max(int(lengths[token // width]) - width + token % width + 1, 0)
        tables[token], ones[token] = table[token // width], 1
