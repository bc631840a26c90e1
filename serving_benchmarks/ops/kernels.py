"""Sparse attention on a GPU, versus FlashMLA, FlashAttention 3, FlashInfer and SGLang's Q8KV8.

All candidates are timed interleaved in one process, as CUDA graphs over several sets of inputs in one cache, without
what serving does once a step: our plan, timed on its own, and the peers' schedules. What a graph leaves is checked
against the reference. Decode is also timed in situ: what it adds to matrix products that read their weights from
memory. A launch in a loop of its own finds its code in caches and overlaps the one before it.

Peers without FP8 rows get a BF16 copy of an FP8 cache, as vLLM makes (prefill) or keeps (decode). It is not timed.
Q8KV8 reads rows with one scale, of fp8_ds_mla a copy, and rounds queries and P. Neither copy nor queries are timed.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import mla_backend
from mla_backend import reference
from mla_backend.kernel_heads import SWAP_AB_HEADS
from mla_backend.plan import Plan, workspace_floats
from serving_benchmarks import options as opt
from serving_benchmarks.ops import batches, peer_kernels, timing
from serving_benchmarks.ops.batches import BLOCK, SETS, SMALLEST_CACHE, RequestBatch, positions
from serving_benchmarks.ops.peer_kernels import Prepared, SparseProblem
from serving_benchmarks.ops.peers import VERSIONS
from serving_benchmarks.results import file as result_file
from serving_benchmarks.results import tables

DEVICE = "cuda"
FORMATS = ("fp8_ds_mla", "fp8_tensor_576", "bf16")  # candidates for one also read copies in those after it
SCALE = 576**-0.5
MAGNITUDE = 0.1  # standard deviation of cached values. With queries of 1 / MAGNITUDE the scores spread by about 1.
MOST_DECODE_QUERIES = 16  # requests with more query tokens are prefill
SCALES = {"fp8_tensor_576": peer_kernels.FP8_TENSOR_SCALE}
OUT_ABSOLUTE, OUT_RELATIVE, LSE_ABSOLUTE, LSE_RELATIVE = 8e-4, 2.01 / 128, 1e-6, 8.01 / 65536
ROUNDED_LSE = 2.0**-9  # added to LSE_ABSOLUTE where Hopper's kernels round scores: one row's lse may be near 0
COSINE = 5e-6  # largest cosine distance of a token. docs/contract.md promises it and the bounds above.
PEERS_ALLOWED, FP8_PEERS_ALLOWED = 10, 1000
"""The bounds of a peer, and of one that rounds to e4m3, are so many times ours. Peers promise no such accuracy."""
MATH_FLOPS = 780e12
"""FLOP/s of a bf16 matrix product of 8192^3. This and the next two rates were measured on an H200: compared with them,
another GPU looks better or worse than it is."""
MEMORY_BYTES = 3.65e12
"""Bytes/s of gathering random FP8 rows of 656 bytes from memory into shared memory. BF16 rows are gathered faster (our
kernel reaches 4.03e12), so times with them can be below a floor made of this."""
L2_BYTES = {"fp8_ds_mla": 5.7e12, "fp8_tensor_576": 5.7e12, "bf16": 7.7e12}  # bytes/s, gathered from L2 out of 32K rows
PRODUCT_ROWS, PRODUCT_WIDTH = 64, 7168
"""Of the products before calls in situ: DeepSeek-V3.2's width. Their weights, 103 MB, are twice an L2."""


class WrongResult(Exception):
    """A kernel did not compute what the reference computes."""


@dataclass(frozen=True)
class Case(batches.CaseOfBatch):
    batch: str
    heads: int
    topk: int
    format: str

    @property
    def decode(self) -> bool:
        return max(queries for queries, _ in self.requests.requests) <= MOST_DECODE_QUERIES


SUITES: dict[str, list[tuple[str, Sequence[int], Sequence[int]]]] = {
    "headline": [
        ("128q1s32k", (8, 16, 32, 64, 128), (2048,)),  # the heads of a GPU, from 64 over 8 GPUs to 128 on one
        *((f"{requests}q1s32k", (16,), (2048,)) for requests in (64, 32, 16, 8)),
        ("1q1s32k", (16, 128), (2048,)),
        ("128q2s64k", (128,), (2048, 32768)),  # two query tokens a request, as in speculative decoding
        ("q4ks32k", (16, 64, 128), (2048,)),  # a chunk of prefill
    ],
    "decode_by_batch": [(f"{2**power}q1s32k", (16, 128), (2048,)) for power in range(10)],
    "prefill_by_context": [(f"q4ks{context}k", (16, 64, 128), (2048,)) for context in (4, 8, 32, 128)],
    "fp8_products": [
        *((spec, (48, 64, 128), (2048,)) for spec in ("q4ks32k", "2q1000s16k", "q3000s48k", "33q2s64k", "128q2s64k")),
        *((f"{requests}q1s32k", (48, 64, 128), (2048,)) for requests in (96, 128, 200)),
        *((spec, (48, 64, 128), (512,)) for spec in ("17q3s32k", "70q1s32k")),
    ],
}
"""Batches, each with heads and top-k: the README's table, decode by requests, prefill by context, FP8 products."""


