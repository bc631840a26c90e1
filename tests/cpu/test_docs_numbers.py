"""The numbers of the README and the docs are those of the committed result files."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import result_examples
from serving_benchmarks import docs

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="needs the source tree")


def test_the_pages_have_the_numbers_that_the_files_have(capsys):
    assert docs.main(["--check"]) == 0, capsys.readouterr().out


def test_every_committed_result_file_is_shown_or_drawn():
    named = " ".join(block["what"] for page in docs.pages(ROOT) for block in docs.MARKED.finditer(page.read_text()))
    drawn = {"sweep.json"}  # docs/sweep.png
    files = {path.name for path in (ROOT / "results").glob("*.json")}
    assert {name for name in files if f"results/{name}" not in named} <= drawn


@pytest.fixture
def tree(tmp_path):
    """A copy of the pages and the result files."""
    shutil.copy(ROOT / "README.md", tmp_path)
    for folder in ("docs", "results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def change_a_number(tree: Path) -> None:
    path = tree / "results" / "kernels.json"
    report = json.loads(path.read_text())
    report["results"][0]["seconds"]["ours"]["median"] = 55.5e-6
    path.write_text(json.dumps(report))


def test_a_number_that_changed_is_found_and_written(tree, capsys):
    change_a_number(tree)
    before = (tree / "README.md").read_text()
    assert docs.main(["--check", "--root", str(tree)]) == 1
    out = capsys.readouterr().out
    assert "README.md as measured" in out and "| 55.5 |" in out and "1 pages differ" in out
    assert (tree / "README.md").read_text() == before
    assert docs.main(["--root", str(tree)]) == 0
    assert capsys.readouterr().out == "README.md rewritten\n"
    changed = [
        (old, new)
        for old, new in zip(before.splitlines(), (tree / "README.md").read_text().splitlines(), strict=True)
        if old != new
    ]
    assert len(changed) == 1 and "| 60.8 |" in changed[0][0] and "| 55.5 |" in changed[0][1]
    assert docs.main(["--check", "--root", str(tree)]) == 0


def test_a_number_within_a_line_is_found_and_written(tree):
    path = tree / "results" / "vllm_0.23_recall.json"
    report = json.loads(path.read_text())
    report["runs"][1]["right"] = 199
    path.write_text(json.dumps(report))
    assert docs.main(["--check", "--root", str(tree)]) == 1
    assert docs.main(["--root", str(tree)]) == 0
    (shown,) = re.findall(r"answers <!-- .+? -->(.+?)<!-- .+? --> held-out", (tree / "docs/serving.md").read_text())
    assert shown == "200 of 200 or 199 of 200"


def test_a_number_that_was_changed_by_hand_is_found(tree, capsys):
    page = tree / "docs" / "serving.md"
    page.write_text(page.read_text().replace("| 16 | decode, ms a step | 2.30 |", "| 16 | decode, ms a step | 2.29 |"))
    assert docs.main(["--check", "--root", str(tree)]) == 1
    assert "docs/serving.md" in capsys.readouterr().out


END = "<!-- end of numbers -->"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("<!-- numbers: nope results/kernels.json -->" + END, "docs/new.md, line 2: 'nope' is not one of kernels, "),
        ("<!-- numbers:  -->" + END, "line 2: '' is not one of"),
        ("<!-- numbers: kernels -->" + END, "line 2: kernels names no result file"),
        ("<!-- numbers: kernels results/nope.json -->" + END, "line 2: there is no results/nope.json"),
        ("<!-- numbers: kernels results/kv_blocks.json -->" + END, "line 2: kernels can't be made of results/kv_bl"),
        ("<!-- numbers: kernels ../README.md -->" + END, "line 2: ../README.md is no JSON"),
        ("<!-- numbers: kernels results/kernels.json -->", "line 2: a mark without its other half: <!-- numbers:"),
        ("\n" + END, "line 3: a mark without its other half: <!-- end of numbers"),
        ("<!-- numbers: a b --><!-- numbers: c d -->" + END, "line 2: a block within a block"),
    ],
)
def test_a_wrong_block_is_explained_with_its_page_and_line(text, told, tree, capsys):
    (tree / "docs" / "new.md").write_text(f"# Title\n{text}\n")
    assert docs.main(["--root", str(tree)]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("name", ["throughput", "serve"])
def test_a_block_can_be_added(name, tree):
    report = getattr(result_examples, name)()
    report["results"][0] = result_examples.failed(report["results"][0], "out of memory")
    result_examples.write(tree / "results", f"{name}_h200", report)
    page = tree / "docs" / "new.md"
    page.write_text(f"Before\n<!-- numbers: {name} results/{name}_h200.json -->\n{END}\nafter\n")
    assert docs.main(["--root", str(tree)]) == 0
    before, marked, heading, _, *rows, nothing, about, end, after, last = page.read_text().split("\n")
    assert (before, end, after, nothing, last) == ("Before", END, "after", "", "")
    assert len(rows) == len(report["results"]) - 1 and {row.count("|") for row in rows} == {heading.count("|")}
    speeds = [f"| {entry['output_tokens_per_second']:.1f} |" for entry in report["results"][1:]]
    assert all(speed in row for speed, row in zip(speeds, rows, strict=True))
    assert about.startswith("small, 4 layers, 16 heads, NVIDIA H200, torch 2.11.0+cu130, vllm 0.23.0, 2026-11-20")


def test_marks_in_examples_are_left_alone(tree, capsys):
    page = tree / "docs" / "new.md"
    page.write_text(f"1. So:\n\n   ```\n   <!-- numbers: nope x -->\n   {END}\n   ```\n\n```sh\n{END}\n```\n")
    before = page.read_text()
    assert docs.main(["--root", str(tree)]) == 0 and page.read_text() == before


def test_pages_stay_as_they_are_if_one_of_them_is_wrong(tree):
    change_a_number(tree)
    (tree / "docs" / "new.md").write_text(END)
    before = (tree / "README.md").read_text()
    assert docs.main(["--root", str(tree)]) == 2
    assert (tree / "README.md").read_text() == before


def test_a_folder_that_is_no_source_tree_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        docs.main(["--root", str(tmp_path)])
    assert stopped.value.code == 2 and "it has no README.md" in capsys.readouterr().err


def test_it_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "serving_benchmarks.docs", "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("all numbers of ")
