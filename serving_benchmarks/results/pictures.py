"""The pictures of reports and of the README.

Colours get lighter in an order that survives printing in grey. Markers and dashes differ as well.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from matplotlib import colormaps, patheffects
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

import mla_backend
from serving_benchmarks.ops import ceilings
from serving_benchmarks.ops.batches import Batch
from serving_benchmarks.results import runs, tables
from serving_benchmarks.results.file import Report, ResultFile

STYLES = (
    {"color": "#000000", "marker": "o", "linestyle": "-"},
    {"color": "#0072b2", "marker": "s", "linestyle": "--"},
    {"color": "#d55e00", "marker": "^", "linestyle": "-."},
    {"color": "#56b4e9", "marker": "D", "linestyle": ":"},
    {"color": "#e69f00", "marker": "v", "linestyle": (0, (6, 1, 1, 1, 1, 1))},
)
"""Of candidates, ours first."""
MOST_LINES = 7
"""Of head counts in a panel. Of more, the round ones are drawn."""
ROUND_HEADS = (1, 8, 16, 32, 64, 128)
LABEL_POINTS = 10
"""Height of a label."""
NEAR_THE_EDGE = 0.8
"""Share of the axes' width. Lines that end right of it have their labels outside the axes."""
DOTS_AN_INCH = 120
OUTLINE = (patheffects.withStroke(linewidth=2.5, foreground="white"),)
"""Keeps lines out of labels."""
ANY = "0.25"
"""The grey in legends of lines with many colours."""

Result = dict[str, Any]
Cell = tuple[int, str, float]
"""Heads, column and ratio."""


@dataclass(frozen=True)
class Picture:
    title: str
    caption: str
    draw: Callable[[ResultFile], Figure | None]
    """None where a file lacks what the picture takes."""


def save(figure: Figure, target: IO[bytes] | str, dpi: int = DOTS_AN_INCH, numbers: str = "") -> None:
    """Writes a PNG. `numbers` are kept in it as text, so that one can tell whether it is up to date."""
    figure.savefig(
        target, dpi=dpi, format="png", metadata={"Software": None, **({NUMBERS: numbers} if numbers else {})}
    )


NUMBERS = "Numbers"
"""Keyword of that text."""


def shade(share: float) -> Any:
    """A colour for 0 to 1, from dark to light."""
    return colormaps["viridis"](0.78 * share)


def some_heads(heads: Iterable[int]) -> list[int]:
    """The head counts that are drawn."""
    found = sorted(set(heads))
    return found if len(found) <= MOST_LINES else [h for h in found if h in ROUND_HEADS] or found[:MOST_LINES]


