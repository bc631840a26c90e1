"""The indexer's ops on a GPU: the scores of all keys of a context, and the choice of the best ones.

A request that decodes has one token. Each token of a prompt sees one key more than the one before it. Blocks of the
cache are random. Operations are two for each product of the queries with the keys that a token sees. Bytes are those
that have to be read and written once: keys, queries, scores and chosen keys. Everything is timed as CUDA graphs over
several sets of inputs. Some tokens of the last set are first checked against the reference.
"""

import argparse
from dataclasses import asdict, dataclass
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
from serving_benchmarks.ops.batches import BLOCK, SETS, SMALLEST_CACHE
from serving_benchmarks.ops.timing import Call, capture, interleaved
from serving_benchmarks.results import file as result_file

CHECKED = 8
"""Tokens that are compared with the reference."""
TOLERANCE = 2.0**-11
"""Of the sum over heads of |weight| |query| |key|."""
MOST_WRITTEN = 2**18
"""Keys that are made at once."""
MOST_HEADS = 128


@dataclass(frozen=True)
class Case:
    """`requests` with `tokens` each. The last token of a request sees `context` keys."""

    requests: int
    tokens: int
    context: int
    heads: int
    topk: int

    def __str__(self) -> str:
        if self.tokens == 1:
            return f"decode {self.requests} x {self.context}"
        return f"prefill {self.tokens} of {self.context}"

    @property
    def all_tokens(self) -> int:
        return self.requests * self.tokens

    @property
    def seen(self) -> int:
        """Keys that tokens see, summed over all tokens."""
        return self.requests * (self.tokens * self.context - self.tokens * (self.tokens - 1) // 2)


@dataclass
class Inputs:
    """The arguments of index_scores in their order, and the outputs of both ops."""

    arguments: tuple[Tensor, ...]
    lengths: Tensor
    scores: Tensor
    chosen: Tensor


def new_cache(fmt: str, tokens: int) -> Tensor:
    """Random keys in every slot."""
    kind = KEY_FORMATS[fmt]
    cache = torch.zeros(-(-tokens // BLOCK), BLOCK, kind.width, dtype=kind.dtype, device="cuda")
    for first in range(0, tokens, MOST_WRITTEN):
        slots = torch.arange(first, min(first + MOST_WRITTEN, tokens), device="cuda")
        write_keys(torch.randn(len(slots), 128, device="cuda"), cache, slots)
    return cache


def new_inputs(case: Case, cache: Tensor, blocks: Tensor) -> Inputs:
    """One set. Queries are fp32, which takes longer to read than bf16."""
    count = case.all_tokens
    queries = torch.randn(count, case.heads, 128, device="cuda")
    weights = torch.randn(count, case.heads, device="cuda")
    requests = torch.arange(case.requests, dtype=torch.int32, device="cuda").repeat_interleave(case.tokens)
    last = torch.arange(case.context - case.tokens, case.context, dtype=torch.int32, device="cuda") + 1
    lengths = last.repeat(case.requests)
    table = blocks.int().view(case.requests, -1)
    scores = torch.zeros(count, case.context, device="cuda")
    chosen = torch.zeros(count, case.topk, dtype=torch.int32, device="cuda")
    return Inputs((queries, weights, cache, table, requests, lengths), lengths, scores, chosen)


def check(case: Case, inputs: Inputs) -> None:
    """Compares some tokens, the last one among them, with the reference. Raises RuntimeError."""
    queries, weights, cache, table, requests, lengths = inputs.arguments
    some = torch.linspace(0, case.all_tokens - 1, CHECKED, device="cuda").long()
    scores = inputs.scores[some]
    for token, got in zip(some.tolist(), scores, strict=True):
        own = slice(token, token + 1)
        length, row = int(lengths[token]), table[requests[token].long()].long()
        keys = cache[row]  # this request's alone: the whole cache would not fit in float
        local = torch.arange(len(row), dtype=torch.int32, device="cuda").unsqueeze(0)
        arguments = queries[own], weights[own], keys, local, torch.zeros_like(requests[own]), lengths[own]
        want = reference.index_scores(*arguments, case.context)[0, :length]
        norms = reference.dequantise_keys(keys).flatten(0, 1).norm(dim=1)[:length]
        allowed = (weights[token].abs() * queries[token].norm(dim=-1)).sum() * norms * TOLERANCE
        if not bool(((got[:length] - want).abs() <= allowed).all()):
            raise RuntimeError(f"index_scores differs from the reference in token {token} of {case}")
    if not torch.equal(inputs.chosen[some], reference.select_top(scores, lengths[some], case.topk)):
        raise RuntimeError(f"select_top differs from the reference in {case}")


def time_case(case: Case, fmt: str, cache: Tensor, rounds: int) -> list[dict[str, Any]]:
    """Checks and times both ops."""
    width = -(-case.context // BLOCK)
    shuffled = torch.randperm(len(cache), device="cuda")
    sets = []
    for number in range(SETS):  # may share blocks if the cache has too few for all
        wanted = torch.arange(case.requests * width, device="cuda") + number * case.requests * width
        sets.append(new_inputs(case, cache, shuffled[wanted % len(shuffled)]))
    calls: dict[str, list[Call]] = {
        "index_scores": [partial(mla_backend.index_scores, *one.arguments, scores=one.scores) for one in sets],
        "select_top": [partial(mla_backend.select_top, one.scores, one.lengths, chosen=one.chosen) for one in sets],
    }
    graphs = {op: capture(own) for op, own in calls.items()}
    check(case, sets[-1])
    seconds = interleaved({op: graph.clock for op, graph in graphs.items()}, rounds=rounds)
    key_bytes = case.requests * case.context * KEY_FORMATS[fmt].token_bytes
    query_bytes = sum(x.nbytes for x in sets[0].arguments[:2])
    moved = {
        "index_scores": key_bytes + query_bytes + 4 * case.seen,
        "select_top": 4 * case.seen + sets[0].chosen.nbytes,
    }
    flops = {"index_scores": 2 * 128 * case.heads * case.seen, "select_top": None}
    about = {"format": fmt, "case": {"name": str(case), **asdict(case)}}
    measured = {op: {"flops": flops[op], "bytes": moved[op], "seconds": seconds[op].as_dict()} for op in calls}
    return [{"op": op, **about, **of} for op, of in measured.items()]


HEADINGS = ["op", "case", "heads", "format", "us", "quartiles", "TFLOP/s", "TB/s"]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each entry, under HEADINGS."""
    lines = []
    for result in results:
        case, seconds = result["case"], result["seconds"]["median"]
        row = [result["op"], case["name"], str(case["heads"]), result["format"]]
        row += result_file.timing_cells(result["seconds"])
        row.append(f"{result['flops'] / seconds / 1e12:.0f}" if result["flops"] else "-")
        lines.append([*row, f"{result['bytes'] / seconds / 1e12:.2f}"])
    return lines


def decode_shape(text: str) -> tuple[int, int]:
    """REQUESTSxCONTEXT."""
    requests, x, context = text.partition("x")
    if not (x and requests.isdecimal() and context.isdecimal() and int(requests) and int(context)):
        raise argparse.ArgumentTypeError(f"must be REQUESTSxCONTEXT, such as 64x4096; got {text!r}")
    return int(requests), int(context)


def add_options(parser: argparse.ArgumentParser) -> None:
    told = "requests with one token each, and the keys that it sees"
    opt.add_list(parser, "--decode", decode_shape, told, "64x4096,64x32768")
    opt.add_list(parser, "--prefill", opt.count, "tokens of whole prompts", "4096")
    opt.add_list(parser, "--heads", opt.whole(1, MOST_HEADS), "of the indexer", "64")
    parser.add_argument("--topk", type=opt.count, default=2048, metavar="N", help="default: %(default)s")
    opt.add_list(parser, "--formats", opt.one_of(KEY_FORMATS), "of the keys", ",".join(KEY_FORMATS))
    opt.add_rounds(parser, 21)
    opt.add_output(parser)


def run(options: argparse.Namespace) -> int:
    opt.require_gpu()
    torch.manual_seed(0)
    shapes = [(requests, 1, context) for requests, context in options.decode]
    shapes += [(1, tokens, tokens) for tokens in options.prefill]
    cases = [Case(*shape, heads, options.topk) for shape in shapes for heads in options.heads]
    tokens = max(SMALLEST_CACHE, *(case.requests * -(-case.context // BLOCK) * BLOCK for case in cases))
    results: list[dict[str, Any]] = []
    for fmt in options.formats:
        cache = new_cache(fmt, tokens)
        for case in track(cases, f"{fmt} keys", console=Console(stderr=True)):
            results += time_case(case, fmt, cache, options.rounds)
    result_file.show(HEADINGS, rows(results), words=4)
    result_file.write(options.output, results, Console(stderr=True), benchmark="index")
    return 0
