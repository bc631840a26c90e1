"""The benchmark of offline throughput measures what it says, for each backend that runs, and refuses what is wrong."""

import contextlib
import io
import json
import math
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import engine_models
from serving_benchmarks import engines, in_flight, kernel_times, latency, supervisor, throughput, throughput_worker
from serving_benchmarks.processes import wait_until
from serving_benchmarks.workloads import Workload

SMALL = ("--input-len", "20", "--output-len", "4", "--num-prompts", "6", "--rounds", "2")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """In the workers, as in engine_models.one_thread: they are other processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return engine_models.save_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def measured(folder, one_thread, tmp_path_factory):
    """The embedded engine at two concurrencies: the report, and what was printed."""
    output, printed = tmp_path_factory.mktemp("out") / "out.json", io.StringIO()
    arguments = [*SMALL, "--concurrency", "2,6", "--shared-prefix", "10", "--profile", "--output", str(output)]
    with contextlib.redirect_stdout(printed):
        assert throughput.main(["--model", str(folder), "--engine", "embedded", *arguments]) == 0
    return json.loads(output.read_text()), printed.getvalue()


def test_each_concurrency_has_an_entry_whose_numbers_agree(measured):
    report, _ = measured
    assert report["environment"]["benchmark"] == "throughput" and report["environment"]["model"]["layers"] == 2
    assert [r["case"]["concurrency"] for r in report["results"]] == [2, 6]
    for result in report["results"]:
        assert (result["engine"], result["backend"], result["error"]) == ("embedded", "embedded", None)
        assert result["num_requests"] == 6 and result["total_num_tokens"] == 6 * (20 + 4)
        assert result["elapsed_time"] == pytest.approx(result["seconds"]["median"])
        assert result["requests_per_second"] * result["elapsed_time"] == pytest.approx(6)
        assert result["tokens_per_second"] * result["elapsed_time"] == pytest.approx(6 * 24)
        assert result["output_tokens_per_second"] * result["elapsed_time"] == pytest.approx(6 * 4)
        requests = result["requests"]
        assert requests["round"] == [0] * 6 + [1] * 6
        assert requests["input_tokens"] == [20] * 12 and requests["output_tokens"] == [4] * 12
        for ttft, tpot, e2e in zip(requests["ttft_s"], requests["tpot_s"], requests["e2e_s"], strict=True):
            assert 0 < ttft < e2e and ttft + 3 * tpot == pytest.approx(e2e)
        assert sum(result["rounds_s"]) > 0 and len(result["rounds_s"]) == 2 == result["seconds"]["turns"]
        assert 0 < result["cache"]["peak_usage"] <= 1 and result["cache"]["tokens"] > 0 == result["preemptions"]
        assert result["memory"]["host_peak_bytes"] > 0 and result["start_s"] > 0


def test_the_profile_of_the_first_shows_attention(measured):
    first, second = measured[0]["results"]
    profile = first["profile"]
    assert second["profile"] is None and profile["batch"] == 2 and profile["device"] == "cpu"
    attention = [row for row in profile["kernels"] if row["attention"]]
    assert [row["name"] for row in attention] == ["mla_backend::sparse_attention"]
    assert attention[0]["calls"] == profile["steps"] * 2, "one call a layer and step"
    assert profile["attention_share"] == pytest.approx(attention[0]["share"])
    assert math.fsum(row["share"] for row in profile["kernels"]) == pytest.approx(1)


def test_it_prints_vllms_lines(measured):
    report, printed = measured
    for result in report["results"]:
        assert f"Throughput: {result['requests_per_second']:.2f} requests/s, " in printed
    assert printed.count("Total num prompt tokens:  120\n") == 2
    assert printed.count("Total num output tokens:  24\n") == 2
    assert "mla_backend::sparse_attention" in printed


def test_waves_leave_prompts_out_where_few_are_in_flight_and_a_folder_of_logs_serves_twice(folder, tmp_path):
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    arguments = [*SMALL, "--model", folder, "--engine", "embedded", "--concurrency", "1,2,6", "--waves", "2"]
    for more, warmed in ((), [2, 4, 6]), (("--warmup", "1"), [1, 1, 1]):
        # what the first run left in the folder is not taken for the second one's
        assert throughput.main([*map(str, arguments), *more, "--logs", str(logs), "--output", str(output)]) == 0
        report = json.loads(output.read_text())
        assert report["environment"]["settings"]["waves"] == 2
        assert report["environment"]["settings"]["warmup"] == (int(more[1]) if more else None)
        events = map(json.loads, (logs / "embedded-embedded.events").read_text().splitlines())
        assert [e["of"] for e in events if e.get("stage") == "warm-up" and e["done"] == 0] == warmed
        for result, used in zip(report["results"], (2, 4, 6), strict=True):
            assert result["error"] is None and result["case"]["num_prompts"] == used == result["num_requests"]
            assert result["requests"]["round"] == [0] * used + [1] * used
            assert result["total_num_tokens"] == used * 24
            assert result["output_tokens_per_second"] * result["elapsed_time"] == pytest.approx(used * 4)


BROKEN = """
    import json, sys
    concurrencies = json.load(open(sys.argv[1]))["concurrencies"]
    with open(sys.argv[2], "a") as events:
        result = dict(requests_per_second=1.0, tokens_per_second=2.0, output_tokens_per_second=1.0, profile=None,
            total_input_tokens=1, total_output_tokens=1, seconds=dict(upper_quartile=1.0, lower_quartile=1.0),
            latency=dict.fromkeys(["ttft_s", "tpot_s"], dict(p50=None, p99=None)))
        print(json.dumps(dict(event="result", concurrency=concurrencies[0], result=result)), file=events)
        events.write('{"event": "a line that is to')
    raise MemoryError("out of everything")
