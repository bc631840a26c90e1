"""Reads the result files of all benchmarks: which one wrote a file, and whether it has what its readers need."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NotUnderstood(ValueError):
    """A file that is no result file of a known benchmark: the text names the file and says why."""


@dataclass(frozen=True)
class ResultFile:
    """What a benchmark wrote, checked: every entry has the fields of its kind in FIELDS."""

    path: Path
    kind: str
    """The benchmark's name, a key of TITLES."""
    environment: dict[str, Any]
    results: list[dict[str, Any]]

    @property
    def title(self) -> str:
        return TITLES[self.kind]

    @property
    def machine(self) -> str:
        return machine(self.environment)

    @property
    def succeeded(self) -> list[dict[str, Any]]:
        """The entries that were measured: not those that say why they failed."""
        return [result for result in self.results if not result.get("error")]


def machine(environment: dict[str, Any]) -> str:
    """The GPUs, or the CPU of a benchmark that used none."""
    names = [gpu["name"] for gpu in environment.get("gpus") or []]
    if names:
        return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    return (environment.get("cpu") or {}).get("model") or "unknown machine"


TITLES = {
    "kernels": "Sparse attention on a GPU",
    "kernel_counters": "What sparse attention keeps busy on a GPU",
    "cpu_attention": "Sparse attention on a CPU",
    "cache_ops": "The ops around attention",
    "index_ops": "The indexer's ops",
    "kv_blocks": "The cache manager's bookkeeping",
    "cpu_generate": "The engine on a CPU",
    "throughput": "Offline throughput",
    "serve": "Serving",
    "vllm_backends": "vLLM's backends beside each other",
    "recall": "The tiny checkpoint's answers",
}


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _share(value: Any) -> bool:
    return value == 0 or _positive(value)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _times(value: Any) -> bool:
    """Some seconds; null for what a request has none of."""
    return isinstance(value, list) and all(one is None or one == 0 or _positive(one) for one in value)


def _timing(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(_positive(value.get(name)) for name in ("fastest", "median", "lower_quartile", "upper_quartile"))
        and _count(value.get("turns"))
    )


def _turns(value: Any) -> bool:
    """What each turn took."""
    return isinstance(value, list) and all(map(_positive, value))


def _rounds(value: Any) -> bool:
    """The turns of what has a spread."""
    return _turns(value) and len(value) > 1


def _timings(value: Any) -> bool:
    return isinstance(value, dict) and "ours" in value and all(map(_timing, value.values()))


Check = Callable[[Any], bool]
_REQUESTS: dict[str, Check] = {f"requests.{name}": _times for name in ("ttft_s", "tpot_s", "e2e_s")}
_RUN: dict[str, Check] = {"engine": _text, "backend": _text, "case": lambda value: isinstance(value, dict)}
_ALWAYS = {*_RUN, "candidate", "way"}
"""What an entry has of these, it has if it failed, too."""
FIELDS: dict[str, dict[str, Check]] = {
    "kernels": {
        "case.batch": _text,
        "case.tokens": _count,
        "case.heads": _count,
        "case.topk": _count,
        "case.format": _text,
        "case.pattern": _text,
        "useful_flops": _positive,
        "bytes": _positive,
        "floor_seconds.math": _positive,
        "seconds": _timings,
        "seconds.plan": _timing,
    },
    "kernel_counters": {
        "case.batch": _text,
        "case.heads": _count,
        "case.topk": _count,
        "case.format": _text,
        **{f"counters.{name}": _positive for name in ("seconds", "clock_hertz")},
        **{f"counters.{name}": _share for name in ("issue_slots", "tensor_cores", "shared_memory", "l2", "memory")},
    },
    "cpu_attention": {
        "case.batch": _count,
        "case.heads": _count,
        "case.context": _count,
        "case.format": _text,
        "useful_flops": _positive,
        "seconds": _timings,
    },
    "cache_ops": {"op": _text, "format": _text, "count": _count, "bytes": _positive, "seconds": _timing},
    "index_ops": {
        "op": _text,
        "format": _text,
        "case.name": _text,
        "case.heads": _count,
        "flops": lambda value: value is None or _positive(value),
        "bytes": _positive,
        "seconds": _timing,
    },
    "kv_blocks": {"trace.name": _text, "operations": _count, "seconds": _timings},
    "cpu_generate": {
        "case.batch": _count,
        "case.context": _count,
        "case.new_tokens": _count,
        "case.kv_cache": _text,
        "seconds": _timings,
    },
    "throughput": {
        **_RUN,
        "seconds": _timing,
        "rounds_s": _rounds,
        "output_tokens_per_second": _positive,
        "requests.round": lambda value: isinstance(value, list),
        **_REQUESTS,
    },
    "serve": {**_RUN, "elapsed_time": _positive, "output_tokens_per_second": _positive, **_REQUESTS},
    "vllm_backends": {
        "candidate": _text,
        "backend": _text,
        "workload": _text,
        "prefill_s": _positive,
        "prefills_s": _turns,
        "decode_ms_a_step": lambda value: value is None or _timing(value),
        "decode_ms_a_step_by_turn": _turns,
        "finite": lambda value: isinstance(value, bool),
        "logprobs_looked_at": _count,
    },
    "recall": {
        "way": _text,
        "engine": _text,
        "cache": _text,
        "asked": _count,
        "right": lambda value: type(value) is int,
    },
}
"""What every entry of a kind has: dotted names, and what their values pass."""


def load(path: Path) -> ResultFile:
    """Reads and checks a result file. Raises NotUnderstood."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise NotUnderstood(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise NotUnderstood(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("environment"), dict):
        raise NotUnderstood(f"{path} was not written by a benchmark of this package: it has no 'environment'")
    results = found.get("results")
    if not isinstance(results, list) or not results:
        raise NotUnderstood(f"{path} has no 'results'")
    kind = _kind(found["environment"])
    if kind not in TITLES:
        raise NotUnderstood(f"{path}: its environment names no benchmark among {', '.join(TITLES)}, but {kind!r}")
    for number, result in enumerate(results):
        _check(result, kind, f"{path}: results[{number}]")
    return ResultFile(path, kind, found["environment"], results)


def _kind(environment: dict[str, Any]) -> str | None:
    """Which benchmark wrote a file: it says so itself, or by the command."""
    if environment.get("benchmark"):
        return str(environment["benchmark"])
    module = re.search(r"-m serving_benchmarks\.(\w+)", str(environment.get("command")))
    return module[1] if module else None


def _check(result: Any, kind: str, where: str) -> None:
    if not isinstance(result, dict):
        raise NotUnderstood(f"{where} is no object")
    failed = bool(result.get("error"))
    for name, passes in FIELDS[kind].items():
        if failed and name not in _ALWAYS:
            continue
        value: Any = result
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise NotUnderstood(f"{where} of {kind} has no {name}")
            value = value[part]
        if not passes(value):
            raise NotUnderstood(f"{where} of {kind}: {name} can't be {_short(value)}")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
