"""The numbers of the README and the docs are those of the committed result files."""

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import result_examples
from serving_benchmarks.results import (
    backend_runs,
    docs,
    kernel_times,
    report,
    result_kinds,
    runs,
    serve_report,
    throughput_report,
)

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="needs the source tree")


def test_the_pages_have_the_numbers_that_the_files_have(capsys):
    assert docs.main(["--check"]) == 0, capsys.readouterr().out


def test_every_committed_result_file_is_shown_or_drawn():
    named = " ".join(block["what"] for page in docs.pages(ROOT) for block in docs.MARKED.finditer(page.read_text()))
    drawn = {"sweep.json"}  # docs/sweep.png
    files = {path.name for path in (ROOT / "results").glob("*.json")}
    assert {name for name in files if f"results/{name}" not in named} <= drawn


def test_the_committed_report_has_the_numbers_that_the_files_have():
    page = ROOT / "docs" / "report_h200" / "report.md"
    text = page.read_text()
    names = re.findall(r"^## .+: (\S+\.json)$", text.replace("\\", ""), re.MULTILINE)
    assert len(names) > 5
    for name in names:
        file = result_kinds.load(ROOT / "results" / name)
        made = report.KINDS[file.kind].markdown({"environment": file.environment, "results": file.results})
        assert made.strip() in text, f"{name} has changed since the report was written"
    assert set(re.findall(r"!\[.+?\]\((.+?)\)", text)) == {path.name for path in page.parent.glob("*.png")}


