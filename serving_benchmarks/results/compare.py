"""Says what became faster or slower between two result files of one kind.

Where both files have the same version of a peer, ours is compared as a share of the fastest such peer's time, because
one machine is up to a tenth faster than the next one of its kind. Everything else is compared as it is. A change counts
where the spread of one file ends before that of the other begins. The spread is that of the rounds: their quartiles, or
more than these where there are few rounds. What was measured once has no known spread, and never counts.

The exit status is 0 if nothing became slower by more than the limit, 1 if something did or no longer runs, and 2 if the
files can't be compared.
"""

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from serving_benchmarks.ops.timing import Timing
from serving_benchmarks.options import Refused
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
    rounds: tuple[float, ...] = ()
    """What each round took, if it is known and peers were interleaved."""

    @classmethod
    def of(cls, seconds: Seconds, interleaved: bool = False) -> "Span":
        if isinstance(seconds, list):
            timing, rounds = Timing.of(seconds).as_dict(), tuple(seconds) if interleaved else ()
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
    seconds: tuple[float, float]
    """Old and new."""
    shares: tuple[float, float] | None
    """The same over the peer's time in the same file. None for what was compared as it is."""
    peer: str | None
    ratio: float
    """New over old, both as shares where there are shares."""
    sure: bool
    """The spreads don't overlap."""
    spread_known: bool

    def slower(self, limit: float) -> bool:
        return self.sure and self.ratio > 1 + limit

    def verdict(self, limit: float) -> str | None:
        """None if there is nothing to say."""
        if self.sure and self.ratio != 1:
            return "faster" if self.ratio < 1 else "slower" if self.slower(limit) else "slower, within the limit"
        if self.ratio <= 1 + limit:
            return None
        return "not sure: within the spread" if self.spread_known else "not sure: measured once"


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
    spans = [Span.of(one.seconds, paired) for one, paired in zip(pair, interleaved, strict=True)]
    common = sorted(pair[0].peers.keys() & pair[1].peers.keys(), key=str)
    peer = min(common, key=lambda name: Span.of(pair[0].peers[name]).value, default=None)
    old, new = spans
    if peer:
        theirs = [Span.of(one.peers[peer], paired) for one, paired in zip(pair, interleaved, strict=True)]
        old, new = old.over(theirs[0]), new.over(theirs[1])
    return Change(
        *key,
        seconds=(spans[0].value, spans[1].value),
        shares=(old.value, new.value) if peer else None,
        peer=tables.peer_title(peer[0]) if peer else None,
        ratio=new.value / old.value,
        sure=new.low > old.high or new.high < old.low,
        spread_known=math.inf not in (old.high, new.high),
    )


def _only(these: dict[tuple[str, str], Timed], others: dict[tuple[str, str], Timed]) -> list[str]:
    """Cases that the others lack, and what else was timed here of cases that they have."""
    cases = {case for case, _ in others}
    missing = (key for key in these if key not in others)
    return list(dict.fromkeys(f"{case}: {what}" if case in cases else case for case, what in missing))


def _warnings(old: ResultFile, new: ResultFile) -> list[str]:
    sides = old.environment, new.environment
    pairs = {
        "machine": tuple(map(machine, sides)),
        **{name: [of.get(name) for of in sides] for name in SHOULD_BE_EQUAL},
    }
    told = []
    for name, (before, after) in pairs.items():
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
            shares = [f"{share:.3f}" for share in change.shares] if change.shares else ["", ""]
            times = [f"{seconds * 1e6:.6g}" for seconds in change.seconds]
            row = [change.case, change.what, text, change.peer or "", *times, *shares, f"{change.ratio - 1:+.1%}"]
            rows.append(row)
        show_table(headings, rows, words=4, width=console.width)
    counts = {text: sum(one == text for _, one in told) for text in dict.fromkeys(text for _, text in told)}
    summary = ", ".join(f"{count} {text}" for text, count in counts.items()) or "nothing changed beyond its spread"
    lines.append(f"{len(comparison.changes)} times compared, limit {limit * 100:g}%: {summary}")
    console.print("\n".join(lines))


def limit_type(text: str) -> float:
    """A share, from a percentage. A number between 0 and 1 without a sign could be either."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    if not found or (not found[2] and 0 < float(found[1]) < 1):
        raise argparse.ArgumentTypeError(f"must be a percentage from 0 up, such as 5%; got {text!r}")
    return float(found[1]) / 100


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD", help="a result file")
    parser.add_argument("new", type=Path, metavar="NEW", help="one of the same kind")
    told = "how much longer something may take; default: 5%%"
    parser.add_argument("--limit", type=limit_type, default="5%", metavar="PERCENT", help=told)


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
