"""The process that runs a model for `throughput` or `checkpoint`, which start it.

    python -m serving_benchmarks.run.worker SPEC EVENTS

SPEC is a JSON file that says what to run. EVENTS gets a line of JSON for each stage, and each result as soon as it is
known, so that a crash loses none. For `throughput` the worker waits for its round before each piece of work, as
`rounds.py` describes.
"""

import json
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from serving_benchmarks.results import kernel_times, runs
from serving_benchmarks.results.runs import Round
from serving_benchmarks.run.engine import MEASURED, Ended, VllmEngine
from serving_benchmarks.run.rounds import Events
from serving_benchmarks.run.sglang_engine import SglangEngine
from serving_benchmarks.run.workloads import random_prompts

ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine}
Engine = VllmEngine | SglangEngine
PROFILED_STEPS = 8
TIMED_STEPS = 32  # decode steps that are timed without the profiler, before those with it


def run_round(engine: Engine, prompts: Sequence[list[int]], new_tokens: int, in_flight: int | None) -> Round:
    """Runs all requests to their ends, so many in flight at a time, or all of them if None."""
    count, starts, last_steps = len(prompts), [], [0] * len(prompts)
    ended: list[Ended | None] = [None] * count
    step_ends: list[float] = []
    begin = time.perf_counter()
    while None in ended:
        while len(starts) < count and len(starts) - (count - ended.count(None)) < (in_flight or count):
            starts.append(time.perf_counter() - begin)
            engine.submit(str(len(starts) - 1), prompts[len(starts) - 1], new_tokens)
        done = engine.step()
        step_ends.append(time.perf_counter() - begin)
        for request in done:
            ended[int(request.id)], last_steps[int(request.id)] = request, len(step_ends) - 1
    elapsed = time.perf_counter() - begin
    if wrong := [request for request in ended if request.output_tokens != new_tokens]:
        told = f"request {wrong[0].id} must give {new_tokens} tokens; the engine gave {wrong[0].output_tokens}"
        raise RuntimeError(told)
    e2e = [step_ends[last] - start for start, last in zip(starts, last_steps, strict=True)]
    ttfts = [request.ttft for request in ended]
    firsts = [None if ttft is None else start + ttft for start, ttft in zip(starts, ttfts, strict=True)]
    inputs, gaps = list(map(len, prompts)), gaps_between_tokens(step_ends, firsts, last_steps)
    found = Round(elapsed, inputs, [new_tokens] * count, ttfts, e2e, gaps)
    return found if engine.sees_steps else replace(found, gaps=found.tpot_s)


def gaps_between_tokens(
    step_ends: Sequence[float], firsts: Sequence[float | None], last_steps: Sequence[int]
) -> list[float]:
    """Seconds between the tokens of all requests: each step gives a token to every request that decodes. Asking vLLM
    for every token would slow it down. With drafts a step may give several tokens, and counts once.

    `firsts`: when each request had its first token, if that is known. `last_steps`: the step that gave it its last.
    """
    gaps: list[float] = []
    for first, last in zip(firsts, last_steps, strict=True):
        if first is not None:
            gaps += numpy.diff(step_ends[min(bisect_left(step_ends, first), last) : last + 1]).tolist()
    return gaps


def measure(
    engine: Engine, prompts: list[list[int]], case: dict[str, Any], spec: dict[str, Any], events: Events
) -> dict[str, Any]:
    """One entry of a result file, without the fields that are the same for the whole process."""
    load = prompts, case["output_len"], case["concurrency"]
    if spec["warmup"]:  # with all of the load's shapes, or the clock runs while kernels are compiled for them
        events.wait("warm-up")
        engine.forget_prefixes()  # of an earlier load: a cached prompt is not computed
        run_round(engine, *load)
    done: list[Round] = []
    engine.host_rows()
    for number in range(spec["rounds"]):
        events.wait(f"round {number + 1} of {spec['rounds']}", round=number)
        engine.forget_prefixes()
        done.append(run_round(engine, *load))
    return {**runs.of_rounds(done), "host_rows": engine.host_rows()}


