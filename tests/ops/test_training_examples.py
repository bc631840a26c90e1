"""The programs of examples/training run, and say what they promise."""

from pathlib import Path

import pytest

from commands import in_python

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "examples").is_dir(), reason="needs the source tree")


def run(program: str, *options: str) -> str:
    done = in_python("-m", f"examples.training.{program}", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_have_the_gradients_of_one():
    printed = run("parallel")
    assert [line.split(" on ")[0] for line in printed.splitlines()] == ["tensor parallel", "sequence parallel"]


def test_a_model_of_two_layers_trains_as_with_the_reference(device, tmp_path):
    """They share lists and the order of contributions."""
    picture = tmp_path / "loss.png"
    small = ("--device", device, "--tokens", "64", "--heads", "2", "--layers", "2")
    printed = run("train", *small, "--steps", "8", "--picture", str(picture))
    assert float(printed.split()[-1]) < 0.05
    assert picture.read_bytes().startswith(b"\x89PNG")
