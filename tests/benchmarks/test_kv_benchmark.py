"""The benchmark of the cache manager measures what it says, and refuses what is wrong."""

import json
import subprocess
import sys

import pytest

from serving_benchmarks.ops import kv_blocks

TRACE = kv_blocks.Trace("short", 40, 4, 600, 200, 60, running=8, blocks=40)


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "serving_benchmarks.ops.kv_blocks", *arguments], capture_output=True, text=True
    )


def test_a_trace_is_the_same_each_time_and_shares_prefixes():
    prompts, outputs = zip(*TRACE.draw(), strict=True)
    assert TRACE.draw() == list(zip(prompts, outputs, strict=True))
    assert len({tuple(prompt[:100]) for prompt in prompts}) <= TRACE.prefixes
    assert all(15 <= len(output) <= 60 for output in outputs)


def test_all_requests_are_served_and_their_blocks_come_back():
    prompts, outputs = map(list, zip(*TRACE.draw(), strict=True))
    side = kv_blocks.Ours(TRACE, prompts)
    log = kv_blocks.serve(side, TRACE, outputs)
    assert log.finished == 40 and log.preempted > 0 and len(log.admissions) == 40 + log.preempted
    assert 0 < log.counts()["hit_tokens"] < sum(map(len, prompts))
    now = side.manager.statistics()
    assert now.free == TRACE.blocks and now.sequences == 0 and now.hit_tokens == log.counts()["hit_tokens"]


def test_a_small_case_is_measured_and_shown(tmp_path):
    output = tmp_path / "out.json"
    done = run("--requests", "5", "--rounds", "2", "--output", output)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert [r["trace"]["name"] for r in report["results"]] == ["chat", "long prompts", "short of blocks"]
    assert all(r["seconds"]["ours"]["median"] > 0 and r["bookkeeping_bytes"]["ours"] > 0 for r in report["results"])
    assert run("--markdown", output).stdout.count("\n|") == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--requests", "0"], "--requests must be 1 or more"),
        (["--rounds", "1"], "--rounds must be 2 or more"),
        (["--markdown", "/nope.json"], "/nope.json is no result file"),
        (["--output", "/proc/nope/x.json"], "--output: "),
    ],
)
def test_wrong_arguments_are_refused(arguments, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kv_blocks", *arguments])
    with pytest.raises(SystemExit) as stopped:
        kv_blocks.main()
    assert stopped.value.code == 2 and text in capsys.readouterr().err
