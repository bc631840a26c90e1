"""Runs in result files of whole models: what they are called, and at which load they ran."""

import statistics
from typing import Any

from serving_benchmarks.results import latency, result_file, result_kinds

EMBEDDED = "embedded"
"""The embedded engine, among backends."""
OUR_BACKENDS = ("SPARSE_MLA", "CUSTOM", EMBEDDED)
"""The plugin under its names, and the engine. The others are what these are held to."""
LATENCIES = {"ttft_s": "first token", "tpot_s": "later token", "e2e_s": "whole request"}
"""Of `requests` of an entry."""
ALL_BETWEEN = 8
"""Rounds of which all lie within the confidence interval of their median, if there are no more."""
_LOAD = ("request_rate", "concurrency")
_UNSAID = {"shared_prefix": 0, "burstiness": 1.0, "tensor_parallel_size": 1}
"""What goes without saying."""


def workload(case: dict[str, Any], *, count: bool = True) -> str:
    """What was asked for, without the load, and without the number of requests if that is no matter. Other seeds are
    other requests of the same kind."""
    unsaid = (*_LOAD, "seed") if count else (*_LOAD, "seed", "num_prompts")
    given = {name: value for name, value in case.items() if value is not None and name not in unsaid}
    tokens = [given.pop(name, None) for name in ("input_len", "output_len")]
    parts = [f"{lengths(case)} tokens"] if None not in tokens else []
    parts += [str(given.pop(name)) for name in ("workload", "source") if name in given]
    if "num_prompts" in given:
        parts.append(f"{given.pop('num_prompts')} requests")
    if "kv_cache_dtype" in given:
        parts.append(f"{given.pop('kv_cache_dtype')} cache")
    parts += [f"{name} {value}" for name, value in given.items() if value != _UNSAID.get(name)]
    return ", ".join(parts)


def lengths(case: dict[str, Any]) -> str:
    """Tokens of a prompt and after it, such as 4096 + 64; where requests differ, the file that says how."""
    if case.get("input_len") is None or case.get("output_len") is None:
        return str(case.get("source"))
    return f"{case['input_len']} + {case['output_len']}"


def heads(environment: dict[str, Any], case: dict[str, Any], noun: str = "") -> str:
    """How many heads the model has and, where tensor parallelism divides them, how many each part has: 16, 8 a GPU."""
    count, parts = environment["model"]["heads"], case.get("tensor_parallel_size") or 1
    part = "GPU" if environment.get("gpus") else "process"
    return f"{count}{noun}" + (f", {count // parts} a {part}" if parts > 1 else "")


def load(case: dict[str, Any]) -> str:
    """How many requests came when."""
    rate, concurrency = (case.get(name) for name in _LOAD)
    parts = [f"{rate:g} a second"] if rate is not None else []
    parts += [f"{concurrency} in flight"] if concurrency is not None else []
    return ", ".join(parts) or "all at once"


def short_load(case: dict[str, Any]) -> str:
    """The same where there is little room: 4/s, or 16 (in flight)."""
    rate, concurrency = (case.get(name) for name in _LOAD)
    parts = [f"{rate:g}/s"] if rate is not None else []
    parts += [str(concurrency)] if concurrency is not None else []
    return ", ".join(parts) or "all"


def load_order(case: dict[str, Any]) -> tuple[float, float]:
    """Sorts by load, the lightest first."""
    rate, concurrency = (case.get(name) for name in _LOAD)
    return tuple(float("inf") if value is None else value for value in (rate, concurrency))


def asked(case: dict[str, Any]) -> str:
    """The workload and the load: backends whose entries of a file have it in common did the same."""
    return f"{workload(case)}, {load(case)}"


def name_of(result: dict[str, Any]) -> str:
    """An entry's name, also if it failed."""
    if "way" in result:
        return result["way"]
    if "candidate" in result:
        return f"{result['candidate']} {result.get('workload') or ''}".strip()
    return f"{result['backend']}, {asked(result['case'])}"


def interleaved(environment: dict[str, Any]) -> bool:
    """Whether the backends of a file took turns, round by round. Older files don't say: theirs did not."""
    return bool((environment.get("settings") or {}).get("interleaved"))


def over_first(first: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """How many times as fast an entry's rounds were as those of the same number of the first one. The two must have
    taken turns. `low` and `high` bound the median with 95 % confidence; of ALL_BETWEEN rounds or fewer, with less
    confidence if they are fewer than six, they are the lowest and the highest."""
    ratios = [theirs / its for theirs, its in zip(first["rounds_s"], result["rounds_s"], strict=True)]
    low, high = latency.percentile_bounds(ratios, 50)
    lowest, highest = min(ratios), max(ratios)
    return {
        "median": statistics.median(ratios),
        "low": lowest if low is None else low,
        "high": highest if high is None else high,
        "lowest": lowest,
        "highest": highest,
    }


def ratio(first: dict[str, Any], result: dict[str, Any], in_turn: dict[str, float] | None) -> str:
    """How many times as fast an entry is as the first one; if they took turns, what `over_first` says of them."""
    if in_turn is None:
        return f"{result['output_tokens_per_second'] / first['output_tokens_per_second']:.2f}"
    return "{median:.2f} ({low:.2f} to {high:.2f})".format(**in_turn)


def markdown(report: dict[str, Any]) -> str:
    """A table for the docs, from a result file; runs that failed are left out."""
    rows = []
    for result in report["results"]:
        if result.get("error"):
            continue
        case = result["case"]
        row = [result["backend"], workload(case), load(case), f"{result['output_tokens_per_second']:.1f}"]
        for name in LATENCIES:
            values = [value for value in result["requests"][name] if value is not None]
            row.append(f"{statistics.median(values) * 1e3:.1f}" if values else "-")
        rows.append(row)
    headings = ["backend", "workload", "load", "output tokens a second"]
    lines = result_file.table(headings + [f"{what}, median, ms" for what in LATENCIES.values()], rows)
    return "\n".join([*lines, "", measured_on(report)])


def measured_on(report: dict[str, Any]) -> str:
    """The line below a table: the model, the machine, and the versions."""
    where = report["environment"]
    vllm, model = where["vllm"], where.get("model") or {}
    told = [
        f"{model['name']}, {model.get('layers')} layers, {model.get('heads')} heads" if model.get("name") else "",
        result_kinds.machine(where),
        f"torch {where['torch']['version']}",
        f"{vllm['distribution']} {vllm['version']}" if vllm["version"] else "no vLLM",
        where["date"][:10],
        f"commit {(where['commit'] or 'unknown')[:10]}",
    ]
    return ", ".join(filter(None, told)) + "."
