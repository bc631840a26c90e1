"""`throughput` with stand-ins for vLLM and SGLang: real workers, interleaved, some of which fail."""

import json
import sys

import pytest

from commands import parsed, status_of
from serving_benchmarks.results import kinds, tables
from serving_benchmarks.run import common, sglang_engine, throughput


def test_interleaved_backends_are_measured_and_one_that_fails_is_said_to(small_model, fake_vllm, capsys):
    output = fake_vllm / "out.json"
    loads = ["--loads", "20+4/1,20+4/6,10+6/1,10+6/6", "--num-prompts", "6", "--waves", "2", "--rounds", "3"]
    how = ["--interleave", "--profile", "--tensor-parallel-size", "2"]
    backends = ["--backend", "ONE,REFUSED,BREAKS,TWO", "--output", output]
    assert status_of("throughput", "--model", small_model, *loads, *how, *backends) == 1
    report = json.loads(output.read_text())
    assert report["environment"]["benchmark"] == "throughput" and report["environment"]["model"]["layers"] == 2
    asked = [(20, 4, 2, 1), (20, 4, 6, 6), (10, 6, 2, 1), (10, 6, 6, 6)]
    named = ("input_len", "output_len", "num_prompts", "concurrency")
    cases = [(r["backend"], *(r["case"][name] for name in named)) for r in report["results"]]
    assert cases == [(name, *case) for name in ("ONE", "REFUSED", "BREAKS", "TWO") for case in asked]
    ones, refused, breaks, twos = (report["results"][i : i + 4] for i in range(0, 16, 4))
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


def test_where_the_first_backend_failed_nothing_is_compared_with_it(small_model, fake_vllm):
    words = ["--loads", "20+4", "--num-prompts", "2", "--rounds", "2", "--interleave", "--output", fake_vllm / "out"]
    together = ["--kv-cache-memory-bytes", "1G"]
    assert status_of("throughput", "--model", small_model, *words, *together, "--backend", "REFUSED,ONE,TWO") == 1
    _, *others = kinds.load(fake_vllm / "out").results
    assert [result["over_first"] for result in others] == [None, None]


def assert_adds_up(result: dict, input_len: int, new: int, count: int) -> None:
    """One of three rounds whose requests all have these lengths."""
    assert result["error"] is None and result["gpus"] == 2
    assert result["total_input_tokens"] == count * input_len and result["total_output_tokens"] == count * new
    elapsed = sorted(result["rounds_s"])[1]
    assert result["output_tokens_per_second"] * elapsed == pytest.approx(count * new)
    assert result["requests_per_second"] * elapsed == pytest.approx(count)
    assert 0 < result["ttft_s"]["p50"] <= result["ttft_s"]["p99"] < max(result["rounds_s"])
    assert 0.002 <= result["itl_s"]["p50"] <= result["itl_s"]["p99"] < max(result["rounds_s"])
    assert result["cache"] == {"tokens": 640}


def test_sglangs_backends_are_measured_as_vllms_are(small_model, fake_sglang, capsys):
    output = fake_sglang / "out.json"
    loads = ["--loads", "20+4/2,10+6/1,10+1/3", "--num-prompts", "6", "--waves", "2", "--rounds", "3"]
    how = ["--engine", "sglang", "--interleave", "--drafts", "3", "--kv-cache-dtype", "fp8_e4m3"]
    how += ["--no-compile", "--no-prefix-caching", "--gpu-memory-utilization", "0.2"]
    how += ["--max-num-batched-tokens", "30", "--engine-args", '{"max_total_tokens": 500}']
    backends = ["--backend", "refused,sparse_mla,breaks,dsa:bfloat16", "--output", output]
    assert status_of("throughput", "--model", small_model, *loads, *how, *backends) == 1
    file = kinds.load(output)
    refused, ours, breaks, theirs = (file.results[i : i + 3] for i in range(0, 12, 3))
    assert {result["error"] for result in refused} == {"ValueError: no such backend"}
    assert all("out of everything" in result["error"] for result in breaks)
    for result, (input_len, new, count) in zip([*ours, *theirs], [(20, 4, 4), (10, 6, 2), (10, 1, 6)] * 2, strict=True):
        assert result["engine"] == result["case"]["engine"] == "sglang" and result["gpus"] == 1
        assert result["total_input_tokens"] == count * input_len and result["total_output_tokens"] == count * new
        assert result["itl_s"] == pytest.approx(result["tpot_s"]) and (result["itl_s"]["p50"] is None) == (new == 1)
        assert result["cache"] == {"tokens": 640} and result["profile"] is None
    asked = json.loads((fake_sglang / "dsa.json").read_text())
    assert asked["kv_cache_dtype"] == "bfloat16" and asked["disable_radix_cache"] and asked["max_total_tokens"] == 500
    assert asked["max_running_requests"] == 3 and asked["chunked_prefill_size"] == 30 and asked["tp_size"] == 1
    assert asked["mem_fraction_static"] == 0.2 and asked["speculative_num_draft_tokens"] == 4
    assert not (fake_sglang / "flushed").exists(), "nothing to forget"
    version = file.environment["sglang"] = "0.5.99"
    told = tables.whole_models(file.report)
    assert f"sglang {version}" in told and "each request's mean" in told
    rows = tables.throughput_versus({**file.report, "results": [*ours, *theirs]}, loads="20+4/2").splitlines()
    assert "sparse_mla, output" in rows[0] and rows[2].count(" | ") == 6 and f"sglang {version}" in rows[-1]
    timed = list(kinds.KINDS["throughput"].timed(file))
    assert timed and all({*one.peers} <= {("dsa:bfloat16", version), ("breaks", version)} for one in timed)


