"""What the README shows is what runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="needs the source tree")


def test_the_readmes_example_runs_and_prints_what_it_says():
    code = re.search(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert f"# {printed}" in code


@pytest.mark.parametrize("name", ["sparse_attention"])
def test_examples_run(name):
    done = subprocess.run([sys.executable, ROOT / "examples" / f"{name}.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    differences = [float(x) for x in re.findall(r"\d\.\de[-+]\d+", done.stdout)]
    assert len(differences) == 3 and max(differences) < 0.01


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_benchmark_measures_a_small_case(tmp_path):
    output = tmp_path / "out.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "serving_benchmarks.ops.cpu_attention",
            "--heads",
            "3",
            "--contexts",
            "32",
            "--batches",
            "2",
            "--rounds",
            "2",
            "--burst",
            "0",
            "--threads",
            "2",
            "--output",
            output,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert {r["case"]["format"] for r in report["results"]} == {"bf16", "fp8_ds_mla"}
    assert all(r["seconds"]["ours"]["median"] > 0 and r["largest_difference"]["ours"] < 0.02 for r in report["results"])
    assert report["environment"]["torch"]["version"] and "ours" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--contexts", "100"], "--contexts must be multiples of 16"),
        (["--heads", "0"], "--heads must be 1 or more"),
        (["--heads", "300"], "--heads must be 256 or fewer"),
        (["--markdown", "/nope.json"], "/nope.json is no result file"),
        (["--output", "/proc/nope/x.json"], "--output: "),
        (["--rounds", "1"], "--rounds must be 2 or more"),
    ],
)
def test_the_benchmark_refuses_wrong_arguments(arguments, text):
    done = subprocess.run(
        [sys.executable, "-m", "serving_benchmarks.ops.cpu_attention", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2 and text in done.stderr