def profile(engine: VllmEngine, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Kernel times of a few steps in which all requests decode, and how long such steps take without the profiler."""
    for i, prompt in enumerate(prompts):
        engine.submit(str(i), prompt, new_tokens, streamed=True)
    while len(engine.decoding) < len(prompts):
        if engine.step():
            raise RuntimeError("a request ended before the last prompt was computed")
    ends = [time.perf_counter()]
    for _ in range(TIMED_STEPS):
        engine.step()
        ends.append(time.perf_counter())
    engine.start_profile()
    for _ in range(PROFILED_STEPS):
        engine.step()
    found = engine.stop_profile()
    if len(engine.decoding) < len(prompts):
        raise RuntimeError("a request ended while it was profiled")
    engine.abort_all()
    about = {"wall_s": float(numpy.median(numpy.diff(ends))) * found["steps"], "batch": len(prompts)}
    return {**found, **about, "context": max(map(len, prompts)), **kernel_times.table(found["kernels"])}


def throughput(spec: dict[str, Any], events: Events) -> None:
    """All runs of one backend."""
    events.send("stage", stage="loading the model")
    begin = time.perf_counter()
    engine = ENGINES[spec["engine"]](spec["model"], spec["arguments"])
    start_seconds = time.perf_counter() - begin
    events.send("stage", stage=f"model loaded after {start_seconds:.0f} s")
    for number, asked in enumerate(spec["runs"]):
        case = asked["case"]
        prompts = random_prompts(case["num_prompts"], case["input_len"], spec["tokens"])
        found = measure(engine, prompts, case, spec, events)
        profiled = None
        if asked["profile"]:
            events.wait("profiling")
            profiled = profile(engine, prompts[: asked["profile"]["batch"]], asked["profile"]["new_tokens"])
        found |= {"cache": {"tokens": engine.cache_tokens}, "start_s": start_seconds, "profile": profiled}
        events.send("result", run=number, result=found)
    events.wait("ending")  # it takes time, and frees memory


def answers(spec: dict[str, Any], events: Events) -> None:
    """What an engine generates greedily, with logprobs, for each of the spec's batches of prompts."""
    events.send("stage", stage="answering")
    events.send("result", **(embedded_answers if spec["engine"] == "embedded" else vllm_answers)(spec))


def vllm_answers(spec: dict[str, Any]) -> dict[str, Any]:
    """The answers of each batch, and the tokens that were drafted and accepted."""
    from vllm import LLM, SamplingParams

    llm = LLM(spec["model"], **{**MEASURED, **spec["arguments"]})
    new = spec["new_tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=1, detokenize=False)
    found = []
    for prompts in spec["batches"]:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        found.append([])
        for tokens, steps in ((one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs):
            logprobs = [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
            found[-1].append({"tokens": list(tokens), "logprobs": logprobs})
    totals = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafted, accepted = (int(totals.get(f"vllm:spec_decode_num_{of}_tokens", 0)) for of in ("draft", "accepted"))
    rows = json.loads(llm.collective_rpc("measured_host_rows")[0])
    return {"answers": found, "drafted": drafted, "accepted": accepted, "host_rows": rows}


def embedded_answers(spec: dict[str, Any]) -> dict[str, Any]:
    """The same of the embedded engine, which drafts nothing."""
    import torch

    from mla_backend.engine import Engine, SamplingParams

    engine = Engine(spec["model"], **{**spec["arguments"], "dtype": getattr(torch, spec["arguments"]["dtype"])})
    params = SamplingParams(max_tokens=spec["new_tokens"], ignore_eos=True, logprobs=1)
    found = []
    for prompts in spec["batches"]:
        answered = [(one.tokens, one.completions[0].logprobs) for one in engine.generate(prompts, params)]
        found.append([{"tokens": t, "logprobs": [step.logprob for step in steps]} for t, steps in answered])
    return {"answers": found, "drafted": 0, "accepted": 0}


def main() -> None:
    spec, events = map(Path, sys.argv[1:])
    given = json.loads(spec.read_text())
    if given["arguments"].get("tensor_parallel_size", 1) > 1:  # or vLLM for CPUs wants a NUMA node for each process
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with events.open("a") as file:
        {"throughput": throughput, "answers": answers}[given["task"]](given, Events(file, sys.stdin))


if __name__ == "__main__":
    main()
