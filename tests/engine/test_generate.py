"""`mla-backend generate`, from the command line to the last result."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import engine_models
from commands import status_of
from mla_backend import cli
from mla_backend.engine import Engine, SamplingParams
from mla_backend.generate import run

ROOT = Path(__file__).parent.parent.parent
SMALL = ["--memory", "4M", "--device", "cpu"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return engine_models.save_small(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


status = partial(status_of, "generate", program=cli.main)


def generate(*arguments) -> int:
    return status(*arguments, *SMALL)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(*arguments, terminal: int = subprocess.PIPE, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "mla_backend", "generate", *map(str, arguments), *SMALL]
    how = dict(stdout=terminal, stderr=terminal, text=True, cwd=ROOT)
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **how, **more)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    """Until a process has written so many results."""
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def test_prompts_from_arguments_are_answered_on_standard_output(model, capfd):
    assert generate(model, "--max-tokens", 5, "--ignore-eos", "abc", "xyz") == 0
    out, err = capfd.readouterr()
    lines = {line["id"]: line for line in map(json.loads, out.splitlines())}
    prompts, params = ["abc", "xyz"], SamplingParams(max_tokens=5, ignore_eos=True)
    want = Engine(model, device="cpu", memory=2**22).generate(prompts, params)
    for id, prompt, result in zip("12", prompts, want, strict=True):
        assert lines[id]["prompt"] == prompt and lines[id]["completions"][0]["text"] == result.text
        assert lines[id]["completions"][0]["tokens"] == result.tokens
    assert "2 of 2 requests, 10 tokens in" in err


def seen_on_a_terminal(*arguments) -> list[str]:
    """The lines that are there in the end, of both streams: what follows the last return to a line's beginning."""
    ours, theirs = pty.openpty()
    process, seen = start(*arguments, terminal=theirs), b""
    os.close(theirs)
    try:
        while part := os.read(ours, 1 << 16):
            seen += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    return [line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n")]


def test_results_are_not_written_into_the_progress_bar(model):
    how = ("--max-tokens", 3, "--ignore-eos", "--most-running", 1)
    lines = seen_on_a_terminal(model, "abc", "xyz", *how, "--output-format", "jsonl")
    assert [json.loads(line)["id"] for line in lines if "{" in line] == ["1", "2"]


def test_on_a_terminal_results_are_text(model):
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    text = Engine(model, device="cpu", memory=2**22).generate(["abc"], params)[0].text
    lines = seen_on_a_terminal(model, "abc", "--max-tokens", 5, "--ignore-eos")
    assert repr(text)[1:-1] in map(str.strip, lines) and not any("{" in line for line in lines)


def test_standard_input_is_read(model, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
    assert generate(model, "--max-tokens", 2, "--chat") == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert sorted(line["messages"][0]["content"] for line in lines) == ["one", "two"]


def test_bad_lines_are_reported_by_number_and_the_rest_is_generated(model, tmp_path, capfd):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = {"custom_id": "good", "method": "POST", "url": "/v1/chat/completions"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    lines = [{**good, "body": body}, {"prompt": "x" * 5000, "id": "long"}, {"prompt": "y", "temperature": -3}]
    lines = [json.dumps(line) for line in (*lines, {"prompt": "fine", "id": "last"})]
    source.write_text("\n".join([lines[0], '{"prompt": ', *lines[1:]]))
    assert generate(model, "--input", source, "--output", output, "--max-tokens", 3) == 1
    assert {line.get("custom_id", line["id"]) for line in lines_of(output)} == {"good", "last"}
    err = capfd.readouterr().err
    assert "line 2: not JSON" in err and "line 4: temperature must be 0 or more; got -3" in err
    assert "line 3: prompt must be" in err and "2 of 5 requests" in err


def test_all_sampling_options_arrive(model, tmp_path):
    output = tmp_path / "out.jsonl"
    options = "--temperature 0.9 --top-k 20 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --seed 3 --samples 2"
    assert generate(model, "abc", "--output", output, "--max-tokens", 6, "--logprobs", 2, *options.split()) == 0
    params = dict(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=3, n=2)
    params = SamplingParams(max_tokens=6, logprobs=2, **params)
    want = Engine(model, device="cpu", memory=2**22).generate(["abc"], params)[0]
    got = lines_of(output)[0]["completions"]
    assert [completion["tokens"] for completion in got] == [completion.tokens for completion in want.completions]
    assert len(got[0]["logprobs"][0]["top_logprobs"]) == 2


def test_resume_needs_the_same_requests(model, tmp_path, capfd):
    output = tmp_path / "out.jsonl"
    assert generate(model, "abc", "--output", output, "--max-tokens", 2) == 0
    before = output.read_text()
    assert generate(model, "abc", "--output", output, "--max-tokens", 2) == 2
    assert "has something in it; --resume goes on with it" in capfd.readouterr().err
    assert generate(model, "abd", "--output", output, "--max-tokens", 2, "--resume") == 2
    assert "request '1' has a result of others" in capfd.readouterr().err
    assert generate(model, "abc", "--output", output, "--max-tokens", 2, "--resume") == 0
    assert "1 of 1 requests are finished already" in capfd.readouterr().err
    assert output.read_text() == before


def test_a_request_that_ends_with_an_error_is_told_and_asked_again(model, tmp_path, capfd, monkeypatch):
    """The model has no logits after a "~", until it is mended."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    batch = {"custom_id": "batch", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "a~"}}
    source.write_text("\n".join(map(json.dumps, ({"prompt": "abc"}, {"prompt": "b~c", "id": "plain"}, batch))))
    arguments = (model, "--input", source, "--output", output, "--max-tokens", 2, "--ignore-eos")
    whole = run._engine

    def spoilt(options):
        engine = whole(options)
        token = engine.tokenizer.encode("~")[-1]
        engine.model.model.embed_tokens.weight.data[token] = torch.nan
        return engine

    monkeypatch.setattr(run, "_engine", spoilt)
    assert generate(*arguments) == 1
    said = capfd.readouterr().err
    assert "line 2: logits are not finite" in said and "line 3: logits" in said and "1 of 3 requests" in said
    assert len(lines_of(output)) == 3
    monkeypatch.undo()
    assert generate(*arguments, "--resume") == 0
    assert "1 of 3 requests are finished already" in capfd.readouterr().err
    lines = {line["id"]: line for line in lines_of(output)}
    assert lines["plain"]["completions"][0]["finish_reason"] == "length"
    assert lines["batch"]["response"]["body"]["choices"][0]["finish_reason"] == "length"
    assert generate(*arguments, "--resume") == 0 and len(lines_of(output)) == 5


def test_kill_9_and_resume_lose_and_repeat_nothing(model, tmp_path):
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("\n".join(f"prompt {i}" for i in range(40)))
    arguments = (model, "--input", source, "--output", output, "--max-tokens", 20, "--ignore-eos", "--most-running", 4)
    killed = start(*arguments)
    wait_for_lines(output, 5, killed)
    killed.kill()
    killed.communicate()
    finished = output.read_text()
    assert 5 <= finished.count("\n") < 40
    output.write_text(finished + '{"id": "7", "prompt": "torn')  # as if killed in the middle of a line
    assert generate(*arguments, "--resume") == 0
    assert output.read_text().startswith(finished)
    lines = lines_of(output)
    assert sorted(int(line["id"]) for line in lines) == list(range(1, 41))
    assert all(line["prompt"] == f"prompt {int(line['id']) - 1}" for line in lines)
    assert all(len(line["completions"][0]["tokens"]) == 20 for line in lines)


def test_ctrl_c_ends_cleanly(model, tmp_path):
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("\n".join(f"prompt {i}" for i in range(500)))
    how = ("--max-tokens", 20, "--ignore-eos", "--most-running", 4)
    process = start(model, "--input", source, "--output", output, *how)
    wait_for_lines(output, 3, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err and "interrupted; with --output, --resume goes on from here" in err
    lines = lines_of(output)  # whole lines all
    assert 3 <= len(lines) < 500 and f"{len(lines)} of 500 requests" in err


def test_a_reader_that_has_enough_ends_it_quietly(model):
    process = start(model, "--max-tokens", "30", "--most-running", "2", stdin=subprocess.PIPE)
    process.stdin.write("\n".join(f"prompt {i}" for i in range(300)))
    process.stdin.close()
    process.stdin = None
    json.loads(process.stdout.readline())
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate()
    assert process.returncode == 1 and "Traceback" not in err and "BrokenPipe" not in err


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["/no/such/model", "x"], "MODEL must be a folder with a config.json; /no/such/model has none"),
        (["MODEL", ""], "PROMPT must not be empty"),
        (["MODEL", "x", "--input", "y"], "PROMPT must be left out with --input; got both"),
        (["MODEL", "--input", "/no/such/file"], "--input can't be read: "),
        (["MODEL", "--input", "/dev/null"], "--input must have one prompt or more; got none"),
        (["MODEL", "x", "--output", "/proc/no/out"], "--output can't be written: "),
        (["MODEL", "x", "--output", "out", "--output-format", "text"], "--output-format must be jsonl with --output"),
        (["MODEL", "x", "--resume"], "--resume needs --output, a file to go on with"),
        (["MODEL", "x", "--max-tokens", "0"], "--max-tokens must be 1 or more; got 0"),
        (["MODEL", "x", "--stop", ""], "--stop must be texts that aren't empty"),
        (["MODEL", "x", "--memory", "lots"], "argument --memory: must be a size such as 4G, 512M or 8GiB; got 'lots'"),
        (["MODEL", "x", "--memory", "1K"], "--memory must be 100864 bytes (98.5 KiB), a block, or more; got 1024"),
        (["MODEL", "x", "--kv-cache", "fp4"], "argument --kv-cache: invalid choice: 'fp4'"),
        (["MODEL", "x", "--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_wrong_arguments_are_named(model, arguments, error, capfd):
    assert status(*(model if text == "MODEL" else text for text in arguments)) == 2
    captured = capfd.readouterr()
    assert error in captured.err and "Traceback" not in captured.err and captured.out == ""


@pytest.mark.parametrize(
    "spoil, error",
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json must be JSON"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'), "model_type must be one of"),
        (lambda folder: (folder / "model.safetensors.index.json").unlink(), "MODEL must have model.safetensors.index"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "MODEL must have a tokenizer that transformers"),
    ],
)
def test_a_spoilt_checkpoint_is_explained(tmp_path, spoil, error, model, capfd):
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)
    assert generate(tmp_path, "x") == 2
    err = capfd.readouterr().err
    assert error in err and "Traceback" not in err
