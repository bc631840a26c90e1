"""The process that runs a model for `throughput` or `checkpoint`, which start it.

    python -m serving_benchmarks.run.worker SPEC EVENTS

SPEC is a JSON file that says what to run. EVENTS gets a line of JSON for each stage, and each result as soon as it is
known, so that a crash loses none. For `throughput` the worker waits for its round before each piece of work, as
`rounds.py` describes.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_benchmarks.results import kernel_times, runs
from serving_benchmarks.results.runs import Round
from serving_benchmarks.run.engine import VllmEngine, counted_between
from serving_benchmarks.run.rounds import Events
from serving_benchmarks.run.sglang_engine import SglangEngine
from serving_benchmarks.run.workloads import Workload, fixed

ENGINES = {"vllm": VllmEngine, "sglang": SglangEngine}
Engine = VllmEngine | SglangEngine
PROFILED_STEPS = 8
TIMED_STEPS = 32
"""Decode steps that are timed without the profiler, before those with it."""
DIGITS = 9
"""Decimals of a request's seconds: a clock knows no more, and files with --requests have thousands of them."""


def run_round(engine: Engine, workload: Workload, concurrency: int | None) -> Round:
    """Runs all requests to their ends.

    Args:
        engine: that has nothing else to do.
        workload: the requests.
        concurrency: requests in flight; all of them if None. Each that ends makes room for the next.
    """
    count = len(workload)
    limit = count if concurrency is None else min(concurrency, count)
    starts, ended, last_steps = [0.0] * count, [None] * count, [0] * count
    step_ends: list[float] = []
    submitted = finished = 0
    begin = time.perf_counter()
    while finished < count:
        while submitted < count and submitted - finished < limit:
            starts[submitted] = time.perf_counter() - begin
            engine.submit(str(submitted), workload.prompts[submitted], workload.output_lens[submitted])
            submitted += 1
        done = engine.step()
        now = time.perf_counter() - begin
        step_ends.append(now)
        for request in done:
            ended[int(request.id)], last_steps[int(request.id)] = request, len(step_ends) - 1
        finished += len(done)
    elapsed = time.perf_counter() - begin
    for i, (request, wanted) in enumerate(zip(ended, workload.output_lens, strict=True)):
        if request.output_tokens != wanted:
            raise RuntimeError(f"request {i} must give {wanted} tokens; the engine gave {request.output_tokens}")
    e2e = [step_ends[last] - start for start, last in zip(starts, last_steps, strict=True)]
    ttfts = [request.ttft for request in ended]
    per_token = [runs.per_token(r.ttft, s, r.output_tokens) for r, s in zip(ended, e2e, strict=True)]
    firsts = [None if ttft is None else start + ttft for start, ttft in zip(starts, ttfts, strict=True)]
    return Round(
        elapsed,
        {
            "input_tokens": [len(prompt) for prompt in workload.prompts],
            "output_tokens": [request.output_tokens for request in ended],
            "cached_tokens": [request.cached_tokens for request in ended],
            "ttft_s": _rounded(ttfts),
            "tpot_s": _rounded(per_token),
            "e2e_s": _rounded(e2e),
            "start_s": _rounded(starts),
        },
        gaps_between_tokens(step_ends, firsts, last_steps)
        if engine.sees_steps
        else [value for value in per_token if value is not None],
    )


def gaps_between_tokens(
    step_ends: Sequence[float], firsts: Sequence[float | None], last_steps: Sequence[int]
) -> list[float]:
    """Seconds between the tokens of all requests: each step gives a token to every request that decodes.

    Asking vLLM for every token would slow it down. With drafts a step may give several tokens, and counts once.

    Args:
        step_ends: when each step ended.
        firsts: when each request had its first token; None if that is not known.
        last_steps: the number of the step that gave each request its last token.
    """
    change = [0] * (len(step_ends) + 1)
    for first, last in zip(firsts, last_steps, strict=True):
        if first is not None:
            change[min(bisect_left(step_ends, first), last) + 1] += 1
            change[last + 1] -= 1
    decoding = itertools.accumulate(change)
    return [
        step_ends[step] - step_ends[step - 1]
        for step, requests in enumerate(itertools.islice(decoding, len(step_ends)))
        for _ in range(requests)
    ]


