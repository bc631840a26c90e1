"""Sparse attention on a GPU, versus FlashMLA, FlashAttention 3 and FlashInfer.

All candidates are timed interleaved in one process, as CUDA graphs over several sets of queries and index lists in one
cache. Work that serving does once a step is outside of the graphs: our plan, which is timed on its own, and the peers'
schedules. In every case the results that a graph leaves, all tokens of the last set, are checked against the reference.

FlashMLA and FlashAttention 3 come out of vLLM's wheels and are called as vLLM calls them. FlashMLA's prefill,
FlashAttention 3 and FlashInfer read no FP8 rows of this kind: for an FP8 cache they get a BF16 copy of it. The copy is
not timed, although vLLM has to make it (prefill) or to keep a cache of 1.76 times the size (decode).
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import mla_backend
from mla_backend import reference
from mla_backend.attention import workspace_floats
from serving_benchmarks import options as opt
from serving_benchmarks.ops import batches, peer_kernels, timing
from serving_benchmarks.ops.batches import Batch, positions
from serving_benchmarks.ops.peer_kernels import Prepared, Problem
from serving_benchmarks.ops.peers import VERSIONS
from serving_benchmarks.results import file as result_file
from serving_benchmarks.results import tables

FORMATS = ("fp8_ds_mla", "bf16")
BLOCK = 64
SCALE = 576**-0.5
MAGNITUDE = 0.1
"""Standard deviation of cached values. With queries of 1 / MAGNITUDE the scores spread by about 1."""
SMALLEST_CACHE = 2**20
"""Tokens. Input sets are spread over the whole cache, as requests are in a server's."""
MOST_DECODE_QUERIES = 16
"""Requests with more query tokens are prefill."""
REST_SECONDS = 0.3
"""Pause before a case is timed: the case before it and the check in float64 may have throttled the clock."""
OUT_ABSOLUTE, OUT_RELATIVE, LSE_ABSOLUTE, LSE_RELATIVE = 8e-4, 2.01 / 128, 1e-6, 8.01 / 65536
ROUNDED_LSE = 2.0**-9
"""Added to LSE_ABSOLUTE for rows of 656 bytes, whose scores Hopper's kernels round. It matters for short lists: the lse
of one row is its score, which may be near 0."""
COSINE = 5e-6
"""Largest cosine distance of a token. docs/contract.md promises it and the bounds above."""
PEERS_ALLOWED = 10
"""The bounds of a peer are this many times ours. Peers promise no such accuracy, they only have to compute the same.
Some round to bf16 where ours don't, which shows where a sum of a few terms is near 0."""
MATH_FLOPS = 780e12
"""FLOP/s of a bf16 matrix product of 8192^3. This and the next two rates were measured on an H200: compared with them,
another GPU looks better or worse than it is."""
MEMORY_BYTES = 3.65e12
"""Bytes/s of gathering random FP8 rows of 656 bytes from memory into shared memory. BF16 rows of 1152 bytes are
gathered faster: our kernel reaches 4.03e12. Their limit was not measured, so times with BF16 rows can be below a floor
made of this."""
L2_BYTES = {"fp8_ds_mla": 5.7e12, "bf16": 7.7e12}
"""Bytes/s of gathering rows of a format from L2, out of a pool of 32K tokens."""


class WrongResult(Exception):
    """A kernel did not compute what the reference computes."""


@dataclass(frozen=True)
class Case:
    batch: Batch
    heads: int
    topk: int
    format: str

    @property
    def decode(self) -> bool:
        return max(queries for queries, _ in self.batch.requests) <= MOST_DECODE_QUERIES

    def as_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch.spec,
            "tokens": self.batch.tokens,
            "heads": self.heads,
            "topk": self.topk,
            "format": self.format,
        }

    def __str__(self) -> str:
        return tables.kernel_name(self.as_dict())


def cases(specs: Sequence[str], heads: Sequence[int], topks: Sequence[int], formats: Sequence[str]) -> list[Case]:
    return [Case(Batch.parse(s), h, k, f) for f in formats for s in specs for k in topks for h in heads]


