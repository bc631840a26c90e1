"""The benchmarks of ops/ that run on a CPU: a small case of each, through the door."""

import json
import subprocess
import sys

from serving_benchmarks.ops import cpu, kv_blocks

TRACE = kv_blocks.Trace("short", 40, 4, 600, 200, 60, running=8, blocks=40)


def run(*arguments):
    command = [sys.executable, "-m", "serving_benchmarks", "ops", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


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


def test_the_bookkeeping_is_measured(tmp_path):
    output = tmp_path / "out.json"
    done = run("kv-blocks", "--requests", "5", "--rounds", "2", "--output", output)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert report["environment"]["benchmark"] == "kv_blocks"
    assert [r["trace"]["name"] for r in report["results"]] == ["chat", "long prompts", "short of blocks"]
    for result in report["results"]:
        timing = result["seconds"]["ours"]
        assert timing["rounds"] == 2 and result["bookkeeping_bytes"]["ours"] > 0
        assert result["operations_a_second"]["ours"] == result["operations"] / timing["median"]
    assert kv_blocks.markdown(report).count("\n|") == 4


def test_attention_on_a_cpu_is_measured_and_checked(tmp_path):
    output = tmp_path / "out.json"
    case = ["--heads", "3", "--contexts", "32", "--batches", "2", "--threads", "2", "--rounds", "2", "--burst", "0"]
    done = run("cpu", *case, "--output", output)
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert report["environment"]["benchmark"] == "cpu"
    small = [result for result in report["results"] if result["case"]["heads"] == 3]
    assert {result["case"]["format"] for result in small} == set(cpu.FORMATS)
    for result in small:
        assert result["seconds"]["ours"]["median"] > 0 and result["largest_difference"]["ours"] < cpu.TOLERANCE
        assert result["useful_flops"] == 2 * 2 * 3 * 32 * (576 + 512)
    assert cpu.markdown(report).count("\n|") == 1 + len(report["results"])
