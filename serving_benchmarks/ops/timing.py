"""The one timer: candidates are timed in rounds, interleaved, so that a machine that slows down slows all of them.

A candidate is a clock: a function that takes the number of the round and returns the seconds that one call took.
"""

import importlib.metadata
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

GRAPH_SECONDS = 4e-4  # how long a graph should take at least, so that the few microseconds of its launch don't count
MOST_PASSES = 64
SITU_SECONDS = 2e-3  # the same with other work before each call: what a call takes is the difference of two graphs
OPT_IN = ("q8kv8",)  # less exact than ours, and off unless asked for: it is timed, but never the best peer
REST_SECONDS = 0.3  # before candidates are timed: checks in float64 may have throttled the clock

Call = Callable[[], object]
Clock = Callable[[int], float]


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, over all rounds."""

    fastest: float
    median: float
    lower_quartile: float
    upper_quartile: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        # of few rounds, exclusive quartiles lie outside of what was measured
        several = samples if len(samples) > 1 else [*samples] * 2
        lower, median, upper = statistics.quantiles(several, n=4, method="inclusive")
        return cls(min(samples), median, lower, upper, len(samples))


def interleaved(candidates: Mapping[str, Clock], *, rounds: int) -> dict[str, Timing]:
    """Times every candidate once a round."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name, seconds in candidates.items():
            samples[name].append(seconds(number))
    return {name: Timing.of(taken) for name, taken in samples.items()}


@dataclass
class Burst:
    """Calls on a GPU that are timed together. It keeps them, and with them the memory that a graph reads and writes."""

    calls: Sequence[Call]
    graph: torch.cuda.CUDAGraph | None = None  # what they were captured in. Without one they are called.

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            for call in self.calls:
                call()

    def seconds(self) -> float:
        """Seconds of one call, in one run."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / len(self.calls)

    def clock(self, _: int) -> float:
        """A run that is not counted, then one that is."""
        self.run()
        return self.seconds()


def capture(calls: Sequence[Call], seconds: float = GRAPH_SECONDS) -> Burst:
    """A graph of all calls, repeated until it lasts so long. Their inputs differ, or they would be in the cache."""
    for call in calls:  # loads kernels, so that capturing does not have to
        call()
    once = captured(calls, passes=1)
    once.seconds()
    passes = min(MOST_PASSES, math.ceil(seconds / (once.seconds() * len(calls))))
    return once if passes == 1 else captured(calls, passes)


def captured(calls: Sequence[Call], passes: int) -> Burst:
    """A graph of all calls in their order, so many times. They have been called before."""
    torch.cuda.synchronize()
    burst = Burst([*calls] * passes, torch.cuda.CUDAGraph())
    with torch.cuda.graph(burst.graph):
        for call in burst.calls:
            call()
    return burst


@dataclass
class Candidate:
    """What is checked and timed on a GPU: calls that differ in their inputs, and what the last one leaves."""

    calls: Sequence[Call]
    results: Sequence[Tensor] = ()  # NaN or -1 before the run that is checked, so that what is checked is what is timed
    check: Callable[[], object] = lambda: None  # what is said of its accuracy. Raises an error if it is wrong.
    layer: Sequence[Call] = ()  # the calls as a layer of a model makes them; none for what layers do not call


def measure(
    ours: Mapping[str, Candidate],
    peers: Mapping[str, Callable[[], Candidate]],
    rounds: int,
    burst: Callable[[Sequence[Call]], Burst] = capture,
    before: Sequence[Call] = (),
) -> dict[str, Any]:
    """Checks all candidates, then times them interleaved. "ours" is one of ours, which peers are compared with.

    With other work to be done `before` each call of a layer, what layers call is also timed in situ: what it adds to
    that work. A peer that can't be made, called or is wrong is left out, with the reason. An error of ours is raised.
    """
    clocks, in_situ, accuracy, failed = {}, {}, {}, {}

    def check_run(name: str, candidate: Candidate, made: Burst) -> None:
        for result in candidate.results:
            result.fill_(torch.nan if result.is_floating_point() else -1)
        made.run()
        torch.cuda.synchronize()
        if (found := candidate.check()) is not None:
            accuracy[name] = found

    def check(name: str, candidate: Candidate) -> None:
        made = burst(candidate.calls)
        check_run(name, candidate, made)
        if before and candidate.layer:
            both = capture([call for pair in zip(before, candidate.layer, strict=True) for call in pair], SITU_SECONDS)
            alone = captured(before, passes=len(both.calls) // (2 * len(before)))
            check_run(name, candidate, both)
            in_situ[name] = lambda number: 2 * both.clock(number) - alone.clock(number)
        clocks[name] = made.clock

    for name, candidate in ours.items():
        check(name, candidate)
    for name, make in peers.items():
        try:
            check(name, make())
        except Exception as error:  # of any kind: a peer must not end a measurement
            failed[name] = first_line(error)
    time.sleep(REST_SECONDS)
    situated = {"in_situ": _versus(in_situ, peers, rounds)} if in_situ else {}
    return {**_versus(clocks, peers, rounds), "accuracy": accuracy, "failed": failed, **situated}


def _versus(clocks: Mapping[str, Clock], peers: Collection[str], rounds: int) -> dict[str, Any]:
    timings = interleaved(clocks, rounds=rounds)
    medians = {name: timing.median for name, timing in timings.items()}
    best = min((name for name in medians if name in peers and name not in OPT_IN), key=medians.get, default=None)
    speed_up = medians[best] / medians["ours"] if best else None
    seconds = {name: asdict(timing) for name, timing in timings.items()}
    return {"seconds": seconds, "best_peer": best, "speed_up": speed_up}


def version_of(module: str, package: str) -> str:
    """A package that is here and its version, or why it is missing, as "missing: ..."."""
    try:
        importlib.import_module(module)
        return f"{package} {importlib.metadata.version(package)}"
    except Exception as error:  # of any kind: it is optional, whatever is wrong with it
        return f"missing: {first_line(error)}"


def first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]
