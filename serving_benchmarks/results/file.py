"""The file that a benchmark writes: JSON with where it was measured and one entry for each thing that was measured.

    {"environment": {"benchmark": KIND, "commit": ..., ...}, "results": [ENTRY, ...]}

kinds.py says what the entries of each kind have, and reads files.
"""

import datetime
import html
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mla_backend import doctor
from mla_backend.sglang_plugin import versions as sglang

Report = dict[str, Any]
"""The contents of a result file."""


class NotUnderstood(ValueError):
    """A file that is not a result file, or not one that can be used. The text names the file and says why."""


@dataclass(frozen=True)
class ResultFile:
    """A result file that kinds.load has checked."""

    path: Path
    kind: str
    """A key of kinds.KINDS."""
    environment: dict[str, Any]
    results: list[dict[str, Any]]

    @property
    def report(self) -> Report:
        return {"environment": self.environment, "results": self.results}

    @property
    def machine(self) -> str:
        return machine(self.environment)

    @property
    def succeeded(self) -> list[dict[str, Any]]:
        """The entries that were measured. The others say why they failed."""
        return [result for result in self.results if not result.get("error")]


def machine(environment: dict[str, Any]) -> str:
    """The GPUs, or the CPU of a benchmark that used none."""
    names = [gpu["name"] for gpu in environment.get("gpus") or []]
    if names:
        return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    return (environment.get("cpu") or {}).get("model") or "unknown machine"


def write(path: Path | None, results: Sequence[dict[str, Any]], console: Console, **more: Any) -> None:
    """Writes results and where they were measured. `more` is added to the environment; it names the kind as
    `benchmark`."""
    if path is None:
        return
    about = {**environment(), **more}
    replace(path, text({"environment": about, "results": results}))
    console.print(f"written to {path}", markup=False, soft_wrap=True)  # a path is never broken


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole, aside and then renamed, or leaves what is there. What UTF-8 lacks becomes an escape."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    path = path.resolve()  # a link stays
    if path.exists() and not path.is_file():  # a device or a pipe
        path.write_bytes(data)
        return
    aside = path.with_name(f"{path.name[:200]}.{os.getpid()}.part")
    try:
        aside.write_bytes(data)
        if path.exists():
            shutil.copymode(path, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def text(report: Report) -> str:
    """JSON with one line for each value, and one line for each list of numbers however long it is."""
    return _NUMBERS.sub(lambda numbers: " ".join(numbers[0].split()), json.dumps(report, indent=1)) + "\n"


_NUMBERS = re.compile(r'(?<=\[)\n[^][{}"]*(?=\])')
"""The inside of a list that has neither text nor other lists in it."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| " + " | ".join(map(_cell, headings)) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]


def _cell(text: str) -> str:
    """Text of a file that neither ends a cell nor becomes markup."""
    return " ".join(html.escape(text, quote=False).replace("|", "&#124;").split())


def microseconds(seconds: float) -> str:
    """A cell."""
    return f"{seconds * 1e6:.1f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def engine(environment: dict[str, Any]) -> str:
    """The engine that was measured, or that kernels come from, with its version."""
    if (environment.get("settings") or {}).get("engine") == "sglang":
        return f"sglang {environment['sglang']}"
    vllm = environment["vllm"]
    return f"{vllm['distribution']} {vllm['version']}" if vllm["version"] else "no vLLM"


def when(environment: dict[str, Any]) -> str:
    """The day, the commit, and whether the tree differed from it."""
    commit, changes, _ = (environment.get("commit") or "unknown").partition("+")
    return f"{environment['date'][:10]}, commit {commit[:10]}{changes and ' and changes'}"


def show(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int, width: int = 110) -> None:
    """Prints a table. All columns but the first `words` are numbers."""
    shown = Table(*headings, box=None, padding=(0, 1))
    for column in shown.columns[words:]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*row)
    console(width).print(shown)


def console(width: int | None = None) -> Console:
    """Prints what files say as it is: no markup, no emoji."""
    return Console(width=width, highlight=False, markup=False, emoji=False)


# Where it was measured: what has to stand beside every number


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command of this process, as plain data for a result file."""
    report, spec = doctor.examine(), sys.modules["__main__"].__spec__
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    # where a file lay on the machine that measured tells nobody else anything
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *program, *words]),
        "commit": _commit(),
        "system": report["system"],
        "python": platform.python_version(),
        "torch": report["torch"],
        "vllm": report["vllm"],
        "sglang": sglang.installed(),
        "cpu": report["cpu"],
        "gpus": report["gpus"]["devices"],
        "driver": next(iter(nvidia_smi("driver_version")), None),
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


def nvidia_smi(field: str) -> list[str]:
    """What NVIDIA's driver says of each GPU of this machine; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return []
    return found.stdout.splitlines() if found.returncode == 0 else []


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
