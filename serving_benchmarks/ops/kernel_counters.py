"""What our attention kernels keep busy on a GPU, by Nsight Compute's counters.

    python -m serving_benchmarks.ops.kernel_counters --suite headline --formats fp8_ds_mla --output counters.json

Every case is run once under `ncu`, which runs its kernel several times for all counters, leaves what L2 holds and the
clock alone, and begins each time with empty caches of instructions. What merges cut tokens in a launch of its own is
not counted. It needs `ncu` (of the CUDA toolkit) and the right to read counters.
"""

import argparse
import csv
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from serving_benchmarks.ops import kernels, suite_files
from serving_benchmarks.results import environment, kernel_report, result_file

METRICS = {
    "seconds": ("gpu__time_duration.sum", 1e-9),
    "clock_hertz": ("sm__cycles_elapsed.avg.per_second", 1.0),
    "issue_slots": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 0.01),
    "tensor_cores": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active", 0.01),
    "shared_memory": ("l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active", 0.01),
    "l2": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 0.01),
    "memory": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 0.01),
}
"""What a result file calls them, Nsight Compute's name, and what its base unit is in ours."""
HEADINGS = {
    "issue_slots": "issue slots",
    "tensor_cores": "tensor cores",
    "shared_memory": "shared memory",
    "l2": "L2",
    "memory": "memory",
}


def find_ncu() -> str | None:
    return shutil.which("ncu") or shutil.which("/usr/local/cuda/bin/ncu")


def run_each_case_once(cases: Sequence[kernels.Case], pattern: str) -> None:
    """What is profiled: one call of sparse_attention for each case, in their order."""
    torch.manual_seed(0)
    caches = kernels.Caches(max(case.batch.cached for case in cases))
    for case in cases:
        problem = kernels.new_problem(case, pattern, caches.blocks)
        prepared, _ = kernels.prepare_ours(problem, caches.by_format[case.format], *kernels.plan_ours(case))
        torch.cuda.synchronize()
        prepared.call()
        torch.cuda.synchronize()


def parse_counters(text: str) -> list[dict[str, Any]]:
    """The counters of each launch, from `ncu --csv --page raw --print-units base`."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise ValueError(f"ncu printed no table of counters, but:\n{text[-1000:]}")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[begin:]))))
    launches = []
    for row in rows[1:]:  # the first one holds units
        counters: dict[str, Any] = {"kernel": row["Kernel Name"].split("(", 1)[0]}
        for name, (metric, unit) in METRICS.items():
            try:
                counters[name] = float(row[metric].replace(",", "")) * unit
            except (KeyError, ValueError):
                raise ValueError(f"this ncu does not know {metric}: it says {row.get(metric)!r}") from None
        launches.append(counters)
    return launches


def profile(ncu: str, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The counters of what this program does when it is asked to run the cases themselves."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(ncu, "--csv", "--page", "raw", "--print-units", "base"),
                *("--clock-control", "none", "--cache-control", "none", "-k", "regex:attention_kernel"),
                *("--metrics", ",".join(metric for metric, _ in METRICS.values())),
                *(sys.executable, "-m", "serving_benchmarks.ops.kernel_counters", "--run-cases", *arguments),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": folder},  # its lock file; one that somebody else left behind is in the way
        )
    if done.returncode:
        raise RuntimeError(f"ncu failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return parse_counters(done.stdout)


def rows_of(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            kernel_report.name_of(result["case"]),
            kernel_report.microseconds(result["counters"]["seconds"]),
            f"{result['counters']['clock_hertz'] / 1e9:.2f}",
            *(f"{100 * result['counters'][name]:.0f}" for name in HEADINGS),
        ]
        for result in results
    ]


COLUMNS = ("case", "us", "GHz", *HEADINGS.values())


def markdown(report: dict[str, Any]) -> str:
    """The table of docs/kernels.md, from a result file."""
    where = report["environment"]
    told = (
        "Percent of what is possible, of issue slots, tensor cores and shared memory for multiprocessors that have "
        f"work. {where['gpus'][0]['name']}, {where['date'][:10]}, commit {(where['commit'] or 'unknown')[:10]}."
    )
    return "\n".join([*result_file.table(COLUMNS, rows_of(report["results"])), "", told])


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.ops.kernel_counters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", default="headline", metavar="NAME|FILE", help="of cases; default: %(default)s")
    parser.add_argument("--heads", type=int, nargs="+", help="only these")
    parser.add_argument("--topk", type=int, nargs="+", help="only these")
    parser.add_argument("--formats", nargs="+", choices=kernels.FORMATS, default=kernels.FORMATS, help="only these")
    parser.add_argument("--pattern", choices=kernels.PATTERNS, default="random", help="of slots; default: %(default)s")
    result_file.add_output(parser)
    result_file.add_markdown(parser)
    parser.add_argument("--run-cases", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.markdown:
        return options
    try:
        suite = suite_files.load(options.suite, kernels.FORMATS)
    except suite_files.SuiteError as error:
        parser.error(f"--suite: {error}")
    options.cases = kernels.suite_cases(suite, options.heads, options.topk, options.formats)
    if not options.cases:
        parser.error(f"--suite {options.suite} has no such heads, topk and formats")
    result_file.require_writable(parser, options.output)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.markdown:
        return kernels.show(options.markdown, markdown)
    why_not = environment.why_no_gpu()
    ncu = find_ncu()
    if not why_not and not ncu and not options.run_cases:
        why_not = "ncu is not installed; it comes with the CUDA toolkit"
    if why_not:
        print(f"error: {why_not}", file=sys.stderr)
        return 2
    if options.run_cases:
        run_each_case_once(options.cases, options.pattern)
        return 0

    console = Console(stderr=True, highlight=False)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with console.status(f"{len(options.cases)} cases under ncu"):
            launches = profile(ncu, given)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if len(launches) != len(options.cases):
        print(f"error: {len(options.cases)} cases made {len(launches)} launches", file=sys.stderr)
        return 1
    results = [
        {"case": {**case.as_dict(), "pattern": options.pattern}, "counters": counters}
        for case, counters in zip(options.cases, launches, strict=True)
    ]
    print("\n".join(result_file.table(COLUMNS, rows_of(results))))
    result_file.write(options.output, results, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
