"""Says what became faster or slower between two result files of one kind.

Where both files have the same version of a peer, ours is compared as a share of the fastest such peer's time, because
machines of one kind differ by a tenth. A change counts where the spread of one file, the quartiles of its rounds or
more where they are few, ends before that of the other begins. What was measured once never counts.

The exit status is 0 if nothing became slower by more than the limit, 1 if something did or no longer runs, and 2 if the
files can't be compared.
"""

import argparse
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from serving_benchmarks.ops.timing import Timing
from serving_benchmarks.options import Refused, add, percentage
from serving_benchmarks.results import runs, tables
from serving_benchmarks.results.file import NotUnderstood, ResultFile, machine
from serving_benchmarks.results.file import console as terminal
from serving_benchmarks.results.file import show as show_table
from serving_benchmarks.results.kinds import KINDS, LACKS, Seconds, Timed, load

SHOULD_BE_EQUAL = ("cpu", "driver", "torch", "vllm", "sglang", "peers", "model", "settings")
"""Of the environments, next to the machine. Where these differ, the cause of a change may not be ours."""


@dataclass(frozen=True)
class Span:
    """Seconds, or a share of a peer's, and its spread."""

    value: float
    low: float = 0.0
    high: float = math.inf
    rounds: tuple[float, ...] = ()  # what each round took, if it is known and peers were interleaved

    @classmethod
    def of(cls, seconds: Seconds, interleaved: bool = False) -> "Span":
        if isinstance(seconds, list):
            timing, rounds = asdict(Timing.of(seconds)), tuple(seconds) if interleaved else ()
        else:
            timing, rounds = seconds if isinstance(seconds, dict) else {"median": seconds, "rounds": 1}, ()
        median = timing["median"]
        if timing["rounds"] < 2:
            return cls(median)
        # so far, two spreads of rounds of one normal distribution lie apart in less than 3 % of cases, from two rounds
        far = max(1.0, 36 / timing["rounds"] ** 1.5)
        low, high = (far * math.log(timing[name] / median) for name in ("lower_quartile", "upper_quartile"))
        return cls(median, median * math.exp(low), median * math.exp(min(high, 700)), rounds)  # no time is below 0

    def over(self, other: "Span") -> "Span":
        """The share of another span: of paired rounds, or with the widest spread that both allow."""
        if self.rounds and len(self.rounds) == len(other.rounds):
            return Span.of([its / others for its, others in zip(self.rounds, other.rounds, strict=True)])
        high = self.high / other.low if other.low > 0 else math.inf
        return Span(self.value / other.value, self.low / other.high, high)


@dataclass(frozen=True)
class Change:
    case: str
    what: str
    peer: str | None
    seconds: list[Span]  # old and new
    compared: list[Span]  # the same, as shares of the peer's time in the same file if there is a peer

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.compared[1].value / self.compared[0].value

    @property
    def sure(self) -> bool:
        """The spreads don't overlap."""
        old, new = self.compared
        return new.low > old.high or new.high < old.low

    def slower(self, limit: float) -> bool:
        return self.sure and self.ratio > 1 + limit

    def verdict(self, limit: float) -> str | None:
        """None if there is nothing to say."""
        if self.sure and self.ratio != 1:
            return "faster" if self.ratio < 1 else "slower" if self.slower(limit) else "slower, within the limit"
        if self.ratio <= 1 + limit:
            return None
        return f"not sure: {'measured once' if math.inf in (s.high for s in self.compared) else 'within the spread'}"


class Comparison(NamedTuple):
    changes: list[Change]
    no_longer: dict[str, str]  # cases that ran in the old file and failed in the new one, with their errors
    only_old: list[str]
    only_new: list[str]
    warnings: list[str]


def compare(old: ResultFile, new: ResultFile) -> Comparison:
    """Compares two files of one kind. Raises NotUnderstood if their kinds differ or they have nothing in common."""
    if old.kind != new.kind:
        raise NotUnderstood(f"{old.path} is of {old.kind}, {new.path} of {new.kind}: only files of one kind compare")
    if KINDS[old.kind].timed is None:
        raise NotUnderstood(f"{old.path}: files of {old.kind} have no times to compare")
    # all of ours that was timed, by case and what of it; of what was measured twice the last counts
    before, after = ({(one.case, one.what): one for one in KINDS[old.kind].timed(file)} for file in (old, new))
    name_of = KINDS[old.kind].name_of
    failed = {name_of(result): str(result["error"]) for result in new.results if result.get("error")}
    no_longer = {case: failed[case] for case, _ in before if case in failed}
    common = [key for key in before if key in after]
    if not common and not no_longer:
        raise NotUnderstood(f"{old.path} and {new.path} have no case in common")
    interleaved = runs.interleaved(old.environment), runs.interleaved(new.environment)
    changes = [_change(key, (before[key], after[key]), interleaved) for key in common]
    only_old = [case for case in _only(before, after) if case not in failed]
    return Comparison(changes, no_longer, only_old, _only(after, before), _warnings(old, new))


