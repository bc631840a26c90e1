"""Offline throughput of attention backends in vLLM or SGLang: the same requests through each, so many at a time.

Each backend runs in a process of its own and loads the model once. It goes through all --lengths at each --concurrency.
For each load it runs all requests once as a warm-up, then they are timed --rounds times. The prefix cache is emptied
before each round. Generation is greedy, and of exactly the wanted length. A backend that fails is reported, the others
go on, and the exit status is 1.

With --interleave all backends are loaded first, and are timed in alternate rounds. A machine that slows down then slows
all of them. The ratio to the first backend is the median of the ratios of rounds of the same number, with its 95 %
confidence interval; of eight rounds or fewer the interval goes from the lowest ratio to the highest.
"""

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving_benchmarks import options as types
from serving_benchmarks.run import common, rounds, sglang_engine, workloads
from serving_benchmarks.run.common import Stages
from serving_benchmarks.run.processes import why_it_ended

INTERLEAVED_SHARE = 0.9
"""Of a GPU's memory, for all backends that are loaded at the same time."""
MOST_PROFILED = 128
"""Requests that decode in the profiled steps."""
PROFILE_ROOM = 96
"""Tokens of a profiled request: for 40 steps, and for those that an engine runs between a question and its answer."""
LEAST_TOKENS_A_STEP = 2048
"""Tokens of prompts that an engine takes in a step, or more."""


def add_options(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    common.add_loads(parser, num_prompts=64)
    types.add_rounds(parser, 3)
    common.add_warmup(parser, "run each load once before it is timed")
    told = "time all backends in alternate rounds. All must fit into memory: --gpu-memory-utilization and "
    told += f"--kv-cache-memory-bytes are for each of them; default: each gets its part of {INTERLEAVED_SHARE}"
    parser.add_argument("--interleave", action="store_true", help=told)
    told = "kernel times of a few decode steps, at the first load of each length"
    parser.add_argument("--profile", action="store_true", help=told)
    told = "SGLang's backends have its names: sparse_mla,dsa; default: %(default)s"
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm", help=told)
    common.add_engine(parser)
    common.add_results(parser, requests=True)


@dataclass(frozen=True)
class Plan(common.Plan):
    """Everything that is measured, after the options have been checked against the model."""

    tokens: list[int]  # what prompts are made of
    runs: list[dict[str, Any]]
    """Of each load its `case`, and how many requests are profiled, with so many tokens each; None for no profile. It
    gives an entry of the result file for each backend."""


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises Refused for options that don't fit the model or each other."""
    if options.engine == "sglang":
        sglang_engine.refuse(options)
    config, settings = common.read_config(options.model), common.settings_of(options)
    settings["gpu_memory_utilization"] = memory_share(options)

    planned, profiles, cases = [], {}, common.cases_of(options, settings)
    for case in cases:
        lengths = case["input_len"], case["output_len"]
        profile = profiled(case, settings) if options.profile and lengths not in profiles else None
        profiles.setdefault(lengths, profile)
        planned.append({"profile": profile, "case": case})

    with_profile = [(length, profile) for (length, _), profile in profiles.items() if profile]
    wished = max((length + profile["new_tokens"] for length, profile in with_profile), default=0)
    common.fit_model_len(settings, config, cases, wished)
    for length, profile in with_profile:
        profile["new_tokens"] = min(profile["new_tokens"], settings["max_model_len"] - length)
    sizes = common.size_warmup(options, settings, config, cases)
    return Plan(settings, sizes, workloads.usable_tokens(config), planned)


def profiled(case: dict[str, Any], settings: dict[str, Any]) -> dict[str, int]:
    """The first request must still decode when the last prompt has been computed and all steps have been seen."""
    limits = case["num_prompts"], case["concurrency"], settings["max_num_seqs"], MOST_PROFILED
    batch = min(filter(None, limits))
    tokens_a_step = 1 + (settings["drafts"] or 0)
    return {
        "batch": batch,
        "new_tokens": tokens_a_step * (PROFILE_ROOM + batch * -(-case["input_len"] // LEAST_TOKENS_A_STEP)),
    }


def memory_share(options: argparse.Namespace) -> float | None:
    """--gpu-memory-utilization, which is split where several backends are loaded at the same time."""
    share, backends = options.gpu_memory_utilization, len(options.backend)
    if not options.interleave or backends == 1:
        return share
    if share is None:  # vLLM wants so much to be free when it starts, even if it is told how large its cache is
        return round(INTERLEAVED_SHARE / backends, 3)
    if share * backends > 1 and options.kv_cache_memory_bytes is None:
        raise types.Refused(f"--gpu-memory-utilization is for each backend with --interleave: {backends} x {share} > 1")
    return share


@dataclass
class Backend:
    """A backend that is being measured."""

    name: str
    worker: rounds.Worker
    left: list[int]
    """The numbers of the runs whose results have not come yet."""


def spec_of(backend: str, options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """What a backend's worker is told."""
    return {
        "task": "throughput",
        "engine": options.engine,
        "model": options.model,
        "arguments": common.engine_arguments(plan.settings, backend),
        "sizes": list(map(asdict, plan.sizes)),
        "tokens": plan.tokens,
        "runs": plan.runs,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "requests": options.requests,
    }


def heard(backend: Backend, plan: Plan, stages: Stages) -> Iterator[dict[str, Any]]:
    """The entries that a backend's worker sends until it waits. If it fails, those that are left have an error."""
    entry = partial(common.entry, plan.settings, backend.name)
    for event in backend.worker.events():
        if event["event"] == "result":
            backend.left.remove(event["run"])
            yield entry(plan.runs[event["run"]]["case"], event["result"])
        else:
            stages.at(f"{backend.name}: {event['stage']}")
    if backend.worker.asks is not None:
        return
    status, said = backend.worker.process.status(), backend.worker.process.says()
    if status == 0 and not backend.left:
        return
    why = why_it_ended(status, said) if status else "it ended without all of its results"
    stages.failed(backend.name, why, said)
    for run in [plan.runs[number] for number in backend.left] or plan.runs[-1:]:
        yield entry(run["case"], why)


def measure(options: argparse.Namespace, plan: Plan, logs: Path, stages: Stages) -> Iterator[dict[str, Any]]:
    """Every entry of the result file, as soon as it is known."""
    for together in [options.backend] if options.interleave else [[name] for name in options.backend]:
        with contextlib.ExitStack() as running:
            backends: dict[rounds.Worker, Backend] = {}
            for name in together:  # one at a time, as engines look at how much memory is free when they start
                stages.at(f"{name}: starting")
                worker = running.enter_context(rounds.started(name, spec_of(name, options, plan), logs))
                backends[worker] = Backend(name, worker, list(range(len(plan.runs))))
                yield from heard(backends[worker], plan, stages)
            for worker, stage in rounds.interleaved(list(backends)):
                stages.at(f"{backends[worker].name}: {stage}")
                yield from heard(backends[worker], plan, stages)


def run(options: argparse.Namespace) -> int:
    plan = plan_of(options)
    return common.run("throughput", options, plan, partial(measure, options, plan), options.interleave)
