"""Result files to try the tools on: those that are committed, and made-up ones of throughput and serve."""

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

from serving_benchmarks.ops.timing import Timing

ROOT = Path(__file__).parents[2]
COMMITTED = {
    name: ROOT / "results" / f"{name}.json"
    for name in (
        "kernels",
        "sweep",
        "kernel_counters",
        "cache_ops",
        "cpu_attention",
        "kv_blocks",
        "vllm_0.23_heads_16",
        "vllm_0.23_recall",
    )
}

ENVIRONMENT = {
    "date": "2026-11-20T22:05:03+00:00",
    "commit": "5214a64bcc1ef44b20b178d43f1475ec824e7057",
    "system": "Linux",
    "python": "3.12.3",
    "torch": {"version": "2.11.0+cu130", "threads": 16},
    "vllm": {"version": "0.23.0", "distribution": "vllm"},
    "cpu": {"model": "Intel(R) Xeon(R) Processor", "cores": 16},
    "gpus": [{"name": "NVIDIA H200"}],
    "driver": "580.159.04",
    "model": {"name": "small", "model_type": "deepseek_v32", "layers": 4, "heads": 16, "experts": 8},
    "settings": {"kv_cache_dtype": "fp8"},
}
SPEED = {"SPARSE_MLA": 1.0, "FLASHMLA_SPARSE": 1.3, "embedded": 1.6}
"""How long requests take with each backend, over ours."""


def committed(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def write(folder: Path, name: str, report: dict[str, Any]) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report))
    return path


def _requests(rng: random.Random, count: int, crowd: float, slow: float) -> dict[str, list[float | None]]:
    """Latencies of requests, the longer the more of them are at it; the last one gives a single token."""
    ttft = [slow * crowd * rng.lognormvariate(-2, 0.4) for _ in range(count)]
    tpot: list[float | None] = [slow * (0.01 + 0.0004 * crowd) * rng.lognormvariate(0, 0.1) for _ in range(count)]
    tpot[-1] = None
    e2e = [first + 63 * (later or 0) for first, later in zip(ttft, tpot, strict=True)]
    return {"ttft_s": ttft, "tpot_s": tpot, "e2e_s": e2e}


def _latency(requests: dict[str, list[float | None]]) -> dict[str, dict[str, float]]:
    found = {}
    for name, values in requests.items():
        known = sorted(value for value in values if value is not None)
        cuts = statistics.quantiles(known, n=100)
        found[name] = {"mean": statistics.mean(known), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    return found


def throughput(
    backends=("SPARSE_MLA", "FLASHMLA_SPARSE", "embedded"), loads=(1, 4, 16, 64), lengths=((4096, 64),)
) -> dict[str, Any]:
    """A file of serving_benchmarks.run.throughput: 64 requests of the same lengths, three rounds, several loads."""
    rng, results = random.Random(0), []
    for backend in backends:
        for (input_len, output_len), load in itertools.product(lengths, loads):
            rounds = [SPEED[backend] * (40 / load + 2) * rng.uniform(0.98, 1.02) for _ in range(3)]
            requests = _requests(rng, 192, load, SPEED[backend])
            seconds = Timing.of(rounds).as_dict()
            median = seconds["median"]
            results.append(
                {
                    "engine": "embedded" if backend == "embedded" else "vllm",
                    "backend": backend,
                    "case": {
                        "workload": "fixed",
                        "source": None,
                        "input_len": input_len,
                        "output_len": output_len,
                        "num_prompts": 64,
                        "shared_prefix": 0,
                        "concurrency": load,
                        "seed": 0,
                        "kv_cache_dtype": "fp8",
                        "tensor_parallel_size": 1,
                    },
                    "error": None,
                    "elapsed_time": median,
                    "num_requests": 64,
                    "total_num_tokens": 64 * (input_len + output_len),
                    "requests_per_second": 64 / median,
                    "tokens_per_second": 64 * (input_len + output_len) / median,
                    "total_output_tokens": 64 * output_len,
                    "output_tokens_per_second": 64 * output_len / median,
                    "seconds": seconds,
                    "rounds_s": rounds,
                    "requests": {"round": [i for i in range(3) for _ in range(64)], **requests},
                    "latency": _latency(requests),
                    "preemptions": 0,
                }
            )
    command = "python -m serving_benchmarks.run.throughput --model small --output throughput.json"
    return {"environment": {**ENVIRONMENT, "command": command, "benchmark": "throughput"}, "results": results}


def serve(backends=("SPARSE_MLA", "FLASHMLA_SPARSE"), rates=(1.0, 4.0, None)) -> dict[str, Any]:
    """A file of serving_benchmarks.run.serve: 200 requests at several rates."""
    rng, results = random.Random(1), []
    for backend in backends:
        for seed, rate in enumerate(rates):
            load = 32 if rate is None else rate * 4
            requests = _requests(rng, 200, load, SPEED[backend])
            elapsed = 200 / rate if rate else 8 * SPEED[backend]
            results.append(
                {
                    "engine": "vllm",
                    "backend": backend,
                    "case": {
                        "input_len": 1024,
                        "output_len": 64,
                        "num_prompts": 200,
                        "shared_prefix": 0,
                        "request_rate": rate,
                        "concurrency": None,
                        "burstiness": 1.0,
                        "seed": seed,
                        "kv_cache_dtype": "fp8",
                        "tensor_parallel_size": 1,
                    },
                    "error": None,
                    "elapsed_time": elapsed,
                    "completed": 200,
                    "failed": 0,
                    "requests_per_second": 200 / elapsed,
                    "tokens_per_second": 200 * 1088 / elapsed,
                    "output_tokens_per_second": 200 * 64 / elapsed,
                    "requests": requests,
                    "latency": _latency(requests),
                    "goodput": {
                        "ttft_limit_s": 2.0,
                        "tpot_limit_s": 0.05,
                        "good": 190,
                        "share": 0.95,
                        "requests_per_second": 190 / elapsed,
                    },
                }
            )
    command = "python -m serving_benchmarks.run.serve --model small --output serve.json"
    return {"environment": {**ENVIRONMENT, "command": command, "benchmark": "serve"}, "results": results}


def on_two_gpus(report: dict[str, Any]) -> dict[str, Any]:
    """The same file, measured with tensor parallelism."""
    environment = {**report["environment"], "gpus": report["environment"]["gpus"] * 2}
    results = [{**entry, "case": {**entry["case"], "tensor_parallel_size": 2}} for entry in report["results"]]
    return {"environment": environment, "results": results}


def failed(entry: dict[str, Any], why: str) -> dict[str, Any]:
    """What stands in place of an entry of throughput or serve that could not be measured."""
    return {**{name: entry[name] for name in ("engine", "backend", "case")}, "error": why}


def every_kind() -> dict[str, dict[str, Any]]:
    """One file of each kind, by its name."""
    return {**{name: committed(name) for name in COMMITTED}, "throughput": throughput(), "serve": serve()}
