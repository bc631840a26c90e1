"""The file that a benchmark writes: JSON with where it was measured and one entry for each thing that was measured.

    {"environment": {"benchmark": KIND, "commit": ..., ...}, "results": [ENTRY, ...]}

kinds.py says what the entries of each kind have, and reads files.
"""

import datetime
import json
import os
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
from rich.text import Text

from mla_backend import doctor, terminal

Report = dict[str, Any]  # the contents of a result file


class NotUnderstood(ValueError):
    """A file that is not a result file, or not one that can be used. The text names the file and says why."""


@dataclass(frozen=True)
class ResultFile:
    """A result file that kinds.load has checked."""

    path: Path
    kind: str  # a key of kinds.KINDS
    environment: dict[str, Any]
    results: list[dict[str, Any]]

    @property
    def report(self) -> Report:
        return {"environment": self.environment, "results": self.results}


def write(path: Path | None, results: Sequence[dict[str, Any]], console: Console, **more: Any) -> None:
    """Writes results and where they were measured. `more` of the environment names the kind as `benchmark`."""
    if path is not None:
        replace(path, text({"environment": {**environment(), **more}, "results": results}))
        console.print(f"written to {path}", markup=False, soft_wrap=True)  # a path is never broken


def replace(path: Path, content: str | bytes) -> None:
    """Writes a file as a whole: no reader finds half of it. Devices are written to. What UTF-8 lacks is escaped."""
    content = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    target = path.resolve()  # a link stays
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    aside = target.with_name(f"{target.name[:200]}.{os.getpid()}.part")
    try:
        aside.write_bytes(content)
        if target.exists():
            shutil.copymode(target, aside)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


def text(report: Report) -> str:
    """JSON with one line for each value; flat lists and objects are values. Floats have eight digits."""
    return _FLAT.sub(lambda flat: re.sub(r"\n *", " ", flat[0].strip()), json.dumps(_rounded(report), indent=1)) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


_FLAT = re.compile(r"(?<=[\[{])\n[^][{}]*(?=[\]}])")  # the inside of a list or object that has no others in it


# Tables


def page(headings: Sequence[str], rows: Sequence[Sequence[str]], note: str | None = None) -> str:
    """A table in Markdown, and a line below it."""
    rows = [[one_line(cell.replace("|", "\\|")) for cell in row] for row in rows]
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines if note is None else [*lines, "", one_line(note)])


def one_line(text: str) -> str:
    return " ".join(text.split())


def show(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int, width: int = 110) -> None:
    """Prints a table. All columns but the first `words` are numbers."""
    shown = Table(*headings, box=None, padding=(0, 1))
    for column in shown.columns[words:]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*map(Text, row))
    console(width).print(shown)


def console(width: int | None = None) -> Console:
    """Prints what files say as it is: no markup, no emoji."""
    return terminal.console(width, markup=False, emoji=False)


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


# Where it was measured: what has to stand beside every number


def machine(environment: dict[str, Any]) -> str:
    """The GPUs, or the CPU of a benchmark that used none."""
    names = [gpu["name"] for gpu in environment.get("gpus") or []]
    if names:
        return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"
    return (environment.get("cpu") or {}).get("model") or "unknown machine"


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


def environment() -> dict[str, Any]:
    """Machine, versions, commit and command of this process, as plain data for a result file."""
    report = doctor.examine()
    # where a file lay on the machine that measured tells nobody else anything
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m serving_benchmarks", *words]),
        "commit": _commit(),
        **{name: report[name] for name in ("system", "python", "torch", "vllm", "cpu")},
        "sglang": report["sglang"]["version"],
        "gpus": report["gpus"]["devices"],
        "driver": next(iter(nvidia_smi("driver_version")), None),
        "library": {k: v for k, v in report["library"].items() if k not in ("path", "formats")},
    }


def nvidia_smi(field: str) -> list[str]:
    """What NVIDIA's driver says of each GPU of this machine; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []


def _commit() -> str | None:
    """The commit of the source tree this runs from, with '+changes' if it differs; None outside of one."""

    def git(*words: str) -> str:
        command, locks = ["git", "-C", str(Path(__file__).parent), *words], {"GIT_OPTIONAL_LOCKS": "0"}
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **locks}).stdout.strip()

    head = git("rev-parse", "HEAD")
    return (head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")) if head else None