def new_figure(panels: int, title: str, width: float = 6.2, height: float = 4.6, columns: int = 2) -> tuple:
    """A figure and the axes of its panels, in rows of `columns`."""
    across = min(panels, columns)
    down = -(-panels // across)
    figure = Figure(figsize=(max(across * width, 7.5), down * height + 0.6), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for unused in axes[panels:]:
        unused.set_visible(False)
    figure.suptitle(title)
    return figure, axes[:panels]


def plain_ticks(axes: Axes, which: str, ticks: Sequence[float] | None = None) -> None:
    """Plain numbers on a logarithmic axis, at given ticks or at 1, 2 and 5 of each decade."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    if ticks is not None:
        axis.set_ticks(list(ticks))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, Any]]) -> None:
    """Writes texts at the ends (x, y) of lines: right of the axes and apart from each other, or next to an end that is
    far from there."""
    to_axes = axes.transScale + axes.transLimits
    ends = [(*to_axes.transform((x, y)), text, color) for x, y, text, color in labels]
    for x, y, text, _ in ends:
        if x < NEAR_THE_EDGE:
            axes.annotate(text, (x, y), (6, 0), "axes fraction", "offset points", va="center", fontsize=8)
    ends = sorted((end for end in ends if end[0] >= NEAR_THE_EDGE), key=lambda end: end[1])
    height = axes.get_figure().get_size_inches()[1] * 72 * 0.75 / axes.get_gridspec().nrows
    step, heights = LABEL_POINTS / height, [end[1] for end in ends]
    for _ in range(100):  # neighbours that are too near push each other away
        for i in range(len(heights) - 1):
            short = step - (heights[i + 1] - heights[i])
            if short > 1e-6:
                heights[i], heights[i + 1] = heights[i] - short / 2, heights[i + 1] + short / 2
    for (x, y, text, color), at in zip(ends, heights, strict=True):
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkB": 3}
        where = {"textcoords": "axes fraction", "annotation_clip": False, "arrowprops": arrow}
        axes.annotate(text, (x, y), (1.03, at), "axes fraction", va="center", fontsize=8, **where)


def legend_below(figure: Figure, handles: Sequence[Any], columns: int = 4) -> None:
    """One entry for each label."""
    unique = {handle.get_label(): handle for handle in handles}
    where = {"loc": "outside lower center", "ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend(list(unique.values()), list(unique), **where)


def of_any_color(**style: Any) -> Line2D:
    """What stands in a legend for lines of many colours."""
    return Line2D([], [], color=ANY, **style)


def _by(results: Iterable[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    groups: dict[Any, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


# Sparse attention on a GPU


def decode_bars(report: Report) -> tuple[Figure, str]:
    """The README's picture: decode speed of ours and of the peers over heads, and its numbers as text."""
    entries = [tables.picked(report, *case) for case in tables.HEADLINE_DECODE if case[0] == "128q1s32k"]
    times = [{"mla-backend": entry["seconds"]["ours"]["median"], **tables.peers_of(entry)} for entry in entries]
    names = [name for name in ("mla-backend", *dict.fromkeys(tables.PEERS.values())) if all(name in of for of in times)]
    base, width, numbers = names[1], 0.84 / len(names), []
    figure = Figure(figsize=(8, 3.7), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(names):
        ours, speeds = number == 0, [of[base] / of[name] for of in times]
        xs = [x + (number - (len(names) - 1) / 2) * width for x in range(len(times))]
        color = "#0072b2" if ours else str(0.62 + 0.3 * number / len(names))
        label = name if ours else f"{', '.join(name.split())} cache"
        axes.bar(xs, speeds, width * 0.94, color=color, label=label)
        look = {"weight": "bold", "color": color, "fontsize": 8.5} if ours else {"color": "0.35", "fontsize": 7}
        for x, speed in zip(xs, speeds, strict=True):
            axes.text(x, speed + 0.03, f"{speed:.2f}", ha="center", **look)
        numbers.append(f"{name}: {' '.join(f'{speed:.2f}' for speed in speeds)}")
    axes.set_xticks(range(len(entries)), [f"{entry['case']['heads']} heads" for entry in entries])
    axes.set_ylabel(f"speed ({base} = 1)")
    axes.set_ylim(0, 1.2 * max(of[base] / of["mla-backend"] for of in times))
    gpu = report["environment"]["gpus"][0]["name"]
    axes.set_title(f"Sparse MLA decode, {gpu}: 128 requests at 32K tokens, top 2048, FP8 cache", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2)
    axes.set_axisbelow(True)
    axes.legend(ncols=len(names), frameon=False, loc="upper right", fontsize=9)
    return figure, "; ".join(numbers)


def bytes_of_peer(result: Result, title: str) -> float:
    """What a peer reads and writes. Peers that have no FP8 read longer rows."""
    case = result["case"]
    if case["format"] == "bf16" or not title.endswith("BF16"):
        return result["bytes"]
    attended = result["useful_flops"] / (2 * case["heads"] * (576 + 512))
    longer = mla_backend.FORMATS["bf16"].token_bytes - mla_backend.FORMATS[case["format"]].token_bytes
    return result["bytes"] + attended * longer


def roofline(file: ResultFile) -> Figure:
    """Useful FLOP/s over FLOP per byte, ours as lines over heads, the peers as marks, below the ceilings."""
    formats = _by(file.results, lambda result: result["case"]["format"])
    note = "" if ceilings.GPU in file.machine else f" (ceilings: {ceilings.GPU})"
    figure, panels = new_figure(len(formats), f"Roofline, {file.machine}{note}", width=7, height=5)
    handles: list[Any] = []
    for panel, (fmt, results) in zip(panels, formats.items(), strict=True):
        panel.set(xscale="log", yscale="log")
        ends, points = [], []
        for (batch, topk), line in _by(results, lambda r: (r["case"]["batch"], r["case"]["topk"])).items():
            line = sorted(line, key=lambda result: result["case"]["heads"])
            x = [result["useful_flops"] / result["bytes"] for result in line]
            y = [result["useful_flops"] / result["seconds"]["ours"]["median"] / 1e12 for result in line]
            handles += panel.plot(x, y, color="black", marker="o", markersize=4, linewidth=0.8, label="mla-backend")
            ends.append((x[-1], y[-1], batch if topk == 2048 else f"{batch}, topk {topk}", "black"))
            points += zip(x, y, strict=True)
        titles = dict.fromkeys(title for result in results for title in tables.peers_of(result))
        for style, title in zip(STYLES[1:] * len(titles), titles, strict=False):
            found = [result for result in results if title in tables.peers_of(result)]
            x = [result["useful_flops"] / bytes_of_peer(result, title) for result in found]
            y = [result["useful_flops"] / tables.peers_of(result)[title] / 1e12 for result in found]
            look = {"color": style["color"], "markersize": 6, "fillstyle": "none", "label": title}
            handles += panel.plot(x, y, style["marker"], **look)
            points += zip(x, y, strict=True)
        low, high = min(x for x, _ in points) * 0.7, max(x for x, _ in points) * 1.4
        slopes = [("memory", ceilings.MEMORY_BYTES, "--")]
        slopes += [("L2", ceilings.L2_BYTES[fmt], ":")] if fmt in ceilings.L2_BYTES else []
        for name, rate, dashes in slopes:
            knee = min(max(ceilings.MATH_FLOPS / rate, low), high)
            label = f"{name}, {rate / 1e12:g} TB/s ({fmt if name == 'L2' else 'FP8 rows'})"
            line = [rate * low / 1e12, rate * knee / 1e12]
            handles += panel.plot([low, knee], line, color="0.4", linestyle=dashes, label=label)
        most = ceilings.MATH_FLOPS
        line = [min(low, most / slopes[-1][1]), high], [most / 1e12] * 2
        handles += panel.plot(*line, color="0.4", label=f"math, {most / 1e12:g} TFLOP/s")
        panel.set(xlim=(low, high), ylim=(min(y for _, y in points) * 0.6, most / 1e12 * 1.5), title=f"{fmt} cache")
        panel.set(xlabel="useful FLOP per byte read or written", ylabel="useful TFLOP/s")
        panel.grid(alpha=0.25, which="major")
        plain_ticks(panel, "x")
        plain_ticks(panel, "y")
        label_ends(panel, ends)
    legend_below(figure, handles)
    return figure


def _shape(result: Result) -> tuple[Any, ...] | None:
    """What results share that differ in their number of requests. None for mixed batches."""
    case = result["case"]
    requests = set(Batch.parse(case["batch"]).requests)
    if len(requests) != 1:
        return None
    ((queries, length),) = requests
    return case["format"], queries, length, case["topk"]


def time_over_batch(file: ResultFile) -> Figure | None:
    """Time over the number of requests, a line for each head count, dashed for the fastest peer."""

    def requests(result: Result) -> int:
        return len(Batch.parse(result["case"]["batch"]).requests)

    groups = {
        shape: results
        for shape, results in _by(file.results, _shape).items()
        if shape and any(len(line) > 1 for line in _by(results, lambda result: result["case"]["heads"]).values())
    }
    if not groups:
        return None
    figure, panels = new_figure(len(groups), f"Attention, {file.machine}")
    dashed = {"markersize": 7, "fillstyle": "none", "linestyle": "--", "linewidth": 1}
    handles = [of_any_color(marker="o", markersize=5, label="mla-backend")]
    if any(tables.peers_of(result) for results in groups.values() for result in results):
        handles.append(of_any_color(marker="o", label="best peer", **dashed))
    for panel, ((fmt, queries, length, topk), results) in zip(panels, groups.items(), strict=True):
        panel.set(xscale="log", yscale="log")
        heads, ends = some_heads(result["case"]["heads"] for result in results), []
        for place, count in enumerate(heads):
            line = sorted((r for r in results if r["case"]["heads"] == count), key=requests)
            color, marker = shade(place / max(1, len(heads) - 1)), STYLES[place % len(STYLES)]["marker"]
            x, y = [requests(r) for r in line], [r["seconds"]["ours"]["median"] * 1e6 for r in line]
            panel.plot(x, y, color=color, marker=marker, markersize=5)
            ends.append((x[-1], y[-1], f"{count} head{'s' * (count > 1)}", color))
            peers = [(requests(r), min(tables.peers_of(r).values()) * 1e6) for r in line if tables.peers_of(r)]
            if peers:
                panel.plot(*zip(*peers, strict=True), color=color, marker=marker, **dashed)
        title = f"{fmt} cache, {queries} query token{'s' * (queries > 1)} each, {_k(length)} cached, topk {topk}"
        panel.set_title(textwrap.fill(title, 70), fontsize=10)
        panel.set(xlabel="requests", ylabel="time, us")
        plain_ticks(panel, "x", sorted({requests(result) for result in results}))
        plain_ticks(panel, "y")
        panel.grid(alpha=0.25)
        label_ends(panel, ends)
    legend_below(figure, handles)
    return figure


def _k(tokens: int) -> str:
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def speed_up(file: ResultFile) -> Figure | None:
    """How many times the best peer's speed is ours, heads by batch. None where no peer ran."""

    def cell(result: Result) -> Cell:
        case = result["case"]
        column = case["batch"] if case["topk"] == 2048 else f"{case['batch']}\ntopk {case['topk']}"
        return case["heads"], column, result["speed_up"]

    def size(result: Result) -> tuple[int, int, int]:
        return result["case"]["tokens"], Batch.parse(result["case"]["batch"]).cached, result["case"]["topk"]

    results = sorted((result for result in file.results if result["best_peer"]), key=size)
    title = f"mla-backend's speed over the best peer's, {file.machine}"
    return _heat(results, cell, "batch", title) if results else None


def cpu_speed_up(file: ResultFile) -> Figure | None:
    """The same of ops cpu, over vLLM's kernel."""

    def cell(result: Result) -> Cell:
        case, seconds = result["case"], result["seconds"]
        return (
            case["heads"],
            f"{case['batch']} x {case['context']}",
            seconds["vllm"]["median"] / seconds["ours"]["median"],
        )

    results = [result for result in file.results if "vllm" in result["seconds"]]
    title = f"mla-backend's speed over vLLM's, {file.machine}"
    return _heat(results, cell, "query tokens x slots", title) if results else None


def _heat(
    results: Sequence[Result], cell: Callable[[Result], tuple[int, str, float]], xlabel: str, title: str
) -> Figure:
    """A panel for each format, with a cell for each result. Hatched where the ratio is below 1."""
    groups = {fmt: list(map(cell, found)) for fmt, found in _by(results, lambda r: r["case"]["format"]).items()}
    most = max(len({column for _, column, _ in cells}) for cells in groups.values())
    ratios = [ratio for cells in groups.values() for *_, ratio in cells]
    notes = ["hatched: the peer is faster"] if min(ratios) < 1 else []
    if any(len(cells) < len({c for c, *_ in cells}) * len({b for _, b, _ in cells}) for cells in groups.values()):
        notes.append("empty: not measured")
    title = "\n".join([title, *(["; ".join(notes)] if notes else [])])
    columns = 1 if most > 8 else 2
    figure, panels = new_figure(len(groups), title, width=max(5.5, most * 0.95), height=4.0, columns=columns)
    reach = max(1.25, *ratios, *(1 / ratio for ratio in ratios))
    norm, colors = LogNorm(1 / reach, reach), colormaps["cividis"]
    for panel, (fmt, cells) in zip(panels, groups.items(), strict=True):
        columns = list(dict.fromkeys(column for _, column, _ in cells))
        heads = sorted({count for count, _, _ in cells})
        for count, column, ratio in cells:
            x, y, color = columns.index(column), heads.index(count), colors(norm(ratio))
            look = {"facecolor": color, "edgecolor": "white", "hatch": "///" if ratio < 1 else None, "linewidth": 0.8}
            panel.fill_between([x - 0.5, x + 0.5], y - 0.5, y + 0.5, **look)
            bright = 0.3 * color[0] + 0.6 * color[1] + 0.1 * color[2] > 0.5
            box = {"facecolor": color, "edgecolor": "none", "pad": 1.5}
            look = {"ha": "center", "va": "center", "color": "black" if bright else "white", "bbox": box}
            panel.text(x, y, f"{ratio:.2f}", **look)
        panel.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(heads) - 0.5), title=f"{fmt} cache", ylabel="heads")
        panel.set_xticks(range(len(columns)), columns, fontsize=8)
        panel.set_yticks(range(len(heads)), heads)
        panel.set_xlabel(xlabel)
    return figure


# The ops around attention


def bandwidth(file: ResultFile) -> Figure:
    """Time and bandwidth over the number of tokens."""
    figure, (times, rates) = new_figure(2, f"The ops around attention, {file.machine}")
    ops = _by(file.results, lambda r: r["op"] if r["format"] == "-" else f"{r['op']}, {r['format']}")
    copies = [result for result in file.results if result["op"].startswith("copy")]
    named = [(name, results) for name, results in ops.items() if not name.startswith("copy")]
    handles: list[Any] = []
    for style, (name, results) in zip(STYLES * len(ops), named, strict=False):
        results = sorted(results, key=lambda result: result["count"])
        x, seconds = [r["count"] for r in results], [r["seconds"]["median"] for r in results]
        handles += times.plot(x, [value * 1e6 for value in seconds], label=name, markersize=5, **style)
        if name != "plan":
            y = [r["bytes"] / value / 1e12 for r, value in zip(results, seconds, strict=True)]
            rates.plot(x, y, label=name, markersize=5, **style)
    if copies:
        fastest = max(result["bytes"] / result["seconds"]["median"] for result in copies)
        handles.append(rates.axhline(fastest / 1e12, color="0.4", linewidth=1, label="the fastest copy of 1 GB"))
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time, us")
    rates.set(xscale="log", xlabel="tokens", ylabel="TB/s read and written")
    rates.set_ylim(bottom=0)
    plain_ticks(times, "y")
    for panel in times, rates:
        plain_ticks(panel, "x", sorted({r["count"] for _, results in named for r in results}))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _k(int(value))))
        panel.grid(alpha=0.25)
    legend_below(figure, handles)
    return figure


