"""What got faster or slower between two result files of one benchmark.

    python -m serving_benchmarks.results.compare results/kernels.json kernels.json --limit 5%

Where a peer was measured in the same process, ours is compared as a share of the peer's time, as one machine is up to
a tenth faster than the next one of its kind; the peer is the fastest one that both files have in the same version.
Everything else is compared as it is. A change counts where the spread of one file ends before that of the other one
begins. It is that of turns or rounds, as the requests of one round have its luck in common: their quartiles, or of
fewer than twelve turns more than those. Where there was one round, percentiles of its requests have 95 % confidence
intervals, and what else was measured once is never sure.

The exit status is 0 if nothing got slower by more than the limit, 1 if something did or no longer runs, and 2 if the
files can't be compared.
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from serving_benchmarks.ops.timing import Timing
from serving_benchmarks.results import kernel_report, latency, runs
from serving_benchmarks.results.result_kinds import NotUnderstood, ResultFile, load

ENOUGH_TURNS = 12
"""For their quartiles to be the spread."""
REACH = {2: 12, 3: 4, 4: 3, 5: 3}
"""How many times as far as the quartiles of so few turns the spread reaches from their median; with more than these,
but not enough, twice as far. Two spreads of turns of one normal distribution then lie apart in 3 % of cases at most."""
REACH_OF_ROUNDS = {2: 24, 3: 6, 4: 5, 5: 4}
"""The same of rounds of a whole model, which last for seconds: hosts drift, so that a few in a row may be alike by
chance, and so may the next few."""
SHOULD_BE_EQUAL = (
    "cpu.model",
    "cpu.cores",
    "driver",
    "torch.version",
    "torch.threads",
    "threads",
    "vllm.version",
    "transformers",
    "peers",
    "peer_attention",
    "l2_flushed",
    "model",
    "settings",
)
"""Of the environments, beside the machine: where these differ, it may not be ours that changed."""

BEFORE = {"interleaved": False, "seconds": 0.0}
"""What is true of files that are older than an entry of their environments."""
UNKNOWN_BEFORE = ("dense_layers", "vocab_size", "random_weights_seed")
"""Entries whose lack in an older file is no difference."""


@dataclass(frozen=True)
class Span:
    """Seconds, and the spread that they come with."""

    value: float
    low: float
    high: float
    rounds: tuple[float, ...] = ()
    """What each round gave, if others were timed in the same rounds."""

    @classmethod
    def of_timing(cls, timing: dict[str, float], of_few: dict[int, int] = REACH) -> "Span":
        """The quartiles of turns, or where there are few as many times as far as `of_few` says."""
        turns, median = timing["turns"], timing["median"]
        reach = 1 if turns >= ENOUGH_TURNS else of_few.get(turns, 2)
        low, high = (  # as ratios: no time is below 0
            median * (timing[quartile] / median) ** reach for quartile in ("lower_quartile", "upper_quartile")
        )
        return cls(median, low, high)

    @classmethod
    def of_rounds(cls, values: Sequence[float], in_turn: bool) -> "Span":
        """Of what rounds gave. `in_turn`: others were timed in the same ones, of which it can be a share."""
        if len(values) == 1 or not min(values):
            return cls.once(statistics.median(values))
        span = cls.of_timing(Timing.of(values).as_dict(), REACH_OF_ROUNDS)
        return replace(span, rounds=tuple(values) if in_turn else ())

    @classmethod
    def once(cls, value: float) -> "Span":
        """What was measured once may have any spread."""
        return cls(value, 0.0, math.inf)

    @classmethod
    def of_percentile(cls, samples: Sequence[float], share: float) -> "Span":
        """A percentile of independent samples, and what bounds it. A bound that is not known is 0 or infinite."""
        value, (low, high) = latency.percentile(samples, share * 100), latency.percentile_bounds(samples, share * 100)
        # of one or two samples it may lie below the rank
        return cls(value, 0.0 if low is None else min(value, low), math.inf if high is None else high)

    def over(self, other: "Span") -> "Span":
        """The share of another span: of the rounds of both in pairs, or with the widest spread that both allow."""
        if self.rounds and len(self.rounds) == len(other.rounds):
            shares = [its / others for its, others in zip(self.rounds, other.rounds, strict=True)]
            return Span.of_rounds(shares, in_turn=False)
        high = self.high / other.low if other.low > 0 else math.inf
        return Span(self.value / other.value, self.low / other.high, high)


@dataclass(frozen=True)
class Measurement:
    """Something of ours that was timed, and what was timed beside it, each with its version."""

    span: Span
    yardsticks: dict[tuple[str, str | None], Span] = field(default_factory=dict)


Measurements = dict[tuple[str, str], Measurement]
"""By the case, and what of it was timed."""


@dataclass(frozen=True)
class Change:
    case: str
    what: str
    seconds: tuple[float, float]
    """Old and new."""
    shares: tuple[float, float] | None
    """The same over the yardstick's time in the same file; None for what was compared as it is."""
    yardstick: str | None
    """The peer that both are shares of."""
    times: float
    """The new time over the old one, both as shares where there are shares."""
    sure: bool
    """The spreads don't overlap."""
    too_few: bool
    """Too little was measured for a spread."""

    def beyond(self, limit: float) -> bool:
        return self.times > 1 + limit


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    only_old: list[str]
    only_new: list[str]
    no_longer: list[tuple[str, str]]
    """Cases that ran in the old file and failed in the new one, and what they said."""
    warnings: list[str]

    def slower(self, limit: float) -> list[Change]:
        """What got slower by more than the limit, and beyond the spread."""
        return [change for change in self.changes if change.sure and change.beyond(limit)]


