"""The pictures of a report. Colours get lighter in an order that print in grey keeps; markers and dashes differ too."""

import io
import math
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from matplotlib import colormaps, patheffects
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image  # matplotlib's own

import mla_backend
from serving_benchmarks.ops import ceilings
from serving_benchmarks.ops.batches import Batch
from serving_benchmarks.results import kernel_report, runs
from serving_benchmarks.results.result_kinds import ResultFile

STYLES = (
    {"color": "#000000", "marker": "o", "linestyle": "-"},
    {"color": "#0072b2", "marker": "s", "linestyle": "--"},
    {"color": "#d55e00", "marker": "^", "linestyle": "-."},
    {"color": "#56b4e9", "marker": "D", "linestyle": ":"},
    {"color": "#e69f00", "marker": "v", "linestyle": (0, (6, 1, 1, 1, 1, 1))},
)
"""Of candidates, ours first."""
MOST_LINES = 7
"""Of one kind in a panel: of more head counts, these many are drawn."""
ROUND_HEADS = (1, 8, 16, 32, 64, 128)
LABEL_POINTS = 10
"""The height of a label, which others keep from it."""
NEAR_THE_EDGE = 0.8
"""Of the axes' width: where lines end right of it, their labels stand outside."""
DOTS_AN_INCH = 120
PALETTE = 256
"""Colours of a PNG. Lines, labels and a scale of colours need no more, and it has two fifths of the bytes."""
ANY = "0.25"
"""The grey in legends of what has many colours."""

Result = dict[str, Any]


def save(figure: Figure, target: IO[bytes]) -> None:
    """Writes a picture as a PNG: the same bytes for the same picture."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DOTS_AN_INCH, format="png")
    with Image.open(drawn) as picture:
        few = picture.convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE)
    few.save(target, format="PNG", optimize=True)


def shade(place: float) -> Any:
    """A colour for 0 to 1, from dark to light."""
    return colormaps["viridis"](0.78 * place)


def some_heads(heads: Iterable[int]) -> list[int]:
    """The head counts that are drawn: all, or of many the round ones."""
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


def plain_ticks(axes: Axes, which: str, places: Sequence[float] | None = None) -> None:
    """A logarithmic axis with numbers as one says them, at given places or at 1, 2 and 5 of each decade."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    if places is not None:
        axis.set_ticks(list(places))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def label_ends(axes: Axes, labels: Sequence[tuple[float, float, str, Any]]) -> None:
    """Writes texts beside the ends (x, y) of lines: right of the axes and apart from one another, or, where a line ends
    far from there, next to its end."""
    to_axes = axes.transScale + axes.transLimits
    ends = [(*to_axes.transform((x, y)), text, color) for x, y, text, color in labels]
    far = [end for end in ends if end[0] < NEAR_THE_EDGE]
    ends = sorted((end for end in ends if end[0] >= NEAR_THE_EDGE), key=lambda end: end[1])
    for x, y, text, _ in far:
        axes.annotate(text, (x, y), (6, 0), "axes fraction", "offset points", va="center", fontsize=8)
    height = axes.get_figure().get_size_inches()[1] * 72 * 0.75 / axes.get_gridspec().nrows
    step, places = LABEL_POINTS / height, [end[1] for end in ends]
    for _ in range(100):  # neighbours that are too near push each other away
        for i in range(len(places) - 1):
            short = step - (places[i + 1] - places[i])
            if short > 1e-6:
                places[i], places[i + 1] = places[i] - short / 2, places[i + 1] + short / 2
    for (x, y, text, color), place in zip(ends, places, strict=True):
        axes.annotate(
            text,
            (x, y),
            (1.03, place),
            "axes fraction",
            "axes fraction",
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkB": 3},
        )


def legend_below(figure: Figure, handles: Sequence[Any], columns: int = 4) -> None:
    """One entry for each label."""
    unique = {handle.get_label(): handle for handle in handles}
    figure.legend(
        list(unique.values()), list(unique), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )


