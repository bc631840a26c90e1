"""The programs that prove things under vLLM, as far as they can be tried without it."""

import argparse
import json
import math
import multiprocessing
import os
import queue
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from serving_benchmarks.run.compare_backends import Candidate, Workload, is_within_noise, line, summary  # noqa: E402
from serving_benchmarks.run.isolated import Failed, Isolated  # noqa: E402
from serving_benchmarks.run.mtp_checkpoint import add_mtp_layer  # noqa: E402
from serving_benchmarks.run.sessions import Generated  # noqa: E402

from examples.recall.accuracy import CHECKPOINT  # noqa: E402
from mla_backend.engine import load_model  # noqa: E402
from serving_benchmarks.models import models  # noqa: E402
from serving_benchmarks.run import (
    compare_backends,  # noqa: E402
    mtp_checkpoint,  # noqa: E402
    recall_answers,  # noqa: E402
)
from serving_benchmarks.run.processes import wait_until  # noqa: E402


def is_running(*command: str) -> bool:
    """Whether any process has this command line and has not ended."""
    wanted = "\0".join([*command, ""])
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text() == wanted:
                return True
        except OSError:
            continue
    return False


def test_what_is_isolated_answers_and_says_why_it_does_not(tmp_path):
    log = tmp_path / "log"
    with Isolated(queue.Queue, {"maxsize": 1}, log=log) as process:
        process.call("put", item=[1, 2])
        assert process.call("get") == [1, 2]
        with pytest.raises(Failed, match="get_nowait: Empty"):
            process.call("get_nowait")
        assert "Empty" in log.read_text()
        process.call("put", item=3)
        assert process.call("get") == 3, "it goes on after an error"
        with pytest.raises(Failed, match="get took more than 0 s"):
            process.call("get", seconds=0.3)
    with pytest.raises(Failed, match="starting: TypeError"):
        Isolated(queue.Queue, {"size": 1}, log=log)
    why = "E1123 12:00:00.5 31 core.py:12] ValueError: no memory left"
    log.write_text(f"INFO fine\n{why}\nRuntimeError: See root cause above\n")
    with pytest.raises(Failed, match="ended by itself; .*no memory left"):
        Isolated(os._exit, {"status": 3}, log=log)


def test_what_is_isolated_takes_its_processes_with_it(tmp_path):
    command = ["sleep", f"600.{os.getpid()}"]
    with Isolated(subprocess.Popen, {"args": command}, log=tmp_path / "log") as process:
        assert wait_until(lambda: is_running(*command), 20)
        with pytest.raises(Failed):
            process.call("wait", seconds=0.1)
        assert wait_until(lambda: not is_running(*command), 20)


def test_what_is_isolated_ends_with_whoever_is_stopped_while_it_starts(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Isolated, "_answer", stop)
    before = set(multiprocessing.active_children())
    with pytest.raises(KeyboardInterrupt):
        Isolated(queue.Queue, {}, log=tmp_path / "log")
    assert set(multiprocessing.active_children()) <= before


def test_whoever_stops_the_questions_keeps_the_answers_so_far(tmp_path, monkeypatch, capsys):
    def ask(name, asked, *_):
        if name == "vllm":
            os.kill(os.getpid(), signal.SIGTERM)
        return {"way": name, "cache": "fp8", "error": None, "asked": 1, "right": 1, "drafted": 0}, None

    monkeypatch.setattr(recall_answers, "ask", ask)
    output = tmp_path / "recall.json"
    assert recall_answers.main(["--ways", "embedded", "vllm", "--questions", "20", "--output", str(output)]) == 143
    assert [entry["way"] for entry in json.loads(output.read_text())["results"]] == ["embedded"]
    assert recall_answers.main(["--ways", "vllm", "--questions", "20", "--output", str(tmp_path / "none")]) == 143
    assert not (tmp_path / "none").exists() and "embedded: 1 of 1 right" in capsys.readouterr().out


def test_whoever_stops_a_comparison_keeps_the_workloads_so_far(tmp_path, monkeypatch):
    def measure(self, workload, progress):
        if workload.prompts == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        self.entries.append({"workload": str(workload), "error": None, "finite": True})

    monkeypatch.setattr(compare_backends.Comparison, "start", lambda *_: None)
    monkeypatch.setattr(compare_backends.Comparison, "measure", measure)
    (tmp_path / "config.json").write_text("{}")
    output = tmp_path / "out.json"
    arguments = ["--workloads", "1x8+1", "2x8+1", "--checkpoint", str(tmp_path), "--output", str(output)]
    assert compare_backends.main(arguments) == 143
    assert [entry["workload"] for entry in json.loads(output.read_text())["results"]] == ["1x8+1"]


def test_workloads_and_candidates_are_read_as_they_are_written():
    assert Workload.parse("16x4096+192") == Workload(16, 4096, 192)
    assert Workload.parse("2x65536+64/1") == Workload(2, 65536, 64, turns=1)
    assert Candidate.parse("SPARSE_MLA") == Candidate("SPARSE_MLA")
    for text in ("A", "A@2", "A+3", "A@2+1"):
        assert str(Candidate.parse(text)) == text
    for parse, text in [(Workload.parse, t) for t in ("16x4096", "0x1+1", "1x1+1/0")] + [(Candidate.parse, "A@0")]:
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            parse(text)
    lengths = [len(text) for text in Workload(5, 100, 1).texts()]
    assert max(lengths) == 100 and min(lengths) >= 75
    assert Workload(5, 100, 1).texts() == Workload(5, 100, 1).texts()


