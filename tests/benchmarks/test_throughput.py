"""The benchmark of offline throughput measures what it says, for each backend that runs, and refuses what is wrong."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import engine_models
import result_examples
from serving_benchmarks.results import kernel_times, latency, runs
from serving_benchmarks.run import engines, in_flight, supervisor, throughput, throughput_worker, turns
from serving_benchmarks.run.processes import wait_until
from serving_benchmarks.run.workloads import Workload
from tests.benchmarks.test_supervisor import alive

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
        assert not result["compiled"], "these models have no kernels of Triton's"


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
    for more, warmed in ((), [2, 4, 6]), (("--warmup", "1", "--size-warmup"), [1, 1, 1]):
        # what the first run left in the folder is not taken for the second one's
        assert throughput.main([*map(str, arguments), *more, "--logs", str(logs), "--output", str(output)]) == 0
        report = json.loads(output.read_text())
        assert report["environment"]["settings"]["waves"] == 2
        assert report["environment"]["settings"]["warmup"] == (int(more[1]) if more else None)
        sizes = report["environment"]["settings"]["size_warmup"]
        assert sizes is ("--size-warmup" in more or torch.cuda.is_available())
        events = list(map(json.loads, (logs / "embedded-embedded.events").read_text().splitlines()))
        assert [e["of"] for e in events if e.get("stage") == "warm-up" and e.get("done") == 0] == warmed
        stages = [e["stage"] for e in events if e["event"] == "ready"]
        first = ["warm-up of step sizes", "warm-up"] if sizes else ["warm-up", "round 1 of 2"]
        assert stages[:2] == first and stages.count("warm-up of step sizes") == sizes
        if sizes:  # six prompts of 20 tokens may share a step: 14 sizes up to 23 tokens are one request
            of = next(e["of"] for e in events if e.get("done") == 0)
            several = (24, 28, 31, 32, 36, 44, 47, 48, 52, 60, 63, 64, 84, 92, 95, 96, 116, 120)
            assert of == 14 + sum(1 + -(-n // 23) for n in several) + 1 + 6
            assert {"event": "progress", "stage": first[0], "done": of, "of": of} in events
        for result, used in zip(report["results"], (2, 4, 6), strict=True):
            assert result["error"] is None and result["case"]["num_prompts"] == used == result["num_requests"]
            assert result["requests"]["round"] == [0] * used + [1] * used
            assert result["total_num_tokens"] == used * 24
            assert result["output_tokens_per_second"] * result["elapsed_time"] == pytest.approx(used * 4)


BROKEN = """
    import json, sys
    with open(sys.argv[2], "a") as events:
        result = dict(requests_per_second=1.0, tokens_per_second=2.0, output_tokens_per_second=1.0, profile=None,
            compiled=None, total_input_tokens=1, total_output_tokens=1,
            seconds=dict(upper_quartile=1.0, lower_quartile=1.0),
            latency=dict.fromkeys(["ttft_s", "tpot_s"], dict(p50=None, p99=None)))
        print(json.dumps(dict(event="result", run=0, result=result)), file=events)
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
    """While the worker works; its process is gone then, too, and there is no file of results that there are none of."""
    logs, output = tmp_path / "logs", tmp_path / "out.json"
    command = [sys.executable, "-m", "serving_benchmarks.run.throughput", "--model", folder, "--engine", "embedded"]
    long = ["--input-len", "100", "--output-len", "400", "--num-prompts", "500", "--logs", logs, "--output", output]
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
    assert not any(map(alive, started)) and not output.exists()


