"""Runs of whole models: what rounds come to, names of workloads and loads, and how rounds of two backends compare."""

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving_benchmarks.ops.timing import Timing

OUR_BACKENDS = ("SPARSE_MLA", "DENSE_MLA", "CUSTOM", "sparse_mla")
"""Names of this project's backend in vLLM, and in SGLang."""
PERCENTILES = (50, 90, 99)
CONFIDENCE = 0.95
"""That a percentile lies within its bounds."""
LOAD = ("request_rate", "concurrency")
_UNSAID = {
    "engine": "vllm",
    "workload": "fixed",
    "shared_prefix": 0,
    "burstiness": 1.0,
    "drafts": 0,
    **dict.fromkeys(("tensor_parallel_size", "data_parallel_size", "decode_context_parallel_size"), 1),
}
"""Values that names leave out."""


def is_ours(backend: str) -> bool:
    """Whether a backend is of this project, with any cache: SPARSE_MLA:bfloat16 is. Others are its peers."""
    return backend.partition(":")[0] in OUR_BACKENDS


# Rounds and latencies


@dataclass
class Round:
    """One pass through a workload."""

    elapsed: float
    requests: dict[str, list[float | int | None]]
    """Lists in the order of the requests, as result files have them."""
    gaps: list[float]
    """Seconds between tokens, of all requests."""


def of_rounds(rounds: Sequence[Round], *, keep_requests: bool) -> dict[str, Any]:
    """Fields of a result file, of rounds of one workload: speeds in the median of their times, and latencies of the
    requests of all rounds. Where requests failed, a round counts as having the mean number of them."""
    seconds = Timing.of([one.elapsed for one in rounds])
    requests = {name: [value for one in rounds for value in one.requests[name]] for name in rounds[0].requests}
    inputs, outputs = (sum(requests[f"{kind}_tokens"]) // len(rounds) for kind in ("input", "output"))
    count = len(requests["e2e_s"]) // len(rounds)
    kept = {"round": [i for i, one in enumerate(rounds) for _ in one.requests["e2e_s"]], **requests}
    return {
        "num_requests": count,
        "total_num_tokens": inputs + outputs,
        "elapsed_time": seconds.median,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "requests_per_second": count / seconds.median,
        "tokens_per_second": (inputs + outputs) / seconds.median,
        "output_tokens_per_second": outputs / seconds.median,
        "seconds": seconds.as_dict(),
        "rounds_s": [one.elapsed for one in rounds],
        **latencies(requests, [gap for one in rounds for gap in one.gaps]),
        **({"requests": kept} if keep_requests else {}),
    }


def per_token(ttft: float | None, e2e: float, tokens: int) -> float | None:
    """Seconds from one token to the next, on average; None for a single token, or where the first one's time is
    unknown."""
    return None if ttft is None or tokens < 2 else (e2e - ttft) / (tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between the two values next to it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def percentile_bounds(values: Sequence[float], percent: float) -> tuple[float | None, float | None]:
    """Which of these independent samples a percentile of what they are drawn from lies between with CONFIDENCE, of
    whatever distribution they are. None where there are too few for a bound."""
    ordered, count = sorted(values), len(values)
    logs = math.log(percent / 100), math.log(1 - percent / 100)
    ways = [math.lgamma(k + 1) for k in range(count + 1)]  # logarithms of factorials
    likely = (ways[-1] - ways[k] - ways[-1 - k] + k * logs[0] + (count - k) * logs[1] for k in range(count))
    below = list(itertools.accumulate(map(math.exp, likely)))  # that so many samples or fewer are at or below it
    low = bisect_right(below, (1 - CONFIDENCE) / 2)
    high = bisect_left(below, (1 + CONFIDENCE) / 2)
    return ordered[low - 1] if low else None, ordered[high] if high < count else None


def summary(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and percentiles of those that are known."""
    known = [value for value in values if value is not None]
    names = [f"p{percent}" for percent in PERCENTILES]
    if not known:
        return dict.fromkeys(["mean", *names])
    found = {name: percentile(known, percent) for name, percent in zip(names, PERCENTILES, strict=True)}
    return {"mean": math.fsum(known) / len(known), **found}


def latencies(requests: dict[str, Sequence[float | None]], gaps: Sequence[float]) -> dict[str, Any]:
    """Fields of a result file: of the lists of requests, and of the seconds between tokens."""
    found, gap = {name: summary(requests[name]) for name in ("ttft_s", "tpot_s", "e2e_s")}, summary(gaps)
    shown = {"ttft_s": found["ttft_s"], "tpot_s": found["tpot_s"], "itl_s": gap}
    return {**{name: {p: of[p] for p in ("p50", "p99")} for name, of in shown.items()}, "latency": found}


# Names and comparisons


def workload(case: dict[str, Any], *, count: bool = True) -> str:
    """What was asked for, without the load. `count`: with the number of requests."""
    left_out = {*LOAD, "seed", "input_len", "output_len", *(() if count else ("num_prompts",))}
    given = {name: value for name, value in case.items() if name not in left_out and value is not None}
    parts = [f"{lengths(case)} tokens"]
    parts += [f"{given.pop('num_prompts')} requests"] if "num_prompts" in given else []
    parts += [f"{given.pop('kv_cache_dtype')} cache"] if "kv_cache_dtype" in given else []
    return ", ".join([*parts, *(f"{name} {value}" for name, value in given.items() if value != _UNSAID.get(name))])


def lengths(case: dict[str, Any]) -> str:
    """Tokens of a prompt and of an answer, such as 4096 + 64."""
    return f"{case['input_len']} + {case['output_len']}"


def heads(environment: dict[str, Any], case: dict[str, Any]) -> str:
    """The model's heads and, with tensor parallelism, those of one GPU: "16, 8 a GPU"."""
    count, parts = (environment.get("model") or {}).get("heads"), case.get("tensor_parallel_size") or 1
    if count is None:
        return "unknown"
    part = "GPU" if environment.get("gpus") else "process"
    return f"{count}" + (f", {count // parts} a {part}" if parts > 1 else "")


def load(case: dict[str, Any], short: bool = False) -> str:
    """How many requests came when. `short`: 4/s, or 16 for so many in flight."""
    rate, concurrency = (case.get(name) for name in LOAD)
    parts = [f"{rate:g}{'/s' if short else ' a second'}"] if rate is not None else []
    parts += [f"{concurrency}{'' if short else ' in flight'}"] if concurrency is not None else []
    return ", ".join(parts) or ("all" if short else "all at once")


def asked(case: dict[str, Any]) -> str:
    """The workload and the load. Entries of one file that share it did the same work."""
    return f"{workload(case)}, {load(case)}"


def name_of(result: dict[str, Any]) -> str:
    return f"{result['backend']}, {asked(result['case'])}"


def interleaved(environment: dict[str, Any]) -> bool:
    """Whether the backends of a file were interleaved, round by round."""
    return bool((environment.get("settings") or {}).get("interleaved"))


def over_first(first: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """How many times as fast an entry is as the first one, of rounds of the same number that both have. The two must
    have been interleaved. `low` and `high` bound the median with 95 % confidence; with too few rounds they are the
    extremes."""
    ratios = [theirs / its for theirs, its in zip(first["rounds_s"], result["rounds_s"], strict=False)]
    low, high = percentile_bounds(ratios, 50)
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
