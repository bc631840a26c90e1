"""Runs of whole models: what rounds come to, names of workloads and loads, and how rounds of two backends compare."""

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

from serving_benchmarks.ops.timing import Timing

OUR_BACKENDS = ("SPARSE_MLA", "DENSE_MLA", "CUSTOM", "sparse_mla")  # in vLLM, and in SGLang
LOAD = ("request_rate", "concurrency")
_UNSAID = {"engine": "vllm", "drafts": 0}
_UNSAID |= dict.fromkeys(("tensor_parallel_size", "data_parallel_size", "decode_context_parallel_size"), 1)
"""Values that names leave out."""


def is_ours(backend: str) -> bool:
    """Whether a backend is of this project, with any cache: SPARSE_MLA:bfloat16 is. Others are its peers."""
    return backend.partition(":")[0] in OUR_BACKENDS


@dataclass
class Round:
    """One pass through a workload. Lists have an item for each request, `gaps` the seconds between all their tokens."""

    elapsed: float
    input_tokens: list[int]
    output_tokens: list[int]
    ttft_s: list[float | None]
    e2e_s: list[float]
    gaps: list[float]

    @property
    def tpot_s(self) -> list[float]:
        """Seconds from one token to the next, on average, of requests with several whose first one's time is known."""
        of = zip(self.ttft_s, self.e2e_s, self.output_tokens, strict=True)
        return [(end - ttft) / (tokens - 1) for ttft, end, tokens in of if ttft is not None and tokens > 1]


def of_rounds(rounds: Sequence[Round]) -> dict[str, Any]:
    """Fields of a result file, of rounds of one workload: speeds in the median of their times, and latencies of the
    requests of all rounds. Where requests failed, a round counts as having the mean number of them."""
    seconds = Timing.of([one.elapsed for one in rounds])

    def mean(name: str) -> int:
        return sum(sum(getattr(one, name)) for one in rounds) // len(rounds)

    count, outputs = sum(len(one.e2e_s) for one in rounds) // len(rounds), mean("output_tokens")
    return {
        "total_input_tokens": mean("input_tokens"),
        "total_output_tokens": outputs,
        "requests_per_second": count / seconds.median,
        "output_tokens_per_second": outputs / seconds.median,
        "seconds": asdict(seconds),
        "rounds_s": [one.elapsed for one in rounds],
        "ttft_s": percentiles([value for one in rounds for value in one.ttft_s]),
        "tpot_s": percentiles([value for one in rounds for value in one.tpot_s]),
        "itl_s": percentiles([value for one in rounds for value in one.gaps]),
    }


def percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    found = numpy.percentile(known, (50, 99)).tolist() if known else [None, None]
    return dict(zip(("p50", "p99"), found, strict=True))


_TAIL = 0.025  # the chance that a median lies beyond one of its bounds: 95 % confidence
ENOUGH = math.ceil(-math.log2(_TAIL))
"""Samples between whose extremes the median of what they are drawn from lies with that confidence."""


def median_bounds(values: Sequence[float]) -> tuple[float, float]:
    """Which of these independent samples the median of what they are drawn from lies between with 95 % confidence, of
    whatever distribution they are; the extremes where there are fewer than ENOUGH."""
    ordered, count = sorted(values), len(values)
    below = list(itertools.accumulate(math.comb(count, k) / 2**count for k in range(count)))
    cut = max(1, bisect_right(below, _TAIL))
    return ordered[cut - 1], ordered[-cut]


def over_first(first: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    """How many times as fast an entry is as the first one, over pairs of interleaved rounds."""
    ratios = [theirs / its for theirs, its in zip(first["rounds_s"], result["rounds_s"], strict=False)]
    low, high = median_bounds(ratios)
    return {"median": float(numpy.median(ratios)), "low": low, "high": high}


def interleaved(environment: dict[str, Any]) -> bool:
    return bool((environment.get("settings") or {}).get("interleaved"))


# Names


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
    """The model's heads and, with tensor parallelism, those of one GPU: "16, 8 per GPU"."""
    count, parts = (environment.get("model") or {}).get("heads"), case.get("tensor_parallel_size") or 1
    if count is None:
        return "-"
    part = "GPU" if environment.get("gpus") else "process"
    return f"{count}" + (f", {count // parts} per {part}" if parts > 1 else "")


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
