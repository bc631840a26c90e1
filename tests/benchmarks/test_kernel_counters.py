"""The program that reads Nsight Compute's counters, as far as it goes without a GPU."""

import json
import stat
from pathlib import Path

import pytest

from serving_benchmarks.ops import kernel_counters, kernels, suite_files
from serving_benchmarks.results import environment

METRICS = [metric for metric, _ in kernel_counters.METRICS.values()]
PRINTED = "\n".join(
    [
        "==PROF== Connected to process 7 (/usr/bin/python3)",
        "==PROF== Disconnected from process 7",
        ",".join(f'"{name}"' for name in ["ID", "Kernel Name", *METRICS]),
        ",".join(f'"{unit}"' for unit in ["", "", "ns", "hz", "%", "%", "%", "%", "%"]),
        '"0","few_heads::attention_kernel<1, 8, 1>(Problem)","53,500","1800000000","56.25","30","59.25","61","4"',
        '"1","many_heads::attention_kernel<1>(AttentionProblem)","2500000","1750000000","36","49","80","35","7"',
    ]
)


def test_counters_are_read_as_ncu_prints_them():
    first, second = kernel_counters.parse_counters(PRINTED)
    assert first == {
        "kernel": "few_heads::attention_kernel<1, 8, 1>",
        "seconds": pytest.approx(53.5e-6),
        "clock_hertz": 1.8e9,
        "issue_slots": pytest.approx(0.5625),
        "tensor_cores": pytest.approx(0.30),
        "shared_memory": pytest.approx(0.5925),
        "l2": pytest.approx(0.61),
        "memory": pytest.approx(0.04),
    }
    assert second["seconds"] == pytest.approx(2.5e-3)


def test_output_without_counters_is_an_error():
    with pytest.raises(ValueError, match="(?s)no table of counters.*ERR_NVGPUCTRPERM"):
        kernel_counters.parse_counters("==ERROR== ERR_NVGPUCTRPERM\n")
    with pytest.raises(ValueError, match="does not know lts__throughput.*: it says None"):
        kernel_counters.parse_counters(PRINTED.replace("lts__throughput", "lts__other"))
    with pytest.raises(ValueError, match="does not know sm__cycles_elapsed.*: it says 'n/a'"):
        kernel_counters.parse_counters(PRINTED.replace("1750000000", "n/a"))


def a_report() -> dict:
    counters = kernel_counters.parse_counters(PRINTED)
    case = {"batch": "128q1s32k", "tokens": 128, "topk": 2048, "format": "fp8_ds_mla", "pattern": "random"}
    return {
        "environment": {
            "gpus": [{"name": "NVIDIA H200"}],
            "commit": "0123456789abcdef",
            "date": "2026-11-22T00:00:00+00:00",
            "command": "python3 -m serving_benchmarks.ops.kernel_counters",
        },
        "results": [
            {"case": {**case, "heads": heads}, "counters": own} for heads, own in zip((8, 64), counters, strict=True)
        ],
    }


def test_a_result_file_is_shown_as_a_table(tmp_path: Path, capsys):
    path = tmp_path / "counters.json"
    path.write_text(json.dumps(a_report()))
    assert kernel_counters.main(["--markdown", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| case | us | GHz | issue slots | tensor cores | shared memory | L2 | memory |"
    assert lines[2] == "| 128q1s32k, h 8, topk 2048, fp8_ds_mla | 53.5 | 1.80 | 56 | 30 | 59 | 61 | 4 |"
    assert lines[3] == "| 128q1s32k, h 64, topk 2048, fp8_ds_mla | 2500 | 1.75 | 36 | 49 | 80 | 35 | 7 |"
    assert "NVIDIA H200" in lines[-1] and "012345678" in lines[-1]


def test_wrong_arguments_say_what_is_wrong(tmp_path: Path, capsys):
    assert kernel_counters.main(["--markdown", str(tmp_path / "none.json")]) == 2
    assert "could not be shown" in capsys.readouterr().err
    for arguments, message in {
        ("--suite", "nope"): "no suite is called 'nope'",
        ("--heads", "7"): "has no such heads",
        ("--formats", "fp16"): "invalid choice: 'fp16'",
        ("--output", str(tmp_path)): "--output:",
    }.items():
        with pytest.raises(SystemExit):
            kernel_counters.main(arguments)
        assert message in capsys.readouterr().err


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch) -> Path:
    """A program in ncu's place, which prints a file and ends as another one says; and a GPU, as far as is asked."""
    printed, status = tmp_path / "printed", tmp_path / "status"
    printed.write_text(PRINTED)
    status.write_text("0")
    program = tmp_path / "ncu"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat {printed}\nexit $(cat {status})\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(kernel_counters, "find_ncu", lambda: str(program))
    monkeypatch.setattr(environment, "why_no_gpu", lambda: None)
    return tmp_path


def test_what_ncu_counts_is_written(fake_ncu: Path, capsys):
    arguments = ["--heads", "8", "--output", str(fake_ncu / "out.json")]  # two cases: one of each format
    assert len(kernels.suite_cases(suite_files.load("headline", kernels.FORMATS))) > 2
    assert kernel_counters.main(arguments) == 0
    given = (fake_ncu / "arguments").read_text()
    assert "--run-cases --heads 8" in given and all(metric in given for metric in METRICS)
    results = json.loads((fake_ncu / "out.json").read_text())["results"]
    assert [result["case"]["format"] for result in results] == ["fp8_ds_mla", "bf16"]
    assert results[1]["counters"]["seconds"] == pytest.approx(2.5e-3)
    assert "128q1s32k, h 8, topk 2048, bf16" in capsys.readouterr().out


def test_failures_of_ncu_are_told(fake_ncu: Path, capsys):
    assert kernel_counters.main(["--heads", "8", "--formats", "bf16"]) == 1
    assert "1 cases made 2 launches" in capsys.readouterr().err
    (fake_ncu / "printed").write_text("==ERROR== ERR_NVGPUCTRPERM")
    assert kernel_counters.main(["--heads", "8"]) == 1
    assert "ERR_NVGPUCTRPERM" in capsys.readouterr().err
    (fake_ncu / "status").write_text("9")
    assert kernel_counters.main(["--heads", "8"]) == 1
    assert "ncu failed" in capsys.readouterr().err


def test_without_a_gpu_or_ncu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(environment, "why_no_gpu", lambda: None)
    monkeypatch.setattr(kernel_counters, "find_ncu", lambda: None)
    assert kernel_counters.main([]) == 2
    assert "ncu is not installed" in capsys.readouterr().err
    monkeypatch.setattr(environment, "why_no_gpu", lambda: "no NVIDIA GPU")
    assert kernel_counters.main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
