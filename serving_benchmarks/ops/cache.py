"""The ops around attention on a GPU: writing the cache, the plan, and positions in a sequence to slots of the cache.

Bandwidth is bytes read and written, over time. The yardstick is the faster of two copies of 1 GB: torch's copy_, which
is cudaMemcpy, and a kernel that multiplies by one. Everything is timed as CUDA graphs over several sets of tokens,
which fill random blocks of the cache. What the ops write is checked by their tests, not here.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from rich.console import Console

import mla_backend
from serving_benchmarks import options as opt
from serving_benchmarks.ops.batches import BLOCK, SETS, SMALLEST_CACHE
from serving_benchmarks.ops.timing import Call, capture, interleaved
from serving_benchmarks.results import file as result_file
from serving_benchmarks.results.tables import cache_rows

FORMATS = ("bf16", "fp8_ds_mla")
COPIED_NUMBERS = 250_000_000
TABLE_WIDTH = 2048
"""Blocks of a request in the block table: sequences of 128K tokens."""
MOST_CONVERTED = 2**16
"""Tokens. Their positions and slots take 16 KB each."""


def time_copies(rounds: int) -> list[dict[str, Any]]:
    source = torch.randn(COPIED_NUMBERS, device="cuda")
    target = torch.empty_like(source)
    copies = {"copy_": lambda: target.copy_(source), "copy by a kernel": lambda: torch.mul(source, 1, out=target)}
    moved = source.nbytes + target.nbytes
    return [entry(name, "fp32", COPIED_NUMBERS, moved, [copy], rounds) for name, copy in copies.items()]


def time_write(tokens: int, fmt: str, rounds: int) -> dict[str, Any]:
    cache = mla_backend.FORMATS[fmt].new_cache(-(-max(tokens, SMALLEST_CACHE) // BLOCK), BLOCK, device="cuda")
    calls: list[Call] = []
    for _ in range(SETS):
        kv_c = torch.randn(tokens, 512, device="cuda").bfloat16()
        k_pe = torch.randn(tokens, 64, device="cuda").bfloat16()
        blocks = torch.randperm(len(cache), device="cuda")
        slots = (blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device="cuda")).flatten()[:tokens]
        calls.append(lambda kv_c=kv_c, k_pe=k_pe, slots=slots: mla_backend.cache_write(kv_c, k_pe, cache, slots))
    moved = tokens * (2 * 576 + slots.element_size() + mla_backend.FORMATS[fmt].token_bytes)
    return entry("cache_write", fmt, tokens, moved, calls, rounds)


def time_plan(tokens: int, rounds: int) -> dict[str, Any]:
    lengths = torch.randint(0, 2049, (tokens,), dtype=torch.int32, device="cuda")
    table = mla_backend.plan(tokens, 2048, topk_length=lengths)
    call = partial(mla_backend.plan, tokens, 2048, topk_length=lengths, out=table)
    return entry("plan", "-", tokens, lengths.nbytes + table.nbytes, [call], rounds)


def time_convert(tokens: int, rounds: int) -> dict[str, Any]:
    requests = min(tokens, 128)
    block_table = torch.randint(0, 2**24, (requests, TABLE_WIDTH), dtype=torch.int32, device="cuda")
    request_ids = torch.arange(tokens, dtype=torch.int32, device="cuda") * requests // tokens
    positions = torch.randint(0, TABLE_WIDTH * BLOCK, (tokens, 2048), dtype=torch.int32, device="cuda")
    slots, counts = mla_backend.convert_indices(positions, block_table, request_ids, BLOCK)
    call = partial(mla_backend.convert_indices, positions, block_table, request_ids, BLOCK, slots=slots, counts=counts)
    moved = positions.nbytes + slots.nbytes + block_table.nbytes + request_ids.nbytes + counts.nbytes
    return entry("convert_indices", "-", tokens, moved, [call], rounds)


def entry(op: str, fmt: str, count: int, moved: int, calls: Sequence[Call], rounds: int) -> dict[str, Any]:
    """Times the calls, and makes an entry of the result file."""
    timing = interleaved({op: capture(calls).clock}, rounds=rounds)[op]
    return {"op": op, "format": fmt, "count": count, "bytes": moved, "seconds": timing.as_dict()}


def add_options(parser: argparse.ArgumentParser) -> None:
    opt.add_list(parser, "--tokens", opt.count, "written, planned and converted at once", "1,128,4096,65536,1048576")
    opt.add_rounds(parser, 21)
    opt.add_output(parser)


def run(options: argparse.Namespace) -> int:
    opt.require_gpu()
    torch.manual_seed(0)
    tokens, rounds = options.tokens, options.rounds
    results = time_copies(rounds) + [time_write(n, fmt, rounds) for fmt in FORMATS for n in tokens]
    results += [time_plan(n, rounds) for n in tokens]
    results += [time_convert(n, rounds) for n in tokens if n <= MOST_CONVERTED]
    result_file.show(*cache_rows(results), words=2)
    result_file.write(options.output, results, Console(stderr=True), benchmark="cache")
    return 0