def of_any_color(**style: Any) -> Line2D:
    """What stands in a legend for lines of many colours."""
    return Line2D([], [], color=ANY, **style)


def _by(results: Iterable[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    groups: dict[Any, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


# Sparse attention on a GPU


def peers_of(result: Result) -> dict[str, tuple[float, float]]:
    """The peers as the README names them: seconds, and the bytes that they read and wrote."""
    case, found = result["case"], {}
    for title, names in kernel_report.README_PEERS.items():
        times = [result["seconds"][name]["median"] for name in names if name in result["seconds"]]
        if times:
            found[title] = min(times), result["bytes"]
            if case["format"] != "bf16" and all(name.endswith("bf16") for name in names):
                attended = result["useful_flops"] / (2 * case["heads"] * (576 + 512))
                longer = mla_backend.FORMATS["bf16"].token_bytes - mla_backend.FORMATS[case["format"]].token_bytes
                found[title] = min(times), result["bytes"] + attended * longer
    return found


def roofline(file: ResultFile) -> Figure:
    """Useful FLOP/s against FLOP per byte, ours as lines over heads, the peers as marks, below the ceilings."""
    formats = _by(file.results, lambda result: result["case"]["format"])
    note = "" if file.machine == ceilings.GPU else f" (ceilings: {ceilings.GPU})"
    figure, panels = new_figure(len(formats), f"Roofline, {file.machine}{note}", width=7, height=5)
    handles: list[Any] = []
    for panel, (fmt, results) in zip(panels, formats.items(), strict=True):
        panel.set(xscale="log", yscale="log")
        ends, xs, ys = [], [], []
        for (batch, topk), line in _by(results, lambda r: (r["case"]["batch"], r["case"]["topk"])).items():
            line = sorted(line, key=lambda result: result["case"]["heads"])
            x = [result["useful_flops"] / result["bytes"] for result in line]
            y = [result["useful_flops"] / result["seconds"]["ours"]["median"] / 1e12 for result in line]
            handles += panel.plot(x, y, color="black", marker="o", markersize=4, linewidth=0.8, label="mla-backend")
            ends.append((x[-1], y[-1], batch if topk == 2048 else f"{batch}, topk {topk}", "black"))
            xs, ys = xs + x, ys + y
        for style, title in zip(STYLES[1:], kernel_report.README_PEERS, strict=False):
            found = [(result, peers_of(result)[title]) for result in results if title in peers_of(result)]
            if not found:
                continue
            x = [result["useful_flops"] / moved for result, (_, moved) in found]
            y = [result["useful_flops"] / seconds / 1e12 for result, (seconds, _) in found]
            handles += panel.plot(
                x, y, style["marker"], color=style["color"], markersize=6, fillstyle="none", label=title
            )
            xs, ys = xs + x, ys + y
        low, high = min(xs) * 0.7, max(xs) * 1.4
        slopes = [("memory", ceilings.MEMORY_BYTES, "--")]
        slopes += [("L2", ceilings.L2_BYTES[fmt], ":")] if fmt in ceilings.L2_BYTES else []
        for name, rate, dashes in slopes:
            turn = min(max(ceilings.MATH_FLOPS / rate, low), high)
            handles += panel.plot(
                [low, turn],
                [rate * low / 1e12, rate * turn / 1e12],
                color="0.4",
                linestyle=dashes,
                label=f"{name}, {rate / 1e12:g} TB/s ({fmt if name == 'L2' else 'FP8 rows'})",
            )
        most = ceilings.MATH_FLOPS
        handles += panel.plot(
            [min(low, most / slopes[-1][1]), high],
            [most / 1e12] * 2,
            color="0.4",
            label=f"math, {most / 1e12:g} TFLOP/s",
        )
        panel.set(xlim=(low, high), ylim=(min(ys) * 0.6, most / 1e12 * 1.5), title=f"{fmt} cache")
        panel.set(xlabel="useful FLOP per byte read or written", ylabel="useful TFLOP/s")
        panel.grid(alpha=0.25, which="major")
        plain_ticks(panel, "x")
        plain_ticks(panel, "y")
        label_ends(panel, ends)
        _mark_heads(panel, results)
    legend_below(figure, handles)
    return figure


def _mark_heads(panel: Axes, results: list[Result]) -> None:
    """A second scale, at the top: which head count has so many FLOP per byte."""
    most_common = statistics.mode(result["case"]["topk"] for result in results)
    places = {
        result["case"]["heads"]: result["useful_flops"] / result["bytes"]
        for result in results
        if result["case"]["topk"] == most_common
    }
    for heads in some_heads(places):
        panel.axvline(places[heads], ymin=0.985, color="black", linewidth=0.8)
        panel.text(places[heads], 1.01, str(heads), ha="center", fontsize=8, transform=panel.get_xaxis_transform())
    panel.text(0.5, 1.06, f"heads, at topk {most_common}", ha="center", fontsize=8, transform=panel.transAxes)
    panel.set_title(panel.get_title(), pad=30)


def _shape(result: Result) -> tuple[Any, ...] | None:
    """What results have in common that differ in their number of requests; None for mixed batches."""
    case = result["case"]
    requests = set(Batch.parse(case["batch"]).requests)
    if len(requests) != 1:
        return None
    ((queries, length),) = requests
    return case["format"], queries, length, case["topk"]


def time_over_batch(file: ResultFile) -> Figure | None:
    """Time against the number of requests, a line for each head count. None where no two numbers of requests are."""
    groups = {shape: results for shape, results in _by(file.results, _shape).items() if shape is not None}

    def requests(result: Result) -> int:
        return len(Batch.parse(result["case"]["batch"]).requests)

    groups = {
        shape: results
        for shape, results in groups.items()
        if any(len(line) > 1 for line in _by(results, lambda result: result["case"]["heads"]).values())
    }
    if not groups:
        return None
    titles = {
        shape: f"{fmt} cache, {queries} query token{'s' * (queries > 1)} each, {_k(length)} cached, topk {topk}"
        for shape in groups
        for fmt, queries, length, topk in [shape]
    }

    def beside(result: Result) -> float | None:
        best = result.get("best_peer")
        return result["seconds"][best]["median"] if best else None

    return _lines_over_batch(
        [(titles[shape], results) for shape, results in groups.items()],
        requests,
        beside,
        "requests",
        f"Attention, {file.machine}",
        "best peer",
    )


def _k(tokens: int) -> str:
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def _lines_over_batch(
    groups: Sequence[tuple[str, list[Result]]],
    batch_of: Callable[[Result], int],
    beside: Callable[[Result], float | None],
    xlabel: str,
    title: str,
    peer: str,
) -> Figure:
    """A panel for each group, a line for each head count, dashed for the peer."""
    figure, panels = new_figure(len(groups), title)
    beside_style = {"markersize": 7, "fillstyle": "none", "linestyle": "--", "linewidth": 1}
    handles = [of_any_color(marker="o", markersize=5, label="mla-backend")]
    if any(map(beside, (result for _, results in groups for result in results))):
        handles.append(of_any_color(marker="o", label=peer, **beside_style))
    for panel, (name, results) in zip(panels, groups, strict=True):
        panel.set(xscale="log", yscale="log")
        heads = some_heads(result["case"]["heads"] for result in results)
        ends = []
        for place, count in enumerate(heads):
            line = sorted((r for r in results if r["case"]["heads"] == count), key=batch_of)
            color = shade(place / max(1, len(heads) - 1))
            x, y = [batch_of(r) for r in line], [r["seconds"]["ours"]["median"] * 1e6 for r in line]
            marker = STYLES[place % len(STYLES)]["marker"]
            panel.plot(x, y, color=color, marker=marker, markersize=5)
            ends.append((x[-1], y[-1], f"{count} head{'s' * (count > 1)}", color))
            peers = [(batch_of(r), beside(r) * 1e6) for r in line if beside(r)]
            if peers:
                panel.plot(*zip(*peers, strict=True), color=color, marker=marker, **beside_style)
        panel.set_title(textwrap.fill(name, 70), fontsize=10)
        panel.set(xlabel=xlabel, ylabel="time, us")
        plain_ticks(panel, "x", sorted({batch_of(result) for result in results}))
        plain_ticks(panel, "y")
        panel.grid(alpha=0.25)
        label_ends(panel, ends)
    legend_below(figure, handles)
    return figure


def time_over_heads(file: ResultFile) -> Figure | None:
    """Time against the number of heads, a line for each batch. None where no batch has three head counts."""
    groups = _by(file.results, lambda result: result["case"]["format"])
    lines = {
        fmt: {
            name: sorted(line, key=lambda result: result["case"]["heads"])
            for name, line in _by(results, lambda r: (r["case"]["batch"], r["case"]["topk"])).items()
            if len(line) >= 3
        }
        for fmt, results in groups.items()
    }
    lines = {fmt: found for fmt, found in lines.items() if found}
    if not lines:
        return None
    figure, panels = new_figure(len(lines), f"Attention, {file.machine}, commit {_commit(file)}")
    floor_style, beside_style = {"linestyle": ":"}, {"marker": "x", "linestyle": "--", "linewidth": 0.8}
    handles = [
        of_any_color(marker="o", markersize=4, label="mla-backend"),
        of_any_color(label="floor (memory: rate of FP8 rows)", **floor_style),
    ]
    if any(r["best_peer"] for found in lines.values() for results in found.values() for r in results):
        handles.append(of_any_color(label="best peer", **beside_style))
    for panel, (fmt, its_lines) in zip(panels, lines.items(), strict=True):
        panel.set(yscale="log")
        ends = []
        for place, ((batch, topk), results) in enumerate(its_lines.items()):
            color = shade(place / max(1, len(its_lines) - 1))
            heads = [result["case"]["heads"] for result in results]
            ours = [result["seconds"]["ours"]["median"] * 1e6 for result in results]
            marker = STYLES[place % len(STYLES)]["marker"]
            panel.plot(heads, ours, color=color, marker=marker, markersize=4)
            floors = [max(result["floor_seconds"].values()) * 1e6 for result in results]
            panel.plot(heads, floors, color=color, **floor_style)
            ends.append((heads[-1], ours[-1], batch if topk == 2048 else f"{batch}, topk {topk}", color))
            beside = [
                (r["case"]["heads"], r["seconds"][r["best_peer"]]["median"] * 1e6) for r in results if r["best_peer"]
            ]
            if beside:
                panel.plot(*zip(*beside, strict=True), color=color, **beside_style)
        panel.set(title=f"{fmt} cache", xlabel="heads", ylabel="time, us")
        most = max(result["case"]["heads"] for results in its_lines.values() for result in results)
        panel.set_xticks([1, *range(16, most + 1, 16)] if most > 16 else range(1, most + 1))
        panel.set_xlim(0, most * 1.02)
        plain_ticks(panel, "y")
        panel.grid(alpha=0.25)
        label_ends(panel, ends)
    legend_below(figure, handles)
    return figure


def _commit(file: ResultFile) -> str:
    return str(file.environment.get("commit") or "unknown")[:10]


def speed_up(file: ResultFile) -> Figure | None:
    """How many times the best peer's speed is ours, heads by batch. None where no peer ran."""

    def column(result: Result) -> str:
        case = result["case"]
        return case["batch"] if case["topk"] == 2048 else f"{case['batch']}\ntopk {case['topk']}"

    def size(result: Result) -> tuple[int, int, int]:
        return result["case"]["tokens"], Batch.parse(result["case"]["batch"]).cached, result["case"]["topk"]

    beside = sorted((result for result in file.results if result["best_peer"]), key=size)
    panels = [
        (f"{fmt} cache", [(result["case"]["heads"], column(result), result["speed_up"]) for result in results])
        for fmt, results in _by(beside, lambda result: result["case"]["format"]).items()
    ]
    return _heat(panels, "batch", f"mla-backend's speed over the best peer's, {file.machine}") if panels else None


def _heat(groups: Sequence[tuple[str, list[tuple[int, str, float]]]], xlabel: str, title: str) -> Figure:
    """A panel for each group of (heads, column, ratio). Hatched where the ratio is below 1."""
    most = max(len({column for _, column, _ in cells}) for _, cells in groups)
    across = 1 if most > 8 else 2
    ratios = [ratio for _, cells in groups for *_, ratio in cells]
    notes = ["hatched: the peer is faster"] if min(ratios) < 1 else []
    if any(len(cells) < len({c for c, *_ in cells}) * len({b for _, b, _ in cells}) for _, cells in groups):
        notes.append("empty: not measured")
    title = "\n".join([title, *(["; ".join(notes)] if notes else [])])
    figure, panels = new_figure(len(groups), title, width=max(5.5, most * 0.95), height=4.0, columns=across)
    reach = max(1.25, *ratios, *(1 / ratio for ratio in ratios))
    norm, colors = LogNorm(1 / reach, reach), colormaps["cividis"]
    for panel, (name, cells) in zip(panels, groups, strict=True):
        columns = list(dict.fromkeys(column for _, column, _ in cells))
        heads = sorted({count for count, _, _ in cells})
        for count, column, ratio in cells:
            x, y = columns.index(column), heads.index(count)
            color = colors(norm(ratio))
            panel.fill_between(
                [x - 0.5, x + 0.5],
                y - 0.5,
                y + 0.5,
                facecolor=color,
                edgecolor="white",
                hatch="///" if ratio < 1 else None,
                linewidth=0.8,
            )
            bright = 0.3 * color[0] + 0.6 * color[1] + 0.1 * color[2] > 0.5
            panel.text(
                x,
                y,
                f"{ratio:.2f}",
                ha="center",
                va="center",
                color="black" if bright else "white",
                bbox={"facecolor": color, "edgecolor": "none", "pad": 1.5},
            )
        panel.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(heads) - 0.5), title=name, ylabel="heads")
        panel.set_xticks(range(len(columns)), columns, fontsize=8)
        panel.set_yticks(range(len(heads)), heads)
        panel.set_xlabel(xlabel)
    return figure


# Sparse attention on a CPU


def _cpu_peer(result: Result) -> float | None:
    return result["seconds"]["vllm"]["median"] if "vllm" in result["seconds"] else None


def cpu_time_over_batch(file: ResultFile) -> Figure | None:
    """As time_over_batch, of cpu_attention."""
    groups = {
        key: results
        for key, results in _by(file.results, lambda r: (r["case"]["format"], r["case"]["context"])).items()
        if len({result["case"]["batch"] for result in results}) > 1
    }
    named = [(f"{fmt} cache, {context} slots", results) for (fmt, context), results in groups.items()]
    title = f"Attention, {file.machine}, {file.environment['torch']['threads']} threads"
    if not named:
        return None
    return _lines_over_batch(named, lambda r: r["case"]["batch"], _cpu_peer, "query tokens", title, "vLLM")


def cpu_speed_up(file: ResultFile) -> Figure | None:
    """As speed_up, of cpu_attention over vLLM's kernel."""

    def cell(result: Result) -> tuple[int, str, float]:
        case = result["case"]
        ratio = _cpu_peer(result) / result["seconds"]["ours"]["median"]
        return case["heads"], f"{case['batch']} x {case['context']}", ratio

    beside = [result for result in file.results if _cpu_peer(result)]
    groups = [
        (f"{fmt} cache", [cell(result) for result in results])
        for fmt, results in _by(beside, lambda r: r["case"]["format"]).items()
    ]
    title = f"mla-backend's speed over vLLM's, {file.machine}"
    return _heat(groups, "query tokens x slots", title) if groups else None


# The ops around attention


def cache_ops(file: ResultFile) -> Figure:
    """Time and bandwidth against the number of tokens."""
    figure, (times, rates) = new_figure(2, f"The ops around attention, {file.machine}")
    ops = _by(file.results, lambda r: r["op"] if r["format"] == "-" else f"{r['op']}, {r['format']}")
    copies = {name: results for name, results in ops.items() if name.startswith("copy")}
    handles: list[Any] = []
    for style, (name, results) in zip(
        STYLES * len(ops), ((name, found) for name, found in ops.items() if name not in copies), strict=False
    ):
        results = sorted(results, key=lambda result: result["count"])
        x, seconds = [r["count"] for r in results], [r["seconds"]["median"] for r in results]
        handles += times.plot(x, [value * 1e6 for value in seconds], label=name, markersize=5, **style)
        if not name.startswith("plan"):
            y = [r["bytes"] / value / 1e12 for r, value in zip(results, seconds, strict=True)]
            rates.plot(x, y, label=name, markersize=5, **style)
    if copies:
        fastest = max(r["bytes"] / r["seconds"]["median"] for results in copies.values() for r in results)
        handles.append(rates.axhline(fastest / 1e12, color="0.4", linewidth=1, label="the fastest copy of 1 GB"))
    times.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time, us")
    rates.set(xscale="log", xlabel="tokens", ylabel="TB/s read and written")
    rates.set_ylim(bottom=0)
    plain_ticks(times, "y")
    counts = sorted({r["count"] for name, results in ops.items() if name not in copies for r in results})
    for panel in times, rates:
        plain_ticks(panel, "x", counts)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _k(int(value))))
        panel.grid(alpha=0.25)
    legend_below(figure, handles)
    return figure


