"""Every kind of result file, described once, and the reader that checks files against it.

To add a kind, add it to KINDS: what its entries must have, how compare holds two files against each other, and which
tables the docs can have of it.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError, create_model

from serving_benchmarks.results import runs, tables
from serving_benchmarks.results.file import NotUnderstood, Report, ResultFile

Seconds = dict[str, float] | list[float] | float  # a timing, the seconds of each round, or what was measured once
LACKS = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What tables, pictures and comparisons raise where an entry lacks what they need."""


# What entries have, strictly typed. What else they have is not looked at.


def has(base: type[BaseModel] = BaseModel, **fields: Any) -> type[BaseModel]:
    """Objects with these fields, and those of the base."""
    return create_model("Object", __base__=base, **{name: (kind, ...) for name, kind in fields.items()})


def _with(*names: str) -> AfterValidator:
    def check(found: dict[str, Any]) -> dict[str, Any]:
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"has no {missing[0]}")
        return found

    return AfterValidator(check)


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
TIMING = has(**dict.fromkeys(("fastest", "median", "lower_quartile", "upper_quartile"), Positive), rounds=Count)
CASE = has(heads=Count, format=str)
TIMED = has(useful_flops=Positive, seconds=Annotated[dict[str, TIMING], _with("ours")])
PLANNED = has(TIMED, bytes=Positive, seconds=Annotated[dict[str, TIMING], _with("ours", "plan")])
LATENCIES = has(**dict.fromkeys(("p50", "p99"), Annotated[float, Field(ge=0, allow_inf_nan=False)] | None))
LOAD = create_model("Load", **{name: (Positive | None, None) for name in (*runs.LOAD, "num_prompts")})
FAILED_RUN = has(backend=str, case=has(LOAD, input_len=Count, output_len=Count))
SPEEDS = has(FAILED_RUN, requests_per_second=Positive, output_tokens_per_second=Positive, gpus=Count)
SERVE = has(SPEEDS, total_output_tokens=Count, ttft_s=LATENCIES, itl_s=LATENCIES)
FAILED_WAY = has(way=str)


# What was timed


@dataclass(frozen=True)
class Timed:
    """Something of ours that was timed, as compare reads it."""

    case: str
    what: str
    seconds: Seconds
    peers: dict[tuple[str, str | None], Seconds] = field(default_factory=dict)
    """What was timed in the same process on the same work, by name and version."""


def _versions(file: ResultFile) -> dict[str, str | None]:
    about = file.environment
    versions = {"vllm": (about.get("vllm") or {}).get("version"), "sglang": about.get("sglang")}
    return {**(about.get("peers") or {}), **versions}


def _candidates_timed(file: ResultFile) -> Iterator[Timed]:
    """Of kinds whose entries have several candidates: ours, with the others as peers. The plan has none."""
    versions, name_of = _versions(file), KINDS[file.kind].name_of
    for result in tables.ran(file.report):
        for where, seconds in (("", result["seconds"]), (" in situ", result.get("in_situ", {}).get("seconds", {}))):
            others = {name: timing for name, timing in seconds.items() if name not in tables.NOT_PEERS}
            peers = {(name, versions.get(re.split("[_,]", name)[0])): timing for name, timing in others.items()}
            for name in filter(seconds.__contains__, tables.NOT_PEERS):
                yield Timed(name_of(result), name + where, seconds[name], {} if name == "plan" else peers)


def _runs_timed(file: ResultFile) -> Iterator[Timed]:
    """Ours, with others at the same load as peers; all where none is ours. A request rate decides the whole time."""
    timed: dict[tuple[str, str], dict[str, tuple[str, Seconds]]] = {}
    for result in tables.ran(file.report):
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