def measurements(file: ResultFile) -> Measurements:
    """All that a file has of ours, with what it can be held to."""
    found: Measurements = {}
    for case, what, measurement in _EXTRACT[file.kind](file):
        key, again = (case, what), 1
        while key in found:
            again += 1
            key = (f"{case} ({again})", what)
        found[key] = measurement
    return found


Found = Iterator[tuple[str, str, Measurement]]
Result = dict[str, Any]


def _kernels(file: ResultFile) -> Found:
    loaded = file.environment.get("peers") or {}
    for result in file.results:
        case, seconds = result["case"], result["seconds"]
        name = kernel_report.name_of(case) + ("" if case["pattern"] == "random" else f", {case['pattern']}")
        peers = {
            (kernel_report.TITLES.get(peer, peer), loaded.get(peer.split("_")[0])): Span.of_timing(timing)
            for peer, timing in seconds.items()
            if peer not in kernel_report.NOT_PEERS
        }
        yield name, "attention", Measurement(Span.of_timing(seconds["ours"]), peers)
        yield name, "plan", Measurement(Span.of_timing(seconds["plan"]))


def _cpu_attention(file: ResultFile) -> Found:
    for result in file.results:
        case = result["case"]
        name = f"b {case['batch']}, h {case['heads']}, {case['context']} slots, {case['format']}"
        peers = _peers(file, result["seconds"])
        yield name, "attention", Measurement(Span.of_timing(result["seconds"]["ours"]), peers)
        if "ours on one thread" in result["seconds"]:
            alone = Span.of_timing(result["seconds"]["ours on one thread"])
            yield name, "attention on one thread", Measurement(alone, peers)


def _kv_blocks(file: ResultFile) -> Found:
    for result in file.results:
        trace, seconds = result["trace"], result["seconds"]
        name = f"{trace['name']}, {trace['requests']} requests" if "requests" in trace else trace["name"]
        yield name, "bookkeeping", Measurement(Span.of_timing(seconds["ours"]), _peers(file, seconds))


def _cpu_generate(file: ResultFile) -> Found:
    for result in file.results:
        case, seconds = result["case"], result["seconds"]
        name = f"b {case['batch']}, {case['context']} + {case['new_tokens']} tokens, {case['kv_cache']}"
        yield name, "generation", Measurement(Span.of_timing(seconds["ours"]), _peers(file, seconds))


def _peers(file: ResultFile, seconds: dict[str, Any]) -> dict[tuple[str, str | None], Span]:
    """All candidates that aren't ours, by name and version."""
    versions = {
        "vllm": (file.environment.get("vllm") or {}).get("version"),
        "transformers": file.environment.get("transformers"),
        "reference": (file.environment.get("torch") or {}).get("version"),
    }
    return {
        (name, versions.get(name.split(",")[0])): Span.of_timing(timing)
        for name, timing in seconds.items()
        if not name.startswith("ours")
    }