# Throughput and serving

BESIDE_A_MARK = (((-6, 3), "right"), ((-6, -9), "right"), ((6, 3), "left"), ((6, -9), "left"))
"""Where a load stands, in points from its mark: of marks near each other the left one has it left, the right one right,
so that it lies on neither."""
UNDER_A_LABEL = (patheffects.withStroke(linewidth=2.5, foreground="white"),)
"""Keeps lines out of it."""


def _backends(file: ResultFile) -> dict[str, dict[str, Any]]:
    """A style for each backend, the same in all pictures of a file."""
    names = sorted({r["backend"] for r in file.succeeded}, key=lambda name: (name not in runs.OUR_BACKENDS, name))
    return {name: STYLES[place % len(STYLES)] for place, name in enumerate(names)}


def _workloads(file: ResultFile) -> dict[str, list[Result]]:
    """Where few are in flight there may be fewer requests: they are of the same workload."""
    return _by(file.succeeded, lambda result: runs.workload(result["case"], count=False))


def _where(file: ResultFile) -> str:
    """The machine, and the model if its size is known."""
    if not (file.environment.get("model") or {}).get("heads"):
        return file.machine
    return f"{file.machine}, {runs.heads(file.environment, file.succeeded[0]['case'], ' heads')}"


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def throughput_over_latency(file: ResultFile) -> Figure | None:
    """Tokens a second against the median time of a token, a line through the loads of each backend."""
    groups = {
        name: found
        for name, results in _workloads(file).items()
        if (found := [result for result in results if known(result["requests"]["tpot_s"])])
    }
    if not groups:
        return None
    styles = _backends(file)
    figure, panels = new_figure(len(groups), f"{file.title}, {_where(file)}")
    handles: list[Any] = []
    for panel, (name, results) in zip(panels, groups.items(), strict=True):
        places = _places_of_labels(results)
        for backend, line in _by(results, lambda result: result["backend"]).items():
            line = sorted(line, key=lambda result: runs.load_order(result["case"]))
            x = list(map(_later_token_ms, line))
            y = [r["output_tokens_per_second"] for r in line]
            handles += panel.plot(x, y, label=backend, markersize=5, **styles[backend])
            for result, mark in zip(line, zip(x, y, strict=True), strict=True):
                offset, side = places[backend, runs.load(result["case"])]
                panel.annotate(
                    runs.short_load(result["case"]), mark, offset, "data", "offset points", fontsize=8,
                    horizontalalignment=side, color=styles[backend]["color"], path_effects=UNDER_A_LABEL,
                )  # fmt: skip
        panel.set_title(textwrap.fill(name, 70), fontsize=10)
        panel.set(
            xlabel="median time of a later token, ms (beside the marks: the load)", ylabel="output tokens a second"
        )
        panel.set_xlim(0, 1.1 * max(map(_later_token_ms, results)) or 1)
        most = max(result["output_tokens_per_second"] for result in results)
        panel.set_ylim(-0.04 * most, 1.1 * most)  # below 0, room for the labels of small loads
        panel.grid(alpha=0.25)
    legend_below(figure, handles)
    return figure


