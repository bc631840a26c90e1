"""What tests of commands share."""

import argparse
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from serving_benchmarks.__main__ import COMMANDS, main

FAKE_VLLM, FAKE_SGLANG = (
    f"{Path(__file__).parent / name}:{Path(__file__).parents[2]}" for name in ("fake_vllm", "fake_sglang")
)
"""The PYTHONPATH with which a stand-in takes an engine's place. It notes things in the folder FAKE_VLLM or so."""


def parsed(command: str, *words: object) -> argparse.Namespace:
    """The options of a command."""
    parser = argparse.ArgumentParser()
    importlib.import_module(f"serving_benchmarks.{COMMANDS[command][0]}").add_options(parser)
    return parser.parse_args(list(map(str, words)))


def status_of(*words: object, program: Callable[[list[str]], int] = main) -> int:
    """The exit status of a command."""
    try:
        return program(list(map(str, words)))
    except SystemExit as stopped:
        return stopped.code


def in_python(*words: object, **environment: str) -> subprocess.CompletedProcess:
    """A process of its own in the source tree, and what it said."""
    how = dict(cwd=Path(__file__).parents[2], env={**os.environ, **environment})
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **how)


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition: Callable[[], bool], seconds: float = 60, every: float = 0.05) -> bool:
    """Whether a condition came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(every)
    return True