def _cache_ops(file: ResultFile) -> Found:
    """What moves memory is held to plain copies; the plan computes, and so do few tokens, mostly."""
    copies = {
        (result["op"], None): Span.of_timing(result["seconds"])
        for result in file.results
        if result["op"].startswith("copy")
    }
    for result in file.results:
        op = result["op"]
        if not op.startswith("copy"):
            held_to = {} if op == "plan" else copies
            name = f"{op}, {result['count']} tokens, {result['format']}"
            yield name, "op", Measurement(Span.of_timing(result["seconds"]), held_to)


def _index_ops(file: ResultFile) -> Found:
    for result in file.results:
        case = result["case"]
        name = f"{result['op']}, {case['name']}, {case['heads']} heads, {result['format']}"
        yield name, "op", Measurement(Span.of_timing(result["seconds"]))


def _throughput(file: ResultFile) -> Found:
    in_turn = runs.interleaved(file.environment)
    yield from _runs(file, lambda result: {"all requests": Span.of_rounds(result["rounds_s"], in_turn)}, (0.5,))


def _serve(file: ResultFile) -> Found:
    def whole(result: dict[str, Any]) -> dict[str, Span]:
        """The server's own speed, where requests did not come at a rate of their own."""
        if result["case"].get("request_rate") is not None:
            return {}
        return {"an output token of all requests": Span.once(1 / result["output_tokens_per_second"])}

    yield from _runs(file, whole, (0.5, 0.99))


def _runs(file: ResultFile, whole: Callable[[dict[str, Any]], dict[str, Span]], shares: Sequence[float]) -> Found:
    """Each backend's times; of the others with the same case as yardsticks, where one of ours is there."""
    timed: dict[tuple[str, str], dict[str, tuple[str, Span]]] = {}
    version, in_turn = (file.environment.get("vllm") or {}).get("version"), runs.interleaved(file.environment)
    for result in file.succeeded:
        spans = whole(result)
        for name, title in runs.LATENCIES.items():
            rounds = _by_round(result["requests"], name)
            for share in shares if rounds else ():
                spans[f"{title}, p{share * 100:.0f}"] = _percentile(rounds, share, in_turn)
        for what, span in spans.items():
            if span.value > 0:
                timed.setdefault((runs.asked(result["case"]), what), {})[result["backend"]] = (
                    runs.name_of(result),
                    span,
                )
    any_of_ours = any(result["backend"] in runs.OUR_BACKENDS for result in file.results)
    for (_, what), backends in timed.items():
        others = {(name, version): span for name, (_, span) in backends.items() if name not in runs.OUR_BACKENDS}
        for backend, (name, span) in backends.items():
            if backend in runs.OUR_BACKENDS:
                yield name, what, Measurement(span, others)
            elif not any_of_ours:
                yield name, what, Measurement(span)


def _by_round(requests: dict[str, list[Any]], name: str) -> list[list[float]]:
    """The latencies that are known of requests, a list for each round."""
    found: dict[int, list[float]] = {}
    for number, value in zip(requests.get("round") or [0] * len(requests[name]), requests[name], strict=True):
        if value is not None:
            found.setdefault(number, []).append(value)
    return list(found.values())


def _percentile(rounds: list[list[float]], share: float, in_turn: bool) -> Span:
    if len(rounds) == 1:
        return Span.of_percentile(rounds[0], share)
    return Span.of_rounds([latency.percentile(samples, share * 100) for samples in rounds], in_turn)


