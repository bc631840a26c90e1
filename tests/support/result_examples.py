"""Result files to try the tools on: a committed one of most kinds, and made-up ones."""

import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serving_benchmarks.ops.timing import Timing
from serving_benchmarks.results import kernel_times

ROOT = Path(__file__).parents[2]
COMMITTED = {"kernels": "h200/kernels", "checkpoint": "h200/checkpoint", "rows": "h200/rows"}
ENVIRONMENT = {
    **{"date": "2026-11-20T22:05:03+00:00", "commit": "5214a64bcc1ef44b20b1", "command": "x", "driver": "580.159.04"},
    "torch": {"version": "2.11.0+cu130", "threads": 16},
    "vllm": {"version": "0.23.0", "distribution": "vllm"},
    "cpu": {"model": "Intel(R) Xeon(R) Processor", "cores": 16},
    "gpus": [{"name": "NVIDIA H200"}],
    "model": {"model_type": "deepseek_v32", "layers": 4, "heads": 16, "experts": 8},
    "settings": {"kv_cache_dtype": "fp8", "interleaved": True},
}
BACKENDS = ("SPARSE_MLA", "FLASHMLA_SPARSE")


def path(name: str) -> Path:
    return ROOT / "results" / f"{COMMITTED[name]}.json"


def write(folder: Path, name: str, report: dict[str, Any]) -> Path:
    written = folder / f"{name}.json"
    written.write_text(json.dumps(report))
    return written


def kernel(report: dict[str, Any], batch: str, heads: int) -> dict[str, Any]:
    """An entry of `kernels`: lists of 2048 FP8 rows."""
    wanted = {"batch": batch, "heads": heads, "topk": 2048, "format": "fp8_ds_mla"}
    return next(entry for entry in report["results"] if wanted.items() <= entry["case"].items())


def _report(kind: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    return json.loads(json.dumps({"environment": {**ENVIRONMENT, "benchmark": kind}, "results": results}))


def _entry(backend: str, slow: float, tokens: int, case: dict[str, Any]) -> dict[str, Any]:
    speed = 1000 / slow
    about = {"engine": "vllm", "backend": backend, "case": {"num_prompts": 64, "kv_cache_dtype": "fp8", **case}}
    speeds = {"requests_per_second": speed * 64 / tokens, "output_tokens_per_second": speed}
    times = {"ttft_s": {"p50": 0.1 * slow, "p99": 0.3 * slow}, "itl_s": {"p50": 0.02 * slow, "p99": 0.05 * slow}}
    return {**about, "gpus": 1, "error": None, **speeds, "total_output_tokens": tokens, **times}


def throughput(backends=BACKENDS, loads=(1, 16), lengths=((4096, 64),), rounds=3) -> dict[str, Any]:
    """A file of `throughput`. The first backend is the fastest."""
    rng, results = random.Random(0), []
    for number, backend in enumerate(backends):
        for (input_len, output_len), load in itertools.product(lengths, loads):
            seconds = [(1 + 0.3 * number) * (40 / load + 2) * rng.uniform(0.98, 1.02) for _ in range(rounds)]
            timing = asdict(Timing.of(seconds))
            case = {"input_len": input_len, "output_len": output_len, "concurrency": load}
            entry = _entry(backend, timing["median"], 64 * output_len, case)
            results.append({**entry, "seconds": timing, "rounds_s": seconds})
    return _report("throughput", results)


def serve(backends=BACKENDS, rates=(1.0, None)) -> dict[str, Any]:
    case = {"input_len": 1024, "output_len": 64, "concurrency": None}
    runs = [(1 + 0.3 * i, name, {**case, "request_rate": rate}) for i, name in enumerate(backends) for rate in rates]
    report = _report("serve", [_entry(name, slow, 64 * 64, its_case) for slow, name, its_case in runs])
    report["environment"]["settings"]["interleaved"] = False  # one round of each
    return report


def index(kind: str = "index") -> dict[str, Any]:
    """A file of `ops index` or `ops sharing`, of which none is committed."""
    seconds = {"fastest": 1e-5, "median": 1.1e-5, "lower_quartile": 1.05e-5, "upper_quartile": 1.2e-5, "rounds": 21}
    entry = {"bytes": 1e7, "useful_flops": 1e9, "seconds": {"ours": seconds}, "best_peer": None, "speed_up": None}
    cases = [{"batch": "64q1s4k", "heads": heads, "format": "fp8", "gpus": 2} for heads in (32, 64)]
    return _report(kind, [{"case": case, **entry} for case in cases])


def failed(entry: dict[str, Any], why: str) -> dict[str, Any]:
    return {**{name: entry[name] for name in ("engine", "backend", "case")}, "error": why}


def of_kernels(kind: str) -> dict[str, Any]:
    """A file of `dense` or `backward`, with the times of one of `kernels`."""
    kernels = json.loads(path("kernels").read_text())
    results = [entry for entry in kernels["results"] if entry["case"]["topk"] == 2048]
    for number, entry in enumerate(results, 1):
        entry |= {"case": {**entry["case"], "rows": number, "lists": "random"}, "parts": {"sum": 1e-3}}
        entry["seconds"]["atomic"] = {**entry["seconds"]["ours"]}
    return {"environment": {**kernels["environment"], "benchmark": kind}, "results": results}


def every_kind() -> dict[str, dict[str, Any]]:
    """One file of each kind."""
    found = {kind: json.loads(path(kind).read_text()) for kind in COMMITTED}
    found |= {kind: of_kernels(kind) for kind in ("dense", "backward")}
    found |= {"throughput": throughput(), "serve": serve(), "index": index(), "sharing": index("sharing")}
    found["throughput"]["results"][0]["profile"] = {"steps": 8, **kernel_times.table([("gemm", 8, 800.0)])}
    return found
