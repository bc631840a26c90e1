"""The one timer for work on the CPU: candidates take turns, so that a machine that slows down slows all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the fastest turn, the median of the turns, their quartiles, and how many turns there were."""

    fastest: float
    median: float
    lower_quartile: float
    upper_quartile: float
    turns: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        # of few turns, other quartiles lie outside of what was measured
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(min(samples), median, lower, upper, len(samples))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def interleaved(
    candidates: Mapping[str, Callable[[int], object]],
    *,
    rounds: int,
    burst_seconds: float,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Times every candidate in turn, `rounds` times over.

    A candidate is called with the number of the round, so that it can rotate its inputs. Its turn is one call that
    isn't counted, then calls for `burst_seconds`, two at least.
    """
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name, call in candidates.items():
            call(number)
            turn_ends = time.perf_counter() + burst_seconds
            turn: list[float] = []
            while len(turn) < 2 or time.perf_counter() < turn_ends:
                begin = time.perf_counter()
                call(number)
                turn.append(time.perf_counter() - begin)
            # one number a turn, lest a fast moment with its many calls outvote the slow ones
            samples[name].append(statistics.median(turn))
        on_round()
    return {name: Timing.of(s) for name, s in samples.items()}
