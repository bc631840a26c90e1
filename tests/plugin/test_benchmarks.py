"""The benchmarks with the true vLLM, on a CPU: they measure our backend, and leave nothing of it behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_installed  # noqa: F401
from examples.recall.accuracy import CHECKPOINT
from serving_benchmarks.models import models
from serving_benchmarks.run import supervisor
from serving_benchmarks.run.processes import wait_until

SMALL_CACHE = ("--kv-cache-dtype", "fp8", "--kv-cache-memory-bytes", str(1 << 27))
NARROW = dict(
    hidden_size=128,
    intermediate_size=192,
    moe_intermediate_size=64,
    q_lora_rank=96,
    qk_nope_head_dim=32,
    v_head_dim=48,
    index_topk=64,
    vocab_size=320,
    max_position_embeddings=512,
)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Path:
    """A model as serving_benchmarks.models.models writes it, but for its widths."""
    folder = tmp_path_factory.mktemp("narrow") / "model"
    models.write(folder, models.config("deepseek-v3.2", layers=2, heads=4, **NARROW))
    return folder


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason=f"there is no trained checkpoint in {CHECKPOINT}")
def test_throughput_of_our_backend_and_of_one_that_vllm_does_not_know(tmp_path):
    output = tmp_path / "out.json"
    command = [sys.executable, "-m", "serving_benchmarks.run.throughput", "--model", CHECKPOINT, "--output", output]
    prompts = ["--input-len", "200", "--output-len", "8", "--num-prompts", "6", "--shared-prefix", "64"]
    how = ["--backend", "NO_SUCH,SPARSE_MLA", "--concurrency", "1,3", "--rounds", "2", "--warmup", "2", "--profile"]
    done = subprocess.run([*command, *prompts, *how, *SMALL_CACHE], capture_output=True, text=True)
    assert done.returncode == 1 and "NO_SUCH failed: " in done.stderr, done.stderr[-4000:]
    results = json.loads(output.read_text())["results"]
    assert [(r["backend"], r["case"]["concurrency"]) for r in results] == [
        (backend, n) for backend in ("NO_SUCH", "SPARSE_MLA") for n in (1, 3)
    ]
    assert all("Unknown attention backend: 'NO_SUCH'" in r["error"] for r in results[:2])
    for result in results[2:]:
        assert result["error"] is None and result["total_num_tokens"] == 6 * 208
        requests = result["requests"]
        assert requests["output_tokens"] == [8] * 12 and len(requests["round"]) == 12
        for ttft, e2e in zip(requests["ttft_s"], requests["e2e_s"], strict=True):
            assert 0 < ttft < e2e
        # the first one of each round finds nothing, as prefixes are forgotten in between
        assert requests["cached_tokens"][0] == requests["cached_tokens"][6] == 0 < requests["cached_tokens"][5] == 64
        assert not result["compiled"], "nothing on a CPU is Triton's"
        assert result["preemptions"] == 0 and 0 < result["cache"]["peak_usage"] < 1
        assert result["cache"]["tokens"] > 1000 and 0 < result["cache"]["prefix_hit_share"] < 1
    profile = results[2]["profile"]
    (attention,) = [row for row in profile["kernels"] if row["name"] == "mla_backend::sparse_attention"]
    assert attention["attention"] and attention["calls"] == profile["steps"] * 3, "one call a layer and step"


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason=f"there is no trained checkpoint in {CHECKPOINT}")
def test_vllm_and_the_engine_take_turns(tmp_path):
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    command = [sys.executable, "-m", "serving_benchmarks.run.throughput", "--model", CHECKPOINT, "--output", output]
    prompts = ["--lengths", "60+8,40+4", "--num-prompts", "4", "--concurrency", "1,4", "--profile"]
    how = ["--engine", "vllm,embedded", "--backend", "NO_SUCH,SPARSE_MLA", "--interleave", "--rounds", "2"]
    done = subprocess.run([*command, *prompts, *how, *SMALL_CACHE, "--logs", logs], capture_output=True, text=True)
    assert done.returncode == 1 and "NO_SUCH failed: " in done.stderr, done.stderr[-4000:]
    report = json.loads(output.read_text())
    assert report["environment"]["settings"]["interleaved"] is True
    names = [(r["backend"], r["case"]["input_len"], r["case"]["concurrency"]) for r in report["results"]]
    backends = ("NO_SUCH", "SPARSE_MLA", "embedded")
    assert names == [(backend, tokens, n) for backend in backends for tokens in (60, 40) for n in (1, 4)]
    for failed, ours, engine in zip(*(report["results"][i : i + 4] for i in (0, 4, 8)), strict=True):
        assert "Unknown attention backend: 'NO_SUCH'" in failed["error"]
        each = 68 if failed["case"]["input_len"] == 60 else 44
        assert ours["total_num_tokens"] == engine["total_num_tokens"] == 4 * each
        ratios = [theirs / its for theirs, its in zip(ours["rounds_s"], engine["rounds_s"], strict=True)]
        assert ours["over_first"]["median"] == 1.0 and ours["preemptions"] == engine["preemptions"] == 0
        assert engine["over_first"]["median"] == pytest.approx(sum(ratios) / 2)
        for names, bound in ((("low", "lowest"), min(ratios)), (("high", "highest"), max(ratios))):
            assert [engine["over_first"][name] for name in names] == pytest.approx([bound] * 2)
    profiles = [result["profile"] for result in report["results"][4:]]
    assert all((profile is not None) == (place % 2 == 0) for place, profile in enumerate(profiles))
    assert all(profile["attention_share"] > 0 for profile in profiles[::2])


def serve_command(model: Path, *more: object) -> list[str]:
    prompts = ["--input-len", 100, "--output-len", 8, "--num-prompts", 8, "--no-rehearsal"]
    command = [
        "-m",
        "serving_benchmarks.run.serve",
        "--model",
        model,
        "--dtype",
        "float32",
        *prompts,
        *SMALL_CACHE,
        *more,
    ]
    return [sys.executable, *map(str, command)]


def test_the_server_answers_vllms_client(narrow, tmp_path):
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    limits = ("--ttft-limit", 1000, "--tpot-limit", 1000)
    command = serve_command(narrow, "--concurrency", 4, "--size-warmup", *limits, "--output", output, "--logs", logs)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "SPARSE_MLA" in (logs / "SPARSE_MLA-server.log").read_text()
    (result,) = json.loads(output.read_text())["results"]
    assert result["completed"] == 8 and result["failed"] == 0
    assert result["requests"]["input_tokens"] == [100] * 8 and result["requests"]["output_tokens"] == [8] * 8
    assert result["goodput"]["share"] == 1.0 and result["bench"]["completed"] == 8
    # vLLM's own sums of the same requests
    assert result["latency"]["tpot_s"]["mean"] * 1e3 == pytest.approx(result["bench"]["mean_tpot_ms"], rel=1e-3)
    assert result["output_tokens_per_second"] == pytest.approx(result["bench"]["output_throughput"], rel=1e-3)
    assert result["preemptions"] == 0 and result["cache"]["peak_usage"] is not None


def test_no_process_of_the_server_is_left_when_the_benchmark_is_killed(narrow, tmp_path):
    logs = tmp_path / "logs"
    log = logs / "SPARSE_MLA-server.log"
    benchmark = subprocess.Popen(serve_command(narrow, "--logs", logs), stderr=subprocess.DEVNULL)
    started: list[int] = []
    try:
        assert wait_until(lambda: log.exists() and "EngineCore pid=" in log.read_text(errors="replace"), 200)
        started = supervisor.descendants(benchmark.pid)
        assert len(started) >= 3, "a supervisor, the server, its engine"
        benchmark.kill()
        benchmark.wait()
        gone = wait_until(lambda: not any((Path("/proc") / str(pid)).exists() for pid in started), 60)
        assert gone, "processes are left"
    finally:
        benchmark.kill()
        for pid in started:
            if (Path("/proc") / str(pid)).exists():
                os.kill(pid, signal.SIGKILL)
