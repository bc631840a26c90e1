"""What docs/engine.md shows is what runs."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import engine_models
from mla_backend import cli

DOCS = Path(__file__).parent.parent.parent / "docs" / "engine.md"
pytestmark = pytest.mark.skipif(not DOCS.is_file(), reason="needs the source tree")
MARK = r"<!-- examples?: run by tests/docs/test_engine_docs.py -->\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return engine_models.save_small(tmp_path_factory.mktemp("small"))


def test_the_examples_in_python_run(folder, capsys):
    examples = re.findall(MARK + r"```python\n(.+?)```", DOCS.read_text(), re.DOTALL)
    assert len(examples) == 2
    names = {"folder": folder}
    with engine_models.one_thread():
        for code in examples:
            exec(code, names)
    out = capsys.readouterr().out
    assert re.match(r"(20|\d) ", out) and out.count("length") + out.count("stop") >= 2


def test_the_commands_run_and_answer_everything(folder, tmp_path, monkeypatch, capfd):
    text = DOCS.read_text()
    commands = re.search(MARK + r"```sh\n(.+?)```", text, re.DOTALL)[1].splitlines()
    batch = re.search(r"```json\n(.+?)```", text, re.DOTALL)[1]
    (tmp_path / "questions.txt").write_text("Why?\nWhat for?\n")
    (tmp_path / "batch.jsonl").write_text(batch)
    monkeypatch.chdir(tmp_path)
    with engine_models.one_thread():
        for command in commands:
            program, *arguments = shlex.split(command.replace("MODEL", str(folder)))
            assert program == "mla-backend" and cli.main(arguments) == 0, command
    assert json.loads(capfd.readouterr().out)["prompt"] == "The capital of France is"
    answers, results = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("answers.jsonl", "results.jsonl")
    )
    assert len(answers) == 2 and sorted(line["id"] for line in results) == ["a", "b"]
