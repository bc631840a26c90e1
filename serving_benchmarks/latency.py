"""Latencies of requests: what is derived from their times, and how many of them are summed up."""

import math
from collections.abc import Sequence

PERCENTILES = (50, 90, 99)


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