def test_what_differs_by_more_than_noise_is_noticed():
    tokens = [[1, 2, 3, 4], [5, 6, 7, 8]]
    first = Generated(tokens, [[-1.0, -1.0, -1.0, -1.0]] * 2)
    noise = compare_backends.compare(first, Generated(tokens, [[-1.0, -1.02, -1.0, -1.0]] * 2))
    tied = compare_backends.compare(first, Generated([[1, 9, 0, 0], tokens[1]], [[-1.0, -1.01, -7.0, -7.0]] * 2))
    assert tied["prompts_equal"] == 0.5 and tied["tokens_until_first_difference"] == 2.5
    # what follows a token that differs isn't compared in the first prompt; in the second it is
    assert tied["logprob_difference_max"] == pytest.approx(6.0)
    assert not is_within_noise(tied, noise)
    close = compare_backends.compare(
        first, Generated([[1, 9, 0, 0], tokens[1]], [[-1.0, -1.01, -7.0, -7.0], [-1.0] * 4])
    )
    assert is_within_noise(close, noise)
    broken = compare_backends.compare(first, Generated(tokens, [[-1.0, math.nan, -1.0, -1.0]] * 2))
    assert not is_within_noise(broken, noise)


def test_a_summary_has_the_median_step_of_the_timed_turns_and_looks_at_every_logprob():
    turns = [
        Generated([[1, 2]], [[-1.0, -2.0]], prefill_s=9.0, step_s=[9.0, 9.0, 9.0]),
        Generated([[1, 2]], [[-1.0, -2.0]], prefill_s=1.0, step_s=[0.001, 0.002, 0.003]),
        Generated([[1, 2]], [[-1.0, math.inf]], prefill_s=3.0, step_s=[0.002, 0.004, 0.002]),
    ]
    found = summary(turns)
    assert found["turns"] == 2 and found["prefill_s"] == 2.0
    assert found["decode_ms_a_step"]["median"] == pytest.approx(2.0)
    assert found["logprobs_looked_at"] == 6 and not found["finite"]
    entry = {"candidate": "A", "workload": "1x1+2", "error": None, **found}
    assert "NOT ALL FINITE" in line(entry) and "2.000" in line(entry)
    assert summary(turns[:1])["prefill_s"] == 9.0, "a single turn is all there is to time"


def test_answers_are_compared_up_to_their_end():
    end = recall_answers.IDS[recall_answers.EOS]
    margins = [[1.0, 2.0, 0.25, 1.0]]
    found = recall_answers.compare(Generated([[7, end, 1, 2]], [], margins), Generated([[7, end, 3, 2]], [], margins))
    assert (found["answers_equal"], found["texts_equal"], found["margins_where_they_part"]) == (1, 0, [0.25])
    other = recall_answers.compare(Generated([[7, 8, end, 2]], [], margins), Generated([[7, end, 3, 2]], [], margins))
    assert other["answers_equal"] == 0 and other["margins_where_they_part"] == [2.0]
    good = dict(error=None, asked=100, right=99, answers_equal=99)
    assert recall_answers.is_good(good) and not recall_answers.is_good({**good, "answers_equal": 98})
    assert not recall_answers.is_good({**good, "right": 98}) and not recall_answers.is_good({"error": "none came"})


def test_a_way_is_reported_in_a_line():
    entry = dict(way="mtp-1", error=None, asked=2, right=2, drafted=5, accepted=3, tokens=[[1, 2, 3]] * 2)
    same = dict(than="embedded", answers_equal=2, texts_equal=2, margins_where_they_part=[])
    assert recall_answers.line({**entry, **same}) == (
        "mtp-1: 2 of 2 right; 2 answers the same as embedded's; 2 the same in all 3 tokens; 3 of 5 drafts accepted"
    )
    other = {**same, "texts_equal": 1, "margins_where_they_part": [0.25]}
    assert "part where 0.250 (median) to 0.250 apart" in recall_answers.line({**entry, **other})
    assert recall_answers.line({**entry, "error": "none came"}) == "mtp-1: FAILED: none came"


def test_a_layer_that_drafts_leaves_the_checkpoint_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(mtp_checkpoint, "CONTEXTS", 1)  # fitted badly, but soon
    add_mtp_layer(CHECKPOINT, tmp_path)
    layers = json.loads((CHECKPOINT / "config.json").read_text())["num_hidden_layers"]
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    before, after = (load_model(folder).state_dict() for folder in (CHECKPOINT, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        added = [name for name in file.keys() if name.startswith(f"model.layers.{layers}.")]
        assert file.get_tensor(f"model.layers.{layers}.eh_proj.weight").shape == (256, 512)
    assert any(name.endswith("indexer.wq_b.weight") for name in added)


def test_the_checkpoint_of_a_comparison_fits_its_workloads():
    config = compare_backends.checkpoint_config(heads=2, max_positions=5000, hidden_size=64, drafts=True)
    assert (config["num_attention_heads"], config["hidden_size"], config["max_position_embeddings"]) == (2, 64, 5000)
    names = [plan.name for plan in models.tensors(config)]
    layers = {int(name.split(".")[2]) for name in names if name.startswith("model.layers.")}
    assert layers == set(range(compare_backends.LAYERS + 1)), "one drafts"
    assert not any("expert" in name for name in names), "what is compared is attention"
    highest = max(token for text in Workload(5, 100, 1).texts() for token in text)
    assert compare_backends.VOCABULARY * 0.9 < highest < config["vocab_size"]
