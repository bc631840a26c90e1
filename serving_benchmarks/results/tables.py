"""The tables of result files, in Markdown, for the docs and for reports.

Each takes the contents of result files, `*reports`. Entries that failed are left out.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from serving_benchmarks.results import file, runs
from serving_benchmarks.results.file import Report, microseconds, page

Entry = dict[str, Any]
ROOFLINE = "Roofline: the longest of math, L2 and memory time at measured rates, of FP8 rows: BF16 rows may pass 100%."
IN_SITU = "Between GEMMs: time added after a GEMM that reads 103 MB of weights."
PEERS = {
    "ours_fp8": "mla-backend, FP8 products",
    "flashmla_fp8": "FlashMLA FP8",
    "flashmla_fp8_one_batch": "FlashMLA FP8",
    "flashmla_bf16": "FlashMLA BF16",
    "fa3_bf16": "FA3 BF16",
    "flashinfer_bf16": "FlashInfer BF16",
    "q8kv8": "SGLang Q8KV8",
    "flashmla": "FlashMLA",
    "flashinfer": "FlashInfer",
    "fa3": "FA3",
    "cudnn": "cuDNN",
    "tilelang": "TileLang",
    "deepgemm": "DeepGEMM and top-k",
}
"""Titles of candidates. Of candidates with one title the fastest counts."""
NOT_PEERS = ("ours", "ours_fp8", "plan", "slot_lists", "atomic")  # candidates that are ours
LATENCIES = ("first token p50, ms", "p99", "inter-token p50, ms", "p99")  # headings of what latencies() gives
FOUND = "rows found"  # a heading
PARALLEL = {"data_parallel_size": "DP", "decode_context_parallel_size": "DCP", "enable_expert_parallel": "EP"}
"""Ways to use GPUs other than tensor parallelism, by their names in cases."""


def ran(report: Report) -> list[Entry]:
    """The entries that were measured. The others say why they failed."""
    return [entry for entry in report["results"] if not entry.get("error")]


# Attention on a GPU


def kernel_name(case: dict[str, Any]) -> str:
    """A case of `kernels` or `rows`."""
    name = f"{case['name']}, " if "name" in case else ""
    return f"{name}{case['batch']}, h {case['heads']}, topk {lists(case)}, {case['format']}"


def index_name(case: dict[str, Any]) -> str:
    among = f", {case['candidates']} candidates" if case.get("candidates") else ""
    return f"{case['batch']}, {case['heads']} heads, {case['format']} keys{among}"


NAMES: dict[str, Callable[[Entry], str]] = {
    **dict.fromkeys(("kernels", "rows"), lambda entry: kernel_name(entry["case"])),
    "dense": "{case[batch]} h{case[heads]} {case[format]}".format_map,
    "backward": "h{case[heads]} {case[rows]} {case[lists]}".format_map,
    "index": lambda entry: index_name(entry["case"]),
    "sharing": "{case[batch]}, {case[heads]} heads, {case[gpus]} GPUs".format_map,
    **dict.fromkeys(("throughput", "serve"), runs.name_of),
    "checkpoint": "{way}".format_map,
}
"""What entries are called, by kind."""


def lists(case: dict[str, Any]) -> str:
    """How many rows a token attends to, in the first and the second cache."""
    return f"{case['topk']} + {case['extra_topk']}" if case.get("extra_topk") else str(case["topk"])


def peer_title(name: str) -> str:
    return PEERS.get(name, name)


def peers_of(result: Entry) -> dict[str, float]:
    """Median seconds of the peers, and of ours with FP8 products, by title."""
    found: dict[str, float] = {}
    for name, timing in result["seconds"].items():
        if name == "ours_fp8" or name not in NOT_PEERS:
            title = peer_title(name)
            found[title] = min(timing["median"], found.get(title, timing["median"]))
    return found


def share_of_floor(result: Entry) -> float:
    return max(result["floor_seconds"].values()) / result["seconds"]["ours"]["median"]


def cases_page(headings: Sequence[str], rows: Sequence[Sequence[str]], note: str, labels: int, noted: str = "") -> str:
    """A table whose first columns, `labels`, describe a case. Those in which all rows are the same go into the note,
    but for the one that it has anyway, `noted`."""
    same = [i for i in range(labels) if len(rows) > 1 and len({row[i] for row in rows}) == 1]
    shown = [i for i in range(len(headings)) if i not in same]
    told = ", ".join(f"{headings[i]} {rows[0][i]}" for i in same if rows[0][i] != "-" and headings[i] != noted)
    rows = [[row[i] for i in shown] for row in rows]
    return page([headings[i] for i in shown], rows, f"All: {told}. {note}" if told else note)


def kernel_line(entry: Entry) -> str:
    """What was measured of a case, for a terminal."""
    ours, best = entry["seconds"]["ours"], entry["best_peer"]
    us, low, high = (microseconds(ours[name]) for name in ("median", "lower_quartile", "upper_quartile"))
    parts = [f"{us} us ({low} to {high})", f"{entry['useful_flops'] / ours['median'] / 1e12:.0f} TFLOP/s"]
    parts += [f"{entry['bytes'] / ours['median'] / 1e12:.2f} TB/s"] if "bytes" in entry else []
    parts += [f"{share_of_floor(entry):.0%} of roofline"] if "floor_seconds" in entry else []
    others = {name: of["median"] for name, of in entry["seconds"].items() if name != "ours"}
    parts += [f"{peer_title(name)} {microseconds(seconds)}" for name, seconds in others.items()]
    parts += [f"{peer_title(best)} over ours {entry['speed_up']:.2f}"] if best else []
    parts += [f"between GEMMs {_time_and_ratio(entry['in_situ'])}"] if "in_situ" in entry else []
    return ", ".join([*parts, *([entry["launch"]] if "launch" in entry else [])])


def label_cells(entry: Entry, *names: str) -> list[str]:
    return [str(entry["case"].get(name) or "-") for name in names or ("batch", "heads", "topk", "format")]


def kernels(report: Report) -> str:
    """Every case, with the time of every peer."""
    results = ran(report)
    titles, situ = _titles(results), any("in_situ" in result for result in results)
    headings = ["batch", "heads", "topk", "cache", "mla-backend", *titles, "best baseline over ours", "of roofline"]
    rows = []
    for result in results:
        row = [*label_cells(result), *_versus(result, titles), f"{share_of_floor(result):.0%}"]
        rows.append([*row, *[_time_and_ratio(result["in_situ"]) if "in_situ" in result else "-"] * situ])
    note = f"{_kernels_measured(report)} {ROOFLINE}"
    note += f" {IN_SITU} In brackets: the best baseline's time over ours." * situ
    return cases_page([*headings, *["between GEMMs"] * situ], rows, note, labels=4)


def fp8_products(report: Report) -> str:
    """Exact and FP8 products of each case, versus the best baseline and versus the one that rounds as they do."""
    headings = ["batch", "heads", "topk", "cache", "exact", "FP8 products", "best BF16 baseline", "SGLang Q8KV8"]
    headings += ["BF16 over exact", "BF16 over FP8 products", "Q8KV8 over FP8 products"]
    rows = []
    for result in (one for one in ran(report) if "ours_fp8" in one["seconds"] and one["best_peer"]):
        times = {name: timing["median"] for name, timing in result["seconds"].items()}
        best, rounds = times[result["best_peer"]], times.get("q8kv8", math.nan)
        cells = times["ours"], times["ours_fp8"], best, rounds
        ratios = best / times["ours"], best / times["ours_fp8"], rounds / times["ours_fp8"]
        rows.append([*label_cells(result), *map(microseconds, cells), *(f"{ratio:.2f}" for ratio in ratios)])
    return cases_page(headings, rows, _kernels_measured(report), labels=4)


def dense(report: Report) -> str:
    """Every case, with the time of every peer."""
    results = ran(report)
    titles = _titles(results)
    names = ["batch", "heads", *(n for n in ("topk", "candidates") if any(one["case"].get(n) for one in results))]
    headings = [*names, "cache", "mla-backend", *titles, "best baseline over ours"]
    rows = [[*label_cells(one, *names, "format"), *_versus(one, titles)] for one in results]
    return cases_page(headings, rows, _kernels_measured(report, lists=""), labels=len(names) + 1)


def _versus(result: Entry, titles: Sequence[str]) -> list[str]:
    """Cells: times of ours and of peers, and the ratio."""
    times = {"ours": result["seconds"]["ours"]["median"]} | peers_of(result)
    cells = [microseconds(times[name]) if name in times else "-" for name in ("ours", *titles)]
    return [*cells, f"{result['speed_up']:.2f}" if result["best_peer"] else "-"]


def _titles(results: Sequence[Entry]) -> list[str]:
    """Of the peers that were timed, in the order of PEERS."""
    titles = dict.fromkeys(title for result in results for title in peers_of(result))
    return sorted(titles, key=lambda title: [*PEERS.values(), title].index(title))


def rows(report: Report) -> str:
    """A line for each case, format and number of heads; a column for each number of requests."""
    lines: dict[tuple[Any, ...], dict[int, Entry]] = {}
    for result in ran(report):
        case = result["case"]
        requests = int(case["batch"].partition("q")[0])
        lines.setdefault((case["name"], case["format"], lists(case), case["heads"]), {})[requests] = result
    columns = sorted({requests for of in lines.values() for requests in of})
    cells = []
    for key, of in lines.items():
        most = of[max(of)]
        row = [*map(str, key), *(_time_and_ratio(of[n]) if n in of else "-" for n in columns)]
        cells.append([*row, f"{most['bytes'] / most['seconds']['ours']['median'] / 1e12:.2f}"])
    headings = ["case", "rows", "list", "heads", *map(str, columns), "TB/s"]
    best = {peer_title(one["best_peer"]) for of in lines.values() for one in of.values() if one["best_peer"]}
    note = f" In brackets: the time of the best, {' or '.join(sorted(best))}, over ours. TB/s: with the most requests."
    return cases_page(headings, cells, _kernels_measured(report) + note, labels=4)


def _time_and_ratio(result: Entry) -> str:
    ratio = f" ({result['speed_up']:.2f})" if result["best_peer"] else ""
    return microseconds(result["seconds"]["ours"]["median"]) + ratio


def backward(*reports: Report) -> str:
    """A row for each case. Ours are the first file's, peers are those of all files, each versus ours in its process."""
    cases: dict[tuple[str, int, int], list[Entry]] = {}
    for entry in (entry for report in reports for entry in ran(report)):
        cases.setdefault(tuple(entry["case"][name] for name in ("lists", "rows", "heads")), []).append(entry)
    titles = _titles([entry for entries in cases.values() for entry in entries])
    rows = []
    for key, entries in cases.items():
        own = entries[0]["seconds"]
        versus = {}
        for entry in entries:
            for title, seconds in peers_of(entry).items():
                versus[title] = f"{seconds * 1e3:.2f} ({seconds / entry['seconds']['ours']['median']:.2f})"
        row = [*map(str, key), *(f"{own[name]['median'] * 1e3:.2f}" for name in ("ours", "atomic"))]
        rows.append([*row, *(versus.get(title, "-") for title in titles)])
    how = "Medians of whole backwards, interleaved, in ms. In brackets: the baseline's time over ours."
    headings = ["lists", "rows", "heads", "mla-backend", "atomic", *titles]
    return cases_page(headings, rows, _measured_with(how, reports), labels=3)


