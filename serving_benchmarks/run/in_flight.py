"""Runs a workload through an engine with no more than so many requests in flight, and notes when each of them ended."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serving_benchmarks.results import latency
from serving_benchmarks.run.engines import MeasuredEngine
from serving_benchmarks.run.workloads import Workload

USAGE_SECONDS = 0.5
"""How often the cache is looked at while the clock runs, as asking vLLM takes a millisecond."""
DIGITS = 9
"""Of requests' seconds after the point: clocks know no more, and result files have thousands of them."""


@dataclass
class Round:
    """One pass through a workload. Lists are in the order of its requests."""

    elapsed: float
    peak_usage: float | None
    requests: dict[str, list[float | int | None]] = field(default_factory=dict)
    """As result files have them: input_tokens, output_tokens, cached_tokens, ttft_s, tpot_s, e2e_s, start_s."""


def run(
    engine: MeasuredEngine,
    workload: Workload,
    concurrency: int | None,
    on_end: Callable[[int], None] = lambda ended: None,
) -> Round:
    """All requests to their ends.

    Args:
        engine: that has nothing else to do.
        workload: the requests.
        concurrency: how many are in flight at most; all of them if None. Each that ends makes room for the next.
        on_end: called with the number of requests that have ended, when there are more.
    """
    count = len(workload)
    limit = count if concurrency is None else min(concurrency, count)
    starts, ends = [0.0] * count, [0.0] * count
    ended = [None] * count
    submitted = finished = 0
    peak_usage, look_at = None, 0.0
    begin = time.perf_counter()
    while finished < count:
        while submitted < count and submitted - finished < limit:
            starts[submitted] = time.perf_counter() - begin
            engine.submit(str(submitted), workload.prompts[submitted], workload.output_lens[submitted])
            submitted += 1
        done = engine.step()
        now = time.perf_counter() - begin
        for request in done:
            ended[int(request.id)], ends[int(request.id)] = request, now
        if done:
            finished += len(done)
            on_end(finished)
        if now >= look_at:
            usage = engine.usage()
            if usage is not None:
                peak_usage = max(usage, peak_usage or 0.0)
            look_at = now + min(USAGE_SECONDS, now / 10)  # more often at first: a run may be short
    elapsed = time.perf_counter() - begin
    wrong = [i for i, request in enumerate(ended) if request.output_tokens != workload.output_lens[i]]
    if wrong:
        raise RuntimeError(
            f"request {wrong[0]} must give {workload.output_lens[wrong[0]]} tokens; "
            f"the engine gave {ended[wrong[0]].output_tokens}"
        )
    e2e = [end - start for start, end in zip(starts, ends, strict=True)]
    per_token = [latency.per_token(r.ttft, s, r.output_tokens) for r, s in zip(ended, e2e, strict=True)]
    return Round(
        elapsed,
        peak_usage,
        {
            "input_tokens": [len(prompt) for prompt in workload.prompts],
            "output_tokens": [request.output_tokens for request in ended],
            "cached_tokens": [request.cached_tokens for request in ended],
            "ttft_s": _rounded([request.ttft for request in ended]),
            "tpot_s": _rounded(per_token),
            "e2e_s": _rounded(e2e),
            "start_s": _rounded(starts),
        },
    )


def _rounded(seconds: list[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in seconds]