@pytest.fixture
def tree(tmp_path):
    """A copy of the pages and the result files."""
    shutil.copy(ROOT / "README.md", tmp_path)
    for folder in ("docs", "results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def change_a_number(tree: Path) -> str:
    """Returns how a page shows what it was: in its table alone, as no sentence is about 64 heads."""
    path = tree / "results" / "kernels.json"
    report = json.loads(path.read_text())
    ours = next(r["seconds"]["ours"] for r in report["results"] if r["case"]["heads"] == 64)
    before, ours["median"] = ours["median"], 55.5e-6
    path.write_text(json.dumps(report))
    return f"| {1e6 * before:.1f} |"


def test_a_number_that_changed_is_found_and_written(tree, capsys):
    shown = change_a_number(tree)
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
    assert len(changed) == 1 and shown in changed[0][0] and "| 55.5 |" in changed[0][1]
    assert docs.main(["--check", "--root", str(tree)]) == 0


def test_ratios_in_a_sentence_follow_the_result_file(tree):
    path = tree / "results" / "kernels.json"
    report = json.loads(path.read_text())
    seconds = report["results"][0]["seconds"]
    assert report["results"][0]["case"]["heads"] == 8
    fp8 = min(own["median"] for name, own in seconds.items() if name.startswith("flashmla_fp8"))
    seconds["ours"]["median"] = fp8 / 3
    path.write_text(json.dumps(report))
    assert docs.main(["--root", str(tree)]) == 0
    assert re.search(r"-->it is 3\.00, [\d.]+ and [\d.]+ times as fast as", (tree / "README.md").read_text())


def test_a_number_within_a_line_is_found_and_written(tree):
    path = tree / "results" / "vllm_0.23_recall.json"
    report = json.loads(path.read_text())
    report["results"][1]["right"] = 199
    path.write_text(json.dumps(report))
    assert docs.main(["--check", "--root", str(tree)]) == 1
    assert docs.main(["--root", str(tree)]) == 0
    (shown,) = re.findall(r"answers <!-- .+? -->(.+?)<!-- .+? --> held-out", (tree / "docs/serving.md").read_text())
    assert shown == "200 of 200 or 199 of 200"


def test_a_number_that_was_changed_by_hand_is_found(tree, capsys):
    page = tree / "docs" / "serving.md"
    text = page.read_text()
    last_digit = re.search(r"\| SPARSE_MLA \| \d\.\d\d(\d) \(", text)
    other = str((int(last_digit[1]) + 1) % 10)
    page.write_text(text[: last_digit.start(1)] + other + text[last_digit.end(1) :])
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


def cells(text: str) -> list[list[str]]:
    """Of the tables in Markdown, without what separates their headings."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len({len(line) for line in lines}) == 1, "a row has as many cells as there are headings"
    return lines


def test_loads_of_servers_are_shown_with_their_latencies_and_goodput():
    report = result_examples.serve(rates=(1.0, None))
    first, second, third, fourth = report["results"]
    first["cache"] = {"peak_usage": 0.5, "prefix_hit_share": 0.256}
    first["latency"]["ttft_s"] |= {"p50": 0.0123, "p99": 0.4567}
    first["latency"]["tpot_s"] |= {"p50": None, "p99": None}  # requests of one token
    first["goodput"] |= {"share": 0.75, "requests_per_second": 7.125}
    report["results"][1] = result_examples.failed(second, "out of memory")
    third["goodput"] = None
    text = serve_report.markdown(report)
    headings, *rows = cells(text)
    assert headings == [*serve_report.HEADINGS, "of the prompts in the prefix cache"]
    speeds = [[f"{r['requests_per_second']:.2f}", f"{r['output_tokens_per_second']:.1f}"] for r in (first, third)]
    times = ["12.3", "456.7", "-", "-"]
    assert rows[0] == ["SPARSE_MLA", "1 requests/s", *speeds[0], *times, "7.12/s, 75 %", "26 %"]
    assert rows[1][:4] == ["FLASHMLA_SPARSE", "1 requests/s", *speeds[1]] and rows[1][8:] == ["-", "-"]
    assert rows[1][4:8] == [
        f"{third['latency'][name][p] * 1e3:.1f}" for name in ("ttft_s", "tpot_s") for p in ("p50", "p99")
    ]
    assert rows[2][:2] == ["FLASHMLA_SPARSE", "all at once"] and len(rows) == 3
    about = text.splitlines()[-1]
    assert about.endswith(
        "commit 5214a64bcc. Each load was run once: 1024 + 64 tokens, 200 requests, fp8 cache. "
        "Goodput: first token within 2 s, later ones 0.05 s apart or less, on average."
    )
    fourth["goodput"] |= {"ttft_limit_s": None}
    assert "average; later ones 0.05 s apart" in serve_report.markdown(report)
    for result in (first, fourth):
        result["goodput"] = None
    assert "Goodput" not in serve_report.markdown(report)


def test_two_backends_stand_beside_each_other_at_each_load_that_both_have():
    report = result_examples.throughput(backends=("SPARSE_MLA", "FLASHMLA_SPARSE"), loads=(1, 16))
    report["results"][3] = result_examples.failed(report["results"][3], "out of memory")
    _, row = cells(throughput_report.beside(report))
    ours, theirs = report["results"][0], report["results"][2]
    speeds = [entry["output_tokens_per_second"] for entry in (ours, theirs)]
    assert row[:3] == ["16", "4096 + 64", "1"] and row[5] == f"{speeds[0] / speeds[1]:.2f}"
    assert [cell.split(" ")[0] for cell in row[3:5]] == [f"{speed:.0f}" for speed in speeds]
    fastest = [entry["total_output_tokens"] / entry["seconds"]["fastest"] for entry in (ours, theirs)]
    assert row[6] == f"{fastest[0] / fastest[1]:.2f}"
    assert row[8] == " / ".join(f"{entry['latency']['tpot_s']['p50'] * 1e3:.2f}" for entry in (ours, theirs))
    for backends in (("SPARSE_MLA",), ("SPARSE_MLA", "FLASHMLA_SPARSE", "embedded")):
        with pytest.raises(ValueError, match="one backend of ours and one other"):
            throughput_report.beside(result_examples.throughput(backends=backends, loads=(1,)))


def test_several_lengths_of_a_file_are_as_those_of_several_files():
    backends = {"backends": ("SPARSE_MLA", "FLASHMLA_SPARSE", "embedded"), "loads": (1, 16)}
    both = result_examples.throughput(**backends, lengths=((4096, 64), (512, 512)))
    first, second = (
        {**both, "results": [entry for entry in both["results"] if entry["case"]["input_len"] == tokens]}
        for tokens in (4096, 512)
    )
    whole = throughput_report.engine_beside(both)
    assert whole == throughput_report.engine_beside(first, second)
    told = [row[1:3] for row in cells(whole)[1:]]
    assert told == [[tokens, load] for tokens in ("4096 + 64", "512 + 512") for load in ("1", "16")]
    for file in (both, first, second):
        file["results"] = [entry for entry in file["results"] if entry["backend"] != "embedded"]
    assert throughput_report.beside(both) == throughput_report.beside(first, second)
    both["results"][2] = result_examples.failed(both["results"][2], "out of memory")
    assert [row[1:3] for row in cells(throughput_report.beside(both))[1:]] == [told[i] for i in (0, 1, 3)]


def test_backends_that_took_turns_are_compared_round_by_round():
    report = result_examples.throughput(backends=("SPARSE_MLA", "FLASHMLA_SPARSE"), loads=(16,))
    ours, theirs = report["results"]
    ours["rounds_s"], theirs["rounds_s"] = [1.0, 2.0, 10.0, 4.0], [2.0, 2.5, 8.0, 4.2]
    before = throughput_report.beside(report)  # a file that doesn't say how it was measured
    assert "took turns" not in before and "(1." not in cells(before)[1][5]
    report["environment"]["settings"] = {**report["environment"]["settings"], "interleaved": True}
    text = throughput_report.beside(report)
    assert cells(text)[1][5] == "1.15 (0.80 to 2.00)", "of 2, 1.25, 0.8 and 1.05"
    said = "backends took turns, ratios (lowest to highest) are of rounds of the same number; latencies ours / theirs."
    assert said in text
    longer = copy.deepcopy(report)
    for entry in longer["results"]:
        entry["rounds_s"] = [*entry["rounds_s"], 3.0, 3.0, 3.0, 3.0, 3.0]
    told = throughput_report.beside(longer)
    assert "Medians of 9 rounds; backends took turns, ratios (95 % confidence intervals) are of rounds of" in told
    assert cells(told)[1][5] == "1.00 (1.00 to 1.25)", "without the lowest and the highest"
    report["results"].reverse()  # who came first in the file is no matter
    assert throughput_report.beside(report) == text
    old = result_examples.throughput(backends=("SPARSE_MLA", "FLASHMLA_SPARSE"), loads=(1,))
    assert "backends took turns in 1 of 2 files, ratios (low" in throughput_report.beside(report, old)


def test_the_line_below_a_table_names_the_commits_and_days_of_all_files():
    first, second, third = (
        result_examples.throughput(backends=("SPARSE_MLA", "FLASHMLA_SPARSE"), loads=(1,)) for _ in range(3)
    )
    assert throughput_report.beside(first, second).endswith("vllm 0.23.0, 2026-11-20, commit 5214a64bcc.")
    second["environment"] = {**second["environment"], "date": "2026-11-19T01:02:03+00:00", "commit": "0123456789ab"}
    told = "vllm 0.23.0, 2026-11-19 and 2026-11-20, commits 5214a64bcc and 0123456789."
    assert throughput_report.beside(first, second, third).endswith(told)


def test_tensor_parallelism_is_told_with_the_heads_of_a_gpu():
    one = result_examples.throughput(backends=("SPARSE_MLA", "FLASHMLA_SPARSE"), loads=(1,))
    two = result_examples.on_two_gpus(one)
    text = throughput_report.beside(two)
    assert cells(text)[1][:3] == ["16, 8 a GPU", "4096 + 64", "1"] and "fp8 cache, 2 x NVIDIA H200, driver" in text
    text = throughput_report.beside(one, two)
    assert [row[0] for row in cells(text)[1:]] == ["16", "16, 8 a GPU"]
    assert "fp8 cache, NVIDIA H200 or 2 x NVIDIA H200, driver" in text
    assert runs.markdown(two).splitlines()[-1].startswith("small, 4 layers, 16 heads, 2 x NVIDIA H200, torch")
    for file, seconds in ((one, 0.01), (two, 0.02)):
        entry = file["results"][0]
        entry["profile"] = {"steps": 10, "wall_s": seconds, **kernel_times.table([("gemm", 1, 100.0)])}
    names, step, *_ = cells(throughput_report.profiles(one, two))
    assert names[1:] == ["SPARSE_MLA, 16 heads", "SPARSE_MLA, 16 heads, 8 a GPU"] and step[1:] == ["1000", "2000"]


def test_the_engine_is_compared_with_the_fastest_round_by_round():
    report = result_examples.throughput(backends=("FLASHMLA_SPARSE", "SPARSE_MLA", "embedded"), loads=(4,))
    for entry, seconds in zip(report["results"], ([9.0, 9.0, 9.0], [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]), strict=True):
        entry["rounds_s"] = seconds
    report["environment"]["settings"] = {**report["environment"]["settings"], "interleaved": True}
    assert cells(throughput_report.engine_beside(report))[1][6] == "1.00 (0.50 to 1.50)"


def test_the_engine_stands_beside_every_backend_of_vllm_at_each_load_that_all_have():
    report = result_examples.throughput(backends=("FLASHMLA_SPARSE", "SPARSE_MLA", "embedded"), loads=(16, 4, 1))
    report["results"][4] = result_examples.failed(report["results"][4], "out of memory")
    other = copy.deepcopy(report)
    other["environment"]["model"]["heads"] = 128
    for entry in other["results"]:
        entry["case"]["input_len"] = 512
    for entry in (entry for entry in other["results"] if entry["backend"] == "FLASHMLA_SPARSE"):
        entry["output_tokens_per_second"] *= 2  # the fastest of vLLM's here, SPARSE_MLA is it in the other file
    text = throughput_report.engine_beside(report, other)
    headings, *rows = cells(text)
    assert headings[3:7] == [
        "embedded, output tokens/s (quartiles)",
        "vLLM, FLASHMLA_SPARSE (quartiles)",
        "vLLM, SPARSE_MLA (quartiles)",
        "ratio to the faster",
    ]
    assert [row[:3] for row in rows] == [
        [heads, tokens, load] for heads, tokens in (("16", "4096 + 64"), ("128", "512 + 64")) for load in ("16", "1")
    ]
    for row, (file, i) in zip(rows, [(report, 0), (report, 2), (other, 0), (other, 2)], strict=True):
        flash, sparse, engine = (file["results"][i + first] for first in (0, 3, 6))
        speeds = [entry["output_tokens_per_second"] for entry in (engine, flash, sparse)]
        assert [cell.split(" ")[0] for cell in row[3:6]] == [f"{speed:.0f}" for speed in speeds]
        seconds, tokens = engine["seconds"], engine["total_output_tokens"]
        low, high = tokens / seconds["upper_quartile"], tokens / seconds["lower_quartile"]
        assert row[3].endswith(f" ({low:.0f} to {high:.0f})")
        assert row[6] == f"{speeds[0] / speeds[1 if file is other else 2]:.2f}"
        assert row[7] == " / ".join(f"{entry['latency']['ttft_s']['p50'] * 1e3:.0f}" for entry in (engine, flash))
        assert row[8] == " / ".join(f"{entry['latency']['tpot_s']['p50'] * 1e3:.2f}" for entry in (engine, flash))
    last = text.splitlines()[-1]
    assert last.startswith(
        "Medians of 3 rounds; latencies embedded / FLASHMLA_SPARSE. 4 layers of deepseek_v32's width"
    )
    assert "NVIDIA H200" in last and "2026-11-20, commit 5214a64bcc." in last


@pytest.mark.parametrize("backends", [("embedded",), ("SPARSE_MLA", "FLASHMLA_SPARSE")])
def test_the_engine_stands_beside_nobody_where_one_of_the_two_is_missing(backends):
    with pytest.raises(ValueError, match=f"must have embedded and a backend of vLLM; they have {', '.join(backends)}"):
        throughput_report.engine_beside(result_examples.throughput(backends=backends, loads=(1,)))


def test_a_table_of_kernels_has_the_longest_of_each_backend_a_step():
    names = {
        "SPARSE_MLA": "void mla::cuda::sm90::many_heads::attention_kernel<(mla::Code)1>(mla::AttentionProblem)",
        "FLASHMLA_SPARSE": "void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<a::B<(C)0, 64>>(P",
    }
    report = result_examples.throughput(backends=tuple(names), loads=(1, 16))
    for entry in report["results"]:
        gemms = [(f"gemm_{i}", 4, 400.0 + i) for i in range(20)]
        own = (names[entry["backend"]], 8, 4000.0)
        profile = {"steps": 4, "wall_s": 0.01, **kernel_times.table([*gemms, own])}
        entry["profile"] = profile if entry["case"]["concurrency"] == 1 else None
    headings, *rows = cells(throughput_report.profiles(report))
    assert headings == ["us a step", "SPARSE_MLA, 16 heads", "FLASHMLA_SPARSE, 16 heads"]
    assert rows[0] == ["the step", "2500", "2500"]
    assert rows[3:5] == [
        ["`many_heads::attention_kernel`", "1000", "-"],
        ["`sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel`", "-", "1000"],
    ]
    assert [row[0] for row in rows[5:]] == [f"`gemm_{i}`" for i in range(19, 12, -1)]


def test_a_table_of_kernels_has_the_lengths_where_there_are_several():
    both = result_examples.throughput(backends=("SPARSE_MLA",), loads=(1, 16), lengths=((4096, 64), (512, 512)))
    for number, entry in enumerate(both["results"], 1):
        profile = {"steps": 1, "wall_s": number * 1e-3, **kernel_times.table([("gemm", 1, 100.0 * number)])}
        entry["profile"] = profile if entry["case"]["concurrency"] == 1 else None
    (_, *names), step, *_, gemm = cells(throughput_report.profiles(both))
    assert names == ["SPARSE_MLA, 16 heads, 4096 + 64", "SPARSE_MLA, 16 heads, 512 + 512"]
    assert step == ["the step", "1000", "3000"] and gemm == ["`gemm`", "100", "300"]
    files = [{**both, "results": both["results"][i : i + 2]} for i in (0, 2)]
    assert throughput_report.profiles(*files) == throughput_report.profiles(both), "as files of one each"
    assert cells(throughput_report.profiles(files[1]))[0] == ["us a step", "SPARSE_MLA, 16 heads"]


def test_ways_to_answer_are_shown_once_and_failures_not_at_all():
    way = dict(engine="vllm", cache="fp8", eager=False, drafts=0, gpus=1, error=None, asked=5, right=5, drafted=0)
    embedded = {**way, "way": "embedded", "engine": "embedded"}
    held = {**way, "way": "tp-2", "gpus": 2, "than": "embedded", "answers_equal": 5, "texts_equal": 3}
    drafted = {**held, "way": "mtp-1", "drafts": 1, "gpus": 1, "drafted": 9, "accepted": 4, "eager": True}
    first, second = {"results": [embedded, drafted]}, {"results": [embedded, held, {"way": "x", "error": "no"}]}
    _, *rows = cells(backend_runs.recall_table(first, second))
    assert rows == [
        ["embedded", "FP8", "CUDA graphs", "-", "1", "5 of 5", "-", "-", "-"],
        ["vLLM", "FP8", "without CUDA graphs", "1", "1", "5 of 5", "5", "3", "4 of 9"],
        ["vLLM", "FP8", "CUDA graphs", "-", "2", "5 of 5", "5", "3", "-"],
    ]


def test_what_was_not_finite_is_shouted():
    report = json.loads((ROOT / "results" / "vllm_0.23_heads_16.json").read_text())
    looked_at = report["results"][0]["logprobs_looked_at"]
    report["results"][1]["finite"] = False
    report["results"].append({"candidate": "SPARSE_MLA", "workload": "1x1+1", "error": "no"})
    _, first, second = cells(backend_runs.markdown(report))
    assert first[-1] == f"all {looked_at}" and second[-1] == "NOT ALL"


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
    done = subprocess.run(
        [sys.executable, "-m", "serving_benchmarks.results.docs", "--check"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("all numbers of ")
