"""`throughput` with a stand-in for vLLM: real workers, interleaved, one of which fails."""

import json

import pytest

from commands import parsed, status_of
from serving_benchmarks.run import common, throughput


def test_interleaved_backends_are_measured_and_one_that_fails_is_said_to(small_model, fake_vllm, capsys):
    output = fake_vllm / "out.json"
    loads = ["--lengths", "20+4,10+6", "--num-prompts", "6", "--concurrency", "1,6", "--waves", "2", "--rounds", "3"]
    how = ["--interleave", "--profile", "--requests", "--tensor-parallel-size", "2", "--size-warmup"]
    backends = ["--backend", "REFUSED,ONE,BREAKS,TWO", "--output", output]
    assert status_of("throughput", "--model", small_model, *loads, *how, *backends) == 1
    report = json.loads(output.read_text())
    assert report["environment"]["benchmark"] == "throughput" and report["environment"]["model"]["layers"] == 2
    asked = [(20, 4, 2, 1), (20, 4, 6, 6), (10, 6, 2, 1), (10, 6, 6, 6)]
    named = ("input_len", "output_len", "num_prompts", "concurrency")
    cases = [(r["backend"], *(r["case"][name] for name in named)) for r in report["results"]]
    assert cases == [(name, *case) for name in ("REFUSED", "ONE", "BREAKS", "TWO") for case in asked]
    refused, ones, breaks, twos = (report["results"][i : i + 4] for i in range(0, 16, 4))
    assert {result["error"] for result in refused} == {"ValueError: no such backend"}
    assert {result["error"] for result in breaks} == {"MemoryError: out of everything"}
    for result, (input_len, new, count, _) in zip([*ones, *twos], asked * 2, strict=True):
        assert_adds_up(result, input_len, new, count)
    profiles = [bool(result["profile"]) for result in twos]
    assert profiles == [True, False, True, False] and twos[0]["profile"]["calls"] == {"cudaGraphLaunch": 8}
    for one, two in zip(ones, twos, strict=True):
        ratios = sorted(a / b for a, b in zip(one["rounds_s"], two["rounds_s"], strict=True))
        assert one["over_first"]["median"] == 1 and two["over_first"]["median"] == pytest.approx(ratios[1])
        assert [two["over_first"][n] for n in ("low", "high")] == pytest.approx([ratios[0], ratios[2]])
    rounds = [line.split(":")[0] for line in capsys.readouterr().err.splitlines() if ": round " in line]
    assert rounds[-6:] == ["ONE", "TWO", "TWO", "ONE", "ONE", "TWO"]


def assert_adds_up(result: dict, input_len: int, new: int, count: int) -> None:
    """One of three rounds whose requests all have these lengths."""
    assert result["error"] is None and result["gpus"] == 2
    assert result["num_requests"] == count and result["total_num_tokens"] == count * (input_len + new)
    assert result["elapsed_time"] == pytest.approx(sorted(result["rounds_s"])[1])
    assert result["output_tokens_per_second"] * result["elapsed_time"] == pytest.approx(count * new)
    assert result["requests_per_second"] * result["elapsed_time"] == pytest.approx(count)
    requests = result["requests"]
    assert requests["round"] == [0] * count + [1] * count + [2] * count
    assert requests["input_tokens"] == [input_len] * count * 3 and requests["output_tokens"] == [new] * count * 3
    for ttft, tpot, e2e in zip(requests["ttft_s"], requests["tpot_s"], requests["e2e_s"], strict=True):
        assert 0 < ttft < e2e and ttft + (new - 1) * tpot == pytest.approx(e2e)
    assert min(requests["ttft_s"]) <= result["ttft_s"]["p50"] <= result["ttft_s"]["p99"] <= max(requests["ttft_s"])
    assert 0.002 <= result["itl_s"]["p50"] <= result["itl_s"]["p99"] <= max(requests["e2e_s"])
    assert result["cache"] == {"tokens": 640, "prefix_hit_share": None} and result["preemptions"] == 0


SETTINGS = {
    "--lengths 100+20,64+80": {"max_model_len": 144},
    "--lengths 100+20,64+80 --max-model-len 200": {"max_model_len": 200},
    # 96 tokens more than the prompt for what is profiled, and one for each prompt's step
    "--lengths 20+4,30+2 --profile --concurrency 1,2": {"max_model_len": 30 + 97},
    "--backend A,B": {"gpu_memory_utilization": None},
    "--backend A,B --interleave": {"gpu_memory_utilization": 0.45},
    "--backend A,B --interleave --gpu-memory-utilization 0.4": {"gpu_memory_utilization": 0.4},
    "--backend A --interleave": {"gpu_memory_utilization": None},
}


@pytest.mark.parametrize(("arguments", "wanted"), SETTINGS.items())
def test_requests_fit_and_interleaved_backends_share_the_memory(small_model, arguments, wanted):
    plan = throughput.plan_of(parsed("throughput", "--model", small_model, "--lengths", "20+4", *arguments.split()))
    assert {name: plan.settings[name] for name in wanted} == wanted


WARMED = {
    "": (6 * 20, 6),
    "--concurrency 1,3": (3 * 20, 3),
    "--concurrency 3 --max-num-seqs 2": (2 * 20, 2),
    "--max-num-batched-tokens 50": (50, 6),
    "--num-prompts 5000": (common.STEP_TOKENS, 5000),
    "--no-warmup": None,
}
"""Tokens and requests of the largest steps of the warm-up, if there is one."""


@pytest.mark.parametrize(("arguments", "largest"), WARMED.items())
def test_step_sizes_are_warmed_up_on_a_gpu_as_far_as_they_are_needed(small_model, monkeypatch, arguments, largest):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    small = ("--lengths", "20+4", "--num-prompts", "6")
    plan = throughput.plan_of(parsed("throughput", "--model", small_model, *small, *arguments.split()))
    assert bool(plan.sizes) is (largest is not None)
    if largest:
        *prompts, decode = [requests.prompts[len(requests) > 1 :] for requests in plan.sizes]
        assert (sum(map(len, prompts[-1])), len(decode)) == largest
        assert max(requests.longest for requests in plan.sizes) <= plan.settings["max_model_len"] == 24


REFUSED = (
    "--num-prompts 0|--rounds 1|--concurrency 1,0|--backend ,|--lengths 20+4,30|--lengths 20+0|--lengths 500+500"
    "|--lengths 50+50 --max-model-len 60|--gpu-memory-utilization 1.5|--vllm-args [1]|--seconds nan|--model /nope"
    f"|--interleave --backend A,B --gpu-memory-utilization 0.6|--logs {__file__}|--output /proc/nope/x.json"
)


@pytest.mark.parametrize("arguments", REFUSED.split("|"))
def test_wrong_arguments_are_refused(small_model, arguments, monkeypatch):
    monkeypatch.setattr(common, "collect", None)  # nothing is measured
    assert status_of("throughput", "--model", small_model, "--lengths", "20+4", *arguments.split()) == 2