def _change(key: tuple[str, str], pair: tuple[Timed, Timed], interleaved: tuple[bool, bool]) -> Change:
    spans = [*map(Span.of, (one.seconds for one in pair), interleaved)]
    common = sorted(pair[0].peers.keys() & pair[1].peers.keys(), key=str)
    if not common:
        return Change(*key, None, spans, spans)
    peer = min(common, key=lambda name: Span.of(pair[0].peers[name]).value)
    theirs = map(Span.of, (one.peers[peer] for one in pair), interleaved)
    return Change(*key, tables.peer_title(peer[0]), spans, [*map(Span.over, spans, theirs)])


def _only(these: dict[tuple[str, str], Timed], others: dict[tuple[str, str], Timed]) -> list[str]:
    """Cases that the others lack, and what else was timed here of cases that they have."""
    cases = {case for case, _ in others}
    missing = (key for key in these if key not in others)
    return list(dict.fromkeys(f"{case}: {what}" if case in cases else case for case, what in missing))


def _warnings(old: ResultFile, new: ResultFile) -> list[str]:
    told, sides = [], [{**of.environment, "machine": machine(of.environment)} for of in (old, new)]
    for name in ("machine", *SHOULD_BE_EQUAL):
        before, after = (side.get(name) for side in sides)
        if isinstance(before, dict) and isinstance(after, dict):
            names = [key for key in {**before, **after} if before.get(key) != after.get(key)]
            before, after = (", ".join(f"{key} {side.get(key)}" for key in names) for side in (before, after))
        told += [f"different {name}: {before} and {after}"] if before != after else []
    return told


def show(comparison: Comparison, limit: float, console: Console) -> None:
    """Prints what changed, worst first. Prints one line if nothing did."""
    told = [(change, change.verdict(limit)) for change in comparison.changes]
    told = sorted((pair for pair in told if pair[1]), key=lambda pair: -pair[0].ratio)
    lines = [f"no longer runs: {case}: {why}" for case, why in comparison.no_longer.items()]
    lines += [f"only in the old file: {case}" for case in comparison.only_old]
    lines += [f"only in the new file: {case}" for case in comparison.only_new]
    console.print(*(f"warning: {warning}\n" for warning in comparison.warnings), sep="", end="")
    if told:
        headings, rows = ("case", "what", "", "of", "old, us", "new, us", "old share", "new share", "change"), []
        for change, text in told:
            shares = [f"{span.value:.3f}" if change.peer else "" for span in change.compared]
            times = [f"{span.value * 1e6:.6g}" for span in change.seconds]
            what = change.case, change.what, text, change.peer or ""
            rows.append([*what, *times, *shares, f"{change.ratio - 1:+.1%}"])
        show_table(headings, rows, words=4, width=console.width)
    counts = {text: sum(one == text for _, one in told) for text in dict.fromkeys(text for _, text in told)}
    summary = ", ".join(f"{count} {text}" for text, count in counts.items()) or "nothing changed beyond its spread"
    lines.append(f"{len(comparison.changes)} times compared, limit {limit * 100:g}%: {summary}")
    console.print("\n".join(lines))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD", help="a result file")
    parser.add_argument("new", type=Path, metavar="NEW", help="one of the same kind")
    add(parser, "--limit", percentage, "how much longer something may take", "5%", "PERCENT")


def run(options: argparse.Namespace) -> int:
    try:
        comparison = compare(load(options.old), load(options.new))
    except NotUnderstood as error:
        raise Refused(str(error)) from None
    except LACKS as error:
        raise Refused(f"{options.old} and {options.new} can't be compared: {error!r}") from error
    console = terminal()
    show(comparison, options.limit, console if console.is_terminal else terminal(180))
    return 1 if comparison.no_longer or any(change.slower(options.limit) for change in comparison.changes) else 0
