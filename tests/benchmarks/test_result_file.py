"""A result file is tried before anything is measured, and nothing of the trial is left; what is written is short."""

import argparse
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from serving_benchmarks.results import result_file


def try_to_write(path: Path | None) -> None:
    result_file.require_writable(argparse.ArgumentParser(), path)


def test_a_new_file_is_not_left_behind_empty(tmp_path):
    try_to_write(tmp_path / "folder" / "out.json")
    assert (tmp_path / "folder").is_dir() and not list((tmp_path / "folder").iterdir())
    try_to_write(None)


@pytest.mark.parametrize("content", ["", '{"environment": {}, "results": []}\n'])
def test_a_file_that_is_there_is_not_touched(tmp_path, content):
    path = tmp_path / "out.json"
    path.write_text(content)
    os.utime(path, (1, 1))
    try_to_write(path)
    assert path.read_text() == content and path.stat().st_mtime == 1


def test_a_link_stays_and_what_it_leads_to_is_not_made(tmp_path):
    link, target = tmp_path / "out.json", tmp_path / "target.json"
    link.symlink_to(target)
    try_to_write(link)
    assert link.is_symlink() and not target.exists()


@pytest.mark.parametrize("name", ["", "file/out.json"])
def test_what_is_no_file_is_refused(tmp_path, name, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        try_to_write(tmp_path / name)
    assert stopped.value.code == 2 and "--output: " in capsys.readouterr().err


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_what_is_written_is_read_again(report):
    assert json.loads(result_file.text(report)) == report


def test_a_list_of_numbers_has_one_line():
    report = {
        "rounds_s": [1.5, None, 2e-7],
        "words": ["[\n1\n]", "a  b"],
        "spaced": ["a  b"],
        "none": [],
        "lists": [[1, 2], [{"a": [3]}]],
    }
    lines = result_file.text(report).splitlines()
    assert ' "rounds_s": [1.5, null, 2e-07],' in lines and "  [1, 2]," in lines and '    "a": [3]' in lines
    assert json.loads("\n".join(lines)) == report


def test_what_a_benchmark_writes_is_so_short(tmp_path):
    result_file.write(tmp_path / "out.json", [{"rounds_s": [1.5, 2.5]}], Console(quiet=True), settings={"cpus": 2})
    written = (tmp_path / "out.json").read_text()
    assert '   "rounds_s": [1.5, 2.5]\n' in written and json.loads(written)["environment"]["settings"] == {"cpus": 2}


def test_a_folder_is_made_and_a_file_in_its_place_is_told_of(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    result_file.require_folder(parser, "--logs", None)
    for _ in range(2):
        result_file.require_folder(parser, "--logs", tmp_path / "new" / "logs")
    assert (tmp_path / "new" / "logs").is_dir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SystemExit) as stopped:
        result_file.require_folder(parser, "--logs", tmp_path / "file")
    assert stopped.value.code == 2 and (tmp_path / "file").read_text() == "mine"
    assert "--logs must be a folder, or the name of a new one" in capsys.readouterr().err
