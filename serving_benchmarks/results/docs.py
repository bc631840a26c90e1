"""Writes the measured numbers of README.md and docs/*.md, out of the committed result files.

    python -m serving_benchmarks.results.docs            # after a result file has changed
    python -m serving_benchmarks.results.docs --check    # says what differs; a test does the same

A page says what it wants between two comments, which don't show, over several lines or within one:

    <!-- numbers: kernels results/kernels.json -->
    a table
    <!-- end of numbers -->

The first word is a key of MAKERS below, then come the result files, as the page's folder or the root has them.
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from serving_benchmarks.ops import cache_ops, cpu_attention, cpu_generate, index_ops, kernel_counters, kv_blocks
from serving_benchmarks.results import backend_runs, kernel_report, runs, serve_report, throughput_report

ROOT = Path(__file__).parents[2]
Maker = Callable[..., str]
MAKERS: dict[str, Maker] = {
    "kernels": kernel_report.markdown,
    "kernel_counters": kernel_counters.markdown,
    "kernel_decode_ratios": kernel_report.decode_ratios,
    "kernel_prefill_ratios": kernel_report.prefill_ratios,
    "cpu_attention": cpu_attention.markdown,
    "cpu_generate": cpu_generate.markdown,
    "cache_ops": cache_ops.markdown,
    "index_ops": index_ops.markdown,
    "plan_time": cache_ops.plan_time,
    "kv_blocks": kv_blocks.markdown,
    "throughput": runs.markdown,
    "serve": serve_report.markdown,
    "backends": backend_runs.markdown,
    "backends_step": backend_runs.step_profile,
    "recall": backend_runs.recall,
    "recall_table": backend_runs.recall_table,
    "throughput_beside": throughput_report.beside,
    "throughput_engine": throughput_report.engine_beside,
    "throughput_profiles": throughput_report.profiles,
}
"""Each takes the contents of the files that a page names, one argument a file, and gives the text."""
MARKED = re.compile(r"<!-- numbers: (?P<what>[^<>]*?) -->(?P<text>.*?)<!-- end of numbers -->", re.DOTALL)
FENCED = re.compile(r"^[ \t]*```.*?^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
"""Examples, in which marks mean nothing."""
MARK = re.compile(r"<!-- (?:numbers:|end of numbers)")


class DocsError(ValueError):
    """A page that can't be written: the text names the page, the line and what is wrong."""


def pages(root: Path) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def rewritten(page: Path, root: Path) -> str:
    """The text of a page, with the numbers that the files have now. Raises DocsError."""
    text = page.read_text()
    marks = FENCED.sub(lambda fenced: re.sub(r"[^\n]", " ", fenced[0]), text)

    def line(position: int) -> str:
        return f"{page.relative_to(root)}, line {text.count(chr(10), 0, position) + 1}"

    blocks = list(MARKED.finditer(marks))
    for mark in MARK.finditer(marks):
        if not any(block.start() <= mark.start() < block.end() for block in blocks):
            raise DocsError(f"{line(mark.start())}: a mark without its other half: {mark[0]}")
    parts, done = [], 0
    for block in blocks:
        if MARK.search(block["text"]):
            raise DocsError(f"{line(block.start())}: a block within a block, or one that does not end")
        made = make(block["what"], page.parent, root, line(block.start()))
        parts += [text[done : block.start("text")], f"\n{made.strip()}\n" if "\n" in made else made]
        done = block.end("text")
    return "".join([*parts, text[done:]])


def make(what: str, folder: Path, root: Path, where: str) -> str:
    """The text of one block. Raises DocsError."""
    name, *files = what.split() or [""]
    if name not in MAKERS:
        raise DocsError(f"{where}: {name!r} is not one of {', '.join(MAKERS)}")
    if not files:
        raise DocsError(f"{where}: {name} names no result file")
    reports = []
    for file in files:
        path = next((base / file for base in (root, folder) if (base / file).is_file()), None)
        if path is None:
            raise DocsError(f"{where}: there is no {file}")
        try:
            reports.append(json.loads(path.read_text()))
        except ValueError as error:
            raise DocsError(f"{where}: {file} is no JSON: {error}") from None
    try:
        return MAKERS[name](*reports)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise DocsError(f"{where}: {name} can't be made of {' '.join(files)}: {error!r}") from error


def differences(before: str, after: str, name: str) -> Iterator[str]:
    lines: list[Any] = [text.splitlines() for text in (before, after)]
    yield from difflib.unified_diff(*lines, f"{name} as it is", f"{name} as measured", lineterm="", n=0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.results.docs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the source tree; default: where this file lies")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    if not (root / "README.md").is_file():
        parser.error(f"--root: {root} is no source tree: it has no README.md")
    try:
        texts = {page: rewritten(page, root) for page in pages(root)}
    except DocsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    changed = [page for page, text in texts.items() if text != page.read_text()]
    for page in changed:
        name = str(page.relative_to(root))
        if options.check:
            print(*differences(page.read_text(), texts[page], name), sep="\n")
        else:
            page.write_text(texts[page])
            print(f"{name} rewritten")
    if not changed:
        print(f"all numbers of {len(texts)} pages are those of the result files")
    elif options.check:
        print(f"{len(changed)} pages differ: python -m serving_benchmarks.results.docs writes them")
    return 1 if changed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
