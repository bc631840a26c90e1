"""Runs of whole models: what their workloads and loads are called, and how rounds of two backends compare."""

import statistics
from typing import Any

from serving_benchmarks.results import latency

OUR_BACKENDS = ("SPARSE_MLA", "CUSTOM")
"""Names of this project's backend in vLLM. Other backends are what it is compared with."""
_LOAD = ("request_rate", "concurrency")
_UNSAID = {
    "workload": "fixed",
    "shared_prefix": 0,
    "burstiness": 1.0,
    "drafts": 0,
    **dict.fromkeys(("tensor_parallel_size", "data_parallel_size", "decode_context_parallel_size"), 1),
}
"""Values that names leave out."""


def workload(case: dict[str, Any], *, count: bool = True) -> str:
    """What was asked for, without the load. `count`: with the number of requests."""
    left_out = {*_LOAD, "seed", "input_len", "output_len", "source", *(() if count else ("num_prompts",))}
    given = {name: value for name, value in case.items() if name not in left_out and value is not None}
    parts = [f"{lengths(case)} tokens"] if case.get("input_len") is not None else [lengths(case)]
    parts += [f"{given.pop('num_prompts')} requests"] if "num_prompts" in given else []
    parts += [f"{given.pop('kv_cache_dtype')} cache"] if "kv_cache_dtype" in given else []
    return ", ".join([*parts, *(f"{name} {value}" for name, value in given.items() if value != _UNSAID.get(name))])


def lengths(case: dict[str, Any]) -> str:
    """Tokens of a prompt and of an answer, such as 4096 + 64, or the file that has the requests."""
    if case.get("input_len") is None or case.get("output_len") is None:
        return str(case.get("source"))
    return f"{case['input_len']} + {case['output_len']}"


def heads(environment: dict[str, Any], case: dict[str, Any], noun: str = "") -> str:
    """The model's heads and, with tensor parallelism, those of one GPU: "16, 8 a GPU"."""
    count, parts = (environment.get("model") or {}).get("heads"), case.get("tensor_parallel_size") or 1
    if count is None:
        return "unknown"
    part = "GPU" if environment.get("gpus") else "process"
    return f"{count}{noun}" + (f", {count // parts} a {part}" if parts > 1 else "")


def load(case: dict[str, Any], short: bool = False) -> str:
    """How many requests came when. `short`: 4/s, or 16 for so many in flight."""
    rate, concurrency = (case.get(name) for name in _LOAD)
    parts = [f"{rate:g}{'/s' if short else ' a second'}"] if rate is not None else []
    parts += [f"{concurrency}{'' if short else ' in flight'}"] if concurrency is not None else []
    return ", ".join(parts) or ("all" if short else "all at once")


def load_order(case: dict[str, Any]) -> tuple[float, float]:
    """Sorts by load, the lightest first."""
    rate, concurrency = (float("inf") if case.get(name) is None else case[name] for name in _LOAD)
    return rate, concurrency


def asked(case: dict[str, Any]) -> str:
    """The workload and the load. Entries of one file that share it did the same work."""
    return f"{workload(case)}, {load(case)}"


def name_of(result: dict[str, Any]) -> str:
    return f"{result['backend']}, {asked(result['case'])}"


def interleaved(environment: dict[str, Any]) -> bool:
    """Whether the backends of a file were interleaved, round by round."""
    return bool((environment.get("settings") or {}).get("interleaved"))


def over_first(first: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """How many times as fast an entry is as the first one, of rounds of the same number. The two must have been
    interleaved. `low` and `high` bound the median with 95 % confidence; with too few rounds they are the extremes."""
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


def tokens_per_gpu(result: dict[str, Any]) -> float:
    """Output tokens a second of each GPU."""
    return result["output_tokens_per_second"] / result["gpus"]


def tokens_per_user(result: dict[str, Any]) -> float | None:
    """Tokens a second that a user sees: 1 / median inter-token latency. None where answers have a single token."""
    seconds = result["itl_s"]["p50"]
    return 1 / seconds if seconds else None
