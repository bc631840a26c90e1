"""What docs/reports.md shows is what runs."""

import json
import re

import pytest

import result_examples
from serving_benchmarks.ops import batches, kernels
from serving_benchmarks.results import compare, result_kinds

DOCS = result_examples.ROOT / "docs" / "reports.md"
pytestmark = pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")


def examples() -> list[str]:
    marked = r"<!-- example: run by tests/docs/test_reports_docs.py -->\n```\w*\n(.+?)```"
    return re.findall(marked, DOCS.read_text(), re.DOTALL)


def test_the_comparison_says_what_it_says_there(tmp_path, capsys):
    report = result_examples.committed("kernels")
    ours = report["results"][1]["seconds"]["ours"]
    for name in ("fastest", "median", "lower_quartile", "upper_quartile"):
        ours[name] *= 1.12
    (tmp_path / "kernels.json").write_text(json.dumps(report))
    paths = [str(result_examples.COMMITTED["kernels"]), str(tmp_path / "kernels.json")]
    assert compare.main([*paths, "--limit", "5%"]) == 1
    said = capsys.readouterr().out
    assert [line.rstrip() for line in said.splitlines()] == examples()[0].splitlines()


def test_the_suite_is_one(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(examples()[1])
    cases = kernels.suite_cases(batches.load_suite(str(path), kernels.FORMATS))
    assert len(cases) == 2 * 2 + 2


def test_all_suites_and_kinds_are_named():
    text = DOCS.read_text()
    tables = "\n".join(line for line in text.splitlines() if line.startswith("| `"))
    assert {*batches.suite_names(), *result_kinds.TITLES} == set(re.findall(r"`(\w+)`", tables))


def test_the_report_of_all_results_has_as_many_files_as_there_are():
    (said,) = re.findall(r"report\.html: (\d+) result files", DOCS.read_text())
    assert int(said) == len(list((result_examples.ROOT / "results").glob("*.json")))


def test_the_committed_report_and_its_results_are_there_and_small():
    folder = result_examples.ROOT / "docs" / "report_h200"
    page = (folder / "report.md").read_text()
    names = re.findall(r"^- \[.+: (\S+\.json)\]\(#s\d+\)", page, re.MULTILINE)
    results = [result_examples.ROOT / "results" / name.replace("\\", "") for name in names]
    pictures = [folder / name for name in re.findall(r"\]\((\w+\.png)\)", page)]
    assert len(results) == page.count('<a id="s') > 9 and set(pictures) == set(folder.glob("*.png"))
    assert sum(path.stat().st_size for path in [folder / "report.md", *results, *pictures]) < 4_000_000