# Whole models


def pareto(reports: Sequence[Report]) -> Figure | None:
    """Output tokens/s per GPU over tokens/s per user: a panel for each model and workload, a line for each backend,
    machine and number of GPUs, a point for each load. None where no request has an inter-token latency."""
    panels_of: dict[str, dict[str, list[Result]]] = {}
    for report, entries in tables.newest_loads(reports):
        for backend, entry in entries.items():
            if runs.tokens_per_user(entry) is not None:
                panel = f"{tables.model_name(report)}\n{tables.workload_name(report, entry)}"
                line = f"{backend}, {tables.gpus_name(report, entry)}"
                panels_of.setdefault(panel, {}).setdefault(line, []).append(entry)
    if not panels_of:
        return None
    styles = _line_styles(dict.fromkeys(line for lines in panels_of.values() for line in lines))
    figure, panels = new_figure(len(panels_of), "Which backend, how many GPUs: up and to the right is better")
    handles: list[Any] = []
    for panel, (name, lines) in zip(panels, sorted(panels_of.items()), strict=True):
        for line, entries in lines.items():
            entries = sorted(entries, key=lambda entry: runs.load_order(entry["case"]))
            x, y = list(map(runs.tokens_per_user, entries)), list(map(runs.tokens_per_gpu, entries))
            handles += panel.plot(x, y, label=line, markersize=5, **styles[line])
            for entry, point in zip(entries, zip(x, y, strict=True), strict=True):
                ours = entry["backend"] in runs.OUR_BACKENDS  # above the line, others below it
                at = ((5, 3), "left") if ours else ((-5, -10), "right")
                look = {"fontsize": 8, "color": styles[line]["color"], "path_effects": OUTLINE, "ha": at[1]}
                panel.annotate(runs.short_load(entry["case"]), point, at[0], textcoords="offset points", **look)
        panel.set_title(name, fontsize=10)
        panel.set(xlabel="tokens/s per user", ylabel="output tokens/s per GPU", yscale="log")
        panel.margins(0.1)
        plain_ticks(panel, "y")
        panel.grid(alpha=0.25)
    legend_below(figure, sorted(handles, key=lambda handle: list(styles).index(handle.get_label())), columns=2)
    return figure


