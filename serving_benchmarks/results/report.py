"""Makes one page, in Markdown, of any result files: which backend and how many GPUs, tables, and where it was measured.

A file that is not understood is named with the reason, on the page too. The exit status is 2 if none is usable.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_benchmarks.options import Refused, new_file
from serving_benchmarks.results import kinds, tables
from serving_benchmarks.results.file import NotUnderstood, ResultFile, machine, one_line, page, replace

MOST_OF_AN_ERROR = 300  # characters
MODELS = ("throughput", "serve")  # kinds whose files are also shown together


def section_of(file: ResultFile) -> str:
    """What the page has of one file. Raises NotUnderstood."""
    kind = kinds.KINDS[file.kind]
    try:
        title = kind.title, machine(file.environment), file.path.name, str(file.environment.get("date"))[:10]
        parts = [one_line("## {}: {}, {}, {}".format(*title))]
        if tables.ran(file.report):
            parts.append(next(iter(kind.makers.values()))(file.report))
        if left_out := _left_out(file):
            parts += ["### Not measured", *map(one_line, left_out)]
        told = {name: _words(value) for name, value in _about(file.environment).items() if value}
        about = [[name, words] for name, words in told.items() if words]
        return "\n\n".join([*parts, "### Where it was measured", page(["", ""], about)])
    except kinds.LACKS as error:
        raise NotUnderstood(f"{file.path} of {file.kind} could not be shown: {error!r}") from error


def _about(environment: dict[str, Any]) -> dict[str, Any]:
    """What a reader wants to know of an environment. A library and a torch with CUDA that used no GPU don't say so."""
    on_gpus, library = bool(environment.get("gpus")), environment.get("library") or {}
    names = "version", "compiler", *("cuda_compiler", "cuda_archs") * on_gpus
    shown = {**environment, "library": {name: library.get(name) for name in names}}
    if not on_gpus:
        used = (kernel["name"] for kernel in library.get("cpu_kernels") or () if kernel["active"])
        shown["library"]["CPU kernel"] = ", ".join(used)
        for name, of_gpus in (("torch", "cuda"), ("settings", "gpu_memory_utilization")):
            shown[name] = {key: value for key, value in (shown.get(name) or {}).items() if key != of_gpus}
    return shown


def _left_out(file: ResultFile) -> list[str]:
    name_of, told = kinds.KINDS[file.kind].name_of, []
    for result in file.results:
        if result.get("error"):
            told.append(f"{name_of(result)}: {textwrap.shorten(str(result['error']), MOST_OF_AN_ERROR)}")
        elif isinstance(peers := result.get("failed"), dict):  # it is a number in those of servers
            told += [f"{tables.peer_title(name)}, {name_of(result)}: {why}" for name, why in peers.items()]
    return told


def _words(value: object) -> str:
    """A value of an environment in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items() if one not in (None, {}, [], ""))
    return "; ".join(map(_words, value)) if isinstance(value, list) else str(value)


def whole_page(sections: Sequence[tuple[ResultFile, str]], not_understood: Sequence[str]) -> str:
    """The whole page, of files and their sections. Whole models that several files have come first, together."""
    parts = ["# Benchmarks of mla-backend"]
    for kind in MODELS:
        reports = [file.report for file, _ in sections if file.kind == kind and tables.ran(file.report)]
        if len(reports) > 1:
            on_gpus = any(report["environment"].get("gpus") for report in reports)
            title = f"## {kinds.KINDS[kind].title}: which backend{', how many GPUs' if on_gpus else ''}"
            parts += [title, tables.whole_models(*reports)]
    parts += [section for _, section in sections]
    parts += ["## Files that were not understood", *map(one_line, not_understood)] if not_understood else []
    return "\n\n".join(parts).replace("<", "&lt;") + "\n"  # nothing in the text of a file is markup of HTML


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="result files of any kinds")
    told, default = "- is standard output; default: %(default)s", Path("report.md")  # tried only when it is needed
    parser.add_argument("--output", type=_file_or_stdout, default=default, metavar="FILE", help=told)


def _file_or_stdout(text: str) -> Path | None:
    """None for standard output."""
    return None if text == "-" else new_file(text)


def run(options: argparse.Namespace) -> int:
    sections, not_understood = [], []
    for path in options.results:
        try:
            file = kinds.load(path)
            sections.append((file, section_of(file)))
        except NotUnderstood as error:
            not_understood.append(str(error))
            print(f"not understood: {error}", file=sys.stderr)
    if not sections:
        raise Refused("there is no result file to report")
    text = whole_page(sections, not_understood)
    if options.output is None:
        print(text, end="")
        return 0
    replace(options.output, text)
    print(f"{options.output}: {len(sections)} of {len(options.results)} files")
    return 0
