"""Offline throughput of attention backends in vLLM or SGLang: the same requests through each, so many at a time.

Each backend has a process of its own, which loads the model once and runs each load as a warm-up and --rounds times,
greedily, with an empty prefix cache. A backend that fails is reported, the others go on, and the exit status is 1.

With --interleave all backends are loaded first, and timed in alternate rounds, so that a slow machine slows all. The
ratio to the first one is the median over rounds, with its 95 % interval (up to eight rounds: lowest to highest).
"""

import argparse
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving_benchmarks import options as types
from serving_benchmarks.run import common, rounds, sglang_engine, workloads
from serving_benchmarks.run.common import Stages
from serving_benchmarks.run.processes import why_it_ended

INTERLEAVED_SHARE = 0.9  # of a GPU's memory, for all backends that are loaded at the same time
MOST_PROFILED, PROFILE_ROOM, LEAST_TOKENS_A_STEP = 128, 96, 2048
"""Requests that decode in the profiled steps; tokens of each, for 40 steps and for those that an engine runs between a
question and its answer; tokens of prompts that an engine takes in a step, or more."""


def add_options(parser: argparse.ArgumentParser) -> None:
    common.add_loads(parser, num_prompts=64, warmup="run each load once before it is timed")
    types.add_rounds(parser, 3)
    told = "time all backends in alternate rounds. All must fit into memory: --gpu-memory-utilization and "
    told += "--kv-cache-memory-bytes are for each of them, and with the latter they start at the same time; default: "
    told += f"each gets its part of {INTERLEAVED_SHARE}"
    parser.add_argument("--interleave", action="store_true", help=told)
    told = "kernel times of a few decode steps, at the first load of each length"
    parser.add_argument("--profile", action="store_true", help=told)
    told = "SGLang's backends have its names: sparse_mla,dsa; default: %(default)s"
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm", help=told)
    common.add_engine(parser)
    common.add_results(parser)


@dataclass(frozen=True)
class Plan:
    """Everything that is measured, after the options have been checked against the model."""

    settings: dict[str, Any]  # of the engine
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
    planned, profiles = [], {}
    for case in common.cases_of(options, settings):
        lengths = case["input_len"], case["output_len"]
        profile = profiled(case, settings) if options.profile and lengths not in profiles else None
        profiles.setdefault(lengths, profile)
        planned.append({"profile": profile, "case": case})
    with_profile = [(length, profile) for (length, _), profile in profiles.items() if profile]
    wished = max((length + profile["new_tokens"] for length, profile in with_profile), default=0)
    settings["max_model_len"] = longest = common.longest_request(config, max(map(sum, profiles)), wished)
    common.size_cpu_cache(config, settings, [run["case"] for run in planned], options.gpu_memory_utilization)
    for length, profile in with_profile:
        profile["new_tokens"] = min(profile["new_tokens"], longest - length)
    return Plan(settings, workloads.usable_tokens(config), planned)


def profiled(case: dict[str, Any], settings: dict[str, Any]) -> dict[str, int]:
    """The first request must still decode when the last prompt has been computed and all steps have been seen."""
    batch = min(filter(None, (case["num_prompts"], case["concurrency"], settings["max_num_seqs"], MOST_PROFILED)))
    steps = PROFILE_ROOM + batch * -(-case["input_len"] // LEAST_TOKENS_A_STEP)
    return {"batch": batch, "new_tokens": (1 + (settings["drafts"] or 0)) * steps}


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


def heard(worker: rounds.Worker, left: list[int], plan: Plan, stages: Stages) -> Iterator[dict[str, Any]]:
    """The entries that a backend's worker sends until it waits. If it fails, those that are `left` have an error."""
    entry = partial(common.entry, plan.settings, worker.name)
    for event in worker.events():
        if event["event"] == "result":
            left.remove(event["run"])
            yield entry(plan.runs[event["run"]]["case"], event["result"])
        else:
            stages.at(f"{worker.name}: {event['stage']}")
    status = worker.process.status()
    if worker.asks is None and (status != 0 or left):
        said = worker.process.says()
        why = why_it_ended(status, said) if status else "it ended without all of its results"
        stages.failed(worker.name, why, said)
        for run in [plan.runs[number] for number in left] or plan.runs[-1:]:
            yield entry(run["case"], why)


def measure(options: argparse.Namespace, plan: Plan, logs: Path, stages: Stages) -> Iterator[dict[str, Any]]:
    """Every entry of the result file, as soon as it is known."""
    spec = {"task": "throughput", "tokens": plan.tokens, "runs": plan.runs}
    spec |= {name: getattr(options, name) for name in ("engine", "model", "rounds", "warmup")}
    for together in [options.backend] if options.interleave else [[name] for name in options.backend]:
        with contextlib.ExitStack() as running:
            left: dict[rounds.Worker, list[int]] = {}  # the runs whose results have not come yet
            for name in together:
                stages.at(f"{name}: starting")
                own = {**spec, "arguments": common.engine_arguments(plan.settings, name)}
                worker = running.enter_context(rounds.started(name, own, logs))
                left[worker] = list(range(len(plan.runs)))
                if not options.kv_cache_memory_bytes:  # an engine that sizes its cache must start alone
                    yield from heard(worker, left[worker], plan, stages)
            for worker in left if options.kv_cache_memory_bytes else ():
                yield from heard(worker, left[worker], plan, stages)
            for worker, stage in rounds.interleaved(list(left)):
                stages.at(f"{worker.name}: {stage}")
                yield from heard(worker, left[worker], plan, stages)


def run(options: argparse.Namespace) -> int:
    plan = plan_of(options)
    common.require_engine(options.engine)
    return common.run("throughput", options, plan.settings, partial(measure, options, plan), options.interleave)
