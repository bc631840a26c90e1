"""Latencies of requests: what is derived from their times, and how many of them are summed up."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

PERCENTILES = (50, 90, 99)
CONFIDENCE = 0.95
"""That a percentile lies within its bounds."""


def per_token(ttft: float | None, e2e: float, tokens: int) -> float | None:
    """Seconds from one token to the next, on average; None for a single token, or where the first one's time is
    unknown."""
    return None if ttft is None or tokens < 2 else (e2e - ttft) / (tokens - 1)


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between the two values next to it."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def percentile_bounds(values: Sequence[float], percent: float) -> tuple[float | None, float | None]:
    """Which of these independent samples a percentile of what they are drawn from lies between with CONFIDENCE, of
    whatever distribution they are. None where there are too few for a bound."""
    ordered, count = sorted(values), len(values)
    logs = math.log(percent / 100), math.log(1 - percent / 100)
    below = list(  # how likely so many samples or fewer are at or below the percentile
        itertools.accumulate(math.exp(_log_ways(count, k) + k * logs[0] + (count - k) * logs[1]) for k in range(count))
    )
    low = bisect_right(below, (1 - CONFIDENCE) / 2)
    high = bisect_left(below, (1 + CONFIDENCE) / 2)
    return ordered[low - 1] if low else None, ordered[high] if high < count else None


def _log_ways(count: int, chosen: int) -> float:
    """The logarithm of the ways to choose so many of a count; their number itself may be more than a float holds."""
    return math.lgamma(count + 1) - math.lgamma(chosen + 1) - math.lgamma(count - chosen + 1)


def summary(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and percentiles of those that are known."""
    known = [value for value in values if value is not None]
    names = [f"p{percent}" for percent in PERCENTILES]
    if not known:
        return dict.fromkeys(["mean", *names])
    found = {name: percentile(known, percent) for name, percent in zip(names, PERCENTILES, strict=True)}
    return {"mean": math.fsum(known) / len(known), **found}


def summaries(requests: dict[str, Sequence[float | None]]) -> dict[str, dict[str, float | None]]:
    """Of the lists of a result file."""
    return {name: summary(requests[name]) for name in ("ttft_s", "tpot_s", "e2e_s")}


def is_good(ttft: float | None, tpot: float | None, ttft_limit: float | None, tpot_limit: float | None) -> bool:
    """Whether a request kept to the limits that there are. One of a single token has no time between tokens to keep."""
    if ttft_limit is not None and (ttft is None or ttft > ttft_limit):
        return False
    return tpot_limit is None or tpot is None or tpot <= tpot_limit
