"""The one timer: candidates are timed in rounds, interleaved, so that a machine that slows down slows all of them.

A candidate is a clock: a function that takes the number of the round and returns the seconds that one call took.
`cpu_clock` calls a function for a while; `Graph.clock` replays a CUDA graph.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

GRAPH_SECONDS = 4e-4
"""How long a graph should take at least, so that the few microseconds of its launch don't count."""
MOST_PASSES = 64

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
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(min(samples), median, lower, upper, len(samples))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def interleaved(
    candidates: Mapping[str, Clock], *, rounds: int, on_round: Callable[[], None] = lambda: None
) -> dict[str, Timing]:
    """Times every candidate once a round."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name, seconds in candidates.items():
            samples[name].append(seconds(number))
        on_round()
    return {name: Timing.of(taken) for name, taken in samples.items()}


def cpu_clock(call: Callable[[int], object], burst_seconds: float) -> Clock:
    """One call that is not counted, then calls for `burst_seconds`, two at least; their median.

    `call` gets the number of the round, so that it can rotate its inputs.
    """

    def seconds(number: int) -> float:
        call(number)
        burst_ends = time.perf_counter() + burst_seconds
        burst: list[float] = []
        while len(burst) < 2 or time.perf_counter() < burst_ends:
            begin = time.perf_counter()
            call(number)
            burst.append(time.perf_counter() - begin)
        # one number a round, lest a fast moment with its many calls outvote the slow ones
        return statistics.median(burst)

    return seconds


@dataclass
class Graph:
    """Calls captured together. It keeps them, and with them the memory that a replay reads and writes."""

    graph: torch.cuda.CUDAGraph
    calls: list[Call]

    def seconds(self) -> float:
        """Seconds of one call, in one replay."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / len(self.calls)

    def clock(self, _: int) -> float:
        """A replay that is not counted, then one that is."""
        self.graph.replay()
        return self.seconds()


def capture(calls: Sequence[Call]) -> Graph:
    """A graph of all calls in their order, repeated until it lasts GRAPH_SECONDS.

    The calls should differ in their inputs, so that none finds its own in the cache.
    """
    for call in calls:  # loads kernels, so that capturing does not have to
        call()
    once = _captured(calls, passes=1)
    once.seconds()
    passes = min(MOST_PASSES, math.ceil(GRAPH_SECONDS / (once.seconds() * len(calls))))
    return once if passes == 1 else _captured(calls, passes)


def _captured(calls: Sequence[Call], passes: int) -> Graph:
    torch.cuda.synchronize()
    graph = Graph(torch.cuda.CUDAGraph(), [*calls] * passes)
    with torch.cuda.graph(graph.graph):
        for call in graph.calls:
            call()
    return graph
