"""The benchmark of the indexer's ops: what it counts, what it shows and what it refuses."""

import json

import pytest

from serving_benchmarks.ops import index_ops
from serving_benchmarks.results import compare, report, result_kinds

TIMING = {"fastest": 9e-6, "median": 1e-5, "lower_quartile": 9.5e-6, "upper_quartile": 1.1e-5, "turns": 21}
ENVIRONMENT = {
    "benchmark": "index_ops",
    "date": "2026-11-20T00:00:00+00:00",
    "command": "python -m serving_benchmarks.ops.index_ops --output index_ops.json",
    "commit": "0123456789abcdef",
    "gpus": [{"name": "NVIDIA H200"}],
    "driver": "1.2",
    "torch": {"version": "2.11.0"},
}


def file_of(tmp_path, name, median=1e-5):
    case = {"name": "decode 64 x 4096", "requests": 64, "tokens": 1, "context": 4096, "heads": 64, "topk": 2048}
    seconds = {**TIMING, "median": median, "lower_quartile": median * 0.95, "upper_quartile": median * 1.05}
    results = [
        {"op": "index_scores", "format": "fp8", "case": case, "flops": 4 * 10**9, "bytes": 35 * 10**6},
        {"op": "select_top", "format": "fp8", "case": case, "flops": None, "bytes": 10**6},
    ]
    path = tmp_path / name
    results = [{**result, "seconds": seconds} for result in results]
    path.write_text(json.dumps({"environment": ENVIRONMENT, "results": results}))
    return path


def test_a_token_sees_the_keys_before_it_and_its_own():
    assert index_ops.Case(64, 1, 4096, 64, 2048).seen == 64 * 4096
    assert index_ops.Case(1, 5, 5, 64, 2048).seen == 1 + 2 + 3 + 4 + 5
    assert index_ops.Case(2, 3, 10, 64, 2048).seen == 2 * (8 + 9 + 10)


def test_results_are_shown_as_rates(tmp_path):
    text = index_ops.markdown(json.loads(file_of(tmp_path, "a.json").read_text()))
    scores, chosen = text.splitlines()[2:4]
    assert scores == "| index_scores | decode 64 x 4096 | 64 | fp8 | 10.0 | 9.5 to 10.5 | 400 | 3.50 |"
    assert chosen == "| select_top | decode 64 x 4096 | 64 | fp8 | 10.0 | 9.5 to 10.5 | - | 0.10 |"
    assert "Medians of 21 replays" in text and "NVIDIA H200" in text


def test_its_files_are_reported_and_compared(tmp_path, capsys):
    old, new = file_of(tmp_path, "a.json"), file_of(tmp_path, "b.json", median=2e-5)
    section = report.section_of(result_kinds.load(old), "x")
    assert "select_top" in str(section)
    assert compare.main([str(old), str(new), "--limit", "5%"]) == 1
    assert "index_scores, decode 64 x 4096, 64 heads, fp8" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--decode", "64"], "'64' is not REQUESTSxCONTEXT"),
        (["--decode", "0x4096"], "'0x4096' is not REQUESTSxCONTEXT"),
        (["--heads", "129"], "--heads must be 128 or fewer"),
        (["--prefill", "0"], "--prefill, --heads and --topk must be 1 or more"),
        (["--rounds", "1"], "--rounds 2 or more"),
        (["--output", "/proc/nope/x.json"], "--output: "),
    ],
)
def test_wrong_arguments_are_explained(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        index_ops.main(arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err