def _vllm_backends(file: ResultFile) -> Found:
    """Ours, beside the others with the same workload; all, where none is ours. They took turns."""
    settings, version = file.environment.get("settings") or {}, (file.environment.get("vllm") or {}).get("version")
    timed: dict[tuple[str, str], list[tuple[Result, Span]]] = {}
    for result in file.succeeded:
        turns = {"prefill of all": result["prefills_s"]}
        turns["a decode step"] = [value / 1e3 for value in result["decode_ms_a_step_by_turn"]]
        for what, seconds in turns.items():
            if seconds:
                span = Span.of_rounds(seconds, in_turn=True)
                timed.setdefault((result["workload"], what), []).append((result, span))
    for (_, what), spans in timed.items():
        others = {
            (result["candidate"], version): span for result, span in spans if result["backend"] not in runs.OUR_BACKENDS
        }
        for result, span in spans:
            name = f"{runs.name_of(result)}, {settings.get('heads')} heads"
            if result["backend"] in runs.OUR_BACKENDS:
                yield name, what, Measurement(span, others)
            elif len(others) == len(spans):
                yield name, what, Measurement(span)


_EXTRACT = {
    "kernels": _kernels,
    "cpu_attention": _cpu_attention,
    "cache_ops": _cache_ops,
    "index_ops": _index_ops,
    "kv_blocks": _kv_blocks,
    "cpu_generate": _cpu_generate,
    "throughput": _throughput,
    "serve": _serve,
    "vllm_backends": _vllm_backends,
}


def _change(key: tuple[str, str], old: Measurement, new: Measurement) -> Change:
    common = old.yardsticks.keys() & new.yardsticks.keys()
    yardstick = min(common, key=lambda name: old.yardsticks[name].value, default=None)
    before, after, shares = old.span, new.span, None
    if yardstick is not None:
        before, after = before.over(old.yardsticks[yardstick]), after.over(new.yardsticks[yardstick])
        shares = before.value, after.value
    sure, too_few = after.low > before.high or after.high < before.low, math.inf in (before.high, after.high)
    seconds, name = (old.span.value, new.span.value), yardstick and yardstick[0]
    return Change(*key, seconds, shares, name, after.value / before.value, sure, too_few)


def _no_longer(ran: Iterable[str], new: ResultFile) -> list[tuple[str, str]]:
    """Of cases that ran, those that failed, and why. What failed before it had a case has the beginning of its name."""
    failures = [(runs.name_of(result), result["error"]) for result in new.results if result.get("error")]
    return [
        (case, why)
        for name, why in failures
        for case in ran
        if case == name or case.startswith((f"{name} ", f"{name}, "))
    ]


def compare(old: ResultFile, new: ResultFile) -> Comparison:
    """Compares two files of one kind. Raises NotUnderstood if their kinds differ, or they have nothing in common."""
    if old.kind != new.kind:
        raise NotUnderstood(
            f"{old.path} is of {old.kind}, {new.path} of {new.kind}: only files of one benchmark compare"
        )
    if old.kind not in _EXTRACT:
        raise NotUnderstood(f"{old.path}: files of {old.kind} have no times to compare")
    before, after = measurements(old), measurements(new)
    no_longer = _no_longer(dict.fromkeys(case for case, _ in before), new)
    common = [key for key in before if key in after]
    if not common and not no_longer:
        raise NotUnderstood(f"{old.path} and {new.path} have no case in common")
    changes = [_change(key, before[key], after[key]) for key in common]
    only_old = [case for case in _only(before, after) if case not in dict(no_longer)]
    return Comparison(changes, only_old, _only(after, before), no_longer, _warnings(old, new))


def _only(these: Measurements, others: Measurements) -> list[str]:
    """Cases that the others don't have, and of those that they have what else was timed here."""
    cases = {case for case, _ in others}
    missing = (key for key in these if key not in others)
    return list(dict.fromkeys(f"{case}: {what}" if case in cases else case for case, what in missing))


def _warnings(old: ResultFile, new: ResultFile) -> list[str]:
    pairs = {"machine": (old.machine, new.machine)}
    pairs |= {name: (_lookup(old.environment, name), _lookup(new.environment, name)) for name in SHOULD_BE_EQUAL}
    told: dict[tuple[str, str], str] = {}  # a CPU that is the machine is told of once
    for name, pair in pairs.items():
        if difference := _difference(*pair):
            told.setdefault(difference, name)
    return [f"different {name}: {old} and {new}" for (old, new), name in told.items()]


