"""What docs/benchmarks.md shows are commands that are understood."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from serving_benchmarks.models import models
from serving_benchmarks.run import workloads

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
pytestmark = pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")
MARK = r"<!-- \w+: \w+ by tests/docs/test_benchmark_docs.py -->\n"


def test_the_commands_are_understood(tmp_path, monkeypatch):
    text = DOCS.read_text()
    blocks = re.findall(MARK + r"```sh\n(.+?)```", text, re.DOTALL)
    commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    assert len(commands) > 10
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "v32-16-heads"):  # only their config.json is looked at
        Path(name).mkdir()
        (Path(name) / "config.json").write_text(json.dumps(models.config("deepseek-v3.2")))
    Path("prompts.jsonl").write_text('{"tokens": [5, 6, 7], "max_tokens": 3}\n')
    Path("lengths.csv").write_text(re.search(MARK + r"```csv\n(.+?)```", text, re.DOTALL)[1])
    assert len(workloads.read_histogram(Path("lengths.csv"))) == 2
    for python, dash_m, module, *arguments in commands:
        assert (python, dash_m) == ("python", "-m")
        importlib.import_module(module).parse_arguments(arguments)


def test_the_size_of_a_model_is_what_it_says():
    said = re.search(
        r"with 16 heads and 8 experts are ([\d.]+) GB, of which ([\d.]+) are the embeddings", DOCS.read_text()
    )
    plans = models.tensors(models.config("deepseek-v3.2", layers=4, heads=16, experts=8))
    ends = [plan for plan in plans if plan.name in ("model.embed_tokens.weight", "lm_head.weight")]
    for number, some in zip(said.groups(), (plans, ends), strict=True):
        assert sum(plan.bytes for plan in some) / 1e9 == pytest.approx(float(number), abs=0.05)