TAKES_TURNS = """
    import json, sys, time
    from pathlib import Path

    spec, mine = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    events, name = mine.open("a"), spec["backend"]

    def diary(text):
        with (mine.parent / "diary").open("a") as file:
            file.write(f"{name} {text}\\n")

    def say(event, **more):
        print(json.dumps(dict(event=event, **more)), file=events, flush=True)

    def others_are_idle():
        for other in mine.parent.glob("*.events"):
            if other != mine and "BREAKS" not in other.name:
                assert json.loads(other.read_text().splitlines()[-1])["event"] == "ready", other

    def turn(stage, **more):
        say("ready", stage=stage, **more)
        assert sys.stdin.readline() == "go\\n"
        others_are_idle()
        diary(stage)
        time.sleep(0.1)  # another one that worked now would be seen to
        others_are_idle()

    others_are_idle()
    diary("starts")
    for place, run in enumerate(spec["runs"]):
        concurrency, workload = run["concurrency"], run["workload"]
        turn("warm-up")
        for number in range(spec["rounds"]):
            turn(f"round {number + 1}", round=number)
            if "BREAKS" in name and concurrency != 2 and number == 1:
                raise MemoryError("out of everything")
            if "HANGS" in name and concurrency != 2:
                diary("hangs")
                time.sleep(1000)
        seconds = [(number + 1.0) * (2 if name == "TWO" else 1 + number) for number in range(spec["rounds"])]
        seconds = [one * 10**workload for one in seconds]
        result = dict(requests_per_second=1.0, tokens_per_second=2.0, output_tokens_per_second=1.0, profile=None,
            compiled=None, total_input_tokens=1, total_output_tokens=1,
            seconds=dict(upper_quartile=1.0, lower_quartile=1.0),
            rounds_s=seconds, latency=dict.fromkeys(["ttft_s", "tpot_s"], dict(p50=None, p99=None)))
        say("result", run=place, result=result)
    turn("ending")
"""


def diary(logs: Path) -> list[tuple[str, str]]:
    """Whose turn it was, and for what, in the order of time."""
    return [tuple(line.split(" ", 1)) for line in (logs / "diary").read_text().splitlines()]


def test_interleaved_backends_take_turns_and_their_rounds_are_compared_in_pairs(folder, tmp_path, monkeypatch, capsys):
    break_vllm(monkeypatch, tmp_path, TAKES_TURNS)
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    arguments = [*SMALL, "--model", folder, "--backend", "ONE,TWO", "--engine", "vllm,embedded", "--logs", logs]
    arguments += ["--concurrency", "2,6", "--rounds", "3", "--interleave", "--output", output]
    assert throughput.main([*map(str, arguments)]) == 0, capsys.readouterr().err
    there, back = ("ONE", "TWO"), ("TWO", "ONE")
    load = [(there, "warm-up"), (there, "round 1"), (back, "round 2"), (there, "round 3")]
    wanted = [(there, "starts"), *load, *load, (there, "ending")]
    assert diary(logs) == [(name, stage) for names, stage in wanted for name in names]

    report = json.loads(output.read_text())
    assert report["environment"]["settings"]["interleaved"] is True
    assert report["environment"]["settings"]["gpu_memory_utilization"] == 0.3, "a third of 0.9 for each"
    names = [(result["backend"], result["case"]["concurrency"]) for result in report["results"]]
    assert names == [(name, n) for name in ("ONE", "TWO", "embedded") for n in (2, 6)]
    for one, two, embedded in zip(*(report["results"][i : i + 2] for i in (0, 2, 4)), strict=True):
        assert set(one["over_first"].values()) == {1.0}
        bounds = {"low": 0.5, "high": 1.5, "lowest": 0.5, "highest": 1.5}
        assert two["over_first"] == {"median": 1.0, **bounds}, "1/2, 4/4, 9/6"
        ratios = sorted(a / b for a, b in zip((1.0, 4.0, 9.0), embedded["rounds_s"], strict=True))
        found = [embedded["over_first"][name] for name in ("lowest", "low", "median", "high", "highest")]
        assert found == pytest.approx([ratios[0], *ratios, ratios[2]])
        assert embedded["num_requests"] == 6 and embedded["total_output_tokens"] == 24
    printed = capsys.readouterr().out
    assert printed.count("Throughput: ") == 6 and printed.count("1.00 (0.50 to 1.50)") == 2


PAIRS = ("--lengths", "30+2,20+4", "--num-prompts", "6", "--rounds", "2")