def _lookup(environment: dict[str, Any], name: str) -> Any:
    """The value of a dotted name; None if there is none."""
    value: Any = environment
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _difference(old: Any, new: Any) -> tuple[str, str] | None:
    """What differs, of dicts only the entries that do."""
    if old == new:
        return None
    if isinstance(old, dict) and isinstance(new, dict):
        unknown = {name for name in UNKNOWN_BEFORE if name not in old or name not in new}
        names = [name for name in {**old, **new} if name not in unknown and _said(old, name) != _said(new, name)]
        if not names:
            return None
        return tuple(", ".join(f"{name} {_said(side, name)}" for name in names) for side in (old, new))
    return str(old), str(new)


def _said(entries: dict[str, Any], name: str) -> Any:
    return entries.get(name, BEFORE.get(name))


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value * 1e6:.4g} us"


def verdict(change: Change, limit: float) -> str | None:
    """What is said of a change; None if there is nothing to say."""
    if change.sure and change.times != 1:
        if change.times < 1:
            return "faster"
        return "slower" if change.beyond(limit) else "slower, within the limit"
    if not change.beyond(limit):
        return None
    return f"not sure: beyond the limit, {'too few measured' if change.too_few else 'within the spread'}"


def show(comparison: Comparison, limit: float, console: Console) -> None:
    """Prints what changed, worst first; nothing but a line if nothing did."""
    for warning in comparison.warnings:
        console.print(f"[yellow]warning:[/yellow] {warning}", highlight=False)
    told = [(change, verdict(change, limit)) for change in comparison.changes]
    told = sorted((pair for pair in told if pair[1]), key=lambda pair: -pair[0].times)
    if told:
        table = Table("case", "what", "old", "new", box=None, padding=(0, 1))
        for heading in ("old share", "new share", "of", "change", ""):
            table.add_column(heading)
        for column in (*table.columns[2:6], table.columns[7]):
            column.justify = "right"
        for change, text in told:
            seconds = map(_seconds, change.seconds)
            shares = (f"{share:.3f}" for share in change.shares) if change.shares else ("", "")
            yardstick = change.yardstick or ""
            table.add_row(change.case, change.what, *seconds, *shares, yardstick, f"{change.times - 1:+.1%}", text)
        console.print(table)
    for case, why in comparison.no_longer:
        console.print(f"no longer runs: {case}: {why}", highlight=False, markup=False)
    for where, cases in (("old", comparison.only_old), ("new", comparison.only_new)):
        for case in cases:
            console.print(f"only in the {where} file: {case}", highlight=False, markup=False)
    counts = {text: sum(one == text for _, one in told) for text in dict.fromkeys(text for _, text in told)}
    summary = ", ".join(f"{count} {text}" for text, count in counts.items()) or "nothing changed beyond its spread"
    console.print(f"{len(comparison.changes)} times compared, limit {limit * 100:g}%: {summary}", highlight=False)


def _limit(text: str) -> float:
    """A share, from a percentage; a number without a sign from 1 up can't be meant as a share."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"must be a percentage from 0 up, such as 5%; got {text!r}")
    if not found[2] and 0 < float(found[1]) < 1:
        raise argparse.ArgumentTypeError(f"must say what it is, {float(found[1]) * 100:g}% or {text}%; got {text!r}")
    return float(found[1]) / 100


def _with_its_limit(words: Sequence[str]) -> Iterator[str]:
    """The same words, --limit and a negative percentage as one: argparse takes such a percentage for an option."""
    rest = iter(words)
    for word in rest:
        value = next(rest, None) if word == "--limit" else None
        yield from [f"--limit={value}"] if value and re.match(r"-[\d.]", value) else filter(None, (word, value))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.results.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD", help="a result file")
    parser.add_argument("new", type=Path, metavar="NEW", help="one of the same benchmark")
    parser.add_argument(
        "--limit",
        type=_limit,
        default=0.05,
        metavar="PERCENT",
        help="how much longer something may take; default: 5%%",
    )
    options = parser.parse_args(list(_with_its_limit(sys.argv[1:] if arguments is None else arguments)))
    try:
        comparison = compare(load(options.old), load(options.new))
    except NotUnderstood as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(comparison, options.limit, Console(width=180 if not sys.stdout.isatty() else None, highlight=False))
    return 1 if comparison.slower(options.limit) or comparison.no_longer else 0


if __name__ == "__main__":
    sys.exit(main())
