"""Makes one page of any result files: which backend and how many GPUs, tables, and where it was measured.

The page, DIR/report.html, needs neither other files nor a network. A file that is not understood is named with the
reason, on the page too. The exit status is 2 if none is usable.
"""

import argparse
import html
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from markdown_it import MarkdownIt

from serving_benchmarks.options import Refused, new_folder
from serving_benchmarks.results import kinds, tables
from serving_benchmarks.results.file import NotUnderstood, ResultFile, machine, page, replace

MOST_OF_AN_ERROR = 300  # characters
MODELS = ("throughput", "serve")  # kinds that the first section is of
MARKDOWN = MarkdownIt("zero").enable("table")
"""Tables and paragraphs alone: nothing in the text of a file is a link, a picture or markup."""
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; max-width: 75em; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { border-top: 1px solid #bbb; margin-top: 2.5em; padding-top: 0.8em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; font-variant-numeric: tabular-nums; }
table { display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: 0.15em 0.7em; text-align: left; vertical-align: top; }
"""


def heading(level: int, text: str, lines: Sequence[str] = ()) -> str:
    """With lines below it."""
    return f"<h{level}>{html.escape(text)}</h{level}>" + "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def section_of(file: ResultFile) -> str:
    """What the page has of one file. Raises NotUnderstood."""
    kind = kinds.KINDS[file.kind]
    date = str(file.environment.get("date"))[:10]
    try:
        parts = [heading(2, f"{kind.title}: {machine(file.environment)}, {file.path.name}, {date}")]
        if file.succeeded:
            parts.append(MARKDOWN.render(next(iter(kind.makers.values()))(file.report)))
        if file.kind in MODELS:
            tables.by_workload([file.report])  # it must do for the first section, too
        if left_out := _left_out(file):
            parts.append(heading(3, "Not measured", left_out))
        about = [[name, _words(value)] for name, value in file.environment.items() if value]
        parts += [heading(3, "Where it was measured"), MARKDOWN.render(page(["", ""], about))]
        return "\n".join(parts)
    except kinds.LACKS as error:
        raise NotUnderstood(f"{file.path} of {file.kind} could not be shown: {error!r}") from error


def _left_out(file: ResultFile) -> list[str]:
    name_of = kinds.KINDS[file.kind].name_of
    failed = [result for result in file.results if result.get("error")]
    told = [f"{name_of(result)}: {textwrap.shorten(str(result['error']), MOST_OF_AN_ERROR)}" for result in failed]
    for result in file.succeeded:
        peers = result.get("failed")  # a number in those of servers
        for name, why in peers.items() if isinstance(peers, dict) else ():
            told.append(f"{tables.peer_title(name)}, {name_of(result)}: {why}")
    return told


def _words(value: object) -> str:
    """A value of an environment in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items() if one not in (None, {}, []))
    return "; ".join(map(_words, value)) if isinstance(value, list) else " ".join(str(value).split())


def whole_page(sections: Sequence[tuple[ResultFile, str]], not_understood: Sequence[str]) -> str:
    """The whole page, of files and their sections. All runs of whole models together come first."""
    models = [file.report for file, _ in sections if file.kind in MODELS and file.succeeded]
    body = [heading(1, "Benchmarks of mla-backend")]
    body += [heading(2, "Which backend, how many GPUs")] if models else []
    for name, measured in tables.by_workload(models).items():
        body += [heading(3, name), MARKDOWN.render(page(*tables.of_models(measured)))]
    body += [section for _, section in sections]
    if not_understood:
        body.append(heading(2, "Files that were not understood", not_understood))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Benchmarks of mla-backend</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="result files of any kinds")
    told, default = "where to write; default: %(default)s", Path("report")  # a path is not made before it is needed
    parser.add_argument("--output", type=new_folder, default=default, metavar="DIR", help=told)


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
    options.output.mkdir(exist_ok=True)
    written = options.output / "report.html"
    replace(written, whole_page(sections, not_understood))
    print(f"{written}: {len(sections)} of {len(options.results)} files")
    return 0
