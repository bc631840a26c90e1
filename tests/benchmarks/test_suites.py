"""Suites are files: those of the package have cases, wrong ones are refused with the file and the entry."""

import json

import pytest

from serving_benchmarks.__main__ import main
from serving_benchmarks.ops import batches, kernels


def shapes(name: str) -> list[tuple[str, int, int, str]]:
    suite = batches.load_suite(name, kernels.FORMATS)
    return [(c.batch.spec, c.heads, c.topk, c.format) for c in kernels.suite_cases(suite)]


@pytest.mark.parametrize("name", batches.suite_names())
def test_every_suite_of_the_package_has_each_case_once(name):
    cases = shapes(name)
    assert cases and len(set(cases)) == len(cases)


def test_a_users_own_file_is_a_suite(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'peers = false\n[[cases]]\nbatches = ["2q1s1k"]\nheads = [4, 3]\ntopk = [7, 9]\nformats = ["bf16"]\n'
        '[[cases]]\nbatches = ["q5"]\nheads = [1]\n'
    )
    per_format = [("2q1s1k", heads, topk, "bf16") for topk in (7, 9) for heads in (4, 3)]
    assert shapes(str(path)) == [("q5", 1, 2048, "fp8_ds_mla"), *per_format, ("q5", 1, 2048, "bf16")]
    assert not batches.load_suite(str(path), kernels.FORMATS).peers


ENTRY = '[[cases]]\nbatches = ["q1"]\nheads = [1]\n'


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("", None),
        ("cases = 3", None),
        ("a =", None),
        ('name = "x"\n' + ENTRY, None),
        ("peers = 1\n" + ENTRY, None),
        ("description = 1\n" + ENTRY, None),
        ("cases = [3]", 1),
        (ENTRY + "[[cases]]\nheads = [1]", 2),
        (ENTRY + '[[cases]]\nbatches = ["q1"]', 2),
        (ENTRY + "head = [1]", 1),
        ('[[cases]]\nbatches = ["seven"]\nheads = [1]', 1),
        ('[[cases]]\nbatches = "q1"\nheads = [1]', 1),
        ('[[cases]]\nbatches = ["q1"]\nheads = [0]', 1),
        ('[[cases]]\nbatches = ["q1"]\nheads = [257]', 1),
        ('[[cases]]\nbatches = ["q1"]\nheads = []', 1),
        ('[[cases]]\nbatches = ["q1"]\nheads = [true]', 1),
        (ENTRY + "topk = [0]", 1),
        (ENTRY + 'formats = ["fp4"]', 1),
    ],
)
def test_a_wrong_suite_is_refused_with_its_file_and_entry(text, entry, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(batches.SuiteError) as error:
        batches.load_suite(str(path), kernels.FORMATS)
    assert str(path) in str(error.value) and (entry is None or f"entry {entry} " in str(error.value))


@pytest.mark.parametrize("name", ["nope", "nope.toml"])
def test_a_suite_that_is_not_there_is_named(name, capsys):
    assert main(["kernels", "--suite", name]) == 2
    assert name in capsys.readouterr().err


TIMING = {"fastest": 1e-5, "median": 2e-5, "lower_quartile": 1.5e-5, "upper_quartile": 3e-5, "rounds": 5}
MEASURED = {"useful_flops": 1e9, "bytes": 1e8, "floor_seconds": {"math": 1e-5, "memory": 4e-5, "l2": 2e-5}}
MEASURED |= {"seconds": {"ours": TIMING, "plan": TIMING}, "failed": {}, "best_peer": None}


@pytest.mark.parametrize(("suite", "asked_for_peers"), [("headline", True), ("sweep", False)])
def test_the_command_measures_the_cases_of_a_suite(suite, asked_for_peers, tmp_path, monkeypatch):
    """All of the command except what needs a GPU."""
    ran, peers = [], {"flashmla": "vllm 0.23.0", "fa3": "missing: nowhere"}

    def measure(case, caches, loaded, *_):
        ran.append((case.batch.spec, case.heads, case.topk, case.format))
        assert loaded == ({"flashmla"} if asked_for_peers else set())
        return {**MEASURED, "case": {**case.as_dict(), "pattern": "random"}}

    monkeypatch.setattr(kernels.opt, "require_gpu", lambda: None)
    monkeypatch.setattr(kernels.peer_kernels, "load", lambda *_: peers)
    monkeypatch.setattr(kernels, "Caches", lambda tokens: tokens)
    monkeypatch.setattr(kernels, "measure", measure)
    output = tmp_path / "out.json"
    options = ["--suite", suite, "--heads", "16", "--formats", "bf16", "--output", str(output)]
    assert main(["kernels", *options]) == 0
    assert ran == [case for case in shapes(suite) if case[1] == 16 and case[3] == "bf16"]
    report = json.loads(output.read_text())
    assert [result["case"]["batch"] for result in report["results"]] == [batch for batch, *_ in ran]
    assert report["environment"]["benchmark"] == "kernels"
    assert report["environment"]["peers"] == (peers if asked_for_peers else {})


def test_a_suite_without_the_asked_for_heads_is_refused(capsys):
    assert main(["kernels", "--suite", "headline", "--heads", "3"]) == 2
    assert "headline" in capsys.readouterr().err
