"""`serve` with a server and a client that only look like vLLM's: what it makes of their numbers, and of failures."""

import json
import os
import signal

import pytest

from commands import parsed, status_of
from serving_benchmarks.results import kinds
from serving_benchmarks.run import common, serve, server, supervisor, throughput

SMALL = ("--loads", "10+3", "--num-prompts", 4)


def test_each_load_has_an_entry_made_of_what_the_client_saved(small_model, fake_vllm, monkeypatch):
    monkeypatch.setattr(serve, "nvidia_smi", lambda _: ["5", "7"])
    loads = ("--loads", "10+3/8", "--num-prompts", 4, "--request-rate", "1,2.5")
    vllms = ("--tensor-parallel-size", 4, "--drafts", 2, "--no-prefix-caching")
    sizes, output = '{"block_size": 64, "decode_context_parallel_size": 2}', fake_vllm / "out.json"
    more = ("--engine-args", sizes, "--output", output)
    assert status_of("serve", "--model", small_model, *loads, *vllms, *more) == 0
    report = json.loads(output.read_text())
    assert report["environment"]["benchmark"] == "serve"
    for result, rate in zip(report["results"], (1.0, 2.5), strict=True):
        case = {"input_len": 10, "output_len": 3, "num_prompts": 4, "request_rate": rate, "concurrency": 8}
        case |= {"engine": "vllm", "kv_cache_dtype": "auto", "tensor_parallel_size": 4}
        case |= {"decode_context_parallel_size": 2, "drafts": 2}
        assert result["case"] == case and result["error"] is None
        assert (result["failed"], result["gpus"]) == (1, 4)
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 7)
        assert result["requests_per_second"] == 1.5 and result["output_tokens_per_second"] == 3.5
        assert result["ttft_s"] == {"p50": 0.5, "p99": pytest.approx(1.48)}
        assert result["itl_s"] == {"p50": pytest.approx(0.1), "p99": pytest.approx(0.294)}
        assert result["tpot_s"] == {"p50": pytest.approx(0.15), "p99": pytest.approx(0.199)}
        assert result["start_s"] > 0 and result["gpu_memory_bytes"] == [5 << 20, 7 << 20]
        assert len(result["each_round"]) == 1
    # the heaviest load comes once before the others, with prompts of its own
    loads = [json.loads(line) for line in (fake_vllm / "loads").open()]
    assert loads == [["2.5", "8", "2", 10], ["1.0", "8", "0", 10], ["2.5", "8", "1", 10]]
    words = (fake_vllm / "server").read_text()
    for part in ("--attention-backend SPARSE_MLA", "--no-enable-prefix-caching", "--block-size 64", "--max-num-seqs 8"):
        assert part in words
    longest = 13 + serve.LENGTH_ROOM + 10 // serve.TEXT_ROOM
    assert f"--max-model-len {longest}" in words and '{"method": "mtp", "num_speculative_' in words


FAILING = {"ENDS": "RuntimeError: no such backend", "SICK": "not ready"}
FAILING |= {"KILLED": "killed by signal 9", "NO_DATA": "ValueError: no such dataset"}


def test_backends_that_fail_are_said_to_and_the_others_go_on(small_model, fake_vllm, monkeypatch, capsys):
    monkeypatch.setattr(server, "READY_SECONDS", 3)
    monkeypatch.setattr(server, "START_TOLD_SECONDS", 1)
    how = ("--backend", ",".join([*FAILING, "FINE"]), "--loads", "10+3/1,10+3/2", "--no-warmup")
    output = fake_vllm / "out.json"
    assert status_of("serve", "--model", small_model, *how, "--num-prompts", 4, "--output", output) == 1
    results = json.loads(output.read_text())["results"]
    found = [(result["backend"], result["case"]["concurrency"]) for result in results]
    assert found == [(name, n) for name in (*FAILING, "FINE") for n in (1, 2)]
    assert all(FAILING[result["backend"]] in result["error"] for result in results[:-2])
    assert [result["error"] for result in results[-2:]] == [None, None]
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("SICK: ") and "of 9" in line]
    assert told and all(line.endswith("7 of 9") for line in told), "how far its start is"


STUCK = {"SLOW": "the load took more than 1 s", "LOSES_RANK": "the server ended: EngineDeadError"}


def test_a_server_that_is_stuck_or_loses_a_rank_is_an_error(small_model, fake_vllm, monkeypatch):
    how = ("--backend", ",".join(STUCK), "--no-warmup", "--limit", 1, "--output", fake_vllm / "out.json")
    monkeypatch.setattr(server, "POLL_SECONDS", 0.05)
    assert status_of("serve", "--model", small_model, *SMALL, *how) == 1
    results = json.loads((fake_vllm / "out.json").read_text())["results"]
    for result, (name, why) in zip(results, STUCK.items(), strict=True):
        assert result["backend"] == name and why in result["error"]
    assert not supervisor.descendants(os.getpid()), "processes are left"


