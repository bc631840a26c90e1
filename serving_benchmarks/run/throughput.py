"""Offline throughput of vLLM's attention backends: the same requests through each, so many in flight at a time.

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
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_benchmarks import options as types
from serving_benchmarks.results import kernel_times, runs
from serving_benchmarks.run import common, rounds, workloads
from serving_benchmarks.run.common import Stages
from serving_benchmarks.run.processes import why_it_ended
from serving_benchmarks.run.workloads import Workload

INTERLEAVED_SHARE = 0.9
"""Of a GPU's memory, for all backends that are loaded at the same time."""
MOST_PROFILED = 128
"""Requests that decode in the profiled steps."""
PROFILE_ROOM = 96
"""Tokens of a profiled request: for 40 steps, and for those that an engine runs between a question and its answer."""
LEAST_TOKENS_A_STEP = 2048
"""Tokens of prompts that an engine takes in a step, or more."""


def lengths_type(text: str) -> tuple[int, int]:
    """The type of a prompt's tokens and those after it, such as 4096+64."""
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be tokens of prompts and after them, such as 4096+64; got {text!r}")
    return int(found[1]), int(found[2])


def add_options(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    told = "tokens of a prompt and after it, such as 4096+64,512+512"
    types.add_list(parser, "--lengths", lengths_type, told, "1024+128")
    parser.add_argument("--num-prompts", type=types.count, default=64, metavar="N", help="default: %(default)s")
    types.add_list(parser, "--concurrency", types.count, "requests in flight; default: all")
    told = "at most so many prompts per request in flight; default: any"
    parser.add_argument("--waves", type=types.count, metavar="N", help=told)
    types.add_rounds(parser, 3)
    told = "more rounds, until every backend was timed for so long at this load; default: only --rounds"
    parser.add_argument("--seconds", type=types.seconds, default=0.0, metavar="S", help=told)
    common.add_warmup(parser, "run each load once before it is timed")
    told = "time all backends in alternate rounds. All must fit into memory: --gpu-memory-utilization and "
    told += f"--kv-cache-memory-bytes are for each of them; default: each gets its part of {INTERLEAVED_SHARE}"
    parser.add_argument("--interleave", action="store_true", help=told)
    told = "kernel times of a few decode steps, at the first load of each length"
    parser.add_argument("--profile", action="store_true", help=told)
    common.add_vllm(parser)
    common.add_results(parser, requests=True)


@dataclass(frozen=True)
class Run:
    """One load: it gives an entry of the result file for each backend."""

    workload: int
    """Which of the plan's workloads."""
    profile: dict[str, int] | None
    """How many requests are profiled, and the tokens that each gets."""
    case: dict[str, Any]

    @property
    def spec(self) -> dict[str, Any]:
        """What a worker is told of it."""
        prompts, concurrency = self.case["num_prompts"], self.case["concurrency"]
        return {"workload": self.workload, "prompts": prompts, "concurrency": concurrency, "profile": self.profile}


@dataclass(frozen=True)
class Plan:
    """Everything that is measured, after the options have been checked against the model."""

    settings: dict[str, Any]
    """Of vLLM."""
    workloads: list[Workload]
    runs: list[Run]
    sizes: list[Workload]
    """The warm-up of step sizes."""


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises Refused for options that don't fit the model or each other."""
    config, settings = common.read_config(options.model), common.vllm_settings(options)
    tokens = workloads.usable_tokens(config)
    made = [workloads.fixed(options.num_prompts, *lengths, tokens) for lengths in options.lengths]
    settings["gpu_memory_utilization"] = memory_share(options)

    planned: list[Run] = []
    for number, lengths in enumerate(options.lengths):
        for concurrency in options.concurrency or [None]:
            prompts = options.num_prompts
            if options.waves and concurrency:
                prompts = min(prompts, options.waves * concurrency)
            case = common.case_of(settings, lengths, prompts, concurrency=concurrency)
            first = options.profile and concurrency == (options.concurrency or [None])[0]
            planned.append(Run(number, profiled(lengths[0], case, settings) if first else None, case))

    longest, most = max(workload.longest for workload in made), config.get("max_position_embeddings")
    if settings["max_model_len"] is None:
        wanted = [run.case["input_len"] + run.profile["new_tokens"] for run in planned if run.profile]
        needed = max([longest, *wanted])
        settings["max_model_len"] = needed if most is None else min(needed, max(longest, most))
    if longest > settings["max_model_len"]:
        raise types.Refused(f"--max-model-len must be {longest} or more for these prompts")
    if most is not None and settings["max_model_len"] > most:
        raise types.Refused(f"requests of {settings['max_model_len']} tokens are too long: the model takes {most}")
    for run in planned:
        if run.profile:
            room = settings["max_model_len"] - run.case["input_len"]
            run.profile["new_tokens"] = min(run.profile["new_tokens"], room)

    in_flight = [min(filter(None, (run.case["num_prompts"], run.case["concurrency"]))) for run in planned]
    longest_prompt = max(input_len for input_len, _ in options.lengths)
    sizes = common.size_warmup(options, settings, config, in_flight, longest_prompt)
    return Plan(settings, made, planned, sizes)


def profiled(input_len: int, case: dict[str, Any], settings: dict[str, Any]) -> dict[str, int]:
    """The first request must still decode when the last prompt has been computed and all steps have been seen."""
    limits = case["num_prompts"], case["concurrency"], settings["max_num_seqs"], MOST_PROFILED
    batch = min(filter(None, limits))
    tokens_a_step = 1 + (settings["drafts"] or 0)
    return {
        "batch": batch,
        "new_tokens": tokens_a_step * (PROFILE_ROOM + batch * -(-input_len // LEAST_TOKENS_A_STEP)),
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
        "model": options.model,
        "arguments": common.vllm_arguments(plan.settings, backend),
        "workloads": [workload.as_dict() for workload in plan.workloads],
        "sizes": [requests.as_dict() for requests in plan.sizes],
        "runs": [run.spec for run in plan.runs],
        "rounds": options.rounds,
        "more_rounds": options.seconds > 0,
        "warmup": options.warmup,
        "requests": options.requests,
    }


def heard(backend: Backend, plan: Plan, stages: Stages) -> Iterator[dict[str, Any]]:
    """The entries that a backend's worker sends until it waits. If it fails, those that are left have an error."""
    gpus = common.gpus(common.vllm_arguments(plan.settings, backend.name))
    head = {"engine": "vllm", "backend": backend.name, "gpus": gpus}
    for event in backend.worker.events():
        if event["event"] == "result":
            backend.left.remove(event["run"])
            yield {**head, "case": plan.runs[event["run"]].case, "error": None, **event["result"]}
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
        yield {**head, "case": run.case, "error": why}


def measure(options: argparse.Namespace, plan: Plan, logs: Path, stages: Stages) -> Iterator[dict[str, Any]]:
    """Every entry of the result file, as soon as it is known."""
    for together in [options.backend] if options.interleave else [[name] for name in options.backend]:
        with contextlib.ExitStack() as running:
            backends: dict[rounds.Worker, Backend] = {}
            for name in together:  # one at a time, as vLLM looks at how much memory is free when it starts
                stages.at(f"{name}: starting")
                worker = running.enter_context(rounds.started(name, spec_of(name, options, plan), logs))
                backends[worker] = Backend(name, worker, list(range(len(plan.runs))))
                yield from heard(backends[worker], plan, stages)
            for worker, stage in rounds.interleaved(list(backends), options.seconds):
                stages.at(f"{backends[worker].name}: {stage}")
                yield from heard(backends[worker], plan, stages)


def in_order(results: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The entries backend by backend, each with `over_first`, its ratio to the first backend's entry of the same load;
    None unless they were interleaved."""
    results = sorted(results, key=lambda result: options.backend.index(result["backend"]))
    firsts: dict[str, dict[str, Any]] = {}
    for result in results:
        if result["error"] is None:
            first = firsts.setdefault(json.dumps(result["case"]), result)
            result["over_first"] = runs.over_first(first, result) if options.interleave else None
    return results


def over_first(result: dict[str, Any]) -> str:
    """A cell of the table."""
    found = result["over_first"]
    return "{median:.2f} ({low:.2f} to {high:.2f})".format(**found) if found else "-"


def run(options: argparse.Namespace) -> int:
    plan = plan_of(options)
    results, status = common.collect(lambda logs, stages: measure(options, plan, logs, stages), options.logs)
    results = in_order(results, options)
    for result in results:
        if result.get("profile"):
            print(f"\n{result['backend']}, {runs.lengths(result['case'])} tokens, {runs.load(result['case'])}")
            print(*kernel_times.lines(result["profile"]), sep="\n")
    if results:
        common.show(common.table(results, "over the first", over_first))
    how = {name: getattr(options, name) for name in ("rounds", "seconds", "waves", "warmup")}
    how |= {"size_warmup": bool(plan.sizes), "interleaved": options.interleave}
    common.write(options, "throughput", results, {**plan.settings, **how})
    return status
