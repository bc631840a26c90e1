"""The tables of single ops, in Markdown and as rows: those around attention, the indexer's, and attention on a CPU."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from serving_benchmarks.results import file
from serving_benchmarks.results.file import Report

CPU_PEERS = {"vllm": "vLLM", "reference": "reference"}
CACHE_HEADINGS = ["op", "format", "tokens or numbers", "us", "TB/s", "of the copy"]
INDEX_HEADINGS = ["op", "batch", "heads", "format", "us", "TFLOP/s", "TB/s"]
CPU_HEADINGS = ["query tokens, heads, slots each", "format", "mla-backend, us", "GFLOP/s", "baseline, us", "ratio"]


def cache_rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each entry, under CACHE_HEADINGS."""
    copies = [r["bytes"] / r["seconds"]["median"] for r in results if r["op"].startswith("copy")]
    lines = []
    for result in results:
        rate = result["bytes"] / result["seconds"]["median"]
        moves = result["op"] != "plan"  # which computes
        row = [result["op"], result["format"], str(result["count"]), file.microseconds(result["seconds"]["median"])]
        row += [f"{rate / 1e12:.2f}" if moves else "-", f"{rate / max(copies):.0%}" if moves and copies else "-"]
        lines.append(row)
    return lines


def index_rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each entry, under INDEX_HEADINGS."""
    lines = []
    for result in results:
        case, seconds = result["case"], result["seconds"]["median"]
        row = [result["op"], case["batch"], str(case["heads"]), result["format"], file.microseconds(seconds)]
        row.append(f"{result['flops'] / seconds / 1e12:.0f}" if result["flops"] else "-")
        lines.append([*row, f"{result['bytes'] / seconds / 1e12:.2f}"])
    return lines


def cpu_rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each entry, under CPU_HEADINGS and one for the speed with all threads over the speed with one."""
    lines = []
    for result in results:
        case, ours = result["case"], result["seconds"]["ours"]["median"]
        peer = next((name for name in CPU_PEERS if name in result["seconds"]), None)
        scaling = result["speed_up_over_one_thread"]
        row = [f"{case['batch']}, {case['heads']}, {case['context']}", case["format"]]
        row += [f"{ours * 1e6:.0f}", f"{result['useful_flops'] / ours / 1e9:.0f}"]
        row.append(f"{CPU_PEERS[peer]} {result['seconds'][peer]['median'] * 1e6:.0f}" if peer else "-")
        row.append(f"{result['speed_up'][peer]:.2f}" if peer else "-")
        lines.append([*row, f"{scaling:.2f}" if scaling else "-"])
    return lines


def cpu(report: Report) -> str:
    where, results = report["environment"], report["results"]
    threads = where["torch"]["threads"]
    kernel = next((k["name"] for k in where["library"]["cpu_kernels"] if k["active"]), "unknown")
    note = (
        f"{where['cpu']['model']}, {threads} threads, torch {where['torch']['version']}, {file.engine(where)}, "
        f"kernel {kernel}, {file.when(where)}. "
        f"Medians of interleaved rounds; threads are compared by their fastest rounds."
    )
    return "\n".join([*file.table([*CPU_HEADINGS, f"{threads} threads over 1"], cpu_rows(results)), "", note])


def _on_gpu(headings: Sequence[str], rows: Callable[[list[dict[str, Any]]], list[list[str]]], report: Report) -> str:
    where, results = report["environment"], report["results"]
    note = (
        f"Medians of {results[0]['seconds']['rounds']} replays of CUDA graphs. {where['gpus'][0]['name']}, driver "
        f"{where['driver']}, torch {where['torch']['version']}, {file.when(where)}."
    )
    return "\n".join([*file.table(headings, rows(results)), "", note])


cache = partial(_on_gpu, CACHE_HEADINGS, cache_rows)
index = partial(_on_gpu, INDEX_HEADINGS, index_rows)
