"""Runs in result files of throughput and serve: what they are called, and at which load they ran."""

from typing import Any

OUR_BACKENDS = ("SPARSE_MLA", "CUSTOM", "embedded")
"""The plugin under its names, and the engine. The others are what these are held to."""
LATENCIES = {"ttft_s": "first token", "tpot_s": "later token", "e2e_s": "whole request"}
"""Of `requests` of an entry."""
_LOAD = ("request_rate", "concurrency")
_UNSAID = {"seed": 0, "shared_prefix": 0, "burstiness": 1.0, "tensor_parallel_size": 1}
"""What goes without saying."""


def workload(case: dict[str, Any]) -> str:
    """What was asked for, without the load."""
    given = {name: value for name, value in case.items() if value is not None and name not in _LOAD}
    tokens = [given.pop(name, None) for name in ("input_len", "output_len")]
    parts = [f"{tokens[0]} + {tokens[1]} tokens"] if None not in tokens else []
    parts += [str(given.pop(name)) for name in ("workload", "source") if name in given]
    if "num_prompts" in given:
        parts.append(f"{given.pop('num_prompts')} requests")
    if "kv_cache_dtype" in given:
        parts.append(f"{given.pop('kv_cache_dtype')} cache")
    parts += [f"{name} {value}" for name, value in given.items() if value != _UNSAID.get(name)]
    return ", ".join(parts)


def load(case: dict[str, Any]) -> str:
    """How many requests came when."""
    rate, concurrency = (case.get(name) for name in _LOAD)
    parts = [f"{rate:g} a second"] if rate is not None else []
    parts += [f"{concurrency} at once"] if concurrency is not None else []
    return ", ".join(parts) or "all at once"


def short_load(case: dict[str, Any]) -> str:
    """The same where there is little room: 4/s, or 16 (at once)."""
    rate, concurrency = (case.get(name) for name in _LOAD)
    parts = [f"{rate:g}/s"] if rate is not None else []
    parts += [str(concurrency)] if concurrency is not None else []
    return ", ".join(parts) or "all"


def load_order(case: dict[str, Any]) -> tuple[float, float]:
    """Sorts by load, the lightest first."""
    rate, concurrency = (case.get(name) for name in _LOAD)
    return tuple(float("inf") if value is None else value for value in (rate, concurrency))


def name_of(result: dict[str, Any]) -> str:
    return f"{result['backend']}, {workload(result['case'])}, {load(result['case'])}"