def latency_shares(file: ResultFile) -> list[tuple[str, Figure]]:
    """For each workload, which share of the requests was done within which time: a row for each load."""
    styles = _backends(file)
    return [(name, _latency_shares(file, name, results, styles)) for name, results in _workloads(file).items()]


def _latency_shares(file: ResultFile, name: str, results: list[Result], styles: dict[str, dict[str, Any]]) -> Figure:
    loads = _by(
        sorted(results, key=lambda result: runs.load_order(result["case"])), lambda result: runs.load(result["case"])
    )
    title = textwrap.fill(f"Latencies, {_where(file)}: {name}", 110)
    figure, panels = new_figure(
        len(loads) * len(runs.LATENCIES), title, width=4, height=2.6, columns=len(runs.LATENCIES)
    )
    handles: list[Any] = []
    places = iter(panels)
    for number, (load, its_results) in enumerate(loads.items(), 1):
        for (latency, what), panel in zip(runs.LATENCIES.items(), places, strict=False):
            unit, size = ("seconds", 1) if latency == "e2e_s" else ("ms", 1e-3)
            for result in its_results:
                values = sorted(value for value in known(result["requests"][latency]) if value > 0)
                if not values:
                    continue
                shares = [(place + 1) / len(values) for place in range(len(values))]
                style = {**styles[result["backend"]], "marker": ""}
                # begins at 0, with the fastest request
                x, y = [value / size for value in (values[0], *values)], [0, *shares]
                handles += panel.step(x, y, where="post", label=result["backend"], **style)
            panel.set(xscale="log", ylim=(0, 1.02))
            panel.grid(alpha=0.25, which="both")
            _few_ticks(panel)
            panel.set_title(f"{what}, {load}", fontsize=9)
            panel.set_yticks([0, 0.5, 0.9, 1], ["0", "50 %", "90 %", "100 %"], fontsize=8)
            if number == len(loads):
                panel.set_xlabel(unit)
    legend_below(figure, handles)
    return figure


def _places_of_labels(results: Iterable[Result]) -> dict[tuple[str, str], tuple[tuple[int, int], str]]:
    """For each backend and load one of BESIDE_A_MARK, by where the backends' marks of that load lie."""
    found = {}
    for load, marks in _by(results, lambda result: runs.load(result["case"])).items():
        marks.sort(key=lambda result: (_later_token_ms(result), -result["output_tokens_per_second"]))
        for rank, result in enumerate(marks):
            place = round(rank * (len(BESIDE_A_MARK) - 1) / max(1, len(marks) - 1))
            found[result["backend"], load] = BESIDE_A_MARK[place]
    return found


def _later_token_ms(result: Result) -> float:
    return statistics.median(known(result["requests"]["tpot_s"])) * 1e3


def _few_ticks(panel: Axes) -> None:
    """As many numbers as fit below a narrow panel with a logarithmic scale."""
    low, high = panel.get_xlim()
    wide = math.log10(high / low)
    subs = (1, 1.5, 2, 3, 4, 5, 7) if wide < 1 else (1, 2, 5) if wide < 2.5 else (1,)
    panel.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]) if wide < 0.4 else LogLocator(subs=subs))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(axis="x", labelsize=8)