def _rounded(seconds: list[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in seconds]


def measure(
    engine: Engine, workload: Workload, concurrency: int | None, spec: dict[str, Any], events: Events
) -> dict[str, Any]:
    """One entry of a result file, without the fields that are the same for the whole process."""
    if spec["warmup"]:  # with all of the workload's shapes, or the clock runs while kernels are compiled for them
        events.wait("warm-up")
        engine.forget_prefixes()  # of an earlier workload: a cached prompt is not computed
        run_round(engine, workload, concurrency)
    done: list[Round] = []
    before = engine.counters()
    for number in range(spec["rounds"]):
        events.wait(f"round {number + 1} of {spec['rounds']}", round=number)
        engine.forget_prefixes()
        done.append(run_round(engine, workload, concurrency))
    return {**runs.of_rounds(done, keep_requests=spec["requests"]), **counted_between(before, engine.counters())}


def profile(engine: VllmEngine, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Kernel times of a few steps in which all requests decode, and how long such steps take without the profiler."""
    for i, prompt in enumerate(prompts):
        engine.submit(str(i), prompt, new_tokens, streamed=True)
    while engine.decoding() < len(prompts):
        if engine.step():
            raise RuntimeError("a request ended before the last prompt was computed; --max-model-len must be more")
    ends = [time.perf_counter()]
    for _ in range(TIMED_STEPS):
        engine.step()
        ends.append(time.perf_counter())
    seconds = statistics.median(end - begin for begin, end in itertools.pairwise(ends))
    engine.start_profile()
    for _ in range(PROFILED_STEPS):
        engine.step()
    found = engine.stop_profile()
    if engine.decoding() < len(prompts):
        raise RuntimeError("a request ended while it was profiled; --max-model-len must be more")
    engine.abort_all()
    return {
        **found,
        "wall_s": seconds * found["steps"],
        "batch": len(prompts),
        "context": max(map(len, prompts)),
        **kernel_times.table(found["kernels"]),
    }


def throughput(spec: dict[str, Any], events: Events) -> None:
    """All runs of one backend."""
    events.send("stage", stage="loading the model")
    begin = time.perf_counter()
    engine = ENGINES[spec["engine"]](spec["model"], spec["arguments"])
    start_seconds = time.perf_counter() - begin
    events.send("stage", stage=f"model loaded after {start_seconds:.0f} s")
    if spec["sizes"]:
        events.wait("warm-up of step sizes")
    for requests in spec["sizes"]:
        run_round(engine, Workload(**requests), None)
    for number, asked in enumerate(spec["runs"]):
        case = asked["case"]
        workload = fixed(case["num_prompts"], case["input_len"], case["output_len"], spec["tokens"])
        found = measure(engine, workload, case["concurrency"], spec, events)
        profiled = None
        if asked["profile"]:
            events.wait("profiling")
            profiled = profile(engine, workload.prompts[: asked["profile"]["batch"]], asked["profile"]["new_tokens"])
        cache = {"tokens": engine.cache_tokens, "prefix_hit_share": found.pop("prefix_hit_share")}
        found |= {"cache": cache, "start_s": start_seconds, "profile": profiled}
        events.send("result", run=number, result=found)
    events.wait("ending")  # it takes time, and frees memory


def answers(spec: dict[str, Any], events: Events) -> None:
    """What an engine generates greedily, with logprobs, for each of the spec's batches of prompts."""
    events.send("stage", stage="answering")
    found, drafted, accepted = (embedded_answers if spec["engine"] == "embedded" else vllm_answers)(spec)
    events.send("result", answers=found, drafted=drafted, accepted=accepted)


def vllm_answers(spec: dict[str, Any]) -> tuple[list[list[dict[str, list]]], int, int]:
    """The answers of each batch, and the tokens that were drafted and accepted."""
    from vllm import LLM, SamplingParams

    llm = LLM(spec["model"], skip_tokenizer_init=True, disable_log_stats=False, **spec["arguments"])
    new = spec["new_tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=2, detokenize=False)
    found = []
    for prompts in spec["batches"]:
        found.append([])
        for output in llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False):
            tokens, steps = output.outputs[0].token_ids, output.outputs[0].logprobs
            logprobs = [step[token].logprob for step, token in zip(steps, tokens, strict=True)]
            found[-1].append(answer(tokens, logprobs, [[one.logprob for one in step.values()] for step in steps]))
    totals = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return found, *(int(totals.get(f"vllm:spec_decode_num_{kind}_tokens", 0)) for kind in ("draft", "accepted"))


def embedded_answers(spec: dict[str, Any]) -> tuple[list[list[dict[str, list]]], int, int]:
    """The same of the embedded engine, which drafts nothing."""
    import torch

    from mla_backend.engine import Engine, SamplingParams

    engine = Engine(spec["model"], **{**spec["arguments"], "dtype": getattr(torch, spec["arguments"]["dtype"])})
    params = SamplingParams(max_tokens=spec["new_tokens"], ignore_eos=True, logprobs=2)
    found = []
    for prompts in spec["batches"]:
        found.append([])
        for result in engine.generate(prompts, params):
            steps = result.completions[0].logprobs
            likeliest = [[likely for _, likely in step.top] for step in steps]
            found[-1].append(answer(result.tokens, [step.logprob for step in steps], likeliest))
    return found, 0, 0


def answer(tokens: Sequence[int], logprobs: Sequence[float], likeliest: Sequence[Sequence[float]]) -> dict[str, list]:
    """The answer to one prompt: tokens, their logprobs, and how far the likeliest two are apart at each of them."""
    margins = [best[0] - best[1] for best in (sorted(step, reverse=True) for step in likeliest)]
    return {"tokens": list(tokens), "logprobs": list(logprobs), "margins": margins}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", type=Path, metavar="SPEC")
    parser.add_argument("events", type=Path, metavar="EVENTS")
    options = parser.parse_args()
    given = json.loads(options.spec.read_text())
    if given["arguments"].get("tensor_parallel_size", 1) > 1:  # or vLLM for CPUs wants a NUMA node for each process
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with options.events.open("a") as file:
        {"throughput": throughput, "answers": answers}[given["task"]](given, Events(file, sys.stdin))


if __name__ == "__main__":
    main()
