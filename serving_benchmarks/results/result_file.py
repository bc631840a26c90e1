"""The file that a benchmark writes: asked for, tried before anything is measured, written, and shown again."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from serving_benchmarks.results import environment


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option --output FILE."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results and their environment as JSON")


def add_markdown(parser: argparse.ArgumentParser) -> None:
    """The option --markdown FILE."""
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="measure nothing; print a result file as the README's table"
    )


def require_writable(parser: argparse.ArgumentParser, path: Path | None) -> None:
    """A file that can't be written is an error before measuring for minutes, not after. One that is there is left as it
    is, and none that isn't is left behind: whoever is stopped before there are results has no empty file of them."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_there = path.exists()
        with path.open("ab"):  # changes nothing
            pass
        if not is_there:
            path.resolve().unlink()  # what a link leads to, not the link
    except OSError as error:
        parser.error(f"--output: {error}")


def require_folder(parser: argparse.ArgumentParser, option: str, path: Path | None) -> None:
    """A folder for what a program writes besides, which is made if it isn't there."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        parser.error(f"{option} must be a folder, or the name of a new one; {path} is a file")
    except OSError as error:
        parser.error(f"{option}: {error}")


def write(path: Path | None, results: Sequence[dict[str, Any]], console: Console, **more: Any) -> None:
    """Results and where they were measured; `more` stands beside the environment's own entries."""
    if path is None:
        return
    about = {**environment.describe(), **more}
    path.write_text(text({"environment": about, "results": results}))
    console.print(f"written to {path}", markup=False, soft_wrap=True)  # a path stays in one piece


def text(report: dict[str, Any]) -> str:
    """A report as result files have it: JSON with a line for each entry, and one for each list of numbers, which may
    have thousands of them."""
    return _NUMBERS.sub(lambda numbers: " ".join(numbers[0].split()), json.dumps(report, indent=1)) + "\n"


_NUMBERS = re.compile(r'(?<=\[)\n[^][{}"]*(?=\])')
"""What is between the brackets of a list that has neither text nor other lists in it."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def gpu_table(headings: Sequence[str], rows: Sequence[Sequence[str]], report: dict[str, Any]) -> str:
    """A table of timed ops in Markdown, and below it how and where a result file's were timed."""
    where, results = report["environment"], report["results"]
    note = (
        f"Medians of {results[0]['seconds']['turns']} replays of CUDA graphs. {where['gpus'][0]['name']}, driver "
        f"{where['driver']}, torch {where['torch']['version']}, {where['date'][:10]}, commit "
        f"{(where['commit'] or 'unknown')[:10]}."
    )
    return "\n".join([*table(headings, rows), "", note])


def show(headings: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> None:
    """Prints a table; all columns but the first `words` are numbers."""
    shown = Table(*headings, box=None, padding=(0, 1))
    for column in shown.columns[words:]:
        column.justify = "right"
    for row in rows:
        shown.add_row(*row)
    Console(width=110, highlight=False).print(shown)


def print_markdown(parser: argparse.ArgumentParser, path: Path, markdown: Callable[[dict[str, Any]], str]) -> None:
    """Prints a result file as the README's table."""
    try:
        print(markdown(json.loads(path.read_text())))
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"--markdown: {path} is no result file: {error!r}")
