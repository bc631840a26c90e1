"""The pictures of reports and of the README.

Colours get lighter in an order that survives printing in grey. Markers and dashes differ as well.
"""

from collections.abc import Sequence
from typing import IO, Any

from matplotlib import patheffects, rcParams
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from serving_benchmarks.results import runs, tables
from serving_benchmarks.results.file import Report

_COLORS, _LINES = "#000000 #0072b2 #d55e00 #56b4e9 #e69f00".split(), ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
STYLES = [{"color": c, "marker": m, "linestyle": line} for c, m, line in zip(_COLORS, "os^Dv", _LINES, strict=True)]
"""Of candidates, ours first."""
DOTS_AN_INCH = 120
OUTLINE = (patheffects.withStroke(linewidth=2.5, foreground="white"),)
"""Keeps lines out of labels."""


rcParams["text.parse_math"] = False  # a name with two $ is no formula


def save(figure: Figure, target: IO[bytes], dpi: int = DOTS_AN_INCH, numbers: str | None = None) -> None:
    """Writes a PNG. `numbers` are kept in it as text, so that one can tell whether it is up to date."""
    figure.savefig(target, dpi=dpi, format="png", metadata={"Software": None, NUMBERS: numbers})


NUMBERS = "Numbers"
"""Keyword of that text."""


def new_figure(panels: int, title: str) -> tuple:
    """A figure and the axes of its panels, two in a row."""
    across = min(panels, 2)
    down = -(-panels // across)
    figure = Figure(figsize=(max(across * 6.2, 7.5), down * 4.6 + 0.6), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for unused in axes[panels:]:
        unused.set_visible(False)
    figure.suptitle(title)
    return figure, axes[:panels]


# Sparse attention on a GPU


def decode_bars(report: Report) -> tuple[Figure, str]:
    """The README's picture: decode speed of ours and of the peers over heads, and its numbers as text."""
    heads = [heads for requests, heads in tables.HEADLINE_DECODE if requests == 128]
    entries = [tables.picked(report, 128, one)["in_situ"] for one in heads]
    times = [{"mla-backend": entry["seconds"]["ours"]["median"], **tables.peers_of(entry)} for entry in entries]
    names = [name for name in ("mla-backend", *dict.fromkeys(tables.PEERS.values())) if all(name in of for of in times)]
    base, width, numbers = names[1], 0.84 / len(names), []
    figure = Figure(figsize=(8, 3.7), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        ours, speeds = number == 0, [of[base] / of[name] for of in times]
        xs = [x + (number - (len(names) - 1) / 2) * width for x in range(len(times))]
        color = "#0072b2" if ours else str(0.48 + 0.4 * number / len(names))
        label = "mla-backend, FP8 cache" if ours else f"{', '.join(name.split())} cache"
        axes.bar(xs, speeds, width * 0.94, color=color, label=label)
        look = {"weight": "bold", "color": color, "fontsize": 8.5} if ours else {"color": "0.35", "fontsize": 7}
        for x, speed in zip(xs, speeds, strict=True):
            axes.text(x, speed + 0.03, f"{speed:.2f}", ha="center", **look)
        numbers.append(f"{name}: {' '.join(f'{speed:.2f}' for speed in speeds)}")
    axes.set_xticks(range(len(entries)), [f"{one} heads" for one in heads])
    axes.set_ylabel(f"speed ({base} = 1)")
    gpu = report["environment"]["gpus"][0]["name"]
    axes.set_title(f"Sparse MLA decode, {gpu}: 128 requests at 32K tokens, top 2048, in situ", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2)
    axes.set_axisbelow(True)
    figure.legend(ncols=min(3, len(names)), frameon=False, loc="outside lower center", fontsize=9)
    return figure, "; ".join(numbers)


# Whole models


def pareto(reports: Sequence[Report]) -> Figure | None:
    """Output tokens/s per GPU over tokens/s per user: a panel for each model and workload, a line for each backend and
    GPUs, a point for each load. None where no request has an inter-token latency."""
    workloads: dict[str, dict[tuple[str, str], list[tables.Entry]]] = {}
    for name, entries in tables.by_workload(reports).items():
        for gpus, entry in entries:
            if runs.tokens_per_user(entry) is not None:
                workloads.setdefault(name, {}).setdefault((entry["backend"], gpus), []).append(entry)
    if not workloads:
        return None
    lines = {line for of in workloads.values() for line in of}
    backends = sorted({backend for backend, _ in lines}, key=lambda name: (not runs.is_ours(name), name))
    machines = sorted({gpus for _, gpus in lines})
    figure, panels = new_figure(len(workloads), "Up and to the right is better")
    handles: dict[tuple[int, int], Any] = {}
    for panel, (name, of) in zip(panels, workloads.items(), strict=True):
        for (backend, gpus), entries in of.items():
            place = backends.index(backend), machines.index(gpus)
            color, style = STYLES[place[0] % len(STYLES)]["color"], STYLES[place[1] % len(STYLES)]
            x, y = list(map(runs.tokens_per_user, entries)), list(map(runs.tokens_per_gpu, entries))
            look = {**style, "color": color, "markersize": 5, "label": f"{backend}, {gpus}"}
            (handles[place],) = panel.plot(x, y, **look)
            at = ((5, 3), "left") if runs.is_ours(backend) else ((-5, -10), "right")
            for entry, point in zip(entries, zip(x, y, strict=True), strict=True):
                look = {"fontsize": 8, "color": color, "path_effects": OUTLINE, "ha": at[1]}
                panel.annotate(runs.load(entry["case"], short=True), point, at[0], textcoords="offset points", **look)
        panel.set_title(name, fontsize=10)
        panel.set(xlabel="tokens/s per user", ylabel="output tokens/s per GPU", yscale="log")
        panel.margins(0.1)
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.grid(alpha=0.25)
    legend = [handles[place] for place in sorted(handles)]
    figure.legend(handles=legend, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure
