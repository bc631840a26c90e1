"""The benchmark of the engine measures what it says, and refuses what is wrong."""

import json
import subprocess
import sys

import pytest

import engine_models  # noqa: F401  (skips without transformers' models)
from serving_benchmarks.ops import cpu_generate


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["cpu_generate", *map(str, arguments)])
    return cpu_generate.main()


def test_a_small_case_is_measured_and_shown(tmp_path, monkeypatch, capsys):
    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "vocab_size"):
        monkeypatch.setitem(cpu_generate.SHAPE, name, 64)
    monkeypatch.setitem(cpu_generate.SHAPE, "num_hidden_layers", 2)
    output = tmp_path / "out.json"
    with engine_models.one_thread():
        small = ("--batches", 2, "--contexts", 8, "--new-tokens", 3, "--heads", 2, "--rounds", 2, "--threads", 1)
        assert run(monkeypatch, *small, "--output", output) == 0
    report = json.loads(output.read_text())
    (result,) = report["results"]
    assert result["seconds"]["ours"]["median"] > 0 and result["speed_up"] > 0
    assert report["environment"]["model"]["hidden_size"] == 64
    assert run(monkeypatch, "--markdown", output) == 0
    assert capsys.readouterr().out.count("\n|") >= 3


def test_both_get_the_same_prompts():
    prompts = cpu_generate.Prompts(5, 40)
    assert prompts.of(3) == prompts.of(3) != prompts.of(4)
    assert all(20 <= len(prompt) <= 40 for prompt in prompts.of(3))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--batches", "0"], "--batches must be 1 or more"),
        (["--contexts", "1"], "--contexts must be 2 or more"),
        (["--new-tokens", "0"], "--new-tokens must be 1 or more"),
        (["--rounds", "1"], "--rounds must be 2 or more"),
        (["--markdown", "/nope.json"], "/nope.json is no result file"),
        (["--output", "/proc/nope/x.json"], "--output: "),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_it_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "serving_benchmarks.ops.cpu_generate", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "--peer-attention" in done.stdout
