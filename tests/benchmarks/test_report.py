"""A report shows what the result files have, in one page that needs nothing else."""

import html.parser
import json
import os

import pytest

import hostile
import result_examples
from serving_benchmarks.__main__ import main

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(not result_examples.path("kernels").is_file(), reason="needs the source tree")

from serving_benchmarks.results import kinds, pictures, tables  # noqa: E402


class Page(html.parser.HTMLParser):
    """What a page has."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.texts = set(), [], []
        self.feed(text)
        self.close()
        assert not any(name.startswith("on") for name, _ in self.attributes)
        self.sources, self.links = ([v for n, v in self.attributes if n == name] for name in ("src", "href"))

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes

    def handle_data(self, data):
        self.texts.append(data)


def flashmla_fp8(seconds):
    """Its median in the faster of two ways to call it."""
    return min(seconds[name]["median"] for name in ("flashmla_fp8", "flashmla_fp8_one_batch"))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a file of each kind, one of which did not wholly run, and of two that are no result files."""
    folder = tmp_path_factory.mktemp("report")
    files = result_examples.every_kind()
    files["throughput"]["results"][0] = result_examples.failed(files["throughput"]["results"][0], "out of <memory>")
    paths = [result_examples.write(folder, name, content) for name, content in files.items()]
    (folder / "notes.json").write_text("{}")
    paths += [folder / "notes.json", folder / "gone.json"]
    assert main(["report", *map(str, paths), "--output", str(folder / "out")]) == 0
    return (folder / "out" / "report.html").read_text()


def test_the_page_needs_nothing_else(page):
    read = Page(page)
    assert all(source.startswith("data:image/png;base64,") for source in read.sources) and len(read.sources) == 1
    assert not read.tags & {"script", "link", "iframe"} and "url(" not in page
    assert all(link.startswith("#") and ("id", link[1:]) in read.attributes for link in read.links)
    assert len(read.links) == len(result_examples.every_kind()) + 1


def test_the_page_has_the_numbers_and_names_what_is_missing(page):
    texts = Page(page).texts
    first = result_examples.every_kind()["kernels"]["results"][0]
    seconds = first["seconds"]
    medians = seconds["ours"]["median"], seconds["fa3_bf16"]["median"], flashmla_fp8(seconds)
    assert {f"{1e6 * median:.1f}" for median in medians} <= set(texts)
    assert any("1 in flight: out of <memory>" in text for text in texts)
    assert any("notes.json" in text for text in texts) and any("gone.json" in text for text in texts)


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_text_of_files_cannot_become_markup(kind, tmp_path):
    evil = '"><script>alert(1)</script><img src=x onerror=alert(1)>'
    text = json.dumps(result_examples.every_kind()[kind])
    for word in ("NVIDIA H200", "Xeon", "FLASHMLA_SPARSE", "cache_write", "/s", "64q1s4k", "python3 "):
        text = text.replace(word, json.dumps(evil)[1:-1])
    (tmp_path / "<b>.json").write_text(text)
    assert main(["report", str(tmp_path / "<b>.json"), "--output", str(tmp_path / "out")]) == 0
    read = Page((tmp_path / "out" / "report.html").read_text())
    assert not read.tags & {"script", "b"} and any("<script>" in text for text in read.texts)


def test_names_are_no_formulas_and_cells_stay_apart(tmp_path):
    text = json.dumps(result_examples.throughput())
    path = tmp_path / "names.json"
    path.write_text(text.replace("FLASHMLA_SPARSE", "$x^$ | &lt;y").replace("NVIDIA H200", "a$b_c$ | d"))
    assert main(["report", str(path), "--output", str(tmp_path / "out")]) == 0
    texts = Page((tmp_path / "out" / "report.html").read_text()).texts
    assert "$x^$ | &lt;y" in texts and any("a$b_c$ | d" in one for one in texts)


def test_a_file_of_a_cpu_without_an_active_kernel_is_shown(tmp_path):
    report = result_examples.every_kind()["cpu"]
    for kernel in report["environment"]["library"]["cpu_kernels"]:
        kernel["active"] = False
    path = result_examples.write(tmp_path, "cpu", report)
    assert main(["report", str(path), "--output", str(tmp_path / "out")]) == 0
    assert "kernel unknown" in (tmp_path / "out" / "report.html").read_text()


def test_names_that_are_no_text_leave_the_page_whole(tmp_path):
    out, good = tmp_path / "out", result_examples.index()
    assert main(["report", str(result_examples.write(tmp_path, "good", good)), "--output", str(out)]) == 0
    before = (out / "report.html").read_text()
    good["environment"]["gpus"][0]["name"] = "\ud800"
    assert main(["report", str(result_examples.write(tmp_path, "half", good)), "--output", str(out)]) == 2
    assert (out / "report.html").read_text() == before
    name = tmp_path / os.fsdecode(b"\xff.json")
    name.write_text(json.dumps(result_examples.index()))
    assert main(["report", str(name), "--output", str(out)]) == 0
    assert "\\udcff.json" in (out / "report.html").read_text()


def test_damaged_files_do_not_stop_the_page():
    hostile.run("reports", [*range(30), 56013])


def test_the_choice_of_backends_and_gpus_has_a_point_for_each_load():
    one, two = result_examples.throughput(), result_examples.throughput()
    for entry in two["results"]:
        entry["gpus"] = entry["case"]["tensor_parallel_size"] = 2
        entry["itl_s"]["p50"] /= 1.5
    figure = pictures.pareto([one, two, result_examples.serve()])
    offline = next(axes for axes in figure.axes if axes.get_title().endswith("offline"))
    drawn = sorted(x for line in offline.get_lines() for x in line.get_xdata())
    entries = [entry for content in (one, two) for entry in content["results"]]
    assert drawn == pytest.approx(sorted(1 / entry["itl_s"]["p50"] for entry in entries))
    drawn = sorted(y for line in offline.get_lines() for y in line.get_ydata())
    assert drawn == pytest.approx(sorted(entry["output_tokens_per_second"] / entry["gpus"] for entry in entries))
    assert sorted(text.get_text() for text in offline.texts) == ["1"] * 4 + ["16"] * 4 and len(figure.axes) == 2
    ((_, entries),) = tables.by_workload([one, two]).items()
    _, rows = tables.which_backend(entries)
    assert [row[:3] for row in rows[:4]] == [
        ["1 in flight", f"{gpus} x NVIDIA H200", backend] for gpus in (1, 2) for backend in result_examples.BACKENDS
    ]
    for entry in one["results"]:  # of a single token each
        entry["itl_s"] = {"p50": None, "p99": None}
    assert pictures.pareto([one]) is None


def test_the_readme_picture_has_bars_of_the_file():
    content = result_examples.every_kind()["kernels"]
    figure, numbers = pictures.decode_bars(content)
    seconds = tables.picked(content, 128, 16)["in_situ"]["seconds"]
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert len(heights) == 5 * 5
    assert heights[1] == pytest.approx(flashmla_fp8(seconds) / seconds["ours"]["median"])
    assert numbers.startswith(f"mla-backend: {heights[0]:.2f} {heights[1]:.2f} ")