def _kernels_measured(report: Report, lists: str = "; random lists") -> str:
    """The line below a table of kernels."""
    return _measured_with(f"Medians of interleaved CUDA graph replays, in us{lists}.", [report])


def _measured_with(how: str, reports: Sequence[Report]) -> str:
    """How, on what machine, and with which versions of peers."""
    where, versions = reports[0]["environment"], set()
    for report in reports:
        timed = {name for result in ran(report) for name in result["seconds"]} - {*NOT_PEERS}
        versions |= {report["environment"]["peers"][name.split("_")[0]] for name in timed}
    told = f"{how} {file.machine(where)}, driver {where['driver']}, torch {where['torch']['version']}, baselines: "
    return f"{told}{', '.join(sorted(versions)) or 'none'}, {file.when(where)}."


# Whole models


def of_models(measured: Sequence[tuple[dict[str, Any], Entry]]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of entries, each with its file's environment. Columns that would be empty are left out."""
    on_gpus = any(about.get("gpus") for about, _ in measured)
    machine, part = ("GPUs", "per GPU") if on_gpus else ("machine", "per process")
    headings = ["heads", machine, "tokens", "load", "backend", "output tokens/s", part, "per user", *LATENCIES]
    headings += ["over the first", FOUND, "start, s", "GB of the fullest GPU", "tokens that fit"]
    rows = []
    for about, entry in measured:
        case, cache, memory = entry["case"], entry.get("cache") or {}, entry.get("gpu_memory_bytes")
        where = gpus_name(about, entry) if about.get("gpus") or about.get("cpu") else "-"
        row = [runs.heads(about, case), where, runs.lengths(case), runs.load(case), entry["backend"]]
        if entry.get("error"):
            rows.append([*row, "failed", *["-"] * (len(headings) - len(row) - 1)])
            continue
        speed, gpus, gap = entry["output_tokens_per_second"], entry["gpus"], entry["itl_s"]["p50"]
        row += [f"{speed:.1f}", "-" if gpus == 1 else f"{speed / gpus:.0f}"]
        row += [_cell(1 / gap if gap else None, "{:.0f}"), *latencies(entry), over_first(entry.get("over_first"))]
        row += [rows_found(entry), _cell(entry.get("start_s"), "{:.0f}")]
        row += [_cell(max(memory) / 1e9 if memory else None, "{:.1f}"), _cell(cache.get("tokens"), "{:.0f}")]
        rows.append(row)
    used = [i for i in range(len(headings)) if any(row[i] != "-" for row in rows)]
    return [headings[i] for i in used], [[row[i] for i in used] for row in rows]


def whole_models(*reports: Report) -> str:
    """Every load and backend: light loads, few GPUs and ours first. Of several files with a load the newest counts."""

    def order(run: tuple[dict[str, Any], Entry]) -> list[Any]:
        case, backend = run[1]["case"], run[1]["backend"]
        load = [case.get(name) or math.inf for name in ("input_len", "output_len", *runs.LOAD)]
        return [load, run[1]["gpus"], not runs.is_ours(backend), backend]

    measured = [(report["environment"], entry) for report, of in newest_loads(reports) for entry in of.values()]
    measured.sort(key=order)
    entries = [entry for _, entry in measured]
    asked = "; ".join(dict.fromkeys(runs.workload(entry["case"], count=False) for entry in entries))
    counts = ", ".join(map(str, sorted({entry["case"]["num_prompts"] for entry in entries})))
    told = f"{asked}; {counts} requests. {_models_measured(reports, entries)}"
    gaps = dict.fromkeys(about["inter_token_latency"] for about, _ in measured if about.get("inter_token_latency"))
    told += "".join(f" Inter-token latency: {note}." for note in gaps)
    if pairs := {len(entry["rounds_s"]) for entry in entries if entry.get("over_first")}:
        told += f" Over the first: a backend's speed over the first one's, in pairs of rounds, with {_bounds(pairs)}."
    return cases_page(*of_models(measured), told, labels=4, noted="tokens")


def throughput_versus(*reports: Report, loads: str | None = None, against: str | None = None) -> str:
    """A row for each load: ours with one cache or several, one other backend, and ratios. Where several files have a
    load, the newest one counts.

    `loads` picks rows, such as 4096+64/64,512+512/64: tokens of a prompt and of an answer, and requests in flight.
    `against` picks the other backend, where files have several.
    """
    names = dict.fromkeys(entry["backend"] for report in reports for entry in report["results"])
    ours, others = ([name for name in names if runs.is_ours(name) == mine] for mine in (True, False))
    others = [name for name in others if against in (None, name)]
    if against and not others:
        raise ValueError(f"against: no file has {against}; they have {', '.join(names)}")
    if not ours or len(others) != 1:
        raise ValueError(f"the files must have ours and one other backend; they have {', '.join(names)}")
    wanted = loads.split(",") if loads is not None else []
    rows, shown, compared = [], set(), []
    for report, entries in newest_loads(reports):
        theirs, mine = entries.get(others[0]), [entries.get(name) for name in ours]
        if theirs is None or not any(mine):
            continue
        case, about = theirs["case"], report["environment"]
        load = f"{runs.lengths(case)}/{runs.load(case, short=True)}".replace(" ", "")
        if wanted and load not in wanted:
            continue
        shown.add(load)
        compared.append(theirs)
        row = [runs.heads(about, case), f"{(about.get('model') or {}).get('layers')}", runs.lengths(case)]
        *speeds, speed = (entry and entry["output_tokens_per_second"] for entry in (*mine, theirs))
        row += [runs.load(case, short=True), *(_cell(one, "{:.0f}") for one in (*speeds, speed))]
        for entry in mine:
            if entry and runs.interleaved(about):
                row.append(over_first(runs.over_first(theirs, entry)))
            else:
                row.append(f"{entry['output_tokens_per_second'] / speed:.2f}" if entry else "-")
        rows.append(row)
    if missing := [load for load in wanted if load not in shown]:
        raise ValueError(f"loads: no file has {', '.join(missing)} with ours and the other backend")
    headings = ["heads", "layers", "prompt + output", "in flight", f"{ours[0]}, output tokens/s"]
    headings += [*ours[1:], *others, "ratio", *(f"ratio of {name}" for name in ours[1:])]
    return page(headings, rows, _models_measured(reports, compared, paired=True))


def over_first(found: dict[str, float] | None) -> str:
    return "{median:.2f} ({low:.2f} to {high:.2f})".format(**found) if found else "-"


def rows_found(entry: Entry) -> str:
    """With HiSparse: the share that hot buffers had of the selected rows that were in no page on the GPU."""
    hot, missing = ((entry.get("host_rows") or {}).get(name, 0) for name in ("hot", "from_host"))
    return _cell(hot / (hot + missing) if hot + missing else None, "{:.0%}")


def latencies(entry: Entry) -> list[str]:
    """Cells: p50 and p99 of the time to the first token and of inter-token latency."""
    found = [(entry[name][p], digits) for name, digits in (("ttft_s", 0), ("itl_s", 2)) for p in ("p50", "p99")]
    return ["-" if seconds is None else f"{seconds * 1e3:.{digits}f}" for seconds, digits in found]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def newest_loads(reports: Sequence[Report]) -> list[tuple[Report, dict[str, Entry]]]:
    """For each model, machine, workload and load: the newest file that has it, and its entries by backend."""
    found: dict[tuple[Any, ...], tuple[Report, dict[str, Entry]]] = {}
    for report in reports:
        about = report["environment"]
        groups: dict[tuple[Any, ...], dict[str, Entry]] = {}
        for entry in ran(report):
            case = entry["case"]
            key = (model_name(report), about.get("benchmark"), file.machine(about), entry["gpus"])
            key += (runs.workload(case, count=False), runs.load(case))
            groups.setdefault(key, {})[entry["backend"]] = entry
        for key, entries in groups.items():
            if key not in found or str(found[key][0]["environment"].get("date")) < str(about.get("date")):
                found[key] = report, entries
    return list(found.values())


def model_name(report: Report) -> str:
    model = report["environment"].get("model") or {}
    parts = [f"{model[name]} {name}" for name in ("heads", "layers") if model.get(name)]
    return ", ".join([str(model.get("model_type") or model.get("name") or "unknown model"), *parts])


def gpus_name(about: dict[str, Any], entry: Entry) -> str:
    """How many GPUs ran an entry, which, and how unless by tensor parallelism: 8 x NVIDIA H100, DP8 EP."""
    names = [gpu["name"] for gpu in about.get("gpus") or []]
    sizes = {short: entry["case"].get(name) or 1 for name, short in PARALLEL.items()}
    how = [short if size is True else f"{short}{size}" for short, size in sizes.items() if size is True or size > 1]
    name = f"{entry['gpus']} x {names[0]}" if names else file.machine(about)
    return ", ".join([name, *([" ".join(how)] if how else [])])


def _bounds(pairs: Collection[int]) -> str:
    """What follows a ratio of so many pairs of rounds, in brackets."""
    extremes, interval = "the lowest and the highest", "95 % confidence intervals"
    if max(pairs) < runs.ENOUGH:
        return extremes
    return interval if min(pairs) >= runs.ENOUGH else f"{interval}, or {extremes} of fewer than {runs.ENOUGH}"


def _models_measured(reports: Sequence[Report], entries: Sequence[Entry], paired: bool = False) -> str:
    """The line below a table of whole models. `paired`: there are ratios."""
    rounds = {len(entry.get("rounds_s", "1")) for entry in entries}
    about = [report["environment"] for report in reports]
    first = about[0]
    models = [each.get("model") or {} for each in about]
    layers, experts = (" or ".join(dict.fromkeys(str(m.get(n)) for m in models)) for n in ("layers", "experts"))
    told = [f"Medians of {' to '.join(map(str, sorted({min(rounds), max(rounds)})))} rounds"]
    told = ["Each load was run once"] if rounds == {1} else told
    if paired and all(map(runs.interleaved, about)):
        told.append(f"ratios of interleaved pairs, with {_bounds(rounds)}")
    said, machines = (first.get("settings") or {}).get("kv_cache_dtype"), dict.fromkeys(map(file.machine, about))
    caches = dict.fromkeys(str(entry.get("kv_cache_dtype", said)) for entry in entries)
    dense = all(m.get("layers", 0) == m.get("dense_layers") for m in models)
    parts = [f"{layers} layers {'without' if dense else f'with {experts}'} experts", f"{' or '.join(caches)} cache"]
    parts += [" or ".join(machines), f"torch {first['torch']['version']}", file.engine(first)]
    parts += dict.fromkeys(map(file.when, about))
    return f"{'; '.join(told)}. {', '.join(parts)}."


# Answers of a checkpoint


def checkpoint(*reports: Report) -> str:
    """A row for each way to answer: how many answers are right, and how many equal those of the file's first way."""
    on_gpus = any(report["environment"].get("gpus") for report in reports)
    count = "GPUs" if on_gpus else "processes"
    headings = ["engine", "backend", "cache", *["decode"] * on_gpus, "drafted tokens", count, "right"]
    headings += ["answers equal to the first way's", "all tokens equal", "drafts accepted"]
    rows, seen = [], set()
    for report in reports:
        for entry in ran(report):
            if entry["way"] in seen and "than" not in entry:  # what others are compared with is in each of the files
                continue
            seen.add(entry["way"])
            row = ["vLLM" if entry["engine"] == "vllm" else "embedded", entry.get("backend") or "-"]
            row += [entry["cache"], *["without CUDA graphs" if entry["eager"] else "CUDA graphs"] * on_gpus]
            row += [str(entry["drafts"] or "-"), f"{entry['gpus']}{', DCP' if entry.get('context_parallel') else ''}"]
            row.append("-" if entry["right"] is None else f"{entry['right']} of {entry['asked']}")
            equal = ("answers_equal", "texts_equal")
            row += [f"{entry[name]} of {entry['asked']}" if name in entry else "-" for name in equal]
            rows.append([*row, f"{entry['accepted']} of {entry['drafted']}" if entry.get("drafted") else "-"])
    machines = dict.fromkeys(f"{file.machine(r['environment'])}, {file.when(r['environment'])}" for r in reports)
    return cases_page(headings, rows, f"{'; '.join(machines)}.", labels=5 + on_gpus)
