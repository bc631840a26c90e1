"""What serving_benchmarks.ops.kernels measured, as a table, and as the README's table."""

from typing import Any

from rich.table import Table

TITLES = {
    "flashmla": "FlashMLA",
    "fa3": "FlashAttention 3",
    "flashinfer": "FlashInfer",
    "tilelang": "TileLang",
    "flashmla_fp8": "FlashMLA, FP8",
    "flashmla_fp8_one_batch": "FlashMLA, FP8, one batch",
    "flashmla_bf16": "FlashMLA, BF16",
    "fa3_bf16": "FA3, BF16",
}
README_PEERS = {
    "FlashMLA, FP8": ("flashmla_fp8", "flashmla_fp8_one_batch"),
    "FlashMLA, BF16": ("flashmla_bf16",),
    "FA3, BF16": ("fa3_bf16",),
}
"""Columns, each the fastest of some candidates."""
FLOOR = (
    "The floor is what math, memory or L2 takes, whichever is most, at rates that were measured; memory's by gathering "
    "FP8 rows of 656 bytes. BF16 rows of 1152 bytes are gathered faster, so more than 100% is possible there."
)
NOT_PEERS = ("ours", "plan", "portable")
"""What else is timed beside the peers: all of it is ours."""


def name_of(case: dict[str, Any]) -> str:
    return f"{case['batch']}, h {case['heads']}, topk {case['topk']}, {case['format']}"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def share_of_floor(result: dict[str, Any]) -> float:
    """The floor over our time. Above 1 where BF16 rows are gathered faster than the FP8 rows of which the floor is."""
    return max(result["floor_seconds"].values()) / result["seconds"]["ours"]["median"]


def table(results: list[dict[str, Any]]) -> Table:
    shown = Table("case", "ours us", "quartiles", "TFLOP/s", "TB/s", "floor", "plan us", box=None, padding=(0, 1))
    portable = any("portable" in result["seconds"] for result in results)
    for column in (*(["portable us"] if portable else []), "best peer", "us", "ratio"):
        shown.add_column(column)
    for column in shown.columns[1:]:
        column.justify = "right"
    for result in results:
        case, ours = result["case"], result["seconds"]["ours"]
        row = [
            name_of(case),
            microseconds(ours["median"]),
            f"{microseconds(ours['lower_quartile'])} {microseconds(ours['upper_quartile'])}",
            f"{result['useful_flops'] / ours['median'] / 1e12:.0f}",
            f"{result['bytes'] / ours['median'] / 1e12:.2f}",
            f"{share_of_floor(result):.0%}",
            microseconds(result["seconds"]["plan"]["median"]),
        ]
        if portable:
            timing = result["seconds"].get("portable")
            row.append(microseconds(timing["median"]) if timing else "")
        best = result["best_peer"]
        if best:
            row += [TITLES[best], microseconds(result["seconds"][best]["median"]), f"{result['speed_up']:.2f}"]
        shown.add_row(*row)
    return shown


def markdown(report: dict[str, Any]) -> str:
    """The README's table, from a result file."""
    where, results = report["environment"], report["results"]
    lines = [
        "| batch | heads | topk | cache | mla-backend | "
        + " | ".join(README_PEERS)
        + " | best peer over ours | of the floor |",
        "|" + "---|" * (7 + len(README_PEERS)),
    ]
    for result in results:
        case, seconds = result["case"], result["seconds"]
        row = [case["batch"], case["heads"], case["topk"], case["format"], microseconds(seconds["ours"]["median"])]
        for names in README_PEERS.values():
            ran = [seconds[name]["median"] for name in names if name in seconds]
            row.append(microseconds(min(ran)) if ran else "-")
        row += [f"{result['speed_up']:.2f}" if result["best_peer"] else "-", f"{share_of_floor(result):.0%}"]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    gpu = where["gpus"][0]["name"]
    versions = sorted({what for what in where["peers"].values() if what.startswith("vllm ")}) or ["none"]
    patterns = sorted({result["case"]["pattern"] for result in results})
    lines += [
        "",
        f"Microseconds, medians of CUDA graph replays in turns in one process; {', '.join(patterns)} lists"
        f"{', L2 emptied before every call' if where['l2_flushed'] else ''}. {gpu}, driver {where['driver']}, "
        f"torch {where['torch']['version']}, peers' kernels: {', '.join(versions)}, {where['date'][:10]}, "
        f"commit {(where['commit'] or 'unknown')[:10]}. {FLOOR}",
    ]
    return "\n".join(lines)


def _result_of(report: dict[str, Any], batch: str, heads: int, fmt: str) -> dict[str, Any]:
    name = name_of({"batch": batch, "heads": heads, "topk": 2048, "format": fmt})
    for result in report["results"]:
        if name_of(result["case"]) == name:
            return result
    raise ValueError(f"there is no {name}")


def decode_ratios(report: dict[str, Any]) -> str:
    """A sentence of the README."""
    found = [_result_of(report, "128q1s32k", heads, "fp8_ds_mla") for heads in (8, 16, 32)]
    over_all = [f"{result['speed_up']:.2f}" for result in found]
    over_fp8 = []
    for seconds in (result["seconds"] for result in found):
        theirs = min(seconds[name]["median"] for name in README_PEERS["FlashMLA, FP8"] if name in seconds)
        over_fp8.append(f"{theirs / seconds['ours']['median']:.2f}")
    return (
        f"it is {over_fp8[0]}, {over_fp8[1]} and {over_fp8[2]} times as fast as FlashMLA's FP8 kernel at 8, 16 and 32 "
        f"heads, and {over_all[0]}, {over_all[1]} and {over_all[2]} times as fast as the best kernel of all"
    )


def prefill_ratios(report: dict[str, Any]) -> str:
    """Half a sentence of the README."""
    fp8, bf16 = (_result_of(report, "q4ks32k", 16, fmt)["speed_up"] for fmt in ("fp8_ds_mla", "bf16"))
    return f"{fp8:.2f} times as fast with FP8 and {bf16:.2f} with BF16 rows"
