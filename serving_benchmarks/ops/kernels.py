"""Sparse attention on a GPU, beside the kernels that vLLM runs there.

    python -m serving_benchmarks.ops.peers peers
    python -m serving_benchmarks.ops.kernels --suite headline --peers peers --output kernels.json

All candidates take turns in one process, as CUDA graphs over several sets of queries and lists within one cache. What
serving does once a step (our plan, FlashMLA's schedule) is outside of the graphs; the time of our plan has its column.
What a candidate's graph leaves behind, all tokens of the last set, is checked in every case against the reference.

The peers are FlashMLA and FlashAttention 3 out of vLLM's wheels, called as vLLM calls them. FlashMLA's kernel for
prefill and FlashAttention 3 have no FP8: beside an FP8 cache they get a BF16 copy of it, which costs them nothing
here, although vLLM has to make it (prefill) or to keep a cache of 1.76 times the size (decode).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

import mla_backend
from mla_backend import library, reference
from mla_backend.attention import workspace_floats
from serving_benchmarks.ops import ceilings, gpu_timing, peer_kernels, suite_files
from serving_benchmarks.ops.batches import PATTERNS, Batch, positions
from serving_benchmarks.ops.peer_kernels import Prepared, Problem
from serving_benchmarks.ops.peers import VERSIONS
from serving_benchmarks.results import environment, kernel_report, result_file

BLOCK = 64
SCALE = 576**-0.5
MAGNITUDE = 0.1
"""Of cached values. With queries of 1 / MAGNITUDE the scores spread by about 1."""
SMALLEST_CACHE = 2**20
"""Tokens. Input sets are spread over the whole cache, as requests are in a server's."""
MOST_DECODE_QUERIES = 16
"""Requests with more query tokens are prefill."""
REST_SECONDS = 0.3
"""Before a case is timed: the one before, and the check in float64, may have throttled the clock."""
OUT_ABSOLUTE, OUT_RELATIVE, LSE_ABSOLUTE, LSE_RELATIVE = 8e-4, 2.01 / 128, 1e-6, 8.01 / 65536
ROUNDED_LSE = 2.0**-9
"""What lse may be off by besides, over FP8 rows, whose scores Hopper's kernels round. It is seen where lists are short:
one slot's lse is its score, which may be next to 0."""
COSINE = 5e-6
"""Accuracy as docs/contract.md promises it, with the cosine distance of each token."""
PEERS_ALLOWED = 10
"""Times as much: a peer has promised nothing of the kind, and is only to have computed the same. Some round to bf16
what ours don't, which shows where lists are short: sums of a few terms may be next to 0 while the terms are not."""


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
        return kernel_report.name_of(self.as_dict())


def cases(specs: Sequence[str], heads: Sequence[int], topks: Sequence[int], formats: Sequence[str]) -> list[Case]:
    return [Case(Batch.parse(s), h, k, f) for f in formats for s in specs for k in topks for h in heads]


FORMATS = ("fp8_ds_mla", "bf16")


def suite_cases(
    suite: suite_files.Suite,
    heads: Sequence[int] | None = None,
    topks: Sequence[int] | None = None,
    formats: Sequence[str] = FORMATS,
) -> list[Case]:
    """The cases of a suite, or those with one of some numbers of heads and so on, in the order they are measured in."""
    return [
        case
        for fmt in FORMATS
        for entry in suite.entries
        if fmt in entry.formats and fmt in formats
        for case in cases(entry.batches, entry.heads, entry.topk, [fmt])
        if case.heads in (heads or [case.heads]) and case.topk in (topks or [case.topk])
    ]


