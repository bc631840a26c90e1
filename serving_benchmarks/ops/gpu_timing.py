"""The one timer for work on a GPU: replays of CUDA graphs, candidates in turn, so that a clock that throttles slows
all of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from serving_benchmarks.ops.timing import Timing

GRAPH_SECONDS = 4e-4
"""How long a graph should take at least, so that the few microseconds of its launch don't count."""
MOST_PASSES = 64
FLUSH_BYTES = 256 * 2**20
"""More than any L2 holds: writing so much leaves nothing of the inputs in it."""


@dataclass
class Graph:
    """Calls captured together. It keeps them, and with them the memory that a replay reads and writes."""

    graph: torch.cuda.CUDAGraph
    calls: list[Callable[[], object]]

    def seconds(self) -> float:
        """Seconds a call, in one replay."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3 / len(self.calls)


def capture(calls: Sequence[Callable[[], object]], between: Callable[[], object] | None = None) -> Graph:
    """A graph of all calls in their order, gone through as often as it takes to last GRAPH_SECONDS.

    The calls should differ in their inputs, so that none finds its own in the cache. `between` runs before each.
    """
    for call in calls:  # loads kernels, so that capturing does not have to
        call()
    once = _captured(calls, between, passes=1)
    once.seconds()
    passes = min(MOST_PASSES, math.ceil(GRAPH_SECONDS / (once.seconds() * len(calls))))
    return once if passes == 1 else _captured(calls, between, passes)


def _captured(calls: Sequence[Callable[[], object]], between: Callable[[], object] | None, passes: int) -> Graph:
    torch.cuda.synchronize()
    graph = Graph(torch.cuda.CUDAGraph(), [*calls] * passes)
    with torch.cuda.graph(graph.graph):
        for call in graph.calls:
            if between:
                between()
            call()
    return graph


def interleaved(candidates: Mapping[str, Graph], *, rounds: int, baseline: Graph | None = None) -> dict[str, Timing]:
    """Times every candidate in turn, `rounds` times over: a replay that isn't counted, then one that is.

    The time of a call of `baseline`, measured right after, is taken off.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, graph in candidates.items():
            graph.graph.replay()
            samples[name].append(graph.seconds() - (baseline.seconds() if baseline else 0))
    return {name: Timing.of(s) for name, s in samples.items()}


def new_flush() -> Callable[[], None]:
    """What empties the L2 cache when it runs before a call; its own time is the baseline then."""
    room = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    return lambda: room.zero_()
