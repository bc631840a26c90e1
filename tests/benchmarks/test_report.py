"""A report shows what the result files have, in one page."""

import json
import re

import pytest

import result_examples
from serving_benchmarks.__main__ import main

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(not result_examples.path("kernels").is_file(), reason="needs the source tree")

from serving_benchmarks.results import kinds, pictures  # noqa: E402


def report_of(folder, *paths) -> str:
    assert main(["report", *map(str, paths), "--output", str(folder / "report.md")]) == 0
    return (folder / "report.md").read_text()


def test_a_page_has_the_numbers_of_each_file_and_names_what_is_missing(tmp_path):
    """One file did not wholly run, and two are no result files."""
    files = result_examples.every_kind()
    files["throughput"]["results"][0] = result_examples.failed(files["throughput"]["results"][0], "out of <memory>")
    (tmp_path / "notes.json").write_text("{}")
    paths = [result_examples.write(tmp_path, name, content) for name, content in files.items()]
    page = report_of(tmp_path, *paths, tmp_path / "notes.json", tmp_path / "gone.json")
    assert page.count("\n## ") == len(files) + 1, "and what is wrong"
    seconds = files["kernels"]["results"][0]["seconds"]
    for name in ("ours", "fa3_bf16"):
        assert f"| {1e6 * seconds[name]['median']:.1f} |" in page
    assert "1 in flight: out of &lt;memory>" in page and "notes.json" in page and "gone.json" in page


def test_a_report_of_a_cpu_names_no_gpu_and_can_go_to_standard_output(tmp_path, capsys):
    report = result_examples.throughput()
    library = {"version": "0.2", "compiler": "g++", "cuda_compiler": "13.0", "cuda_archs": "90a", "ops": ["plan"]}
    report["environment"] |= {"gpus": [], "library": {**library, "cpu_kernels": [{"name": "avx2", "active": True}]}}
    report["environment"]["settings"]["gpu_memory_utilization"] = 0.45
    report["environment"]["torch"] = {"version": "2.13.0", "cuda": "13.0"}
    assert main(["report", str(result_examples.write(tmp_path, "cpu", report)), "--output", "-"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# ") and "avx2" in page and not re.search("GPU|CUDA", page, re.IGNORECASE)


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_text_of_files_cannot_become_markup_and_cells_stay_apart(kind, tmp_path):
    text, evil = json.dumps(result_examples.every_kind()[kind]), json.dumps('"><script> | \n\n# x')[1:-1]
    for word in ("NVIDIA H200", "Xeon", "FLASHMLA_SPARSE", "scores", "/s", "64q1s4k", "python3 "):
        text = text.replace(word, evil)
    (tmp_path / "<b>.json").write_text(text)
    page = report_of(tmp_path, tmp_path / "<b>.json")
    assert "<" not in page and "\n# x" not in page
    for table in page.split("\n\n"):
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines() if line.startswith("|")}) <= 1


def test_backends_and_numbers_of_gpus_of_several_files_are_compared_load_by_load(tmp_path):
    one, two = result_examples.throughput(), result_examples.throughput()
    for entry in two["results"]:
        entry["gpus"] = entry["case"]["tensor_parallel_size"] = 2
    paths = [result_examples.write(tmp_path, name, report) for name, report in (("two", two), ("one", one))]
    together = report_of(tmp_path, *paths).split("## ")[1]
    headings, _, *rows = [line.strip("| ").split(" | ") for line in together.splitlines() if line.startswith("|")]
    found = [dict(zip(headings, row, strict=True)) for row in rows]
    assert [(row["load"], row["GPUs"], row["backend"]) for row in found[:4]] == [
        ("1 in flight", f"{gpus} x NVIDIA H200", name) for gpus in (1, 2) for name in result_examples.BACKENDS
    ]
    assert len(found) == 8
    first, of_two = one["results"][0], found[2]
    assert of_two["per user"] == f"{1 / first['itl_s']['p50']:.0f}" and found[0]["per GPU"] == "-"
    assert of_two["per GPU"] == f"{first['output_tokens_per_second'] / 2:.0f}"


def test_the_readme_picture_has_the_ratios_of_the_file():
    content = result_examples.every_kind()["kernels"]
    figure, numbers = pictures.heat_map(content)
    assert len(figure.axes) == 2 and [len(axes.texts) for axes in figure.axes] == [14, 14]
    ratio = result_examples.kernel(content, "128q1s32k", 128)["in_situ"]["speed_up"]
    assert f"fp8_ds_mla 128q1s32k 128: {ratio:.2f}" in numbers.split("; ")
    assert f"{ratio:.2f}" in [text.get_text() for text in figure.axes[0].texts]


def test_the_picture_of_whole_models_has_ours_over_the_other_backend():
    content = result_examples.throughput(loads=(16,))
    figure, numbers = pictures.gains(content)
    assert [len(bars) for bars in figure.axes[0].containers] == [1, 1]
    theirs, ours = (content["results"][i]["ttft_s"]["p50"] for i in (1, 0))
    assert numbers.startswith("16 heads, 4096 + 64, 16 in flight: ") and numbers.endswith(f" {theirs / ours:.2f}")