class Caches:
    """One cache in each format, with the same values as far as e4m3 has them: the bf16 one is a copy of the fp8 one."""

    def __init__(self, tokens: int):
        blocks = -(-max(tokens, SMALLEST_CACHE) // BLOCK)
        self.by_format = {name: f.new_cache(blocks, BLOCK, device="cuda") for name, f in mla_backend.FORMATS.items()}
        rows = self.by_format["bf16"].view(blocks * BLOCK, 576)
        for slots in torch.arange(len(rows), device="cuda").split(2**18):
            values = torch.randn(len(slots), 576, device="cuda").mul_(MAGNITUDE).bfloat16()
            mla_backend.cache_write(values[:, :512], values[:, 512:], self.by_format["fp8_ds_mla"], slots)
            mla_backend.cache_gather(self.by_format["fp8_ds_mla"], slots, out=rows[slots[0] : slots[-1] + 1])

    @property
    def blocks(self) -> int:
        return len(self.by_format["bf16"])


def new_problem(case: Case, pattern: str, blocks: int) -> Problem:
    """A batch of random queries, whose requests own random blocks of the cache."""
    batch, wanted = case.batch, case.batch.blocks(BLOCK)
    table = torch.full((len(wanted), max(wanted)), -1, dtype=torch.int32, device="cuda")
    owned = torch.randperm(blocks, dtype=torch.int32, device="cuda")[: sum(wanted)].split(wanted)
    for row, its_blocks in zip(table, owned, strict=True):
        row[: len(its_blocks)] = its_blocks
    picked = positions(batch, case.topk, pattern, device="cuda")
    slots, counts = mla_backend.convert_indices(picked, table, batch.token_requests().cuda(), BLOCK)
    q = torch.randn(batch.tokens, case.heads, 576, device="cuda").div_(MAGNITUDE).bfloat16()
    return Problem(q, slots, counts, SCALE, batch.queries)


def unless_full(lengths: Tensor, topk: int) -> Tensor | None:
    """What our kernels are told of lists of these lengths, int32 `[T]`: nothing if all of them are full."""
    return None if bool((lengths == topk).all()) else lengths


def lengths_for(case: Case) -> Tensor | None:
    """The same of a case's lists, on the GPU."""
    return unless_full(case.batch.visible().clamp(max=case.topk).cuda(), case.topk)


def plan_ours(case: Case) -> tuple[Tensor, Tensor]:
    """Our plan of a case, and a workspace for it."""
    plan = mla_backend.plan(
        case.batch.tokens, case.topk, topk_length=lengths_for(case), num_heads=case.heads, device="cuda"
    )
    return plan, torch.zeros(workspace_floats(plan.shape[0], case.heads), device="cuda")


def prepare_ours(problem: Problem, cache: Tensor, plan: Tensor, workspace: Tensor) -> tuple[Prepared, Tensor]:
    """Our call, and where its lse will be."""
    out = torch.empty((*problem.q.shape[:2], 512), dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(out.shape[:2], device="cuda")
    lengths = unless_full(problem.counts, problem.slots.shape[1])

    def call() -> None:
        mla_backend.sparse_attention(
            problem.q,
            cache,
            problem.slots,
            scale=SCALE,
            topk_length=lengths,
            plan=plan,
            workspace=workspace,
            out=out,
            lse=lse,
        )

    return Prepared(call, out), lse


@contextmanager
def chosen_kernel(name: str) -> Iterator[None]:
    """Within it, plans and launches are for this kernel of ours; a graph that was captured keeps it."""
    library.select_cuda_kernel(name)
    try:
        yield
    finally:
        library.select_cuda_kernel("auto")


def peers_for(case: Case, caches: Caches, loaded: set[str]) -> dict[str, Callable[[Problem], Prepared]]:
    """The peers' kernels that vLLM could run here, with either format of the cache."""
    fp8, bf16 = caches.by_format["fp8_ds_mla"], caches.by_format["bf16"]
    peers: dict[str, Callable[[Problem], Prepared]] = {}
    if "flashmla" in loaded:
        if case.format == "fp8_ds_mla" and case.heads < 32:
            peers["flashmla_fp8_one_batch"] = lambda problem: peer_kernels.flashmla_decode(problem, fp8, True)
        if case.format == "fp8_ds_mla" and case.decode and case.batch.queries:
            peers["flashmla_fp8"] = lambda problem: peer_kernels.flashmla_decode(problem, fp8, False)
        peers["flashmla_bf16"] = lambda problem: peer_kernels.flashmla_prefill(problem, bf16)
    if "fa3" in loaded:
        peers["fa3_bf16"] = lambda problem: peer_kernels.fa3(problem, bf16)
    return peers


def attend_exactly(problem: Problem, cache: Tensor) -> tuple[Tensor, Tensor]:
    """The reference's out and lse in float32, a few tokens at a time, as their rows in float64 are large."""
    at_once = max(1, 2**30 // (problem.slots.shape[1] * 576 * 8))
    parts = [
        reference.sparse_attention(q, cache, slots, scale=SCALE)[:2]
        for q, slots in zip(problem.q.split(at_once), problem.slots.split(at_once), strict=True)
    ]
    return torch.cat([out.float() for out, _ in parts]), torch.cat([lse.float() for _, lse in parts])


def check_out(got: Tensor, want: Tensor, times: float = 1) -> dict[str, float]:
    """How far a result is from the reference; an error if that is more than so many times what ours may be off by."""
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


def replay_poisoned(graph: gpu_timing.Graph, *results: Tensor) -> None:
    """What is checked is what is timed: the graph's own last results, written over NaN."""
    for result in results:
        result.fill_(torch.nan)
    graph.graph.replay()
    torch.cuda.synchronize()


def measure(
    case: Case,
    caches: Caches,
    loaded: set[str],
    pattern: str,
    sets: int,
    rounds: int,
    flush: Callable[[], None] | None,
    portable: bool,
) -> dict[str, Any]:
    """One case: ours, our plan, our portable kernel if that is asked for, and every peer that can run it."""
    cache = caches.by_format[case.format]
    problems = [new_problem(case, pattern, caches.blocks) for _ in range(sets)]
    exact_out, exact_lse = attend_exactly(problems[-1], cache)

    graphs, accuracy = {}, {}

    def add_ours(name: str) -> Tensor:
        """A graph of our calls, checked. Returns their plan."""
        plan, workspace = plan_ours(case)
        ours = [prepare_ours(problem, cache, plan, workspace) for problem in problems]
        graphs[name] = gpu_timing.capture([prepared.call for prepared, _ in ours], flush)
        last, lse = ours[-1]
        replay_poisoned(graphs[name], last.out, lse)
        try:
            accuracy[name] = check_out(last.out, exact_out)
            hopper = torch.cuda.get_device_capability()[0] == 9
            check_lse(lse, exact_lse, rounded=hopper and cache.dtype == torch.uint8)
        except WrongResult as error:
            raise WrongResult(f"mla_backend, {name}, {case}: {error}") from None
        return plan

    plan = add_ours("ours")
    if portable:
        with chosen_kernel("portable"):
            add_ours("portable")
    lengths = lengths_for(case)
    graphs["plan"] = gpu_timing.capture(
        [lambda: mla_backend.plan(case.batch.tokens, case.topk, topk_length=lengths, num_heads=case.heads, out=plan)],
        flush,
    )

    failed = {}
    for name, prepare in peers_for(case, caches, loaded).items():
        try:
            prepared = [prepare(problem) for problem in problems]
            graph = gpu_timing.capture([one.call for one in prepared], flush)
            replay_poisoned(graph, prepared[-1].out)
            accuracy[name] = check_out(prepared[-1].out, exact_out, PEERS_ALLOWED)
            graphs[name] = graph
        except (RuntimeError, WrongResult) as error:
            failed[name] = str(error).splitlines()[0]
    baseline = gpu_timing.capture([flush]) if flush else None
    time.sleep(REST_SECONDS)
    timings = gpu_timing.interleaved(graphs, rounds=rounds, baseline=baseline)

    attended = sum(int(problem.counts.sum()) for problem in problems) / sets
    row_bytes = mla_backend.FORMATS[case.format].token_bytes
    flops = 2 * attended * case.heads * (576 + 512)
    medians = {name: timing.median for name, timing in timings.items()}
    best = min((name for name in medians if name not in kernel_report.NOT_PEERS), key=medians.get, default=None)
    return {
        "case": {**case.as_dict(), "pattern": pattern},
        "useful_flops": flops,
        "bytes": attended * (row_bytes + 4) + case.batch.tokens * case.heads * (2 * (576 + 512) + 4),
        "floor_seconds": {
            "math": flops / ceilings.MATH_FLOPS,
            "memory": min(attended, case.batch.cached) * row_bytes / ceilings.MEMORY_BYTES,
            "l2": attended * row_bytes / ceilings.L2_BYTES[case.format],
        },
        "seconds": {name: timing.as_dict() for name, timing in timings.items()},
        "accuracy": accuracy,
        "failed": failed,
        "best_peer": best,
        "speed_up": medians[best] / medians["ours"] if best else None,
    }


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.ops.kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--suite",
        metavar="NAME|FILE",
        help="; ".join(f"{name}: {suite_files.load(name, FORMATS).description}" for name in suite_files.names())
        + "; or a file of your own, see docs/reports.md",
    )
    what.add_argument(
        "--batches", nargs="+", metavar="SPEC", help="128q1s32k is 128 requests of 1 query token at 32K tokens"
    )
    what.add_argument(
        "--heads", type=int, nargs="+", help="of a suite only these; with --batches the default is 16 128"
    )
    what.add_argument("--topk", type=int, nargs="+", help=f"likewise; the default is {suite_files.DEFAULT_TOPK}")
    what.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="likewise; the default is all")
    what.add_argument(
        "--pattern",
        choices=PATTERNS,
        default="random",
        help="; ".join(f"{name}: {text}" for name, text in PATTERNS.items()) + "; default: %(default)s",
    )
    peers = parser.add_argument_group("beside what")
    peers.add_argument(
        "--peers", type=Path, metavar="FOLDER", help="from serving_benchmarks.ops.peers; default: an installed vllm"
    )
    peers.add_argument(
        "--vllm", default=VERSIONS[0], metavar="VERSION", help="whose kernels in that folder; default: %(default)s"
    )
    peers.add_argument("--ours-only", action="store_true", help="no peers, whatever the suite says")
    peers.add_argument(
        "--portable", action="store_true", help="our kernel for any GPU, too, to see whether another one is behind it"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--sets", type=int, default=4, help="of queries and lists, in turn; default: %(default)s")
    how.add_argument("--rounds", type=int, default=15, help="turns of every candidate; default: %(default)s")
    how.add_argument("--flush-l2", action="store_true", help="empty the L2 cache before every call")
    results = parser.add_argument_group("results")
    results.add_argument("--output", type=Path, metavar="FILE", help="write them and their environment as JSON")
    results.add_argument(
        "--markdown", type=Path, metavar="FILE", help="measure nothing; print a result file as the README's table"
    )
    options = parser.parse_args(arguments)
    if options.markdown:
        return options

    if (options.suite is None) == (options.batches is None):
        parser.error("either --suite or --batches must be given")
    for name in ("heads", "topk", "sets"):
        values = getattr(options, name)
        if values is not None and min(values if isinstance(values, list) else [values]) < 1:
            parser.error(f"--{name} must be 1 or more")
    if options.heads and max(options.heads) > suite_files.MOST_HEADS:
        parser.error(f"--heads must be {suite_files.MOST_HEADS} or fewer")
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more, or there is no spread")
    if options.suite:
        try:
            suite = suite_files.load(options.suite, FORMATS)
        except suite_files.SuiteError as error:
            parser.error(f"--suite: {error}")
        options.ours_only |= not suite.peers
        options.cases = suite_cases(suite, options.heads, options.topk, options.formats)
        if not options.cases:
            parser.error(f"--suite {options.suite} has no such heads, topk and formats")
    else:
        try:
            options.cases = cases(
                options.batches, options.heads or [16, 128], options.topk or [suite_files.DEFAULT_TOPK], options.formats
            )
        except ValueError as error:
            parser.error(f"--batches: {error}")
    result_file.require_writable(parser, options.output)
    return options


def show(source: Path, markdown: Callable[[dict[str, Any]], str] = kernel_report.markdown) -> int:
    """Prints a result file."""
    try:
        print(markdown(json.loads(source.read_text())))
    except (OSError, ValueError, LookupError, TypeError) as error:
        print(f"{source} could not be shown: {error!r}", file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.markdown:
        return show(options.markdown)
    why_not = environment.why_no_gpu()
    if why_not:
        print(f"error: {why_not}", file=sys.stderr)
        return 2

    console = Console(stderr=True, highlight=False)
    loaded = {}
    if not options.ours_only:
        loaded = peer_kernels.load(options.peers, options.vllm)
        for name, what in loaded.items():
            console.print(f"{kernel_report.TITLES[name]}: {what}")
    running = {name for name, what in loaded.items() if what.startswith("vllm ")}
    torch.manual_seed(0)
    caches = Caches(max(case.batch.cached for case in options.cases))
    flush = gpu_timing.new_flush() if options.flush_l2 else None
    results = []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("", total=len(options.cases))
            for case in options.cases:
                progress.update(task, description=str(case))
                how = options.pattern, options.sets, options.rounds, flush, options.portable
                results.append(measure(case, caches, running, *how))
                progress.advance(task)
    except WrongResult as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    Console(width=130, highlight=False).print(kernel_report.table(results))
    for result in results:
        for name, why in result["failed"].items():
            console.print(f"{kernel_report.TITLES[name]} left out of {kernel_report.name_of(result['case'])}: {why}")
    result_file.write(options.output, results, console, peers=loaded, l2_flushed=options.flush_l2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
