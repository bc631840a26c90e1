"""The pictures of the README. Each comes with its numbers as text."""

import io
import itertools
import math
import re

import matplotlib
from matplotlib.colors import CenteredNorm
from matplotlib.figure import Figure

from serving_benchmarks.results import runs, tables
from serving_benchmarks.results.file import Report

matplotlib.rcParams["text.parse_math"] = False  # text of files is no formula
CACHES = {"fp8_ds_mla": "FP8 cache", "bf16": "BF16 cache"}
NUMBERS = "Numbers"  # keyword of the text that a picture keeps


def png(figure: Figure, numbers: str) -> bytes:
    """`numbers` are kept as text, to tell whether it is up to date. It is sharp where a page shows it 800 wide."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=160, format="png", metadata={"Software": None, NUMBERS: numbers})
    return drawn.getvalue()


def heat_map(report: Report) -> tuple[Figure, str]:
    """The fastest peer's time over ours, by cache, requests and heads."""
    ratios: dict[tuple[str, str, int], float] = {}
    for entry in tables.ran(report):
        case, timed = entry["case"], entry.get("in_situ", entry)  # decode between GEMMs
        if case["topk"] == 2048 and re.fullmatch(r"(\d+q1|q4k)s32k", case["batch"]) and timed["best_peer"]:
            ratios[case["format"], case["batch"], case["heads"]] = timed["speed_up"]
    formats = [name for name in CACHES if any(name == one for one, _, _ in ratios)]
    batches = sorted({batch for _, batch, _ in ratios}, key=lambda batch: int(f"0{batch.partition('q')[0]}") or 1e9)
    heads = sorted({number for _, _, number in ratios})
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(formats), sharey=True, squeeze=False)[0], formats, strict=True):
        cells = [[math.log2(ratios.get((name, batch, one), math.nan)) for one in heads] for batch in batches]
        axes.imshow(cells, cmap="RdBu", norm=CenteredNorm(0, 1), aspect="auto")
        for (x, one), (y, batch) in itertools.product(enumerate(heads), enumerate(batches)):
            if ratio := ratios.get((name, batch, one)):
                axes.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=9)
        axes.set_xticks(range(len(heads)), map(str, heads))
        axes.set_yticks(range(len(batches)), [b.partition("q")[0] or "prefill" for b in batches])
        axes.set(title=CACHES[name], xlabel="heads per GPU", facecolor="0.95")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    figure.supylabel("requests in decode", fontsize=10)
    gpu = report["environment"]["gpus"][0]["name"]
    figure.suptitle(f"Best other kernel's time over ours, {gpu}, 32K tokens, top 2048; grey: not measured", fontsize=10)
    return figure, "; ".join(f"{' '.join(map(str, key))}: {ratio:.2f}" for key, ratio in ratios.items())


def gains(*reports: Report) -> tuple[Figure, str]:
    """Whole models: ours over the one other backend, by heads and load."""
    ratios: dict[str, tuple[float, float]] = {}
    for report, entries in tables.newest_loads(reports):
        (theirs,) = (entry for name, entry in entries.items() if not runs.is_ours(name))
        ours, case = next(entry for name, entry in entries.items() if runs.is_ours(name)), theirs["case"]
        speed = runs.over_first(theirs, ours)["median"]
        name = f"{runs.heads(report['environment'], case)} heads, {runs.lengths(case)}, {runs.load(case)}"
        ratios[name] = speed, theirs["ttft_s"]["p50"] / ours["ttft_s"]["p50"]
    figure = Figure(figsize=(8, 0.6 + 0.4 * len(ratios)), layout="constrained")
    axes = figure.subplots()
    colors = {"output tokens/s": "#0072b2", "first token sooner, p50": "#92c5de"}
    for number, (label, color) in enumerate(colors.items()):
        ys, widths = [y + 0.4 * number for y in range(len(ratios))], [pair[number] for pair in ratios.values()]
        axes.bar_label(axes.barh(ys, widths, 0.38, color=color, label=label), fmt="%.2f", padding=3, fontsize=8)
    axes.set_yticks([y + 0.2 for y in range(len(ratios))], ratios)
    axes.invert_yaxis()
    axes.axvline(1, color="0.3", linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=2, frameon=False, loc="outside lower center", fontsize=9)
    axes.set_title(f"SPARSE_MLA over vLLM's default, {report['environment']['gpus'][0]['name']}", fontsize=10)
    return figure, "; ".join(f"{name}: {speed:.2f} {first:.2f}" for name, (speed, first) in ratios.items())