@dataclass(frozen=True)
class Kind:
    name: str
    """That a file's environment has as "benchmark"."""
    title: str
    entry: type[BaseModel]  # what every entry that ran has
    makers: dict[str, Callable[..., str]]
    """Tables for the docs by name, of reports, and of texts as keyword arguments. A report shows the first one."""
    timed: Callable[[ResultFile], Iterator[Timed]] | None = _candidates_timed  # None: there is nothing to compare
    failed: type[BaseModel] = has()  # what entries that failed have

    def name_of(self, entry: dict[str, Any]) -> str:
        """What an entry is called, whether it ran or failed."""
        return tables.NAMES[self.name](entry)


_KERNELS = has(PLANNED, case=has(CASE, batch=str, topk=Count), floor_seconds=has(math=Positive))
_ROWS = has(TIMED, case=has(CASE, name=str, batch=str, topk=Count), bytes=Positive)
_BACKWARD = has(TIMED, case=has(heads=Count, rows=Count, lists=str), parts=dict)
_INDEX = has(TIMED, case=has(CASE, batch=str), bytes=Positive)
_THROUGHPUT = has(SERVE, seconds=TIMING, rounds_s=Annotated[list[Positive], Field(min_length=2)])
_CHECKPOINT = has(FAILED_WAY, engine=str, cache=str, gpus=Count, asked=Count, right=Annotated[int, Field(ge=0)] | None)
_OFFLINE_TABLES = {"throughput": tables.whole_models, "throughput_versus": tables.throughput_versus}
_SERVE_TABLES = {"serve": tables.whole_models, "serve_versus": tables.throughput_versus}
_KERNEL_TABLES = {"kernels": tables.kernels, "fp8_products": tables.fp8_products}
_KINDS = (
    Kind("kernels", "Sparse attention on a GPU", _KERNELS, _KERNEL_TABLES),
    Kind("rows", "Sparse attention on other rows, on a GPU", _ROWS, {"rows": tables.rows}),
    Kind("dense", "Dense decode on a GPU", has(PLANNED, case=has(CASE, batch=str)), {"dense": tables.dense}),
    Kind("backward", "The backward of sparse attention on a GPU", _BACKWARD, {"backward": tables.backward}),
    Kind("index", "The indexer on a GPU", _INDEX, {"index": tables.dense}),
    Kind("sharing", "The indexer's selection on several GPUs", _INDEX, {"sharing": tables.dense}),
    Kind("throughput", "Offline throughput", _THROUGHPUT, _OFFLINE_TABLES, _runs_timed, FAILED_RUN),
    Kind("serve", "Serving", SERVE, _SERVE_TABLES, _runs_timed, FAILED_RUN),
    Kind("checkpoint", "A checkpoint's answers", _CHECKPOINT, {"checkpoint": tables.checkpoint}, None, FAILED_WAY),
)
KINDS = {kind.name: kind for kind in _KINDS}


def load(path: Path) -> ResultFile:
    """Reads and checks a result file. Raises NotUnderstood."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair is in JSON, but can't be written
    except (OSError, ValueError, RecursionError) as error:
        raise NotUnderstood(f"{path} can't be read as JSON: {error}") from None
    return checked(found, path)


def checked(report: Report, path: Path) -> ResultFile:
    """The contents of a file, if every entry has what its kind needs. Raises NotUnderstood."""
    if not isinstance(report, dict) or not isinstance(report.get("environment"), dict):
        raise NotUnderstood(f"{path} was not written by a benchmark of this package: it has no 'environment'")
    kind, results = report["environment"].get("benchmark"), report.get("results")
    if not isinstance(results, list) or not results:
        raise NotUnderstood(f"{path} has no 'results'")
    if not isinstance(kind, str) or kind not in KINDS:
        raise NotUnderstood(f"{path}: 'benchmark' in its environment is {kind!r}, none of {', '.join(KINDS)}")
    for number, result in enumerate(results):
        failed = isinstance(result, dict) and bool(result.get("error"))
        try:
            (KINDS[kind].failed if failed else KINDS[kind].entry).model_validate(result, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise NotUnderstood(f"{path}: results[{number}] of {kind}: {where}: {first['msg']}") from None
    return ResultFile(path, kind, report["environment"], results)
