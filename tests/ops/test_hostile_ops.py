"""Some seeds of the attacks on the ops: wild plans, and arguments that are wrong or unusual."""

import subprocess
import sys
from pathlib import Path

import pytest

import hostile
import torture


@pytest.mark.parametrize("attack", ["plans", "ops"])
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_what_is_wrong_is_refused_or_harmless(attack, first):
    hostile.run(attack, range(first, first + 50))


def test_a_list_of_one_slot_has_the_tolerance_of_the_contract():
    hostile.run("plans", [779179])


def test_torture_counts_what_it_finds_and_goes_on(monkeypatch, capsys):
    tried = []

    def run(command, **more):
        seed = int(command[command.index("--seed") + 1])
        tried.append(seed)
        Path(command[command.index("--batch") + 1]).write_text(str(seed + 1))
        return subprocess.CompletedProcess(command, seed % 4 == 0, "", "")

    monkeypatch.setattr(torture.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["torture.py", "--attack", "plans", "--seed", "2", "--minutes", "0.002"])
    assert torture.main() == 1
    out = capsys.readouterr().out
    assert tried[:4] == [2, 3, 4, 6] and out.count("FOUND by plans with seed 5 ") == 2
    assert out.splitlines()[-1].startswith("FOUND") and f"\n{sum(seed % 4 == 0 for seed in tried)} found\n" in out