"""


def break_vllm(monkeypatch, tmp_path: Path, code: str = BROKEN) -> None:
    """Workers for vLLM run this instead."""
    script, worker = tmp_path / "broken.py", throughput.worker_command
    script.write_text(textwrap.dedent(code))

    def command(spec: Path, events: Path) -> list[str]:
        vllm = json.loads(spec.read_text())["engine"] == "vllm"
        return [sys.executable, str(script), str(spec), str(events)] if vllm else worker(spec, events)

    monkeypatch.setattr(throughput, "worker_command", command)


def test_a_backend_that_fails_is_said_to_and_the_others_go_on(folder, tmp_path, monkeypatch, capsys):
    break_vllm(monkeypatch, tmp_path)
    output = tmp_path / "out.json"
    arguments = [*SMALL, "--model", folder, "--engine", "vllm,embedded", "--backend", "ONE,TWO", "--concurrency", "2,6"]
    assert throughput.main([*map(str, arguments), "--output", str(output)]) == 1
    results = json.loads(output.read_text())["results"]
    errors = [(r["backend"], r["case"]["concurrency"], r["error"]) for r in results]
    why = "MemoryError: out of everything"
    failed = [(name, n, why if n == 6 else None) for name in ("ONE", "TWO") for n in (2, 6)]
    assert errors == [*failed, ("embedded", 2, None), ("embedded", 6, None)]
    shown = capsys.readouterr()
    assert "ONE failed: " + why in shown.err and "TWO failed: " + why in shown.err
    assert shown.out.count("failed") == 2


def test_one_that_ends_early_without_an_error_has_failed(folder, tmp_path, monkeypatch, capsys):
    break_vllm(monkeypatch, tmp_path, "pass")
    assert throughput.main([*SMALL, "--model", str(folder)]) == 1
    assert "ended without all of its results" in capsys.readouterr().err


def test_one_that_is_killed_has_failed(folder, tmp_path, monkeypatch, capsys):
    break_vllm(monkeypatch, tmp_path, "import os; print('so far', flush=True); os.kill(os.getpid(), 9)")
    assert throughput.main([*SMALL, "--model", str(folder)]) == 1
    assert "killed by signal 9; it said last: so far" in capsys.readouterr().err


def test_it_can_be_stopped(folder, tmp_path):
    """While the worker works; its process is gone then, too."""
    logs = tmp_path / "logs"
    command = [sys.executable, "-m", "serving_benchmarks.throughput", "--model", folder, "--engine", "embedded"]
    long = ["--input-len", "100", "--output-len", "400", "--num-prompts", "500", "--logs", logs]
    process = subprocess.Popen([*command, *long], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        events = logs / "embedded-embedded.events"
        assert wait_until(lambda: events.exists() and "warm-up" in events.read_text(), 60)
        started = supervisor.descendants(process.pid)
        assert len(started) >= 2 and all(map(alive, started))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert not any(map(alive, started))


def alive(pid: int) -> bool:
    return (Path("/proc") / str(pid)).exists()


class OneTokenAStep:
    """An engine that gives each request a token in each step, and knows how many there were at a time."""

    cache_tokens = None

    def __init__(self, lie: int = 0):
        self.left: dict[str, int] = {}
        self.given: dict[str, int] = {}
        self.most, self.lie = 0, lie
        self.told: list[int | str] = []

    def forget_prefixes(self):
        self.told.append("forget")

    def counters(self):
        return engines.Counters(0, None, None)

    def submit(self, id, prompt, new_tokens, *, streamed=False):
        self.told.append(new_tokens)
        self.left[id] = self.given[id] = new_tokens
        self.most = max(self.most, len(self.left))

    def step(self):
        for id in self.left:
            self.left[id] -= 1
        ended = [id for id, left in self.left.items() if not left]
        for id in ended:
            del self.left[id]
        return [engines.Ended(id, None, self.given[id] - self.lie, None) for id in ended]

    def usage(self):
        return None


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (20, 9), (None, 9)])
def test_no_more_requests_are_in_flight_than_allowed(concurrency, most):
    engine, told = OneTokenAStep(), []
    workload = Workload([[1]] * 9, [1, 2, 3, 1, 5, 1, 1, 2, 2])
    done = in_flight.run(engine, workload, concurrency, told.append)
    assert engine.most == most and told[-1] == 9 and told == sorted(told)
    assert done.requests["output_tokens"] == workload.output_lens
    assert done.requests["ttft_s"] == done.requests["tpot_s"] == [None] * 9 and done.peak_usage is None
    assert all(0 < e2e <= done.elapsed for e2e in done.requests["e2e_s"])


@pytest.mark.parametrize(
    ("warmup", "before"),
    [(None, ["forget", 40, 2, 33]), (2, ["forget", 32, 2]), (9, ["forget", 32, 2, 32]), (0, [])],
)
def test_a_load_is_run_before_it_is_timed_as_it_is_unless_less_is_asked_for(warmup, before):
    engine, told = OneTokenAStep(), io.StringIO()
    workload = Workload([[1]] * 3, [40, 2, 33])
    found = throughput_worker.measure(engine, workload, 3, 2, warmup, throughput_worker.Events(told))
    assert engine.told == [*before, *["forget", 40, 2, 33] * 2]
    assert found["requests"]["round"] == [0] * 3 + [1] * 3 and found["total_output_tokens"] == 75
    stages = dict.fromkeys(json.loads(line)["stage"] for line in told.getvalue().splitlines())
    assert list(stages) == [*(["warm-up"] if before else []), "round 1 of 2", "round 2 of 2"]


def test_a_request_that_ends_early_is_an_error():
    with pytest.raises(RuntimeError, match="request 0 must give 3 tokens; the engine gave 2"):
        in_flight.run(OneTokenAStep(lie=1), Workload([[1]], [3]), None)


def test_the_embedded_engines_prefixes_are_forgotten_when_they_should_be(folder):
    settings = {"max_model_len": 200, "kv_cache_memory_bytes": None, "max_num_seqs": 2, "max_num_batched_tokens": None}
    settings |= {"dtype": None, "kv_cache_dtype": "fp8", "prefix_caching": None}
    workload = Workload([list(range(150))], [2])

    def cached(engine) -> list[int]:
        with engine_models.one_thread():
            return in_flight.run(engine, workload, None).requests["cached_tokens"]

    engine = engines.start("embedded", "embedded", str(folder), settings)
    assert cached(engine) == [0] and cached(engine) == [128]
    engine.forget_prefixes()
    assert cached(engine) == [0]
    counted = throughput_worker.since(engines.Counters(0, 0, 0), engine.counters())
    assert counted["prefix_hit_share"] == pytest.approx(128 / 450) and counted["preemptions"] == 0
    engine = engines.start("embedded", "embedded", str(folder), {**settings, "prefix_caching": False})
    assert cached(engine) == [0] and cached(engine) == [0]


def test_latencies_are_summed_up():
    assert latency.percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5 and latency.percentile([7.0], 99) == 7.0
    assert latency.percentile([float(i) for i in range(101)], 90) == pytest.approx(90)
    found = latency.summary([None, 3.0, 1.0])
    assert found["mean"] == found["p50"] == 2.0 and found["p99"] == pytest.approx(2.98)
    assert latency.summary([None]) == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert latency.per_token(1.0, 4.0, 4) == 1.0
    assert latency.per_token(1.0, 1.0, 1) is latency.per_token(None, 1.0, 4) is None


ATTENTION = [
    "void mla::cuda::sm90::few_heads::attention_kernel<(mla::Code)1, 16>(mla::AttentionProblem)",
    "void mla::cuda::sm90::many_heads::attention_kernel<(mla::Code)1>(mla::AttentionProblem)",
    "mla::cuda::(anonymous namespace)::merge_cut_tokens_kernel(mla::AttentionProblem)",
    "void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<sm90::decode::sparse_fp8::Kernel>",
    "void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512, 8, 32, 256>(CombineParams)",
    "void sm90::fwd::sparse_attn_fwd_kernel<sm90::fwd::KernelTemplate<576, false>>",
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>",
    "mla_backend::sparse_attention",
]
NO_ATTENTION = [
    "nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT",
    "void deep_gemm::sm90_fp8_mqa_logits<64u, 128u, false, 2u, 256u, 3u, 3u, 132u, 128u, 512u, float>",
    "void vllm::ConcatMLAQKernel<c10::BFloat16, 512>(c10::BFloat16*)",
    "mla::cuda::(anonymous namespace)::convert_kernel(mla::cuda::(anonymous namespace)::Problem)",
    "mla::cuda::(anonymous namespace)::plan_kernel(mla::PlanProblem)",
    "_convert_req_index_to_global_index_kernel",
    "vllm::unified_mla_kv_cache_update",
]


def test_kernels_that_attend_are_known_by_their_names():
    assert all(map(kernel_times.is_attention, ATTENTION)) and not any(map(kernel_times.is_attention, NO_ATTENTION))


def test_a_profile_keeps_the_longest_kernels_and_all_of_the_time():
    many = [(f"kernel {i}", 2, float(i)) for i in range(1, 101)] + [(ATTENTION[0], 8, 50.5)]
    found = kernel_times.table(many)
    assert found["total_us"] == 5050 + 50.5 and found["attention_us"] == 50.5
    assert found["kernels"][0]["name"] == "kernel 100" and found["kernels"][-1]["name"] == kernel_times.THE_REST
    assert sum(row["total_us"] for row in found["kernels"]) == pytest.approx(found["total_us"])
    assert sum(row["calls"] for row in found["kernels"]) == 208


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--num-prompts", "0"], "--num-prompts must be 1 or more; got 0"),
        (["--waves", "0"], "--waves must be 1 or more; got 0"),
        (["--rounds", "1"], "--rounds must be 2 or more"),
        (["--engine", "vllm,fast"], "must be of vllm, embedded; got 'vllm,fast'"),
        (["--concurrency", "1,0"], "must be numbers from 1 up, such as 1,16,64; got '1,0'"),
        (["--backend", ","], "--backend must name one or more"),
        (["--shared-prefix", "-1"], "--shared-prefix must be 0 or more"),
        (["--shared-prefix", "20", "--input-len", "20"], "the shared prefix must be shorter"),
        (["--jsonl", "/nope.jsonl"], "/nope.jsonl"),
        (["--histogram", "/nope.csv", "--input-len", "3"], "--input-len can't be given with a file"),
        (["--jsonl", "/nope.jsonl", "--shared-prefix", "3"], "--shared-prefix can't be given with --jsonl"),
        (["--input-len", "500", "--output-len", "500"], "requests of 1000 tokens are too long for the model"),
        (["--input-len", "50", "--max-model-len", "60"], "--max-model-len must be 178 or more for these prompts"),
        (["--engine", "embedded", "--dtype", "float16"], "--dtype must be bfloat16 or float32"),
        (["--engine", "embedded", "--tensor-parallel-size", "2"], "--tensor-parallel-size must be 1"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be more than 0 and at most 1"),
        (["--no-compile", "--enforce-eager"], "only one can be given"),
        (["--vllm-args", "[1]"], "--vllm-args: must be an object"),
        (["--model", "/nope"], "--model: must be a folder with a config.json"),
        (["--output", "/proc/nope/x.json", "--input-len", "20"], "--output: "),
    ],
)
def test_wrong_arguments_are_refused(folder, arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        throughput.main(["--model", str(folder), *arguments])
    assert stopped.value.code == 2 and text in capsys.readouterr().err
