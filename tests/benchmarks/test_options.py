"""The door: every command has its help, and wrong options are refused with their names."""

import argparse

import pytest

from serving_benchmarks import options as opt
from serving_benchmarks.__main__ import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_its_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0 and f"python -m serving_benchmarks {command}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["ops"], ["nope"], ["ops", "nope"], ["--nope"]])
def test_what_is_no_command_is_refused(words, capsys):
    assert main(words) == 2
    assert not capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["docs", "--check"]])
def test_a_full_disk_is_a_sentence(words, monkeypatch, capfd):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(words) == 1
        monkeypatch.undo()
    assert capfd.readouterr().err.startswith("error: ")


def test_values_are_read():
    assert opt.count("3") == 3 and opt.positive("0.5") == 0.5
    assert opt.listed(opt.count)("16, 1,16") == [16, 1] and opt.names("a,b") == ["a", "b"]
    assert opt.json_object('{"a": 1}') == {"a": 1}
    sizes = {"1G": 2**30, "512M": 2**29, "8GiB": 2**33, "1.5GB": 3 * 2**29, "100": 100, "4g": 4 * 10**9, "4gib": 2**32}
    assert {text: opt.size(text) for text in sizes} == sizes
    assert opt.load("20+4") == ((20, 4), None) and opt.load("20+4/3") == ((20, 4), 3)


REFUSED = [(opt.count, "0"), (opt.count, "1.5"), (opt.rounds, "1"), (opt.whole(1, 3), "4"), (opt.positive, "nan")]
REFUSED += [(opt.positive, "-1"), (opt.positive, "0"), (opt.positive, "inf"), (opt.listed(opt.count), "1,,2")]
REFUSED += [(opt.listed(opt.count), ""), (opt.listed(opt.one_of(["a"])), "a,b"), (opt.json_object, "[]")]
REFUSED += [
    (opt.json_object, "{"),
    (opt.new_file, "/proc/nope/x.json"),
    (opt.new_file, "-"),
    (opt.new_folder, __file__),
    (opt.share, "1.5"),
]
REFUSED += [(opt.folder_in_one, "/proc/nope/x")]
REFUSED += [(opt.percentage, text) for text in ("0.05", "-5%", "five", "nan", "")] + [(opt.pattern, "(")]
REFUSED += [(opt.size, text) for text in ("0", "0G", "-1G", "1X", "G", "1Gi2")]


@pytest.mark.parametrize(("read", "text"), REFUSED)
def test_wrong_values_are_refused(read, text):
    with pytest.raises(argparse.ArgumentTypeError):
        read(text)


def test_an_output_is_left_as_it_is(tmp_path):
    assert not opt.new_file(str(tmp_path / "new.json")).exists()
    (tmp_path / "old.json").write_text("results")
    assert opt.new_file(str(tmp_path / "old.json")).read_text() == "results"
