"""The picture of the README."""

import io

import matplotlib
from matplotlib.figure import Figure

from serving_benchmarks.results import tables
from serving_benchmarks.results.file import Report

matplotlib.rcParams["text.parse_math"] = False  # text of files is no formula
NUMBERS = "Numbers"  # keyword of the text that a picture keeps


def png(figure: Figure, numbers: str) -> bytes:
    """`numbers` are kept as text, to tell whether it is up to date. It is sharp where a page shows it 800 wide."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=160, format="png", metadata={"Software": None, NUMBERS: numbers})
    return drawn.getvalue()


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
    axes.set_title(f"Sparse MLA decode, {gpu}: 128 requests at 32K tokens, top 2048, between GEMMs", fontsize=10)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2)
    axes.set_axisbelow(True)
    figure.legend(ncols=min(3, len(names)), frameon=False, loc="outside lower center", fontsize=9)
    return figure, "; ".join(numbers)