def test_sglangs_prefix_cache_is_emptied_before_each_round(small_model, fake_sglang):
    how = ["--loads", "20+4", "--num-prompts", "2", "--rounds", "2", "--engine", "sglang", "--backend", "dsa"]
    assert status_of("throughput", "--model", small_model, *how) == 0
    flushed = (fake_sglang / "flushed").read_text().split()
    assert flushed == ["True", *["False", "True"] * 2], "before the warm-up and two rounds, until it was"


def test_sglang_gets_its_names_of_all_settings_or_they_are_refused():
    of_sglang = {*sglang_engine.NAMES, *sglang_engine.LACKS, "max_model_len"}
    assert {*common.SAME_NAME} <= of_sglang
    sizes = {"tp_size": 2, "dp_size": 3}
    assert [common.gpus(sizes | more) for more in ({}, {"enable_dp_attention": True})] == [6, 2]


SETTINGS = {
    "--loads 100+20,64+80": {"max_model_len": 144, "max_num_seqs": None},
    # 96 tokens more than the prompt for what is profiled, and one for each prompt's step
    "--loads 20+4/1,20+4/2,30+2/1,30+2/2 --profile": {"max_model_len": 30 + 97},
    "--loads 100+20/3,64+80/7": {"max_model_len": 144, "max_num_seqs": 7},
    "--backend A,B": {"gpu_memory_utilization": None},
    "--backend A,B --interleave": {"gpu_memory_utilization": 0.45},
    "--backend A,B --interleave --gpu-memory-utilization 0.4": {"gpu_memory_utilization": 0.4},
    "--backend A --interleave": {"gpu_memory_utilization": None},
}


def loads(arguments):
    """Those that fit into the small model, unless there are others."""
    return () if "--loads" in arguments else ("--loads", "20+4")


@pytest.mark.parametrize(("arguments", "wanted"), SETTINGS.items())
def test_requests_fit_and_interleaved_backends_share_the_memory(small_model, arguments, wanted):
    plan = throughput.plan_of(parsed("throughput", "--model", small_model, *loads(arguments), *arguments.split()))
    assert {name: plan.settings[name] for name in wanted} == wanted


LOADS = "--loads 20+4 --num-prompts 2"
ENGINE_NEEDED = [f"throughput {LOADS}", f"throughput --engine sglang --backend dsa {LOADS}", f"serve {LOADS}"]
ENGINE_NEEDED += ["checkpoint --input-len 20 --output-len 4"]


@pytest.mark.parametrize("words", ENGINE_NEEDED)
def test_an_engine_that_is_not_installed_is_a_sentence_with_the_command(small_model, words, monkeypatch, capsys):
    for name in ("vllm", "sglang"):
        monkeypatch.setitem(sys.modules, name, None)
    assert status_of(*words.split(), "--model", small_model) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "pip install" in said and ("sglang" if "sglang" in words else "vllm") in said


REFUSED = (
    "--num-prompts 0|--rounds 1|--loads 20+4/0|--backend ,|--loads 20+4,30|--loads 20+0|--loads 500+500"
    "|--gpu-memory-utilization 1.5|--engine-args [1]|--model /nope|--loads 20+4/|--loads 20/4|--loads 500+500/2"
    "|--engine sglang|--engine sglang --backend dsa --profile|--engine sglang --backend dsa --kv-cache-memory-bytes 9"
    f"|--engine other|--interleave --backend A,B --gpu-memory-utilization 0.6|--logs {__file__}"
    "|--output /proc/nope/x.json"
)


WRONG = [("serve", words) for words in ("--limit nan", "--request-rate 0", "--loads 1+2000", "--loads 5+3/0")]
WRONG += [("throughput", words) for words in REFUSED.split("|")]


@pytest.mark.parametrize(("command", "arguments"), WRONG)
def test_wrong_arguments_are_refused(small_model, command, arguments, monkeypatch):
    monkeypatch.setattr(common, "collect", None)  # nothing is measured
    assert status_of(command, "--model", small_model, *loads(arguments), *arguments.split()) == 2
