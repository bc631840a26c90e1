"""What serving_benchmarks.run.serve measured, as rows for a terminal and as a table for the docs."""

from typing import Any

from serving_benchmarks.results import result_file, runs

HEADINGS = "backend|load|requests/s|output tokens/s|TTFT p50, ms|p99|TPOT p50, ms|p99|goodput".split("|")


def in_words(case: dict[str, Any]) -> str:
    """A load, for people: requests a second, and in flight at most; None: no limit."""
    rate, concurrency = case["request_rate"], case["concurrency"]
    parts = [f"{rate:g} requests/s"] if rate is not None else []
    parts += [f"{concurrency} in flight"] if concurrency is not None else []
    return ", ".join(parts) or "all at once"


def row(result: dict[str, Any]) -> list[str]:
    """The cells of an entry that did not fail, as HEADINGS names them."""
    times = [result["latency"][name][p] for name in ("ttft_s", "tpot_s") for p in ("p50", "p99")]
    goodput = result["goodput"]
    return [
        result["backend"],
        in_words(result["case"]),
        f"{result['requests_per_second']:.2f}",
        f"{result['output_tokens_per_second']:.1f}",
        *("-" if seconds is None else f"{seconds * 1e3:.1f}" for seconds in times),
        "-" if goodput is None else f"{goodput['requests_per_second']:.2f}/s, {100 * goodput['share']:.0f} %",
    ]


def line(result: dict[str, Any]) -> str:
    """An entry that did not fail, shortly."""
    backend, load, requests, tokens, ttft, _, tpot, *_ = row(result)
    times = f"TTFT p50 {ttft} ms, TPOT p50 {tpot} ms"
    return f"{backend}, {load}: {requests} requests/s, {tokens} output tokens/s, {times}"


def markdown(report: dict[str, Any]) -> str:
    """A table for the docs, from a result file; loads that failed are left out."""
    ran = [result for result in report["results"] if not result.get("error")]
    rows = [[*row(result), _found(result)] for result in ran]
    lines = result_file.table([*HEADINGS, "of the prompts in the prefix cache"], rows)
    asked = list(dict.fromkeys(runs.workload(result["case"]) for result in ran))
    limits = list(dict.fromkeys(_limits(result["goodput"]) for result in ran if result["goodput"]))
    about = [runs.measured_on(report), f"Each load was run once: {'; '.join(asked)}." if asked else ""]
    about += [f"Goodput: {'; '.join(limits)}." if limits else ""]
    return "\n".join([*lines, "", " ".join(filter(None, about))])


def _found(result: dict[str, Any]) -> str:
    """The share of a load's prompt tokens that the server had already."""
    share = (result.get("cache") or {}).get("prefix_hit_share")
    return "-" if share is None else f"{100 * share:.0f} %"


def _limits(goodput: dict[str, Any]) -> str:
    """What a good request keeps to."""
    first, later = goodput["ttft_limit_s"], goodput["tpot_limit_s"]
    parts = [f"first token within {first:g} s"] if first is not None else []
    parts += [f"later ones {later:g} s apart or less, on average"] if later is not None else []
    return ", ".join(parts)