def suite_cases(
    suite: batches.Suite,
    heads: Sequence[int] | None = None,
    topks: Sequence[int] | None = None,
    formats: Sequence[str] = FORMATS,
) -> list[Case]:
    """The cases of a suite in the order of measuring; only those with these heads, topks and formats, if given."""
    return [
        case
        for fmt in FORMATS
        for entry in suite.entries
        if fmt in entry.formats and fmt in formats
        for case in cases(entry.batches, entry.heads, entry.topk, [fmt])
        if case.heads in (heads or [case.heads]) and case.topk in (topks or [case.topk])
    ]


class Caches:
    """One cache in each format, with the same values: the bf16 one is a copy of the fp8 one."""

    def __init__(self, tokens: int):
        blocks = -(-max(tokens, SMALLEST_CACHE) // BLOCK)
        self.by_format = {name: mla_backend.FORMATS[name].new_cache(blocks, BLOCK, device="cuda") for name in FORMATS}
        rows = self.by_format["bf16"].view(blocks * BLOCK, 576)
        for slots in torch.arange(len(rows), device="cuda").split(2**18):
            values = torch.randn(len(slots), 576, device="cuda").mul_(MAGNITUDE).bfloat16()
            mla_backend.cache_write(values[:, :512], values[:, 512:], self.by_format["fp8_ds_mla"], slots)
            mla_backend.cache_gather(self.by_format["fp8_ds_mla"], slots, out=rows[slots[0] : slots[-1] + 1])

    @property
    def blocks(self) -> int:
        return len(self.by_format["bf16"])


def new_lists(batch: Batch, topk: int, blocks: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Random lists and their lengths, of requests that own random blocks of a cache."""
    wanted = batch.blocks(block_size)
    table = torch.full((len(wanted), max(wanted)), -1, dtype=torch.int32, device="cuda")
    owned = torch.randperm(blocks, dtype=torch.int32, device="cuda")[: sum(wanted)].split(wanted)
    for row, its_blocks in zip(table, owned, strict=True):
        row[: len(its_blocks)] = its_blocks
    picked = positions(batch, topk, device="cuda")
    return mla_backend.convert_indices(picked, table, batch.token_requests().cuda(), block_size)


def new_problem(case: Case, blocks: int) -> Problem:
    """A batch of random queries."""
    indices, counts = new_lists(case.batch, case.topk, blocks, BLOCK)
    q = torch.randn(case.batch.tokens, case.heads, 576, device="cuda").div_(MAGNITUDE).bfloat16()
    return Problem(q, indices, counts, SCALE, case.batch.queries)


def lengths_of(problem: Problem) -> Tensor | None:
    """The topk_length argument: None if all lists are full."""
    return None if bool((problem.counts == problem.indices.shape[1]).all()) else problem.counts


def prepare_ours(problem: Problem, cache: Tensor, plan: Tensor, workspace: Tensor) -> tuple[Prepared, Tensor]:
    """Our call and its lse."""
    out = torch.empty((*problem.q.shape[:2], 512), dtype=problem.q.dtype, device="cuda")
    lse = torch.empty(out.shape[:2], device="cuda")
    more = {**problem.more, "plan": plan, "workspace": workspace, "out": out, "lse": lse}
    attend = partial(mla_backend.sparse_attention, scale=problem.scale, topk_length=lengths_of(problem), **more)
    return Prepared(lambda: attend(problem.q, cache, problem.indices), out), lse


def peers_for(
    case: Case, problem: Problem, caches: Caches, loaded: set[str]
) -> dict[str, Callable[[Problem], Prepared]]:
    """The loaded peers that vLLM could call for a case, each with the cache that it reads."""
    return {
        name: partial(peer.prepare, cache=caches.by_format[peer.cache])
        for name, peer in peer_kernels.PEERS.items()
        if peer.library in loaded and peer.cache in (case.format, "bf16") and peer.takes(problem, case.decode)
    }


def attend_exactly(problem: Problem, cache: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's out and lse in float32, a few tokens at a time, as their rows in float64 are large."""
    names = ("extra_indices", "extra_topk_length")
    of_tokens = {name: problem.more[name] for name in names if problem.more.get(name) is not None}
    listed = problem.indices.shape[1] + (of_tokens["extra_indices"].shape[1] if of_tokens else 0)
    parts = []
    for tokens in torch.arange(len(problem.q), device="cuda").split(max(1, 2**30 // (listed * 576 * 8))):
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


def check_lse(got: Tensor, want: Tensor, *, rounded: bool) -> None:
    absolute = LSE_ABSOLUTE + ROUNDED_LSE * rounded
    if not ((got - want).abs() <= absolute + LSE_RELATIVE * want.abs()).all():
        raise WrongResult(f"wrong lse: it differs by {(got - want).abs().max().item():.3g}")


def replay_poisoned(graph: timing.Graph, *results: Tensor) -> None:
    """Replays a graph over results of NaN, so that what is checked is what is timed."""
    for result in results:
        result.fill_(torch.nan)
    graph.graph.replay()
    torch.cuda.synchronize()


def measure(case: Case, caches: Caches, loaded: set[str], sets: int, rounds: int) -> dict[str, Any]:
    """Checks and times one case: ours, our plan, and every peer that can run it."""
    cache = caches.by_format[case.format]
    problems = [new_problem(case, caches.blocks) for _ in range(sets)]
    found = time_problems(case, problems, cache, peers_for(case, problems[-1], caches, loaded), rounds)
    attended = sum(int(problem.counts.sum()) for problem in problems) / sets
    row_bytes = mla_backend.FORMATS[case.format].token_bytes
    flops = 2 * attended * case.heads * (576 + 512)
    return {
        "case": case.as_dict(),
        "useful_flops": flops,
        "bytes": attended * (row_bytes + 4) + case.batch.tokens * case.heads * (2 * (576 + 512) + 4),
        "floor_seconds": {
            "math": flops / MATH_FLOPS,
            "memory": min(attended, case.batch.cached) * row_bytes / MEMORY_BYTES,
            "l2": attended * row_bytes / L2_BYTES[case.format],
        },
        **found,
    }


def time_problems(
    case: object,
    problems: Sequence[Problem],
    cache: Tensor,
    peers: Mapping[str, Callable[[Problem], Prepared]],
    rounds: int,
) -> dict[str, Any]:
    """Checks and times ours, our plan and peers on problems whose lists have the same lengths. Raises WrongResult."""
    exact_out, exact_lse = attend_exactly(problems[-1], cache)

    any_set = problems[-1]
    (tokens, heads, _), topk, more = any_set.q.shape, any_set.indices.shape[1], any_set.more
    about = {"topk_length": lengths_of(any_set), "extra_topk_length": more.get("extra_topk_length")}
    about["extra_topk"] = more["extra_indices"].shape[1] if "extra_indices" in more else 0
    make_plan = partial(mla_backend.plan, tokens, topk, num_heads=heads, **about)
    plan = make_plan(device="cuda")
    workspace = torch.zeros(workspace_floats(plan.shape[0], heads), device="cuda")
    ours = [prepare_ours(problem, cache, plan, workspace) for problem in problems]
    graphs = {"ours": timing.capture([prepared.call for prepared, _ in ours])}
    last, lse = ours[-1]
    replay_poisoned(graphs["ours"], last.out, lse)
    try:
        accuracy = {"ours": check_out(last.out, exact_out)}
        hopper = torch.cuda.get_device_capability()[0] == 9
        check_lse(lse, exact_lse, rounded=hopper and cache.shape[-1] == mla_backend.FORMATS["fp8_ds_mla"].width)
    except WrongResult as error:
        raise WrongResult(f"mla_backend, {case}: {error}") from None
    graphs["plan"] = timing.capture([lambda: make_plan(out=plan)])

    failed = {}
    for name, prepare in peers.items():
        try:
            prepared = [prepare(problem) for problem in problems]
            graph = timing.capture([one.call for one in prepared])
            replay_poisoned(graph, prepared[-1].out)
            accuracy[name] = check_out(prepared[-1].out, exact_out, PEERS_ALLOWED)
            graphs[name] = graph
        except Exception as error:  # of any kind: a peer must not end a measurement
            failed[name] = (str(error) or repr(error)).splitlines()[0]
    time.sleep(REST_SECONDS)
    timings = timing.interleaved({name: graph.clock for name, graph in graphs.items()}, rounds=rounds)

    medians = {name: taken.median for name, taken in timings.items()}
    best = min((name for name in medians if name not in tables.NOT_PEERS), key=medians.get, default=None)
    return {
        "seconds": {name: taken.as_dict() for name, taken in timings.items()},
        "accuracy": accuracy,
        "failed": failed,
        "best_peer": best,
        "speed_up": medians[best] / medians["ours"] if best else None,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    def lists(group: argparse._ArgumentGroup, name: str, item: Callable[[str], Any], help: str) -> None:
        group.add_argument(name, type=opt.listed(item), metavar=f"{name[2:].upper()},...", help=help)

    what = parser.add_argument_group("what is measured")
    either = what.add_mutually_exclusive_group(required=True)
    suites = (f"{name}: {batches.load_suite(name, FORMATS).description}" for name in batches.suite_names())
    either.add_argument(
        "--suite", metavar="NAME|FILE", help="; ".join(suites) + "; or a file of your own, as docs/benchmarks.md says"
    )
    lists(either, "--batches", Batch.parse, "128q1s32k is 128 requests with 1 query token each at 32K tokens")
    heads = opt.between(1, batches.MOST_HEADS)
    lists(what, "--heads", heads, "only these of a suite; default with --batches: 16,128")
    lists(what, "--topk", opt.count, f"only these of a suite; default with --batches: {batches.DEFAULT_TOPK}")
    lists(what, "--formats", opt.one_of(FORMATS), "only these formats of the cache; default: all")
    add_ways(parser, 15)


def add_ways(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The options of `kernels` and `rows` that say how they measure."""
    peers = parser.add_argument_group("peers")
    peers.add_argument(
        "--peers", type=Path, metavar="FOLDER", help="that the command `peers` has filled; default: an installed vllm"
    )
    peers.add_argument(
        "--vllm", default=VERSIONS[0], metavar="VERSION", help="whose kernels in that folder; default: %(default)s"
    )
    peers.add_argument("--ours-only", action="store_true", help="no peers, whatever the suite says")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--sets", type=opt.count, default=4, metavar="N", help="of queries and lists, rotated; default: %(default)s"
    )
    opt.add_rounds(how, rounds)
    opt.add_output(parser)


def chosen_cases(options: argparse.Namespace) -> tuple[list[Case], bool]:
    """The cases that the options name, and whether peers are measured. Raises Refused."""
    formats = options.formats or FORMATS
    if options.batches:
        heads, topk = options.heads or [16, 128], options.topk or [batches.DEFAULT_TOPK]
        specs = [batch.spec for batch in options.batches]
        return cases(specs, heads, topk, [name for name in FORMATS if name in formats]), not options.ours_only
    try:
        suite = batches.load_suite(options.suite, FORMATS)
    except batches.SuiteError as error:
        raise opt.Refused(f"--suite: {error}") from None
    found = suite_cases(suite, options.heads, options.topk, formats)
    if not found:
        raise opt.Refused(f"--suite {options.suite} has no such heads, topk and formats")
    return found, suite.peers and not options.ours_only


def run(options: argparse.Namespace) -> int:
    chosen, with_peers = chosen_cases(options)
    opt.require_gpu()
    console = Console(stderr=True, highlight=False)
    found, loaded = load_peers(options, with_peers, console)
    torch.manual_seed(0)
    caches = Caches(max(case.batch.cached for case in chosen))
    try:
        results = [
            measure(case, caches, loaded, options.sets, options.rounds)
            for case in track(chosen, "measuring", console=console)
        ]
    except WrongResult as error:
        console.print(f"error: {error}", markup=False)
        return 1
    finish(results, "kernels", found, options.output, console)
    return 0


def load_peers(options: argparse.Namespace, wanted: bool, console: Console) -> tuple[dict[str, str], set[str]]:
    """What `peer_kernels.load` says of each peer, and those that are there."""
    found = peer_kernels.load(options.peers, options.vllm) if wanted else {}
    for name, version in found.items():
        console.print(f"{name}: {version}", markup=False, soft_wrap=True)
    return found, {name for name, version in found.items() if not version.startswith("missing")}


def finish(results: Sequence[dict[str, Any]], kind: str, peers: dict[str, str], output: Path, console: Console) -> None:
    """Prints and writes what was measured, and says what failed."""
    headings, rows = tables.kernel_rows([result for result in results if "error" not in result])
    result_file.show(headings, rows, words=1, width=140)
    for result in results:
        failed = {"mla_backend": result["error"]} if "error" in result else result["failed"]
        for name, why in failed.items():
            console.print(f"{name} failed for {tables.kernel_name(result['case'])}: {why}", markup=False)
    result_file.write(output, results, console, benchmark=kind, peers=peers)