def products(count: int) -> list[timing.Call]:
    """Matrix products of a model's size, each with weights of its own."""
    new = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    x, weights = new(PRODUCT_ROWS, PRODUCT_WIDTH), [new(PRODUCT_WIDTH, PRODUCT_WIDTH) for _ in range(count)]
    return [partial(torch.mm, x, weight, out=torch.empty_like(x)) for weight in weights]


class Caches(dict[tuple[str, int], Tensor]):
    """A cache of random rows for each format and page size, made when first asked for, large enough for all cases."""

    def __init__(self, tokens: int):
        self.tokens = max(tokens, SMALLEST_CACHE)
        self.copies: dict[tuple[str, int, str], Tensor] = {}

    def __missing__(self, key: tuple[str, int]) -> Tensor:
        (name, page), fmt = key, mla_backend.FORMATS[key[0]]
        cache = self[key] = fmt.new_cache(-(-self.tokens // page), page, device=DEVICE)
        for slots in torch.arange(len(cache) * page, device=DEVICE).split(2**18):
            rows = torch.randn(len(slots), fmt.head_dim, device=DEVICE).mul_(MAGNITUDE)
            kv_c, k_pe = rows[:, : fmt.latent], rows[:, fmt.latent :] if fmt.rope else None
            mla_backend.cache_write(kv_c, k_pe, cache, slots, format=name, scale=SCALES.get(name, 1.0))
        return cache

    def copied(self, name: str, page: int, to: str) -> Tensor:
        """The same values in rows of another format, for what reads no others."""
        cache = self[name, page]
        if name != to and (name, page, to) not in self.copies:
            made = self.copies[name, page, to] = mla_backend.FORMATS[to].new_cache(len(cache), page, device=DEVICE)
            for slots in torch.arange(len(cache) * page, device=DEVICE).split(2**18):
                rows = mla_backend.cache_gather(cache, slots, format=name, scale=SCALES.get(name, 1.0))
                mla_backend.cache_write(rows[:, :512], rows[:, 512:], made, slots, format=to, scale=SCALES.get(to, 1.0))
        return cache if name == to else self.copies[name, page, to]


def new_table(wanted: Sequence[int], blocks: int) -> Tensor:
    """A block table of requests that own so many random blocks each of a cache."""
    owned = torch.randperm(blocks, dtype=torch.int32, device=DEVICE)[: sum(wanted)].split(list(wanted))
    return torch.nn.utils.rnn.pad_sequence(owned, batch_first=True, padding_value=-1)


def new_lists(batch: RequestBatch, topk: int, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Random lists and their lengths, of requests that own random blocks of a cache."""
    table = new_table(batch.blocks(block_size), blocks)
    picked = positions(batch.visible().to(DEVICE), topk)
    return mla_backend.convert_indices(picked, table, batch.token_requests().to(DEVICE), block_size)


def new_problem(batch: RequestBatch, heads: int, fmt: str, lists: tuple[Tensor, Tensor], **more: Any) -> SparseProblem:
    """Random queries of a batch to rows of a format."""
    rows, more = mla_backend.FORMATS[fmt], {"cache_format": fmt, "cache_scale": SCALES.get(fmt, 1.0), **more}
    q = torch.randn(batch.tokens, heads, rows.head_dim, device=DEVICE).div_(MAGNITUDE).to(rows.number)
    return SparseProblem(q, *lists, rows.head_dim**-0.5, batch.queries, more)


def lengths_of(problem: SparseProblem) -> Tensor | None:
    """The topk_length argument: None if all lists are full."""
    return None if bool((problem.counts == problem.indices.shape[1]).all()) else problem.counts


def prepare_ours(problem: SparseProblem, cache: Tensor, plan: Plan, workspace: Tensor) -> tuple[Prepared, Tensor]:
    """Our call and its lse."""
    out = torch.empty((*problem.q.shape[:2], 512), dtype=problem.q.dtype, device=DEVICE)
    lse = torch.empty(out.shape[:2], device=DEVICE)
    more = {**problem.more, "plan": plan, "workspace": workspace, "out": out, "lse": lse}
    attend = partial(mla_backend.sparse_attention, scale=problem.scale, topk_length=lengths_of(problem), **more)
    return Prepared(lambda: attend(problem.q, cache, problem.indices), out), lse


def listed_rows(problem: SparseProblem) -> int:
    """Rows that the tokens attend to, over all of them, in both caches."""
    extra, lengths = problem.more.get("extra_indices"), problem.more.get("extra_topk_length")
    more = 0 if extra is None else extra.numel() if lengths is None else int(lengths.sum())
    return int(problem.counts.sum()) + more


def peers_for(
    case: Case, problem: SparseProblem, by_format: Mapping[str, Tensor], loaded: set[str]
) -> dict[str, Callable[[SparseProblem], Prepared]]:
    """The loaded peers that vLLM could call for a case, each with the cache that it reads."""
    return {
        name: partial(peer.prepare, cache=by_format[peer.cache])
        for name, peer in peer_kernels.PEERS.items()
        if peer.library in loaded and peer.cache in by_format and peer.takes(problem, case.decode)
    }


def attend_exactly(problem: SparseProblem, cache: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's out and lse in float32, a few tokens at a time, as their rows in float64 are large."""
    names = ("extra_indices", "extra_topk_length")
    of_tokens = {name: problem.more[name] for name in names if problem.more.get(name) is not None}
    listed = problem.indices.shape[1] + (of_tokens["extra_indices"].shape[1] if of_tokens else 0)
    parts = []
    for tokens in torch.arange(len(problem.q), device=DEVICE).split(max(1, 2**30 // (listed * 576 * 8))):
        more = {**problem.more, **{name: each[tokens] for name, each in of_tokens.items()}, "scale": problem.scale}
        parts.append(reference.sparse_attention(problem.q[tokens], cache, problem.indices[tokens], **more)[:2])
    return torch.cat([out.float() for out, _ in parts]), torch.cat([lse.float() for _, lse in parts])


def check_out(got: Tensor, want: Tensor, times: float = 1) -> dict[str, float]:
    """How far a result is from the reference. Raises WrongResult beyond `times` the bounds."""
    got = got.float()
    difference = (got - want).abs()
    allowed = times * (want.abs() * OUT_RELATIVE).clamp(min=OUT_ABSOLUTE)
    flat, exact = got.flatten(1).double(), want.flatten(1).double()
    distance = 1 - 2 * (flat * exact).sum(1) / (flat.square() + exact.square()).sum(1)
    found = {"largest_difference": difference.max().item(), "cosine_distance": distance.max().item()}
    if not (difference <= allowed).all() or not found["cosine_distance"] <= times * COSINE:
        raise WrongResult(f"wrong result: {', '.join(f'{name} {value:.3g}' for name, value in found.items())}")
    return found


def prepared_candidate(prepare: Callable[[Any], Prepared], problems: Sequence[Any], want: Tensor) -> timing.Candidate:
    """Calls of a peer on all sets. `want` is the last one's out, of the reference."""
    made = [prepare(problem) for problem in problems]
    out = made[-1].out  # a call may give it other memory
    times = FP8_PEERS_ALLOWED if made[-1].rounds else PEERS_ALLOWED
    calls, layers = [one.call for one in made], [one.layer for one in made]
    return timing.Candidate(calls, [out], lambda: check_out(out.view(want.shape), want, times), layers)


def check_ours(got: Sequence[Tensor], want: Sequence[Tensor], cache: Tensor, products: str) -> dict[str, float]:
    """Our out and lse. FP8 products round them as a peer's may."""
    (out, lse), (exact_out, exact_lse) = got, want
    if products == "fp8":
        return check_out(out, exact_out, FP8_PEERS_ALLOWED)
    absolute = LSE_ABSOLUTE + ROUNDED_LSE * rounds_queries(cache)
    if not ((lse - exact_lse).abs() <= absolute + LSE_RELATIVE * exact_lse.abs()).all():
        raise WrongResult(f"wrong lse: it differs by {(lse - exact_lse).abs().max().item():.3g}")
    return check_out(out, exact_out)


def rounds_queries(cache: Tensor) -> bool:
    """Whether the kernel for these rows does."""
    rounding = (mla_backend.FORMATS[name].width for name in ("fp8_ds_mla", "fp8_tensor_576"))
    return torch.cuda.get_device_capability()[0] == 9 and cache.element_size() == 1 and cache.shape[-1] in rounding


def measure(case: Case, caches: Caches, loaded: set[str], rounds: int, before: Sequence[timing.Call]) -> dict[str, Any]:
    """Checks and times one case: ours, our plan, and every peer that can run it. Decode also `before` in situ."""
    source = "fp8_ds_mla" if case.format == "bf16" else case.format
    by_format = {name: caches.copied(source, BLOCK, name) for name in FORMATS[FORMATS.index(case.format) :]}
    batch = case.requests
    lists = (new_lists(batch, case.topk, len(by_format["bf16"]), BLOCK) for _ in range(SETS))
    problems = [new_problem(batch, case.heads, case.format, one) for one in lists]
    peers = peers_for(case, problems[-1], by_format, loaded)
    found = time_problems(problems, by_format[case.format], case.format, peers, rounds, before if case.decode else ())
    attended = sum(map(listed_rows, problems)) / SETS
    row_bytes = mla_backend.FORMATS[case.format].token_bytes
    floor = {"math": found["useful_flops"] / MATH_FLOPS, "l2": attended * row_bytes / L2_BYTES[case.format]}
    floor["memory"] = min(attended, batch.cached) * row_bytes / MEMORY_BYTES
    return {"floor_seconds": floor, **found}


def time_problems(
    problems: Sequence[SparseProblem],
    cache: Tensor,
    fmt: str,
    peers: Mapping[str, Callable[[SparseProblem], Prepared]],
    rounds: int,
    before: Sequence[timing.Call] = (),
) -> dict[str, Any]:
    """Checks and times ours, our plan and peers on problems whose lists have the same lengths. Raises WrongResult.
    `before`: other work for each problem, after which calls are timed in situ as well."""
    exact_out, exact_lse = attend_exactly(problems[-1], cache)
    any_set, more = problems[-1], problems[-1].more
    (tokens, heads, width), topk = any_set.q.shape, any_set.indices.shape[1]
    about = {"num_heads": heads, "topk_length": lengths_of(any_set), "cache_format": fmt}
    if "extra_indices" in more:
        about |= {"extra_topk": more["extra_indices"].shape[1], "extra_topk_length": more["extra_topk_length"]}
    make_plan = partial(mla_backend.plan, tokens, topk, **about)

    def candidate(plan: Plan, products: str) -> timing.Candidate:
        workspace = torch.zeros(workspace_floats(plan.launch.ctas, heads), device=DEVICE)
        asked = [replace(problem, more={**problem.more, "products": products}) for problem in problems]
        prepared = [prepare_ours(problem, cache, plan, workspace) for problem in asked]
        (last, lse), calls = prepared[-1], [one.call for one, _ in prepared]
        check = partial(check_ours, (last.out, lse), (exact_out, exact_lse), cache, products)
        return timing.Candidate(calls, [last.out, lse], check, calls)

    ours = {"ours": candidate(plan := make_plan(device=DEVICE), "exact")}
    if mla_backend.FORMATS[fmt].fp8 and heads > SWAP_AB_HEADS:  # FP8 products have a kernel of their own
        ours["ours_fp8"] = candidate(make_plan(products="fp8", device=DEVICE), "fp8")
    ours["plan"] = timing.Candidate([lambda: make_plan(out=plan)])
    make = partial(prepared_candidate, problems=problems, want=exact_out)
    theirs = {name: partial(make, prepare) for name, prepare in peers.items()}
    listed, row_bytes = sum(map(listed_rows, problems)) / len(problems), mla_backend.FORMATS[fmt].token_bytes
    flops = 2 * listed * heads * (width + 512)
    moved = listed * (row_bytes + 4) + tokens * heads * (2 * (width + 512) + 4)
    found = timing.measure(ours, theirs, rounds, before=before)
    return {"useful_flops": flops, "bytes": moved, "launch": str(plan.launch), **found}


def add_options(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    either = what.add_mutually_exclusive_group(required=True)
    either.add_argument("--suite", choices=SUITES, help="batches with heads and top-k of their own")
    told = "128q1s32k is 128 requests with 1 query token each at 32K tokens"
    opt.add_list(either, "--batches", RequestBatch.parse, told)
    heads, only = opt.whole(1, batches.MOST_HEADS), "only these of a suite; default with --batches:"
    opt.add_list(what, "--heads", heads, f"{only} 16,128")
    opt.add_list(what, "--topk", opt.count, f"{only} 2048")
    opt.add_list(what, "--formats", opt.one_of(FORMATS), "of the cache", "fp8_ds_mla,bf16")
    add_ways(parser, 15)


def add_ways(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options of commands that have peers out of vLLM's wheels."""
    told = "that the command `peers` has filled; default: an installed vllm"
    opt.add(parser, "--peers", Path, told, metavar="FOLDER")
    opt.add(parser, "--vllm", str, "whose kernels in that folder", VERSIONS[0], "VERSION")
    parser.add_argument("--ours-only", action="store_true", help="no peers")
    add_ends(parser, rounds)


def add_ends(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options of every command that `measure_cases` serves."""
    opt.add_rounds(parser, rounds)
    told = "begin no case after so many seconds; default: all are measured"
    opt.add(parser, "--limit-s", opt.positive, told, math.inf, "S")
    opt.add_output(parser)


def add_cases(parser: argparse.ArgumentParser, kind: str, cases: Sequence[Any]) -> None:
    """The option --cases, for commands with cases of their own."""
    told = f"only cases in whose names it finds a match; one is {tables.NAMES[kind]({'case': cases[0].as_dict()})}"
    parser.add_argument("--cases", type=opt.pattern, default="", metavar="REGEX", help=told)


def asked_for(options: argparse.Namespace, kind: str, cases: Sequence[Any]) -> list[Any]:
    """The cases that --cases names. Raises Refused."""
    named = {tables.NAMES[kind]({"case": case.as_dict()}): case for case in cases}
    found = [case for name, case in named.items() if options.cases.search(name)]
    if not found:
        raise opt.Refused(f"--cases: no case has a match; there are {'; '.join(named)}")
    return found


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The cases that the options name, all of the first format first. Raises Refused."""
    heads, topk = options.heads or [16, 128], options.topk or [2048]
    asked = SUITES[options.suite] if options.suite else [(batch.spec, heads, topk) for batch in options.batches]
    found = [
        Case(spec, heads, topk, fmt)
        for fmt in options.formats
        for spec, of_heads, of_topk in asked
        for topk, heads in itertools.product(of_topk, of_heads)
        if heads in (options.heads or [heads]) and topk in (options.topk or [topk])
    ]
    if not found:
        raise opt.Refused(f"--suite {options.suite} has no such heads and topk")
    return found


def run(options: argparse.Namespace) -> int:
    chosen = chosen_cases(options)
    opt.require_gpu()
    return measure_batches(options, "kernels", chosen, partial(measure, before=products(SETS)))


Measure = Callable[..., dict[str, Any]]


def measure_batches(options: argparse.Namespace, kind: str, cases: Sequence[Any], measure: Measure) -> int:
    """`measure_cases` of batches. `measure` also gets caches, the names of loaded peers, and rounds."""
    opt.require_gpu()
    found = {} if options.ours_only else peer_kernels.load(options.peers, options.vllm)
    torch.manual_seed(0)
    caches = Caches(max(case.requests.cached for case in cases))
    return measure_cases(options, kind, cases, partial(measure, caches=caches), found)


def measure_cases(
    options: argparse.Namespace, kind: str, cases: Sequence[Any], measure: Measure, peers: dict[str, str]
) -> int:
    """Measures one case after the other, prints and writes what was found. A case that fails does not stop the others.

    `peers` are versions by name, or why they are missing. The exit status is 1 if a case failed, or if the time was
    over before all were measured.
    """
    console, results, began = Console(stderr=True, highlight=False), [], time.monotonic()
    say = partial(console.print, markup=False, soft_wrap=True)
    for name, version in peers.items():
        say(f"{name}: {version}")
    loaded = {name for name, version in peers.items() if not version.startswith("missing")}
    for number, case in enumerate(cases, 1):
        if time.monotonic() - began > options.limit_s:
            say(f"--limit-s {options.limit_s:g} is over: {len(cases) - number + 1} cases were not measured")
            break
        entry = {"case": case.as_dict()}
        name = tables.NAMES[kind](entry)
        try:
            entry |= measure(case, loaded=loaded, rounds=options.rounds)
            print(f"{number} of {len(cases)}: {name}: {tables.kernel_line(entry)}", flush=True)
        except (RuntimeError, ValueError, WrongResult) as error:
            entry["error"] = timing.first_line(error)
        results.append(entry)
        for who, why in ({"mla_backend": entry["error"]} if "error" in entry else entry["failed"]).items():
            say(f"{who} failed for {name}: {why}")
    if results:
        result_file.write(options.output, results, console, benchmark=kind, peers=peers)
    return 1 if len(results) < len(cases) or any("error" in result for result in results) else 0