def test_rounds_interleave_backends(small_model, fake_vllm):
    how = ("--loads", "20+2/1,20+2/4,10+3/1,10+3/4", "--num-prompts", 9, "--waves", 2, "--no-warmup")
    parallel = ("--engine-args", '{"data_parallel_size": 4, "enable_expert_parallel": true}')
    backends = ("--backend", "SPARSE_MLA,OTHER,KILLED", "--rounds", 3, "--output", fake_vllm / "out.json")
    assert status_of("serve", "--model", small_model, *how, *parallel, *backends) == 1
    order = (fake_vllm / "starts").read_text().split()
    assert order == ["SPARSE_MLA", "OTHER", "KILLED", "OTHER", "SPARSE_MLA", "SPARSE_MLA", "OTHER"]
    found = kinds.load(fake_vllm / "out.json")
    loads = [(10 * length, n, min(9, 2 * n)) for length in (2, 1) for n in (1, 4)]
    named = ("input_len", "concurrency", "num_prompts")
    assert [tuple(result["case"][name] for name in named) for result in found.results] == loads * 3
    ours, others, failed = (found.results[i : i + 4] for i in (0, 4, 8))
    assert {result["error"] is None for result in ours + others} == {True} and all(one["error"] for one in failed)
    for result in ours:
        assert result["rounds_s"] == [2.0] * 3 and result["seconds"]["rounds"] == len(result["each_round"]) == 3
        assert result["failed"] == 3 and result["output_tokens_per_second"] == 3.5
        assert result["over_first"]["median"] == 1 and result["gpus"] == 4


@pytest.mark.usefixtures("children_hear_ctrl_c")
@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_measured_before_a_signal_is_kept_and_the_status_is_the_signals(how, status):
    def measure(*_):
        yield {"error": None}
        signal.raise_signal(how)

    assert common.collect(measure, None) == ([{"error": None}], status)


def test_what_is_not_given_is_left_to_vllm(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    settings = common.settings_of(parsed("serve", "--model", "any"))
    arguments = common.engine_arguments(settings, "B")
    assert arguments.keys() == {"attention_backend", "kv_cache_dtype", "tensor_parallel_size"}
    assert common.gpus(arguments) == 1 and common.gpus({**arguments, "data_parallel_size": 3}) == 3
    own_cache = {"attention_backend": "B", "kv_cache_dtype": "bfloat16"}
    assert common.engine_arguments(settings, "B:bfloat16") == {**arguments, **own_cache}
    given = common.engine_arguments({**settings, "engine_args": {"additional_config": {"a": 1}}}, "B:fp8:b=true")
    assert given["additional_config"] == {"a": 1, "b": True} and given["kv_cache_dtype"] == "fp8"
    given = common.engine_arguments(settings, "B:fp8:host_pool_gib=8")["kv_transfer_config"]
    assert (given["kv_connector"], given["kv_connector_extra_config"]) == ("HiSparseConnector", {"host_pool_gib": "8"})


def test_on_a_cpu_vllm_gets_a_cache_for_the_load(small_model, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def cache(plan_of, command: str, in_flight: int, *more: object) -> int | None:
        plan = plan_of(parsed(command, "--model", small_model, "--loads", f"20+4/{in_flight}", *more))
        return (plan[0] if command == "serve" else plan.settings)["kv_cache_memory_bytes"]

    for command, plan_of in (("serve", serve.plan_of), ("throughput", throughput.plan_of)):
        one, many = (cache(plan_of, command, n) for n in (1, 15))
        assert many == 8 * one and many < 1 << 30, "a request more than are in flight"
        assert cache(plan_of, command, 1, "--gpu-memory-utilization", 0.5) is None
        assert cache(plan_of, command, 1, "--kv-cache-memory-bytes", 1 << 20) == 1 << 20


def test_an_entry_says_the_cache_of_its_own_backend():
    options = parsed("throughput", "--model", "any", "--backend", "B,B:bfloat16", "--kv-cache-dtype", "fp8")
    settings = common.settings_of(options)
    (case,) = common.cases_of(options, settings)
    entries = [common.entry(settings, name, case, "failed") for name in options.backend]
    assert [entry["kv_cache_dtype"] for entry in entries] == ["fp8", "bfloat16"] and "kv_cache_dtype" not in case
