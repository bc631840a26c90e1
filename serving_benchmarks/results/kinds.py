"""Every kind of result file, described once, and the reader that checks files against it.

To add a kind, add it to KINDS: what its entries must have, how compare holds two files against each other, and which
tables the docs can have of it.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving_benchmarks.results import op_tables, runs, tables
from serving_benchmarks.results.file import NotUnderstood, Report, ResultFile

Check = Callable[[Any], bool]
Entry = dict[str, Any]
Seconds = dict[str, float] | list[float] | float
"""A timing, the seconds of each round, or what was measured once."""


@dataclass(frozen=True)
class Timed:
    """Something of ours that was timed, as compare reads it."""

    case: str
    what: str
    seconds: Seconds
    peers: dict[tuple[str, str | None], Seconds] = field(default_factory=dict)
    """What was timed in the same process on the same work, by name and version."""


@dataclass(frozen=True)
class Kind:
    title: str
    name_of: Callable[[Entry], str]
    """What an entry is called, whether it ran or failed."""
    fields: dict[str, Check]
    """What every entry that ran has: dotted names, and what their values pass."""
    makers: dict[str, Callable[..., str]]
    """Tables for the docs, by the names that pages use. Each takes reports, and text as keyword arguments. A report
    shows the first one."""
    timed: Callable[[ResultFile], Iterator[Timed]] | None = None
    """None: there is nothing to compare."""
    always: tuple[str, ...] = ()
    """Fields that failed entries have as well."""


# What values pass


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _count(value: Any) -> bool:
    return type(value) is int and value > 0


def _timing(value: Any) -> bool:
    names = ("fastest", "median", "lower_quartile", "upper_quartile")
    return _object(value) and all(_positive(value.get(name)) for name in names) and _count(value.get("rounds"))


def _timings(value: Any) -> bool:
    return _object(value) and "ours" in value and all(map(_timing, value.values()))


def _rounds(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(map(_positive, value))


def _percentiles(value: Any) -> bool:
    """p50 and p99, in seconds. Both are None where requests have no such time."""
    if not _object(value) or not {"p50", "p99"} <= value.keys():
        return False
    values = [value["p50"], value["p99"]]
    return values == [None, None] or all(one == 0 or _positive(one) for one in values)


def _run_case(value: Any) -> bool:
    """What was asked of a whole model. The load may be unknown."""
    names = ("request_rate", "concurrency", "num_prompts", "tensor_parallel_size")
    return _object(value) and all(value.get(name) is None or _positive(value[name]) for name in names)


# What was timed

OURS = (*tables.NOT_PEERS, "ours on one thread")
"""Candidates that are not peers."""


def _versions(file: ResultFile) -> dict[str, str | None]:
    about = file.environment
    named = {"vllm": (about.get("vllm") or {}).get("version"), "reference": (about.get("torch") or {}).get("version")}
    return {**(about.get("peers") or {}), **named, "sglang": about.get("sglang")}


def _candidates_timed(file: ResultFile) -> Iterator[Timed]:
    """Of kinds whose entries have several candidates: ours, with the others as peers. The plan has none."""
    versions = _versions(file)
    for result in file.succeeded:
        for where, seconds in (("", result["seconds"]), (" in situ", result.get("in_situ", {}).get("seconds", {}))):
            peers = {
                (name, versions.get(re.split("[_,]", name)[0])): timing
                for name, timing in seconds.items()
                if name not in OURS
            }
            for name in filter(seconds.__contains__, OURS):
                its_peers = {} if name == "plan" else peers
                yield Timed(KINDS[file.kind].name_of(result), name + where, seconds[name], its_peers)


def _ops_timed(file: ResultFile) -> Iterator[Timed]:
    """Of kinds that have one op an entry. Ops that move memory have plain copies as peers. The plan computes."""
    copies = {(r["op"], None): r["seconds"] for r in file.results if r["op"].startswith("copy")}
    for result in file.results:
        if not result["op"].startswith("copy"):
            peers = {} if result["op"] == "plan" else copies
            yield Timed(KINDS[file.kind].name_of(result), "op", result["seconds"], peers)


def _runs_timed(file: ResultFile) -> Iterator[Timed]:
    """Ours, with other backends at the same load as peers. All backends where none is ours. With a rate of requests,
    the rate decides how long they all take."""
    timed: dict[tuple[str, str], dict[str, tuple[str, Seconds]]] = {}
    for result in file.succeeded:
        rounds = result.get("rounds_s", ())
        once = result["total_output_tokens"] / result["output_tokens_per_second"]
        at_rate = result["case"].get("request_rate") is not None
        seconds: dict[str, Seconds] = {} if at_rate else {"all requests": rounds if len(rounds) > 1 else once}
        for name, what in (("ttft_s", "first token"), ("itl_s", "inter-token latency")):
            seconds |= {f"{what}, {p}": value for p, value in result[name].items() if value}
        for what, value in seconds.items():
            timed.setdefault((runs.asked(result["case"]), what), {})[result["backend"]] = runs.name_of(result), value
    any_of_ours = any(runs.is_ours(result["backend"]) for result in file.results)
    version = _versions(file).get(file.results[0].get("engine"))
    for (_, what), backends in timed.items():
        others = {(name, version): value for name, (_, value) in backends.items() if not runs.is_ours(name)}
        for backend, (name, value) in backends.items():
            if runs.is_ours(backend) or not any_of_ours:
                yield Timed(name, what, value, others if any_of_ours else {})


# The kinds

_RUN: dict[str, Check] = {
    "backend": _text,
    "case": _run_case,
    **dict.fromkeys(("case.input_len", "case.output_len"), _count),
    "gpus": _count,
    "total_output_tokens": _count,
    "requests_per_second": _positive,
    "output_tokens_per_second": _positive,
    "ttft_s": _percentiles,
    "itl_s": _percentiles,
}
_OP: dict[str, Check] = {"op": _text, "format": _text, "bytes": _positive, "seconds": _timing}
_CASE: dict[str, Check] = {"case.heads": _count, "case.format": _text, "useful_flops": _positive, "seconds": _timings}

KINDS = {
    "kernels": Kind(
        "Sparse attention on a GPU",
        lambda entry: tables.kernel_name(entry["case"]),
        {
            **_CASE,
            "case.batch": _text,
            **dict.fromkeys(("case.tokens", "case.topk"), _count),
            **dict.fromkeys(("bytes", "floor_seconds.math"), _positive),
            "seconds.plan": _timing,
        },
        {"kernels": tables.kernels, "kernels_decode": tables.headline},
        _candidates_timed,
    ),
    "rows": Kind(
        "Sparse attention on other rows, on a GPU",
        lambda entry: tables.kernel_name(entry["case"]),
        {**_CASE, "case.name": _text, "case.batch": _text, "case.topk": _count, "bytes": _positive},
        {"rows": tables.rows},
        _candidates_timed,
    ),
    "dense": Kind(
        "Dense decode on a GPU",
        lambda entry: "{batch} h{heads} {format}".format(**entry["case"]),
        {**_CASE, "case.batch": _text, "bytes": _positive, "seconds.plan": _timing},
        {"dense": tables.dense},
        _candidates_timed,
    ),
    "backward": Kind(
        "The backward of sparse attention on a GPU",
        lambda entry: "h{heads} {rows} {lists}".format(**entry["case"]),
        {**dict.fromkeys(("case.heads", "case.rows"), _count), "case.lists": _text}
        | {"useful_flops": _positive, "seconds": _timings, "parts": _object},
        {"backward": tables.backward},
        _candidates_timed,
    ),
    "cache": Kind(
        "The ops around attention",
        lambda entry: f"{entry['op']}, {entry['count']} tokens, {entry['format']}",
        {**_OP, "count": _count},
        {"cache": op_tables.cache},
        _ops_timed,
    ),
    "index": Kind(
        "The indexer's ops",
        lambda entry: f"{entry['op']}, {entry['case']['batch']}, {entry['case']['heads']} heads, {entry['format']}",
        {**_OP, "case.batch": _text, "case.heads": _count, "flops": lambda value: value is None or _positive(value)},
        {"index": op_tables.index},
        _ops_timed,
    ),
    "cpu": Kind(
        "Sparse attention on a CPU",
        lambda entry: "b {batch}, h {heads}, {context} slots, {format}".format(**entry["case"]),
        {**_CASE, "case.batch": _count, "case.context": _count},
        {"cpu": op_tables.cpu},
        _candidates_timed,
    ),
    "throughput": Kind(
        "Offline throughput",
        runs.name_of,
        {**_RUN, "seconds": _timing, "rounds_s": _rounds},
        {
            "throughput": tables.whole_models,
            "throughput_versus": tables.throughput_versus,
            "throughput_profiles": tables.throughput_profiles,
        },
        _runs_timed,
        always=("backend", "case"),
    ),
    "serve": Kind(
        "Serving",
        runs.name_of,
        _RUN,
        {"serve": tables.whole_models, "serve_versus": tables.throughput_versus},
        _runs_timed,
        always=("backend", "case"),
    ),
    "checkpoint": Kind(
        "A checkpoint's answers",
        lambda entry: entry["way"],
        {
            **{"way": _text, "engine": _text, "cache": _text, "gpus": _count, "asked": _count},
            "right": lambda value: value is None or (type(value) is int and value >= 0),  # None: no answer is known
        },
        {"checkpoint": tables.checkpoint},
        always=("way",),
    ),
}
"""By the name that a file's environment has as "benchmark"."""
LACKS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What tables, pictures and comparisons raise where an entry lacks what they need."""


def load(path: Path) -> ResultFile:
    """Reads and checks a result file. Raises NotUnderstood."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is in JSON, but can't be written
    except OSError as error:
        raise NotUnderstood(f"{path}: {error.strerror}") from None
    except UnicodeError as error:
        raise NotUnderstood(f"{path} is not text: {error}") from None
    except (ValueError, RecursionError) as error:
        raise NotUnderstood(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("environment"), dict):
        raise NotUnderstood(f"{path} was not written by a benchmark of this package: it has no 'environment'")
    return checked(found, path)


def checked(report: Report, path: Path) -> ResultFile:
    """The contents of a file, if every entry has what its kind needs. Raises NotUnderstood."""
    kind, results = report["environment"].get("benchmark"), report.get("results")
    if not isinstance(results, list) or not results:
        raise NotUnderstood(f"{path} has no 'results'")
    if not isinstance(kind, str) or kind not in KINDS:
        raise NotUnderstood(f"{path}: 'benchmark' in its environment is {_short(kind)}, none of {', '.join(KINDS)}")
    for number, result in enumerate(results):
        _check(result, kind, f"{path}: results[{number}]")
    return ResultFile(path, kind, report["environment"], results)


def _check(result: Any, kind: str, where: str) -> None:
    if not _object(result):
        raise NotUnderstood(f"{where} is no object")
    failed = bool(result.get("error"))
    for name, passes in KINDS[kind].fields.items():
        if failed and name not in KINDS[kind].always:
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
