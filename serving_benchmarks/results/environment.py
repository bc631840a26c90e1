"""Where a result was measured: what has to stand beside every number."""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from mla_backend import doctor


def describe() -> dict[str, Any]:
    """Machine, versions, commit and command of this process, as plain data for a result file."""
    report = doctor.examine()
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *_program(), *map(_without_folder, sys.argv[1:])]),
        "commit": _commit(),
        "system": report["system"],
        "python": platform.python_version(),
        "torch": report["torch"],
        "vllm": report["vllm"],
        "cpu": report["cpu"],
        "gpus": report["gpus"]["devices"],
        "driver": _driver(),
        "library": {k: v for k, v in report["library"].items() if k not in ("path", "formats")},
    }


def why_no_gpu() -> str | None:
    """Why nothing can be measured on a GPU here, in one line; None if it can."""
    report = doctor.examine()
    if not report["gpus"]["devices"]:
        return f"no NVIDIA GPU to measure on: {report['gpus']['why']}"
    if not report["library"]["cuda_archs"]:
        return "the library was built without CUDA"
    return None


def _driver() -> str | None:
    """The version of NVIDIA's driver."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return found.stdout.splitlines()[0] if found.returncode == 0 and found.stdout else None


def _without_folder(argument: str) -> str:
    """Where a file lay on the machine that measured tells nobody else anything."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _program() -> list[str]:
    """What the interpreter was told to run: a package, a module or a file."""
    spec = sys.modules["__main__"].__spec__
    return ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]


def _commit() -> str | None:
    """The commit of the source tree this runs from, with '+changes' if it differs; None outside of one."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        ).stdout.strip()

    head = git("rev-parse", "HEAD")
    return (head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")) if head else None