def test_several_lengths_are_measured_by_one_process_as_each_would_be_alone(folder, tmp_path, capsys):
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    more = ["--shared-prefix", "10", "--seed", "3", "--profile", "--concurrency", "2,6", "--waves", "2"]
    arguments = ["--model", str(folder), "--engine", "embedded", *more]
    assert throughput.main([*PAIRS, *arguments, "--logs", str(logs), "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    cases = [result["case"] for result in report["results"]]
    told = [tuple(case[name] for name in ("input_len", "output_len", "num_prompts", "concurrency")) for case in cases]
    assert told == [(30, 2, 4, 2), (30, 2, 6, 6), (20, 4, 4, 2), (20, 4, 6, 6)]
    assert all((case["shared_prefix"], case["seed"], case["workload"]) == (10, 3, "fixed") for case in cases)
    for result, (prompt, new, used, _) in zip(report["results"], told, strict=True):
        assert result["error"] is None and result["num_requests"] == used
        assert result["requests"]["input_tokens"] == [prompt] * used * 2
        assert result["requests"]["output_tokens"] == [new] * used * 2
        assert result["requests"]["cached_tokens"][0] == result["requests"]["cached_tokens"][used] == 0
        assert result["output_tokens_per_second"] * result["elapsed_time"] == pytest.approx(used * new)
    profiles = [result["profile"] for result in report["results"]]
    assert [profile and (profile["batch"], profile["context"]) for profile in profiles] == [
        (2, 30),
        None,
        (2, 20),
        None,
    ]
    assert len({result["start_s"] for result in report["results"]}) == 1, "the model was loaded once"
    spec = json.loads((logs / "embedded-embedded.spec.json").read_text())
    for workload, (prompt, new) in zip(spec["workloads"], ((30, 2), (20, 4)), strict=True):
        alone = ["--input-len", str(prompt), "--output-len", str(new), "--num-prompts", "6"]
        assert [Workload(**workload)] == throughput.parse_arguments([*alone, *arguments]).workloads
    printed, said = capsys.readouterr()
    lines = said.splitlines()
    assert lines.pop(2).startswith("embedded: model loaded after ")
    rounds = ["warm-up", "round 1 of 2", "round 2 of 2"]
    sizes = ["warm-up of step sizes"] if torch.cuda.is_available() else []
    stages = ["starting", "loading the model", *sizes, *([*rounds, "profiling", *rounds] * 2), "ending"]
    assert lines[: len(stages)] == [f"embedded: {stage}" for stage in stages]
    heads = [f"embedded, {p} + {n} tokens, {load} in flight\n" for p, n, _, load in told]
    assert [printed.count(head) for head in heads] == [1] * 4
    tables = printed[printed.index("\n 30 + 2 tokens") :].split("\n 20 + 4 tokens")
    assert [sum(line.startswith(" embedded") for line in text.splitlines()) for text in tables] == [2, 2]


def test_with_several_lengths_rounds_of_the_same_ones_are_compared(folder, tmp_path, monkeypatch, capsys):
    break_vllm(monkeypatch, tmp_path, TAKES_TURNS)
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    arguments = [*PAIRS, "--model", folder, "--engine", "vllm,embedded", "--backend", "ONE", "--interleave"]
    arguments += ["--concurrency", "2,6", "--logs", logs, "--output", output]
    assert throughput.main([*map(str, arguments)]) == 0, capsys.readouterr().err
    stages = ["starts", *["warm-up", "round 1", "round 2"] * 4, "ending"]
    assert diary(logs) == [("ONE", stage) for stage in stages]
    results = json.loads(output.read_text())["results"]
    order = [(r["backend"], r["case"]["input_len"], r["case"]["concurrency"]) for r in results]
    assert order == [(name, tokens, n) for name in ("ONE", "embedded") for tokens in (30, 20) for n in (2, 6)]
    for i, (one, embedded) in enumerate(zip(results[:4], results[4:], strict=True)):
        assert one["rounds_s"] == ([1.0, 4.0] if i < 2 else [10.0, 40.0])
        assert set(one["over_first"].values()) == {1.0}
        ratios = sorted(a / b for a, b in zip(one["rounds_s"], embedded["rounds_s"], strict=True))
        assert [embedded["over_first"][name] for name in ("lowest", "highest")] == pytest.approx(ratios)
        assert embedded["requests"]["output_tokens"] == [2 if i < 2 else 4] * 12
    printed = capsys.readouterr().out
    assert printed.count("ONE, 30 + 2 tokens, 6 in flight\n") == 1
    shown = ["{median:.2f} ({low:.2f} to {high:.2f})".format(**r["over_first"]) for r in results[4:]]
    tables = printed[printed.index("\n 30 + 2 tokens") :].split("\n 20 + 4 tokens")
    for text, its in zip(tables, (shown[:2], shown[2:]), strict=True):
        rows = [line.rstrip() for line in text.splitlines() if re.match(" (ONE|embedded) ", line)]
        assert [row.split()[:2] for row in rows] == [[name, n] for name in ("ONE", "embedded") for n in ("2", "6")]
        assert all(row.endswith(told) for row, told in zip(rows, ["1.00", "1.00", *its], strict=True))


def test_with_several_lengths_one_that_fails_has_failed_in_all_that_are_left(folder, tmp_path, monkeypatch, capsys):
    break_vllm(monkeypatch, tmp_path)
    output = tmp_path / "out.json"
    arguments = [*PAIRS, "--model", folder, "--concurrency", "2,6", "--output", output]
    assert throughput.main([*map(str, arguments)]) == 1
    results = json.loads(output.read_text())["results"]
    asked = [(r["case"]["input_len"], r["case"]["concurrency"], r["error"] is None) for r in results]
    assert asked == [(30, 2, True), (30, 6, False), (20, 2, False), (20, 6, False)]
    assert len({runs.name_of(result) for result in results}) == 4
    first, second = capsys.readouterr().out.split("\n 20 + 4 tokens")
    assert (first.count("failed"), second.count("failed")) == (1, 2)


def test_tables_of_several_lengths_are_no_wider_than_others():
    """With names and numbers as on a large GPU, after backends have taken turns."""
    report = result_examples.throughput(lengths=((131072, 1024), (512, 512)), loads=(64,))
    over = {"median": 1.31, "low": 1.09, "high": 1.46, "lowest": 1.02, "highest": 1.5}
    for result in report["results"]:
        result["over_first"], result["output_tokens_per_second"] = over, 19616.04
        result["seconds"] |= {"lower_quartile": 1.47, "upper_quartile": 1.81, "median": 1.67}
        result["total_output_tokens"] = 64 * 512
    lines = {}
    for several in (True, False):
        printed = io.StringIO()
        for table in throughput.tables(report["results"], several):
            Console(file=printed, width=throughput.TABLE_WIDTH).print(table)
        lines[several] = [line.rstrip() for line in printed.getvalue().splitlines()]
    titles = [" 131072 + 1024 tokens", " 512 + 512 tokens"]
    assert [line for line in lines[True] if line not in titles] == lines[False] and set(titles) < set(lines[True])
    rows = [line for line in lines[True] if re.match(" (SPARSE_MLA|FLASHMLA_SPARSE|embedded) ", line)]
    assert len(rows) == 6 and all(re.search(r" 19616\.0 +18103\.9 to 22291\.2 ", row) for row in rows)
    assert sum(row.endswith(" 1.31 (1.09 to 1.46)") for row in rows) == 4, "all but the first of each"
    assert max(map(len, lines[True])) <= throughput.TABLE_WIDTH


@pytest.mark.parametrize(
    ("arguments", "longest"),
    [
        (["--lengths", "100+20,64+80"], 144),
        (["--lengths", " 20+4 , 30+2 "], 32),
        (["--lengths", "100+20,64+80", "--max-model-len", "200"], 200),
        # 96 more tokens than the prompt for what is profiled, and one for the prompt itself
        (["--lengths", "20+4,30+2", "--profile", "--concurrency", "1,2"], 30 + 97),
    ],
)
def test_the_longest_request_is_the_longest_of_all_lengths(folder, arguments, longest):
    options = throughput.parse_arguments(["--model", str(folder), *arguments])
    assert options.max_model_len == longest and len(options.workloads) == 2


def test_where_an_interleaved_backend_fails_the_others_go_on_taking_turns(folder, tmp_path, monkeypatch, capsys):
    break_vllm(monkeypatch, tmp_path, TAKES_TURNS)
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    arguments = [*SMALL, "--model", folder, "--backend", "BREAKS,ONE,TWO", "--concurrency", "2,6", "--logs", logs]
    assert throughput.main([*map(str, arguments), "--interleave", "--output", str(output)]) == 1
    three, two = ("BREAKS", "ONE", "TWO"), ("ONE", "TWO")
    load = [(three, "warm-up"), (three, "round 1"), (three[::-1], "round 2")]
    wanted = [(three, "starts"), *load, *load, (two, "ending")]
    assert diary(logs) == [(name, stage) for names, stage in wanted for name in names]
    results = json.loads(output.read_text())["results"]
    why = "MemoryError: out of everything"
    assert [result["error"] for result in results] == [None, why, None, None, None, None]
    assert [result["backend"] for result in results] == [name for name in three for _ in range(2)]
    # the first that has a result is what the others are held to
    assert [result.get("over_first", {}).get("median") for result in results] == [1.0, None, 1.0, 1.0, 0.75, 0.75]
    assert "BREAKS failed: " + why in capsys.readouterr().err


def test_one_after_the_other_nothing_is_paired(folder, tmp_path, monkeypatch):
    break_vllm(monkeypatch, tmp_path, TAKES_TURNS)
    output, logs = tmp_path / "out.json", tmp_path / "logs"
    arguments = [*SMALL, "--model", folder, "--backend", "ONE,TWO", "--logs", logs, "--output", output]
    assert throughput.main([*map(str, arguments)]) == 0
    stages = ["starts", "warm-up", "round 1", "round 2", "ending"]
    assert diary(logs) == [(name, stage) for name in ("ONE", "TWO") for stage in stages]
    report = json.loads(output.read_text())
    assert report["environment"]["settings"]["interleaved"] is False
    assert [result["over_first"] for result in report["results"]] == [None, None]


FAKED = """
import json, sys
from serving_benchmarks.run import throughput
throughput.worker_command = lambda spec, events: [sys.executable, {script!r}, str(spec), str(events)]
sys.exit(throughput.main())
"""


@pytest.mark.usefixtures("children_hear_ctrl_c")
@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_interleaved_ones_all_end_when_they_are_stopped(folder, tmp_path, how, status):
    """While one of them works, and another one waits for its turn."""
    script, output, logs = tmp_path / "fake.py", tmp_path / "out.json", tmp_path / "logs"
    script.write_text(textwrap.dedent(TAKES_TURNS))
    command = [sys.executable, "-c", FAKED.format(script=str(script)), *SMALL, "--model", folder, "--interleave"]
    arguments = ["--backend", "ONE,HANGS", "--concurrency", "2,6", "--logs", logs, "--output", output]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: (logs / "diary").exists() and ("HANGS", "hangs") in diary(logs), 60)
        started = supervisor.descendants(process.pid)
        assert len(started) == 6 and all(map(alive, started)), "two workers, each with a supervisor and its watcher"
        process.send_signal(how)
        assert process.wait(60) == status
        assert wait_until(lambda: not any(map(alive, started)), 60), "processes are left"
    finally:
        process.kill()
    if how != signal.SIGKILL:
        results = json.loads(output.read_text())["results"]
        assert [(r["backend"], r["case"]["concurrency"]) for r in results] == [("ONE", 2), ("HANGS", 2)]
        assert results[1]["over_first"]["median"] == 1.0


@dataclasses.dataclass(eq=False)
class Waits:
    """A worker for `turns.in_turn` that has so many pieces of work, and ends within the last one."""

    rounds: list[int | None]
    had: int = 0

    @property
    def asks(self):
        if self.had == len(self.rounds):
            return None
        number = self.rounds[self.had]
        return {"event": "ready"} if number is None else {"event": "ready", "round": number}

    def give_turn(self, word):
        assert word == turns.GO
        self.had += 1
        return f"piece {self.had - 1}"


@given(
    rounds=st.lists(st.none() | st.integers(0, 9), max_size=12),
    lasts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
)
def test_turns_go_round_by_round_there_and_back_whoever_drops_out(rounds, lasts):
    workers = [Waits(rounds[:last]) for last in lasts]
    had = []
    for worker, stage in turns.in_turn(workers):
        had.append((workers.index(worker), worker.had - 1))
        assert stage == f"piece {worker.had - 1}"
    for piece, number in enumerate(rounds):
        wanted = [index for index, worker in enumerate(workers) if len(worker.rounds) > piece]
        assert [index for index, of in had if of == piece] == (wanted[::-1] if (number or 0) % 2 else wanted)
    assert [piece for _, piece in had] == sorted(piece for _, piece in had), "nobody is ahead of the others"
    assert len(had) == sum(len(worker.rounds) for worker in workers)


@dataclasses.dataclass(eq=False)
class Times:
    """A worker for `turns.in_turn` that has rounds that last so long, at two loads, and asks for one more each time."""

    least: int
    lasts: list[float]
    loads: list[int] = dataclasses.field(default_factory=lambda: [0])

    @property
    def asks(self):
        done = self.loads[-1]
        timed = sum(itertools.islice(itertools.cycle(self.lasts), done))
        return {"round": done, "optional": done >= self.least, "timed_s": timed} if len(self.loads) < 3 else None

    def give_turn(self, word):
        if word == turns.GO:
            self.loads[-1] += 1
        else:
            assert word == turns.ENOUGH and self.asks["optional"]
            self.loads.append(0)
        return word


@given(
    lasts=st.lists(st.lists(st.floats(0.1, 3), min_size=1, max_size=5), min_size=1, max_size=4),
    least=st.integers(2, 5),
    seconds=st.floats(0, 9),
)
def test_rounds_go_on_until_all_have_been_timed_for_long_enough(lasts, least, seconds):
    workers = [Times(least, list(one)) for one in lasts]
    for _ in turns.in_turn(workers, seconds):
        pass
    for worker in workers:
        assert worker.loads == workers[0].loads and worker.loads[0] == worker.loads[1], "ratios are of pairs of rounds"
    done = workers[0].loads[0]

    def timed(rounds):
        return min(sum(itertools.islice(itertools.cycle(worker.lasts), rounds)) for worker in workers)

    assert done >= least and timed(done) >= seconds
    assert done == least or timed(done - 1) < seconds


def test_seconds_add_rounds_to_those_that_are_asked_for(folder, tmp_path, capsys):
    output, seconds = tmp_path / "out.json", 0.5
    arguments = [*SMALL, "--model", str(folder), "--engine", "embedded", "--concurrency", "2,6"]
    assert throughput.main([*arguments, "--seconds", str(seconds), "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    assert report["environment"]["settings"]["seconds"] == seconds
    for result in report["results"]:
        rounds = result["rounds_s"]
        assert sum(rounds) >= seconds and (len(rounds) == 2 or sum(rounds[:-1]) < seconds)
        assert result["seconds"]["turns"] == len(rounds) == result["requests"]["round"][-1] + 1


ROUNDS = st.lists(st.tuples(*[st.floats(0.01, 100)] * 3), min_size=2, max_size=20)


@given(ROUNDS)
def test_a_machine_that_slows_down_changes_nothing_of_what_rounds_say_in_pairs(rounds):
    first, other, slow = zip(*rounds, strict=True)
    plain = runs.over_first({"rounds_s": first}, {"rounds_s": other})
    slowed = [{"rounds_s": [a * b for a, b in zip(seconds, slow, strict=True)]} for seconds in (first, other)]
    assert runs.over_first(*slowed) == pytest.approx(plain)
    assert plain["lowest"] <= plain["low"] <= plain["median"] <= plain["high"] <= plain["highest"]
    assert len(rounds) > runs.ALL_BETWEEN or (plain["low"], plain["high"]) == (plain["lowest"], plain["highest"])
    back = runs.over_first({"rounds_s": other}, {"rounds_s": first})
    assert back["lowest"] == pytest.approx(1 / plain["highest"])
    assert back["highest"] == pytest.approx(1 / plain["lowest"])
    assert (back["low"], back["high"]) == pytest.approx((1 / plain["high"], 1 / plain["low"]))


def test_of_more_rounds_than_that_not_all_lie_within_the_interval():
    for rounds, ends in ((runs.ALL_BETWEEN, 0), (runs.ALL_BETWEEN + 1, 1)):
        assert latency.percentile_bounds(range(rounds), 50) == (ends, rounds - 1 - ends)


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

    def compiled(self):
        return None

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


class Told:
    """Turns whenever they are asked for, which are noted."""

    def __init__(self, told: list[int | str]):
        self.told = told

    def readline(self) -> str:
        self.told.append("turn")
        return "go\n"


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (20, 9), (None, 9)])
def test_no_more_requests_are_in_flight_than_allowed(concurrency, most):
    engine, told = OneTokenAStep(), []
    workload = Workload([[1]] * 9, [1, 2, 3, 1, 5, 1, 1, 2, 2])
    done = in_flight.run(engine, workload, concurrency, told.append)
    assert engine.most == most and told[-1] == 9 and told == sorted(told)
    assert done.requests["output_tokens"] == workload.output_lens
    assert done.requests["ttft_s"] == done.requests["tpot_s"] == [None] * 9 and done.peak_usage is None
    assert all(0 < e2e <= done.elapsed for e2e in done.requests["e2e_s"])
    for value in done.requests["e2e_s"] + done.requests["start_s"]:
        assert value == round(value, 9), "files of thousands of requests have no digits that no clock knows"


@pytest.mark.parametrize(
    ("warmup", "before"),
    [(None, ["forget", 40, 2, 33]), (2, ["forget", 32, 2]), (9, ["forget", 32, 2, 32]), (0, [])],
)
def test_a_load_is_run_before_it_is_timed_as_it_is_unless_less_is_asked_for(warmup, before):
    engine, told = OneTokenAStep(), io.StringIO()
    workload = Workload([[1]] * 3, [40, 2, 33])
    found = throughput_worker.measure(engine, workload, 3, 2, warmup, throughput_worker.Events(told, Told(engine.told)))
    assert engine.told == [*(["turn", *before] if before else []), *["turn", "forget", 40, 2, 33] * 2]
    assert found["requests"]["round"] == [0] * 3 + [1] * 3 and found["total_output_tokens"] == 75
    events = [json.loads(line) for line in told.getvalue().splitlines()]
    stages = [*(["warm-up"] if before else []), "round 1 of 2", "round 2 of 2"]
    assert list(dict.fromkeys(event["stage"] for event in events)) == stages
    assert [event["stage"] for event in events if event["event"] == "ready"] == stages
    assert [event["round"] for event in events if event["event"] == "ready" and "round" in event] == [0, 1]


def test_sizes_of_steps_are_warmed_up_one_after_the_other():
    engine, told = OneTokenAStep(), io.StringIO()
    sizes = [Workload([[1]], [2]), Workload([[1], [2, 3], [2]], [1, 4, 3]), Workload([[1, 2]], [5])]
    throughput_worker.warm_sizes(engine, sizes, throughput_worker.Events(told, Told(engine.told)))
    assert engine.told == ["turn", 2, 1, 4, 3, 5] and engine.most == 3
    events = [json.loads(line) for line in told.getvalue().splitlines()]
    assert {event["stage"] for event in events} == {"warm-up of step sizes"}
    done = [event["done"] for event in events if event["event"] == "progress"]
    assert (done[0], done[-1]) == (0, 5) and done == sorted(done)


@pytest.mark.parametrize(
    ("arguments", "most", "in_flight"),
    [
        ((), 6 * 20, 6),
        (("--concurrency", "1,3"), 3 * 20, 3),
        (("--concurrency", "8"), 6 * 20, 6),
        (("--concurrency", "3", "--max-num-seqs", "2"), 2 * 20, 2),
        (("--max-num-batched-tokens", "50"), 50, 6),
        (("--num-prompts", "5000"), throughput.STEP_TOKENS, 5000),
        (("--no-size-warmup",), None, None),
        (("--warmup", "0"), None, None),
        (("--warmup", "1"), 6 * 20, 6),
    ],
)
def test_sizes_of_steps_are_those_that_the_workloads_need(folder, monkeypatch, arguments, most, in_flight):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = throughput.parse_arguments(["--model", str(folder), *SMALL, *arguments])
    sizes = throughput.sizes_of(options)
    assert options.size_warmup is (most is not None) is bool(sizes)
    if sizes:
        *prompts, decode = [requests.prompts[len(requests) > 1 :] for requests in sizes]
        assert sum(map(len, prompts[-1])) == most and len(decode) == in_flight
        assert max(requests.longest for requests in sizes) <= options.max_model_len == 24


@pytest.mark.parametrize(("more", "sizes"), [((), False), (("--size-warmup",), True)])
def test_without_a_gpu_sizes_of_steps_are_warmed_up_only_if_that_is_asked_for(folder, monkeypatch, more, sizes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = throughput.parse_arguments(["--model", str(folder), *SMALL, *more])
    assert options.size_warmup is sizes is bool(throughput.sizes_of(options))


def test_a_worker_ends_when_nobody_gives_turns_any_more():
    engine = OneTokenAStep()
    with pytest.raises(RuntimeError, match="nobody gives turns any more"):
        events = throughput_worker.Events(io.StringIO(), io.StringIO("go\n"))
        throughput_worker.measure(engine, Workload([[1]], [3]), None, 2, 0, events)
    assert engine.told == ["forget", 3], "the first round, for which there was a turn"


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


def test_a_profile_shows_attention_however_short_it_is():
    names = [f"kernel {i}" for i in range(100)]
    found = kernel_times.table([(name, 1, 10.0) for name in names] + [(ATTENTION[0], 3, 0.5)])
    assert [row["calls"] for row in found["kernels"] if row["attention"]] == [3]
    lines = kernel_times.lines({**found, "steps": 1, "batch": 2, "context": 5, "wall_s": 1.0}, most=4)
    assert sum(line.endswith(tuple(names)) for line in lines) == 4 and ATTENTION[0][:100] in lines[-1]


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
        (["--lengths", "20+4", "--input-len", "20"], "--lengths can't be given with --input-len"),
        (["--lengths", "20+4", "--output-len", "128"], "--lengths can't be given with --output-len"),
        (["--lengths", "20+4", "--histogram", "/nope.csv"], "--lengths can't be given with --histogram"),
        (["--lengths", "20+4", "--jsonl", "/nope.jsonl"], "--lengths can't be given with --jsonl"),
        (["--lengths", "20+4,30"], "--lengths: must be tokens from 1 up, such as 4096+64,512+512; got '20+4,30'"),
        (["--lengths", "20+0"], "--lengths: must be tokens from 1 up"),
        (["--lengths", ""], "--lengths: must be tokens from 1 up"),
        (["--lengths", "20+4,30+2,20+4"], "--lengths: must have each pair once; got '20+4,30+2,20+4'"),
        (["--lengths", "40+4,20+4", "--shared-prefix", "30"], "shorter than the shortest prompt, 20 tokens; got 30"),
        (["--lengths", "20+4,500+500"], "requests of 1000 tokens are too long for the model"),
        (["--lengths", "20+4,50+50", "--max-model-len", "60"], "--max-model-len must be 100 or more"),
        (["--jsonl", "/nope.jsonl", "--shared-prefix", "3"], "--shared-prefix can't be given with --jsonl"),
        (["--input-len", "500", "--output-len", "500"], "requests of 1000 tokens are too long for the model"),
        (["--input-len", "50", "--max-model-len", "60"], "--max-model-len must be 178 or more for these prompts"),
        (["--engine", "embedded", "--dtype", "float16"], "--dtype must be bfloat16 or float32"),
        (["--engine", "embedded", "--tensor-parallel-size", "2"], "--tensor-parallel-size must be 1"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization must be more than 0 and at most 1"),
        (
            ["--interleave", "--backend", "A,B", "--gpu-memory-utilization", "0.6", "--input-len", "20"],
            "--gpu-memory-utilization is for each backend with --interleave: 2 can't have 0.6 each",
        ),
        (["--no-compile", "--enforce-eager"], "only one can be given"),
        (["--vllm-args", "[1]"], "--vllm-args: must be an object"),
        (["--seconds", "-1"], "--seconds must be 0 or more; got -1"),
        (["--seconds", "nan"], "--seconds must be 0 or more; got nan"),
        (["--model", "/nope"], "--model: must be a folder with a config.json"),
        (["--logs", __file__, "--input-len", "20"], "--logs must be a folder, or the name of a new one"),
        (["--output", "/proc/nope/x.json", "--input-len", "20"], "--output: "),
    ],
)
def test_wrong_arguments_are_refused(folder, arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        throughput.main(["--model", str(folder), *arguments])
    assert stopped.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "share"),
    [
        (["--backend", "A,B"], None),
        (["--backend", "A,B", "--interleave"], 0.45),
        (["--backend", "A,B", "--interleave", "--kv-cache-memory-bytes", "1000"], 0.45),
        (["--backend", "A,B", "--interleave", "--gpu-memory-utilization", "0.4"], 0.4),
        (
            ["--backend", "A,B", "--interleave", "--gpu-memory-utilization", "0.6", "--kv-cache-memory-bytes", "9"],
            0.6,
        ),
        (["--engine", "vllm,embedded", "--interleave", "--gpu-memory-utilization", "0.6"], 0.6),
        (["--backend", "A", "--interleave"], None),
    ],
)
def test_backends_that_are_there_at_the_same_time_share_the_memory(folder, arguments, share):
    options = throughput.parse_arguments(["--model", str(folder), *SMALL, *arguments])
    assert options.gpu_memory_utilization == share
