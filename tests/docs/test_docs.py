"""What README and docs show is what runs.

A comment in front of a fenced block, which does not show, says what is done with the block:

    <!-- example: tested -->      runs and prints what its comments say
    <!-- commands: run -->        lines of mla-backend succeed
    <!-- commands: parsed -->     lines of `python -m serving_benchmarks` are understood
    <!-- file: NAME -->           is there under that name when the page's commands run

Blocks of a page share their variables. `folder` and MODEL are a small checkpoint.
"""

import argparse
import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import commands
import engine_models
from mla_backend import cli, tried_versions
from serving_benchmarks.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"^<!-- (example|commands|file): (\S+) -->\n```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"^<!-- (?:examples?|commands?|files?):", re.MULTILINE)
SAID = re.compile(r"print\(.*\)  # (.+)")
pytestmark = pytest.mark.skipif(not PAGES[0].is_file(), reason="needs the source tree")


def blocks(*marks: str) -> dict[str, list[tuple[str, str]]]:
    """The languages and texts of the blocks with one of these marks, by page."""
    found = {}
    for page in PAGES:
        for kind, how, language, text in MARKED.findall(page.read_text()):
            if f"{kind}: {how}" in marks:
                found.setdefault(page.name, []).append((language, text))
    return found


EXAMPLES = blocks("example: tested")


def parsed(words: list[str]) -> argparse.Namespace:
    """The options of a command of serving_benchmarks."""
    (command,) = [name for name in COMMANDS if words[: len(name.split())] == name.split()]
    return commands.parsed(command, *words[len(command.split()) :])


def pages_with(found: dict[str, list[tuple[str, str]]]) -> list:
    return [pytest.param(texts, id=page) for page, texts in found.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return engine_models.save_small(tmp_path_factory.mktemp("small"))


@pytest.fixture
def beside_model(tmp_path, monkeypatch, folder) -> Path:
    """The current folder, with a checkpoint called MODEL in it."""
    monkeypatch.chdir(tmp_path)
    Path("MODEL").symlink_to(folder)
    return tmp_path


def test_every_mark_is_one_that_is_tested():
    for page in PAGES:
        text = page.read_text()
        known = [m for m in MARKED.finditer(text) if m[1] == "file" or m[2] in ("tested", "run", "parsed")]
        assert len(known) == len(MARK.findall(text)), page.name
        assert {m[3] for m in known if m[1] == "example"} <= {"python"}, page.name


def test_every_block_says_what_it_is_and_all_python_is_tested():
    for page in PAGES:
        languages = re.findall(r"^```(\w*)\n.*?^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        assert {*languages} <= {"python", "json", "sh", "console", "text"}, page.name
        assert languages.count("python") == len(EXAMPLES.get(page.name, [])), page.name


@pytest.mark.parametrize("examples", pages_with(EXAMPLES))
def test_examples_print_what_they_say(examples, folder):
    names = {"folder": folder}
    for _, text in examples:
        with contextlib.redirect_stdout(io.StringIO()) as out, engine_models.one_thread():
            exec(compile(text, "example", "exec"), names)
        printed = out.getvalue().splitlines()
        assert printed or "print(" not in text
        for said in SAID.findall(text):
            assert printed == said.split(", then "), said


@pytest.mark.parametrize("commands", pages_with(blocks("commands: run")))
def test_commands_succeed(commands, beside_model):
    Path("questions.txt").write_text("Why?\nWhat for?\n")
    for page in PAGES:
        for kind, name, _, text in MARKED.findall(page.read_text()):
            if kind == "file":
                Path(name).write_text(text)
    outputs = set()
    with engine_models.one_thread():
        for line in "".join(text for _, text in commands).splitlines():
            program, *arguments = shlex.split(line)
            assert program == "mla-backend" and cli.main(arguments) == 0, line
            if "--output" in arguments:
                outputs.add((arguments[arguments.index("--input") + 1], arguments[arguments.index("--output") + 1]))
    for asked, answered in outputs:
        results = [json.loads(line) for line in Path(answered).read_text().splitlines()]
        assert len(results) == len(Path(asked).read_text().splitlines()), answered


@pytest.mark.parametrize("commands", pages_with(blocks("commands: parsed")))
def test_benchmark_commands_are_understood(commands, beside_model):
    for line in "".join(text for _, text in commands).splitlines():
        python, dash_m, package, *words = shlex.split(line)
        assert (python, dash_m, package) == ("python", "-m", "serving_benchmarks"), line
        parsed(words)


def test_the_example_of_sparse_attention_is_accurate():
    done = commands.in_python("-m", "examples.sparse_attention")
    assert done.returncode == 0, done.stderr
    differences = [float(x) for x in re.findall(r"\d\.\de[-+]\d+", done.stdout)]
    assert len(differences) == 3 and max(differences) < 0.01


def test_the_pages_name_the_versions_that_the_plugins_know():
    for page in (ROOT / "README.md", ROOT / "docs" / "tested.md"):
        for version in (*tried_versions.VLLM, *tried_versions.SGLANG):
            assert re.search(rf"\b{re.escape(version)}\b", page.read_text()), f"{page.name} lacks {version}"


def test_links_lead_somewhere():
    texts = {page: page.read_text() for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]}
    anchors = {}
    for page, text in texts.items():
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors[page] = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    for page, text in texts.items():
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            path = (page.parent / target).resolve() if target else page
            assert path.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors[path], f"{page.name} links to {target}#{anchor}"
