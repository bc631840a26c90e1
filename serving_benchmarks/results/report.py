"""Makes one page of any result files: which backend and how many GPUs, a picture, tables, and where it was measured.

The page, DIR/report.html, has its pictures in it and needs neither other files nor a network. A file that is not
understood is named with the reason, on the page too. The exit status is 2 if none is usable.
"""

import argparse
import base64
import html
import io
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from serving_benchmarks.options import Refused, new_folder
from serving_benchmarks.results import kinds, tables
from serving_benchmarks.results.file import NotUnderstood, ResultFile, replace

MOST_OF_AN_ERROR = 300
"""Characters."""
MODELS = ("throughput", "serve")
"""Kinds that the first section is of."""
PARETO = (
    "Output tokens/s per GPU over tokens/s per user. "
    "Points are loads, labelled with the requests in flight (or the requests a second). Tokens/s per user is one over "
    "the median inter-token latency. A line that lies above and to the right of another gives users the same speed for "
    "fewer GPUs. Where several files have a load, the newest one is shown."
)


def _figure(figure: Any, caption: str) -> str:
    """A picture in the page itself."""
    from serving_benchmarks.results import pictures

    drawn = io.BytesIO()
    pictures.save(figure, drawn)
    data, caption = base64.b64encode(drawn.getvalue()).decode(), html.escape(caption)
    return f'<figure><img src="data:image/png;base64,{data}" alt=""><figcaption>{caption}</figcaption></figure>'


def section_of(file: ResultFile) -> str:
    """What the page has of one file. Raises NotUnderstood."""
    body, table = [], next(iter(kinds.KINDS[file.kind].makers.values()))
    try:
        if file.succeeded:
            body += ["<h3>Numbers</h3>", markdown_to_html(table(file.report))]
        which_backend([file])  # what would stop the page
        if left_out := _left_out(file):
            body.append(f"<h3>Not measured</h3>{_list(map(html.escape, left_out))}")
        about = html_table(None, environment_rows(file))
        return "\n".join([*body, "<h3>Where it was measured</h3>", f'<div class="about">{about}</div>'])
    except kinds.LACKS as error:
        raise NotUnderstood(f"{file.path} of {file.kind} could not be shown: {error!r}") from error


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"


def _left_out(file: ResultFile) -> list[str]:
    name_of = kinds.KINDS[file.kind].name_of
    failed = [result for result in file.results if result.get("error")]
    told = [f"{name_of(result)}: {textwrap.shorten(str(result['error']), MOST_OF_AN_ERROR)}" for result in failed]
    for result in file.succeeded:
        case = name_of(result)
        told += [f"{tables.peer_title(name)}, {case}: {why}" for name, why in (result.get("failed") or {}).items()]
    return told


def environment_rows(file: ResultFile) -> list[tuple[str, str]]:
    """Where and how a file was measured."""
    about = file.environment

    def part(name: str, *parts: str) -> str:
        found = about.get(name)
        return " ".join(str(found[one]) for one in parts if found.get(one)) if isinstance(found, dict) else ""

    rows = [(name, about.get(name)) for name in ("date", "commit", "command")]
    rows += [("machine", file.machine), ("CPU", part("cpu", "model")), ("CPU cores", part("cpu", "cores"))]
    rows += [(name, about.get(name)) for name in ("driver", "system", "python")]
    rows += [("torch", part("torch", "version")), ("threads", part("torch", "threads"))]
    rows += [("vLLM", part("vllm", "distribution", "version")), ("SGLang", about.get("sglang"))]
    rows += [("mla-backend", part("library", "version"))]
    for name in ("peers", "model", "settings"):
        if isinstance(about.get(name), dict):
            told = (f"{key} {value}" for key, value in about[name].items() if value not in (None, {}))
            rows.append((name, ", ".join(told)))
    return [(name, str(value)) for name, value in rows if value]


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; max-width: 75em; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { border-top: 1px solid #bbb; margin-top: 2.5em; padding-top: 0.8em; }
figure { margin: 1.5em 0; break-inside: avoid; } figure img { max-width: 100%; height: auto; }
figcaption { color: #444; max-width: 60em; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.15em 0.7em; text-align: left; vertical-align: top; }
td { white-space: nowrap; } .about td { white-space: normal; overflow-wrap: anywhere; }
thead th { border-bottom: 1px solid #555; }
"""


def markdown_to_html(text: str) -> str:
    """Tables in Markdown, as file.table writes them, and lines of text."""
    parts: list[str] = []
    lines = text.splitlines()
    while lines:
        if lines[0].startswith("|"):
            count = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
            cells = ([html.unescape(cell) for cell in line.strip("| ").split(" | ")] for line in lines[:count])
            heading, _, *rows = cells
            parts.append(html_table(heading, rows))
            lines = lines[count:]
        else:
            line = lines.pop(0)
            parts += [f"<p>{html.escape(line)}</p>"] if line.strip() else []
    return "\n".join(parts)


def html_table(heading: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell.strip())}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{row(heading, 'th')}</thead>" if heading else ""
    return f'<div class="wide"><table>{head}<tbody>{"".join(row(cells, "td") for cells in rows)}</tbody></table></div>'


def which_backend(files: Sequence[ResultFile]) -> str:
    """The first section: all runs of whole models together. Empty where there are none."""
    from serving_benchmarks.results import pictures

    reports = [file.report for file in files if file.kind in MODELS and file.succeeded]
    if not reports:
        return ""
    parts, figure = ['<h2 id="s0">Which backend, how many GPUs</h2>'], pictures.pareto(reports)
    if figure is not None:
        parts.append(_figure(figure, PARETO + tables.latency_note(reports)))
    for name, entries in tables.by_workload(reports).items():
        parts.append(f"<h3>{html.escape(name)}</h3>{html_table(*tables.which_backend(entries))}")
    return "\n".join(parts)


def page(sections: Sequence[tuple[ResultFile, str]], not_understood: Sequence[str]) -> str:
    """The whole page, of files and their sections."""
    first = which_backend([file for file, _ in sections])
    links, body = ['<a href="#s0">Which backend, how many GPUs</a>'] if first else [], [first]
    for number, (file, section) in enumerate(sections, 1):
        about = f"{file.machine}, {file.path.name}, {str(file.environment.get('date'))[:10]}"
        title, about = html.escape(kinds.KINDS[file.kind].title), html.escape(about)
        links.append(f'<a href="#s{number}">{title}</a>: {about}')
        body += [f'<h2 id="s{number}">{title}: {about}</h2>', section]
    if not_understood:
        body += ["<h2>Files that were not understood</h2>", _list(map(html.escape, not_understood))]
    body = ["<h1>Benchmarks of mla-backend</h1>", _list(links), *body]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Benchmarks of mla-backend</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="result files of any kinds")
    told, default = "where to write; default: %(default)s", Path("report")  # a path is not made before it is needed
    parser.add_argument("--output", type=new_folder, default=default, metavar="DIR", help=told)


def run(options: argparse.Namespace) -> int:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise Refused(f"pictures need matplotlib: pip install matplotlib ({error})") from None
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
    replace(written, page(sections, not_understood))
    print(f"{written}: {len(sections)} of {len(options.results)} files")
    return 0