def _line_styles(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A colour for each backend, ours first; a marker and dashes for each machine and number of GPUs."""
    parts = sorted(line.partition(", ") for line in lines)
    backends = sorted({backend for backend, _, _ in parts}, key=lambda name: (name not in runs.OUR_BACKENDS, name))
    machines = sorted({where for _, _, where in parts})  # few GPUs first
    found = {}
    for backend, comma, where in parts:
        color = STYLES[backends.index(backend) % len(STYLES)]["color"]
        style = STYLES[machines.index(where) % len(STYLES)]
        found[f"{backend}{comma}{where}"] = {**style, "color": color}
    return found


PICTURES = {
    "speed_up": Picture(
        "Speed over the best peer's",
        "Above 1, mla-backend is faster than the fastest peer in the same process.",
        speed_up,
    ),
    "time_over_batch": Picture(
        "Time over batch", "Medians. Dashed: the fastest peer. Both axes are logarithmic.", time_over_batch
    ),
    "roofline": Picture(
        "Roofline",
        "On the left, gathering cached rows is the limit, on the right, the tensor cores. Lines join the head counts "
        "of one batch. The ceilings were measured: gathering FP8 rows of 656 bytes from memory (BF16 rows of 1152 "
        "bytes are gathered faster, so points can lie above), rows from L2 where requests share a sequence, and a "
        "large matrix product. Peers that have no FP8 read more bytes.",
        roofline,
    ),
    "cpu_speed_up": Picture("Speed over vLLM's", "Above 1, mla-backend is faster than vLLM's kernel.", cpu_speed_up),
    "bandwidth": Picture(
        "Time and bandwidth", "The grey line is a plain copy. The plan computes and moves next to nothing.", bandwidth
    ),
}
"""By the names that kinds.py uses."""
