"""The indexer's ops on a GPU: the scores of all keys of a context, and the choice of the best ones.

Batches are written as those of `kernels` are. Operations are two for each product of the queries with the keys that a
token sees. Bytes are those that have to be read and written once: keys, queries, scores and chosen keys. Everything is
timed as CUDA graphs over several sets of inputs. Some tokens of the last set are first checked against the reference.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import mla_backend
from mla_backend import reference
from mla_backend.keys import KEY_FORMATS, write_keys
from serving_benchmarks import options as opt
from serving_benchmarks.ops import kernels
from serving_benchmarks.ops.batches import BLOCK, SETS, SMALLEST_CACHE, CaseOfBatch, RequestBatch
from serving_benchmarks.ops.timing import Call, capture, interleaved
from serving_benchmarks.results import file as result_file
from serving_benchmarks.results.tables import index_rows

CHECKED = 8  # tokens that are compared with the reference
TOLERANCE = 2.0**-11  # of the sum over heads of |weight| |query| |key|
MOST_HEADS = 128


@dataclass(frozen=True)
class Case(CaseOfBatch):
    batch: str
    heads: int
    topk: int


Inputs = tuple[tuple[Tensor, ...], Tensor, Tensor]
"""The arguments of index_scores in their order, scores and chosen keys."""


def new_cache(fmt: str, tokens: int) -> Tensor:
    """Random keys in every slot."""
    kind = KEY_FORMATS[fmt]
    cache = torch.zeros(-(-tokens // BLOCK), BLOCK, kind.width, dtype=kind.dtype, device=kernels.DEVICE)
    for slots in torch.arange(tokens, device=cache.device).split(2**18):
        write_keys(torch.randn(len(slots), 128, device=cache.device), cache, slots)
    return cache


def new_inputs(case: Case, cache: Tensor, table: Tensor) -> Inputs:
    """One set. Queries are fp32, which takes longer to read than bf16."""
    batch, device = case.requests, cache.device
    queries = torch.randn(batch.tokens, case.heads, 128, device=device)
    weights = torch.randn(batch.tokens, case.heads, device=device)
    requests, lengths = batch.token_requests().to(device), batch.visible().to(device)
    scores = torch.zeros(batch.tokens, batch.longest, device=device)
    chosen = torch.zeros(batch.tokens, case.topk, dtype=torch.int32, device=device)
    return (queries, weights, cache, table, requests, lengths), scores, chosen


def check(case: Case, inputs: Inputs) -> None:
    """Compares some tokens, the last one among them, with the reference. Raises RuntimeError."""
    (queries, weights, cache, table, requests, lengths), scores, chosen = inputs
    some = torch.linspace(0, len(queries) - 1, CHECKED, device=cache.device).long()
    scores = scores[some]
    for token, got in zip(some.tolist(), scores, strict=True):
        own = slice(token, token + 1)
        length, row = int(lengths[token]), table[requests[token].long()].long()
        keys = cache[row]  # this request's alone: the whole cache would not fit in float
        local = torch.arange(len(row), dtype=torch.int32, device=cache.device).unsqueeze(0)
        arguments = queries[own], weights[own], keys, local, torch.zeros_like(requests[own]), lengths[own]
        want = reference.index_scores(*arguments, scores.shape[1])[0, :length]
        norms = reference.dequantise_keys(keys).flatten(0, 1).norm(dim=1)[:length]
        allowed = (weights[token].abs() * queries[token].norm(dim=-1)).sum() * norms * TOLERANCE
        if not bool(((got[:length] - want).abs() <= allowed).all()):
            raise RuntimeError(f"index_scores differs from the reference in token {token} of {case}")
    if not torch.equal(chosen[some], reference.select_top(scores, lengths[some], case.topk)):
        raise RuntimeError(f"select_top differs from the reference in {case}")


def time_case(case: Case, fmt: str, cache: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Checks and times both ops."""
    batch = case.requests
    tables = kernels.new_table(batch.blocks(BLOCK) * SETS, len(cache)).chunk(SETS)  # no set finds another's keys in L2
    sets = [new_inputs(case, cache, table) for table in tables]
    calls: dict[str, list[Call]] = {
        "index_scores": [partial(mla_backend.index_scores, *given, scores=scores) for given, scores, _ in sets],
        "select_top": [partial(mla_backend.select_top, scores, of[-1], chosen=chosen) for of, scores, chosen in sets],
    }
    graphs = {op: capture(own) for op, own in calls.items()}
    check(case, sets[-1])
    seconds = interleaved({op: graph.clock for op, graph in graphs.items()}, rounds=rounds)
    seen = int(batch.visible().sum())
    read = batch.cached * KEY_FORMATS[fmt].token_bytes + sum(x.nbytes for x in sets[0][0][:2])
    moved = {"index_scores": read + 4 * seen, "select_top": 4 * seen + sets[0][2].nbytes}
    flops = {"index_scores": 2 * 128 * case.heads * seen, "select_top": None}
    measured = {op: {"flops": flops[op], "bytes": moved[op], "seconds": seconds[op].as_dict()} for op in calls}
    return [{"op": op, "format": fmt, "case": case.as_dict(), **of} for op, of in measured.items()]


def add_options(parser: argparse.ArgumentParser) -> None:
    opt.add_list(parser, "--batches", RequestBatch.parse, "as those of `kernels`", "64q1s4k,64q1s32k,q4k")
    opt.add_list(parser, "--heads", opt.whole(1, MOST_HEADS), "of the indexer", "64")
    parser.add_argument("--topk", type=opt.count, default=2048, metavar="N", help="default: %(default)s")
    opt.add_list(parser, "--formats", opt.one_of(KEY_FORMATS), "of the keys", ",".join(KEY_FORMATS))
    opt.add_rounds(parser, 21)
    opt.add_output(parser)


def run(options: argparse.Namespace) -> int:
    opt.require_gpu()
    torch.manual_seed(0)
    cases = [Case(batch.spec, heads, options.topk) for batch in options.batches for heads in options.heads]
    tokens = max(SMALLEST_CACHE, *(SETS * BLOCK * sum(batch.blocks(BLOCK)) for batch in options.batches))
    results: list[dict[str, Any]] = []
    for fmt in options.formats:
        cache = new_cache(fmt, tokens)
        for case in track(cases, f"{fmt} keys", console=Console(stderr=True)):
            results += time_case(case, fmt, cache, options.rounds)
    result_file.show(*index_rows(results), words=4)
    result_file.write(options.output, results, Console(stderr=True), benchmark="index")
    return 0
