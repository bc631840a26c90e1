"""The numbers of README and docs are those of the committed result files."""

import json
import shutil

import pytest

import result_examples
from serving_benchmarks.__main__ import main
from serving_benchmarks.results import docs, kinds, tables

ROOT = result_examples.ROOT
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="needs the source tree")
END = "<!-- end of numbers -->"


def test_the_pages_have_the_numbers_that_the_files_have(capsys):
    pytest.importorskip("matplotlib")
    assert main(["docs", "--check"]) == 0, capsys.readouterr().out


def test_the_committed_files_are_of_known_kinds_and_small():
    files = list((ROOT / "results").rglob("*.json"))
    assert len({kinds.load(path).kind for path in files}) > 5
    assert sum(path.stat().st_size for path in files) < 1_200_000


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A page with a table of the kernels, and the result files."""
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    shutil.copytree(ROOT / "results", tmp_path / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"Before\n<!-- numbers: kernels results/h200/kernels.json -->\n{END}\nafter\n")
    return tmp_path


def test_a_number_that_changed_is_found_and_written(tree, capsys):
    pytest.importorskip("matplotlib")
    assert main(["docs"]) == 0 and main(["docs", "--check"]) == 0
    page, picture, path = (tree / name for name in ("README.md", "docs/speed.png", "results/h200/kernels.json"))
    before, drawn = page.read_text(), picture.read_bytes()
    assert before.startswith("Before\n<!-- numbers") and before.endswith(f"{END}\nafter\n") and before.count("\n") > 30
    report = json.loads(path.read_text())
    entry = result_examples.kernel(report, "128q1s32k", 64)
    entry["seconds"]["ours"]["median"], entry["in_situ"]["speed_up"] = 55.5e-6, 2.0
    path.write_text(json.dumps(report))
    capsys.readouterr()
    assert main(["docs", "--check"]) == 1 and page.read_text() == before and picture.read_bytes() == drawn
    assert "| 55.5 |" in capsys.readouterr().out
    assert main(["docs"]) == 0 and main(["docs", "--check"]) == 0 and picture.read_bytes() != drawn
    pairs = zip(before.splitlines(), page.read_text().splitlines(), strict=True)
    assert sum(old != new for old, new in pairs) == 1
    page.write_text(before)
    assert main(["docs", "--check"]) == 1, "a number that was changed by hand"


def test_a_page_can_leave_out_cases(tree):
    pytest.importorskip("matplotlib")
    mark = "<!-- numbers: kernels results/h200/kernels.json{} -->\n" + END
    (tree / "docs" / "new.md").write_text("\n".join(map(mark.format, ("", " case.heads=16,64"))))
    assert main(["docs"]) == 0
    everything, some = (cells(part)[1:] for part in (tree / "docs" / "new.md").read_text().split(END)[:2])
    kept = [row[:2] + row[3:] for row in everything if row[1] in ("16", "64")]
    assert some == kept != [], "without the column in which all rows are the same"


WRONG = {
    f"<!-- numbers: nope results/h200/kernels.json -->{END}": "docs/new.md, line 2: 'nope' is not one of kernels, ",
    f"<!-- numbers: kernels -->{END}": "line 2: kernels names no result file",
    f"<!-- numbers: kernels results/nope.json -->{END}": "line 2: there is no results/nope.json",
    f"<!-- numbers: kernels results/h200/dense.json -->{END}": "is of dense, not of kernels",
    f"<!-- numbers: kernels results/h200/kernels.json rows=3 -->{END}": "line 2: kernels can't be made of",
    f"<!-- numbers: kernels results/h200/kernels.json case.heads=3 -->{END}": "line 2: no case has case.heads=3",
    f"<!-- numbers: kernels results/h200/kernels.json case.nope=3 -->{END}": "line 2: kernels can't be made of",
    "<!-- numbers: kernels results/h200/kernels.json -->": "docs/new.md: a mark without its other half",
    f"\n{END}": "docs/new.md: a mark without its other half",
    f"<!-- numbers: a b --><!-- numbers: c d -->{END}": "docs/new.md: a mark without its other half",
}


@pytest.mark.parametrize(("text", "told"), WRONG.items())
def test_a_wrong_block_is_explained_and_no_page_is_written(text, told, tree, capsys):
    before = (tree / "README.md").read_text()
    (tree / "docs" / "new.md").write_text(f"# Title\n{text}\n")
    assert main(["docs"]) == 2 and (tree / "README.md").read_text() == before
    assert told in capsys.readouterr().err


def cells(text: str) -> list[list[str]]:
    """Of the table in Markdown, without what separates the headings."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(set(map(len, lines))) == 1, "a row has as many cells as there are headings"
    return lines


@pytest.mark.parametrize("maker", docs.MAKERS)
def test_every_maker_makes_a_table_of_a_file_of_its_kind(maker):
    kind = docs.MAKERS[maker]
    assert len(cells(kinds.KINDS[kind].makers[maker](result_examples.every_kind()[kind]))) > 1


def test_backends_are_compared_at_each_load_that_both_have():
    report = result_examples.throughput(loads=(1, 16), lengths=((4096, 64), (512, 512)))
    ours, theirs = report["results"][1], report["results"][5]
    ours["rounds_s"], theirs["rounds_s"] = [1.0, 2.0, 10.0, 4.0], [2.0, 2.5, 8.0, 4.2]
    report["results"][4] = result_examples.failed(report["results"][4], "out of memory")
    rows = cells(tables.throughput_versus(report))[1:]
    assert [row[2:4] for row in rows] == [["4096 + 64", "16"], ["512 + 512", "1"], ["512 + 512", "16"]]
    assert rows[0][:2] == ["16", "4"] and rows[0][6] == "1.15 (0.80 to 2.00)", "of 2, 1.25, 0.8 and 1.05"
    speeds = [entry["output_tokens_per_second"] for entry in (ours, theirs)]
    assert rows[0][4:6] == [f"{speed:.0f}" for speed in speeds]
    report["environment"]["settings"]["interleaved"] = False
    assert cells(tables.throughput_versus(report))[1][6] == f"{speeds[0] / speeds[1]:.2f}"
    picked = cells(tables.throughput_versus(report, loads="512+512/1,4096+64/16"))[1:]
    assert [row[2:4] for row in picked] == [["4096 + 64", "16"], ["512 + 512", "1"]]
    three = result_examples.throughput(backends=("SPARSE_MLA", "FLASHMLA_SPARSE", "FLASHINFER"))
    for wrong, loads in ((report, "4096+64/1"), (report, "64"), (report, ""), (three, None)):
        with pytest.raises(ValueError):
            tables.throughput_versus(wrong, loads=loads)
