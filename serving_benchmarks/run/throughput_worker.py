"""The process that measures one backend for `serving_benchmarks.run.throughput`, which starts it.

    python -m serving_benchmarks.run.throughput_worker SPEC EVENTS

SPEC is a JSON file that says what to run. EVENTS gets a line of JSON for each thing that happens: where the work is,
and each result as soon as it is there, so that what came before a crash is not lost. Once the model is loaded, each
piece of work waits for its turn, a line on standard input, as `turns.py` gives them.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from serving_benchmarks.ops.timing import Timing
from serving_benchmarks.results import kernel_times, latency
from serving_benchmarks.run import compilations, engines, memory
from serving_benchmarks.run.counters import since
from serving_benchmarks.run.engines import MeasuredEngine
from serving_benchmarks.run.in_flight import Round, run
from serving_benchmarks.run.turns import GO
from serving_benchmarks.run.workloads import Workload

WARMUP_OUTPUT = 32
"""Tokens of a request of the warm-up, at most, where only so many requests are asked for."""
PROFILED_STEPS = 8
TIMED_STEPS = 32
"""Before those, without the profiler."""
PROFILE_ROOM = 96
"""Tokens of a request for both, and for what an engine does between being asked and answering."""
MOST_PROFILED = 128
"""Requests that decode at a time then."""
LEAST_TOKENS_A_STEP = 2048
"""That engines take of prompts, unless they are told to take fewer."""
PROGRESS_SECONDS = 0.2


class Events:
    """Lines of JSON, each written whole.

    Args:
        file: that they are written to.
        turns: has a line for each turn.
    """

    def __init__(self, file: TextIO, turns: TextIO):
        self._file, self._turns, self._next = file, turns, 0.0

    def send(self, event: str, **more: Any) -> None:
        self._file.write(json.dumps({"event": event, **more}) + "\n")
        self._file.flush()

    def turn(self, stage: str, **more: Any) -> bool:
        """Asks to work, and waits for an answer: whether it may, or is to leave this out, if it is optional. All that
        is done until the next call belongs to this turn."""
        self.send("ready", stage=stage, **more)
        answer = self._turns.readline().strip()
        if not answer:
            raise RuntimeError("nobody gives turns any more")
        return answer == GO

    def progress(self, stage: str, of: int) -> Callable[[int], None]:
        """What to call with the number of requests that have ended."""
        self.send("progress", stage=stage, done=0, of=of)

        def on_end(done: int) -> None:
            if time.monotonic() >= self._next or done == of:
                self.send("progress", stage=stage, done=done, of=of)
                self._next = time.monotonic() + PROGRESS_SECONDS

        return on_end


def measure(
    engine: MeasuredEngine,
    workload: Workload,
    concurrency: int | None,
    rounds: int,
    warmup: int | None,
    events: Events,
    more_rounds: bool = False,
) -> dict[str, Any]:
    """One entry of a result file, but for what is the same for all of a process.

    Args:
        engine, workload, concurrency: as for `in_flight.run`.
        rounds: passes that are timed.
        warmup: requests that are run before, with short outputs; all of the workload as it is if None. Engines compile
            kernels when a shape comes for the first time, and keep them on disk: without a warm-up of the same shapes
            the engine that is measured first compiles for those after it, while the clock runs.
        events: who is told, and asked for a turn before each pass.
        more_rounds: whether more passes follow until whoever gives turns has enough of them.
    """
    before = workload if warmup is None else workload.first(warmup, WARMUP_OUTPUT)
    if len(before):
        events.turn("warm-up")
        engine.forget_prefixes()  # an earlier workload's: what is cached is not computed
        run(engine, before, concurrency, events.progress("warm-up", len(before)))
    done: list[Round] = []
    compiled: list[compilations.Compiled | None] = []
    counted = engine.counters()
    while len(done) < rounds or more_rounds:
        number, timed = len(done), sum(one.elapsed for one in done)
        stage = f"round {number + 1}" if more_rounds else f"round {number + 1} of {rounds}"
        if not events.turn(stage, round=number, optional=number >= rounds, timed_s=timed):
            break
        engine.forget_prefixes()
        engine.compiled()  # what came before is not of this round
        done.append(run(engine, workload, concurrency, events.progress(stage, len(workload))))
        compiled.append(engine.compiled())
    return {**entry(done), **since(counted, engine.counters()), "compiled": compilations.of_rounds(compiled)}


def warm_sizes(engine: MeasuredEngine, sizes: list[Workload], events: Events) -> None:
    """Runs what `workloads.of_step_sizes` gives, each element's requests at once, before anything is measured. Which
    requests are in a step of a round depends on the moment, so a whole round as a warm-up doesn't show an engine all
    sizes of steps, and one that is new to it has kernels compiled while the clock runs."""
    stage, of, before = "warm-up of step sizes", sum(map(len, sizes)), 0
    events.turn(stage)
    ended = events.progress(stage, of)
    for requests in sizes:
        run(engine, requests, None, lambda done, before=before: ended(before + done))
        before += len(requests)


def entry(rounds: list[Round]) -> dict[str, Any]:
    """What a result file says of rounds of the same workload."""
    elapsed = [one.elapsed for one in rounds]
    seconds = Timing.of(elapsed)
    first = rounds[0].requests
    inputs, outputs = sum(first["input_tokens"]), sum(first["output_tokens"])
    count = len(first["e2e_s"])
    requests = {name: [value for one in rounds for value in one.requests[name]] for name in first}
    usages = [one.peak_usage for one in rounds if one.peak_usage is not None]
    return {
        "elapsed_time": seconds.median,
        "num_requests": count,
        "total_num_tokens": inputs + outputs,
        "requests_per_second": count / seconds.median,
        "tokens_per_second": (inputs + outputs) / seconds.median,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "output_tokens_per_second": outputs / seconds.median,
        "seconds": seconds.as_dict(),
        "rounds_s": elapsed,
        "requests": {"round": [i for i in range(len(rounds)) for _ in range(count)], **requests},
        "latency": latency.summaries(requests),
        "peak_usage": max(usages, default=None),
    }


def profiled_requests(
    prompts: list[list[int]], concurrency: int | None, max_num_seqs: int | None
) -> tuple[list[list[int]], int]:
    """The prompts whose decode steps are profiled, and how many tokens each of them may get: so many that the first one
    still decodes when the last one's prompt is done and all steps have been seen."""
    batch = prompts[: min(concurrency or MOST_PROFILED, max_num_seqs or MOST_PROFILED, MOST_PROFILED)]
    return batch, PROFILE_ROOM + sum(-(-len(prompt) // LEAST_TOKENS_A_STEP) for prompt in batch)


def profile(engine: MeasuredEngine, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Kernel times of a few steps in which all requests decode, and how long such steps take unobserved."""
    for i, prompt in enumerate(prompts):
        engine.submit(str(i), prompt, new_tokens, streamed=True)
    while engine.decoding() < len(prompts):
        if engine.step():
            raise RuntimeError("a request ended before the last one's prompt was done; --max-model-len must be more")
    ends = [time.perf_counter()]
    for _ in range(TIMED_STEPS):
        engine.step()
        ends.append(time.perf_counter())
    # the median, lest one slow moment of the host be taken for what steps take
    seconds = statistics.median(end - begin for begin, end in itertools.pairwise(ends))
    engine.start_profile()
    for _ in range(PROFILED_STEPS):
        engine.step()
    device, steps, kernels = engine.stop_profile()
    if engine.decoding() < len(prompts):
        raise RuntimeError("a request ended while it was profiled; --max-model-len must be more")
    engine.abort_all()
    return {
        "steps": steps,
        "wall_s": seconds * steps,
        "batch": len(prompts),
        "context": max(map(len, prompts)),
        "device": device,
        **kernel_times.table(kernels),
    }


def work(spec: dict[str, Any], events: Events) -> None:
    """Everything that a spec asks for."""
    events.send("stage", stage="loading the model")
    begin = time.perf_counter()
    engine = engines.start(spec["engine"], spec["backend"], spec["model"], spec["settings"])
    start_seconds = time.perf_counter() - begin
    events.send("stage", stage=f"model loaded after {start_seconds:.0f} s")
    workloads = [Workload(**workload) for workload in spec["workloads"]]
    if spec["sizes"]:
        warm_sizes(engine, [Workload(**requests) for requests in spec["sizes"]], events)
    for number, asked in enumerate(spec["runs"]):
        workload, concurrency = workloads[asked["workload"]].first(asked["prompts"]), asked["concurrency"]
        found = measure(engine, workload, concurrency, spec["rounds"], spec["warmup"], events, spec["more_rounds"])
        profiled = None
        if asked["profile"]:
            events.turn("profiling")
            most = spec["settings"]["max_num_seqs"]
            prompts, new_tokens = profiled_requests(workload.prompts, concurrency, most)
            room = spec["settings"]["max_model_len"] - max(map(len, prompts))
            profiled = profile(engine, prompts, min(new_tokens, room))
        usage, hits = found.pop("peak_usage"), found.pop("prefix_hit_share")
        found |= {
            "memory": {
                "host_peak_bytes": memory.host_peak_bytes(),
                "device_used_bytes": memory.device_used_bytes(),
                "torch_peak_bytes": engine.torch_peak_bytes(),
            },
            "cache": {"tokens": engine.cache_tokens, "peak_usage": usage, "prefix_hit_share": hits},
            "start_s": start_seconds,
            "profile": profiled,
        }
        events.send("result", run=number, result=found)
    events.turn("ending")  # it takes its time, and gives back memory


def main() -> None:
    spec, events = sys.argv[1:]
    with Path(events).open("a") as file:
        work(json.loads(Path(spec).read_text()), Events(file, sys.stdin))


if __name__ == "__main__":
    main()
