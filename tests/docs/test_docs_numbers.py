"""The numbers of README and docs are those of the committed result files."""

import json
import shutil
from pathlib import Path

import pytest

import result_examples
from serving_benchmarks.__main__ import main
from serving_benchmarks.results import docs, file, kernel_times, kinds, tables

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
def tree(tmp_path):
    """A page with a table of the kernels, and the result files."""
    shutil.copytree(ROOT / "results", tmp_path / "results")
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"Before\n<!-- numbers: kernels results/h100/kernels.json -->\n{END}\nafter\n")
    return tmp_path


def write(tree: Path, *options: str) -> int:
    return main(["docs", "--root", str(tree), *options])


def test_a_number_that_changed_is_found_and_written(tree, capsys):
    pytest.importorskip("matplotlib")
    assert write(tree) == 0 and write(tree, "--check") == 0
    page, picture, path = (tree / name for name in ("README.md", "docs/speed.png", "results/h100/kernels.json"))
    before, drawn = page.read_text(), picture.read_bytes()
    assert before.startswith("Before\n<!-- numbers") and before.endswith(f"{END}\nafter\n") and before.count("\n") > 30
    report = json.loads(path.read_text())
    entry = tables.picked(report, 128, 64)
    entry["seconds"]["ours"]["median"] = entry["in_situ"]["seconds"]["ours"]["median"] = 55.5e-6
    path.write_text(json.dumps(report))
    capsys.readouterr()
    assert write(tree, "--check") == 1 and page.read_text() == before and picture.read_bytes() == drawn
    assert "| 55.5 |" in capsys.readouterr().out
    assert write(tree) == 0 and write(tree, "--check") == 0 and picture.read_bytes() != drawn
    pairs = zip(before.splitlines(), page.read_text().splitlines(), strict=True)
    assert sum(old != new for old, new in pairs) == 1
    page.write_text(before)
    assert write(tree, "--check") == 1, "a number that was changed by hand"


def test_a_page_can_leave_out_cases(tree):
    pytest.importorskip("matplotlib")
    mark = "<!-- numbers: kernels results/h100/kernels.json{} -->\n" + END
    (tree / "docs" / "new.md").write_text("\n".join(map(mark.format, ("", " case.format=bf16 case.heads=16"))))
    assert write(tree) == 0
    everything, some = (cells(part)[1:] for part in (tree / "docs" / "new.md").read_text().split(END)[:2])
    assert [row[:5] for row in some] == [row[:5] for row in everything if (row[1], row[3]) == ("16", "bf16")] != []


WRONG = {
    f"<!-- numbers: nope results/h200/kernels.json -->{END}": "docs/new.md, line 2: 'nope' is not one of kernels, ",
    f"<!-- numbers: kernels -->{END}": "line 2: kernels names no result file",
    f"<!-- numbers: kernels results/nope.json -->{END}": "line 2: there is no results/nope.json",
    f"<!-- numbers: kernels results/h100/dense.json -->{END}": "is of dense, not of kernels",
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
    assert write(tree) == 2 and (tree / "README.md").read_text() == before
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


def test_the_headline_of_kernels_has_the_fastest_peer():
    report = result_examples.every_kind()["kernels"]
    for row in cells(tables.headline(report))[1:]:
        best = min(tables.peers_of(tables.picked(report, int(row[0]), int(row[1]))["in_situ"]).values())
        assert row[3] == file.microseconds(best)


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


def test_ours_may_have_several_caches():
    names = ("SPARSE_MLA", "SPARSE_MLA:bfloat16", "FLASHMLA_SPARSE")
    both = result_examples.throughput(backends=names, loads=(16,))
    one = result_examples.throughput(backends=names[::2], loads=(32,))
    headings, first, second = cells(tables.throughput_versus(both, one))
    assert [heading.partition(",")[0] for heading in headings[4:7]] == [*names]
    assert headings[7:] == ["ratio", f"ratio of {names[1]}"]
    assert "-" not in first and [cell == "-" for cell in second[4:]] == [False, True, False, False, True]
    timed = list(kinds.KINDS["throughput"].timed(kinds.checked(both, Path("both.json"))))
    assert timed and all({peer for peer, _ in one.peers} == {names[2]} for one in timed)


def test_of_several_files_the_newest_has_its_loads_shown():
    old = result_examples.throughput(loads=(1, 16))
    new = result_examples.throughput(loads=(16,), rounds=5)
    new["environment"]["date"] = "2026-11-21T00:00:00+00:00"
    for entry in new["results"]:
        entry["output_tokens_per_second"] = 1234.0
        entry["case"]["num_prompts"] = 32
    for files in ((old, new), (new, old)):
        rows = cells(tables.throughput_versus(*files))[1:]
        assert len(rows) == 2 and [row[4] for row in rows if row[3] == "16"] == ["1234"]
    for entry in new["results"]:
        entry["gpus"] = entry["case"]["tensor_parallel_size"] = 2
    rows = cells(tables.whole_models(old, new))[1:]
    gpus = [("16", "1 x NVIDIA H200")] * 4 + [("16, 8 a GPU", "2 x NVIDIA H200")] * 2
    assert [(row[0], row[1]) for row in rows] == gpus, "another number of GPUs"


def test_what_a_server_needs_and_how_gpus_share_the_work_has_columns_where_it_is_known():
    report = result_examples.serve(rates=(None,))
    headings, *rows = cells(tables.whole_models(report))
    assert len(rows) == 2 and not {"per GPU", "start, s", "over the first"} & set(headings)
    ours, _ = report["results"]
    ours |= {"gpus": 8, "start_s": 95.2, "gpu_memory_bytes": [3e9, 84.5e9]}
    ours |= {"cache": {"tokens": 1000, "prefix_hit_share": None}, "output_tokens_per_second": 4000.0}
    ours["case"] |= {"data_parallel_size": 8, "enable_expert_parallel": True, "decode_context_parallel_size": 1}
    headings, first, other = cells(tables.whole_models(report))
    found = dict(zip(headings, first, strict=True))
    wanted = {
        "GPUs": "8 x NVIDIA H200, DP8 EP",
        "per GPU": "500",
        "per user": "50",
        "start, s": "95",
        "GB of the fullest GPU": "84.5",
    }
    wanted |= {"tokens in the cache": "1000"}
    assert {name: found[name] for name in wanted} == wanted and other[headings.index("start, s")] == "-"


def test_profiles_say_what_kernels_do_in_a_step_of_the_first_load():
    report = result_examples.throughput(loads=(1, 4))
    ours, theirs = [("mla::cuda::attention_kernel<1>(p)", 8, 4000.0)], [("flash_fwd<e<f>>(g", 8, 3000.0)]
    attentions = dict(zip(result_examples.BACKENDS, (ours, theirs), strict=True))
    others = [("nvjet_a", 4, 400.0), ("moe::single_group_topk", 4, 40.0), ("topk", 4, 80.0), ("any", 4, 20.0)]
    for entry in report["results"]:
        table = kernel_times.table([*attentions[entry["backend"]], *others])
        entry["profile"] = {"steps": 4, "wall_s": 0.01, **table}
    headings, *rows = cells(tables.throughput_profiles(report))
    found = [dict(zip(headings, row, strict=True)) for row in rows]
    assert [row["backend"] for row in found] == list(result_examples.BACKENDS)
    assert [row["attention"] for row in found] == ["1000", "750"]
    assert [row["all kernels"] for row in found] == ["1135", "885"]
    wanted = {"matrix products": "100", "experts": "10", "top-k": "20", "the rest": "5", "indexer": "0"}
    assert all(row[name] == value for row in found for name, value in wanted.items())
