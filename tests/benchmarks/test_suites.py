"""Suites are files: those of the package are what the README was measured with, wrong ones are explained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from serving_benchmarks.ops import kernels, suite_files

ROOT = Path(__file__).parent.parent.parent
needs_sources = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="needs the source tree")


def shapes(name: str) -> list[tuple[str, int, int, str]]:
    return [
        (c.batch.spec, c.heads, c.topk, c.format) for c in kernels.suite_cases(suite_files.load(name, kernels.FORMATS))
    ]


@needs_sources
@pytest.mark.parametrize(("suite", "file"), [("headline", "kernels.json"), ("sweep", "sweep.json")])
def test_a_suite_is_what_its_committed_results_were_measured_with(suite, file):
    measured = [r["case"] for r in json.loads((ROOT / "results" / file).read_text())["results"]]
    assert shapes(suite) == [(c["batch"], c["heads"], c["topk"], c["format"]) for c in measured]


def test_every_suite_of_the_package_has_cases_once_and_says_what_it_shows():
    assert {"headline", "sweep", "decode_by_heads", "decode_by_batch", "prefill_by_context"} <= set(suite_files.names())
    assert {"small_batches", "formats"} <= set(suite_files.names())
    for name in suite_files.names():
        cases = shapes(name)
        assert cases and len(set(cases)) == len(cases), name
        assert suite_files.load(name, kernels.FORMATS).description, name


def test_suites_measure_what_their_names_say():
    assert len({heads for _, heads, _, _ in shapes("decode_by_heads")}) == 5
    assert len({batch for batch, *_ in shapes("decode_by_batch")}) == 10
    assert all(not c.decode for c in kernels.suite_cases(suite_files.load("prefill_by_context", kernels.FORMATS)))
    assert all(c.batch.tokens <= 8 for c in kernels.suite_cases(suite_files.load("small_batches", kernels.FORMATS)))
    per_format = [[case[:3] for case in shapes("formats") if case[3] == fmt] for fmt in kernels.FORMATS]
    assert per_format[0] == per_format[1]
    assert [suite_files.load(name, kernels.FORMATS).peers for name in ("headline", "sweep")] == [True, False]


def test_a_users_own_file_is_a_suite(tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text(
        'peers = false\n[[cases]]\nbatches = ["2q1s1k"]\nheads = [4, 3]\ntopk = [7, 9]\nformats = ["bf16"]\n'
        '[[cases]]\nbatches = ["q5"]\nheads = [1]\n'
    )
    assert shapes(str(path)) == [
        ("q5", 1, 2048, "fp8_ds_mla"),
        ("2q1s1k", 4, 7, "bf16"),
        ("2q1s1k", 3, 7, "bf16"),
        ("2q1s1k", 4, 9, "bf16"),
        ("2q1s1k", 3, 9, "bf16"),
        ("q5", 1, 2048, "bf16"),
    ]
    options = kernels.parse_arguments(["--suite", str(path), "--heads", "3"])
    assert len(options.cases) == 2 and options.ours_only


ENTRY = '[[cases]]\nbatches = ["q1"]\nheads = [1]\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", " has no [[cases]]"),
        ("cases = 3", " has no [[cases]]"),
        ("cases = [3]", "entry 1 of cases must be a table, got 3"),
        ("a =", " is no TOML: "),
        ('name = "x"\n' + ENTRY, ": 'name' is not one of description, peers, cases"),
        ("peers = 1\n" + ENTRY, ": peers must be true or false, got 1"),
        ("description = 1\n" + ENTRY, ": description must be a text, got 1"),
        (ENTRY + "[[cases]]\nheads = [1]", ", entry 2 of cases has no batches"),
        (ENTRY + '[[cases]]\nbatches = ["q1"]', ", entry 2 of cases has no heads"),
        (ENTRY + "head = [1]", ", entry 1 of cases: 'head' is not one of batches, heads, topk, formats"),
        ('[[cases]]\nbatches = ["seven"]\nheads = [1]', ", entry 1 of cases: batches: 'seven' is no batch"),
        ('[[cases]]\nbatches = "q1"\nheads = [1]', ", entry 1 of cases: batches must be a list of texts, got 'q1'"),
        ('[[cases]]\nbatches = ["q1"]\nheads = [0]', ", entry 1 of cases: heads must be 1 to 256, got [0]"),
        ('[[cases]]\nbatches = ["q1"]\nheads = [257]', ", entry 1 of cases: heads must be 1 to 256, got [257]"),
        (
            '[[cases]]\nbatches = ["q1"]\nheads = []',
            ", entry 1 of cases: heads must be a list of whole numbers, got []",
        ),
        ('[[cases]]\nbatches = ["q1"]\nheads = [true]', ", entry 1 of cases: heads must be a list of whole numbers"),
        (ENTRY + "topk = [0]", ", entry 1 of cases: topk must be 1 or more, got [0]"),
        (ENTRY + 'formats = ["fp4"]', ", entry 1 of cases: formats: 'fp4' is not one of fp8_ds_mla, bf16"),
    ],
)
def test_a_wrong_suite_is_explained_with_its_file_and_entry(text, told, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        kernels.main(["--suite", str(path)])
    message = capsys.readouterr().err
    assert stopped.value.code == 2 and f"--suite: {path}" in message and told in message


@pytest.mark.parametrize(("name", "told"), [("nope", "no suite is called 'nope'"), ("nope.toml", "nope.toml: No such")])
def test_a_suite_that_is_not_there_is_named(name, told):
    with pytest.raises(suite_files.SuiteError, match=told):
        suite_files.load(name, kernels.FORMATS)


@needs_sources
def test_suites_are_packaged(tmp_path):
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    packed = {path.stem for path in (tmp_path / "serving_benchmarks" / "suites").iterdir()}
    assert packed == set(suite_files.names())


@needs_sources
@pytest.mark.parametrize(("suite", "asked_for_peers"), [("headline", True), ("sweep", False)])
def test_a_suite_decides_whether_peers_are_loaded(suite, asked_for_peers, tmp_path, monkeypatch):
    """The whole program but for what needs a GPU, up to a file that the other programs read."""
    measured = json.loads((ROOT / "results" / "kernels.json").read_text())["results"][0]
    loaded, ran = [], []

    def load(*_):
        loaded.append(suite)
        return {"flashmla": "vllm 0.23.0"}

    def measure(case, *_):
        ran.append(case)
        return {**measured, "case": {**case.as_dict(), "pattern": "random"}}

    monkeypatch.setattr(kernels.environment, "why_no_gpu", lambda: None)
    monkeypatch.setattr(kernels.peer_kernels, "load", load)
    monkeypatch.setattr(kernels, "Caches", lambda tokens: tokens)
    monkeypatch.setattr(kernels, "measure", measure)
    output = tmp_path / "out.json"
    assert kernels.main(["--suite", suite, "--heads", "16", "--formats", "bf16", "--output", str(output)]) == 0
    assert bool(loaded) == asked_for_peers
    wanted = [case for case in shapes(suite) if case[1] == 16 and case[3] == "bf16"]
    assert [(c.batch.spec, c.heads, c.topk, c.format) for c in ran] == wanted
    report = json.loads(output.read_text())
    assert [result["case"]["batch"] for result in report["results"]] == [batch for batch, *_ in wanted]
    assert report["environment"]["peers"] == ({"flashmla": "vllm 0.23.0"} if asked_for_peers else {})
