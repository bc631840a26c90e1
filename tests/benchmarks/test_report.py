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
    assert not read.tags & {"script", "link", "iframe", "img", "a"} and "url(" not in page
    assert page.count("<h2>") == len(result_examples.every_kind()) + 2, "and the choice of a backend, and what is wrong"


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
    evil += " ![x](http://x) [y](http://y) | $x^2$ [/red] `z`"
    for word in ("NVIDIA H200", "Xeon", "FLASHMLA_SPARSE", "scores", "/s", "64q1s4k", "python3 "):
        text = text.replace(word, json.dumps(evil)[1:-1])
    (tmp_path / "<b>.json").write_text(text)
    assert main(["report", str(tmp_path / "<b>.json"), "--output", str(tmp_path / "out")]) == 0
    read = Page((tmp_path / "out" / "report.html").read_text())
    assert not read.tags & {"script", "b", "img", "a"} and any("<script>" in text for text in read.texts)


def test_names_are_no_formulas_and_cells_stay_apart(tmp_path):
    text = json.dumps(result_examples.throughput())
    path = tmp_path / "names.json"
    path.write_text(text.replace("FLASHMLA_SPARSE", "$x^$ | &lt;y").replace("NVIDIA H200", "a$b_c$ | d"))
    assert main(["report", str(path), "--output", str(tmp_path / "out")]) == 0
    texts = Page((tmp_path / "out" / "report.html").read_text()).texts
    assert "$x^$ | &lt;y" in texts and any("a$b_c$ | d" in one for one in texts)


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


def test_the_choice_of_backends_and_gpus_has_a_row_for_each_load():
    one, two = result_examples.throughput(), result_examples.throughput()
    for entry in two["results"]:
        entry["gpus"] = entry["case"]["tensor_parallel_size"] = 2
    server, offline = tables.by_workload([one, two, result_examples.serve()]).values()
    headings, rows = tables.of_models(offline)
    found = [dict(zip(headings, row, strict=True)) for row in rows]
    assert [(row["load"], row["GPUs"], row["backend"]) for row in found[:4]] == [
        ("1 in flight", f"{gpus} x NVIDIA H200", name) for gpus in (1, 2) for name in result_examples.BACKENDS
    ]
    assert len(found) == 8 and len(server) == 4
    for (_, entry), row in zip(offline, found, strict=True):
        assert row["per user"] == f"{1 / entry['itl_s']['p50']:.0f}"
        assert row["per GPU"] == ("-" if entry["gpus"] == 1 else f"{entry['output_tokens_per_second'] / 2:.0f}")


def test_the_readme_picture_has_bars_of_the_file():
    content = result_examples.every_kind()["kernels"]
    figure, numbers = pictures.decode_bars(content)
    seconds = tables.picked(content, 128, 16)["in_situ"]["seconds"]
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert len(heights) == 5 * 5
    assert heights[1] == pytest.approx(flashmla_fp8(seconds) / seconds["ours"]["median"])
    assert numbers.startswith(f"mla-backend: {heights[0]:.2f} {heights[1]:.2f} ")
