"""What serving_benchmarks.run.throughput measured, one backend beside another: tables for the docs."""

import re
from collections.abc import Iterator
from typing import Any

from serving_benchmarks.ops.timing import Timing
from serving_benchmarks.results import kernel_times, latency, result_file, result_kinds, runs

NAMES_SHOWN = 8
"""Kernels of each profile."""
TEMPLATE = re.compile(r"<[^<>]*>")
NAME_LENGTH = 56


def beside(*reports: dict[str, Any]) -> str:
    """A table of the loads of all files, ours beside the other backend; loads that one of the two failed are left out.

    Each file has to be of two backends, and all files of the same two. What else a machine does makes rounds longer,
    never shorter: where steps wait for the host, the fastest rounds say more about the backends than the median ones.
    """
    ours, other = _backends(reports)
    headings = ["heads", "prompt + output", "in flight", f"{ours}, output tokens/s (quartiles)"]
    headings += [f"{other} (quartiles)", "ratio", "of the fastest rounds", "first token, ms", "later tokens, ms"]
    rows = []
    for report in reports:
        for mine, theirs in _of_each_load(report, ours, other):
            ratios = [_ratio(report, theirs, mine), f"{_fastest(mine) / _fastest(theirs):.2f}"]
            rows.append([*_load(report, mine), _speed(mine), _speed(theirs), *ratios, *_latencies(mine, theirs)])
    return "\n".join([*result_file.table(headings, rows), "", _where(reports, "ours / theirs")])


def engine_beside(*reports: dict[str, Any]) -> str:
    """A table of the loads of all files, the embedded engine beside vLLM with each of its backends; loads that one of
    them failed are left out.

    The ratio is to the fastest of vLLM's backends at that load, latencies are beside the first one that the files name.
    """
    names = _backend_names(reports)
    others = [name for name in names if name != runs.EMBEDDED]
    if runs.EMBEDDED not in names or not others:
        raise ValueError(f"the files must have {runs.EMBEDDED} and a backend of vLLM; they have {', '.join(names)}")
    headings = ["heads", "prompt + output", "in flight", f"{runs.EMBEDDED}, output tokens/s (quartiles)"]
    headings += [f"vLLM, {name} (quartiles)" for name in others]
    headings += ["ratio to the faster" if len(others) > 1 else "ratio", "first token, ms", "later tokens, ms"]
    rows = []
    for report in reports:
        for mine, *theirs in _of_each_load(report, runs.EMBEDDED, *others):
            faster = max(theirs, key=lambda entry: entry["output_tokens_per_second"])
            ratio = _ratio(report, faster, mine)
            speeds = map(_speed, (mine, *theirs))
            rows.append([*_load(report, mine), *speeds, ratio, *_latencies(mine, theirs[0])])
    return "\n".join([*result_file.table(headings, rows), "", _where(reports, f"{runs.EMBEDDED} / {others[0]}")])


def profiles(*reports: dict[str, Any]) -> str:
    """A table of the profiled decode steps of all files: the kernels that take longest, microseconds a step.

    Headings have the lengths of requests where there are several.
    """
    profiled = [(report, entry) for report in reports for entry in _ran(report) if entry.get("profile")]
    several = len({runs.lengths(entry["case"]) for _, entry in profiled}) > 1
    found = {}
    for report, entry in profiled:
        name = f"{entry['backend']}, {runs.heads(report['environment'], entry['case'], ' heads')}"
        found[f"{name}, {runs.lengths(entry['case'])}" if several else name] = entry["profile"]
    times = {name: _by_short_name(profile) for name, profile in found.items()}
    shown = {kernel for of in times.values() for kernel in sorted(of, key=of.__getitem__)[-NAMES_SHOWN:]}
    rows = [
        ["the step", *(f"{profile['wall_s'] / profile['steps'] * 1e6:.0f}" for profile in found.values())],
        ["all kernels", *(f"{profile['total_us'] / profile['steps']:.0f}" for profile in found.values())],
        ["of them attention", *(f"{profile['attention_share']:.1%}" for profile in found.values())],
    ]
    for kernel in sorted(shown, key=lambda kernel: (-max(of.get(kernel, 0.0) for of in times.values()), kernel)):
        rows.append([f"`{kernel}`", *(f"{of[kernel]:.0f}" if kernel in of else "-" for of in times.values())])
    return "\n".join(result_file.table(["us a step", *found], rows))


def short_name(kernel: str) -> str:
    """A kernel's name without what it returns, its arguments, its templates' and all but the last of its namespaces."""
    name = kernel.replace("(anonymous namespace)::", "")
    while TEMPLATE.search(name):
        name = TEMPLATE.sub("", name)
    name = name.partition("<")[0]  # one that was cut off within
    name = name.partition("(")[0].removeprefix("void ").strip()
    return "::".join(name.split("::")[-2:])[-NAME_LENGTH:]


def _by_short_name(profile: dict[str, Any]) -> dict[str, float]:
    """Microseconds a step; kernels whose short names are the same are added."""
    found: dict[str, float] = {}
    for row in profile["kernels"]:
        if row["name"] != kernel_times.THE_REST:
            name = short_name(row["name"])
            found[name] = found.get(name, 0.0) + row["total_us"] / profile["steps"]
    return found


def _ran(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in report["results"] if not entry.get("error")]


def _of_each_load(report: dict[str, Any], *backends: str) -> Iterator[list[dict[str, Any]]]:
    """The entries of these backends, in their order, for each workload and load that all of them ran."""
    entries = {(entry["backend"], runs.asked(entry["case"])): entry for entry in _ran(report)}
    for asked in dict.fromkeys(asked for _, asked in entries):
        found = [entries[backend, asked] for backend in backends if (backend, asked) in entries]
        if len(found) == len(backends):
            yield found


def _backend_names(reports: tuple[dict[str, Any], ...]) -> list[str]:
    return list(dict.fromkeys(entry["backend"] for report in reports for entry in report["results"]))


def _backends(reports: tuple[dict[str, Any], ...]) -> tuple[str, str]:
    names = _backend_names(reports)
    ours, others = ([name for name in names if (name in runs.OUR_BACKENDS) == mine] for mine in (True, False))
    if (len(ours), len(others)) != (1, 1):
        raise ValueError(f"the files must have one backend of ours and one other; they have {', '.join(names)}")
    return ours[0], others[0]


def _ratio(report: dict[str, Any], theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    return runs.ratio(theirs, mine, runs.over_first(theirs, mine) if runs.interleaved(report["environment"]) else None)


def _speed(entry: dict[str, Any]) -> str:
    seconds, tokens = Timing.of(entry["rounds_s"]), entry["total_output_tokens"]
    low, high = tokens / seconds.upper_quartile, tokens / seconds.lower_quartile
    return f"{entry['output_tokens_per_second']:.0f} ({low:.0f} to {high:.0f})"


def _fastest(entry: dict[str, Any]) -> float:
    """Output tokens a second of the fastest round."""
    return entry["total_output_tokens"] / entry["seconds"]["fastest"]


def _load(report: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """Cells: heads, tokens of a request, requests in flight."""
    case = entry["case"]
    return [runs.heads(report["environment"], case), runs.lengths(case), runs.short_load(case)]


def _latencies(*entries: dict[str, Any]) -> list[str]:
    """Cells: medians of the first token and of later ones, in ms, of all entries."""
    return [
        " / ".join(f"{entry['latency'][name]['p50'] * 1e3:.{digits}f}" for entry in entries)
        for name, digits in (("ttft_s", 0), ("tpot_s", 2))
    ]


def _where(reports: tuple[dict[str, Any], ...], latencies: str) -> str:
    """The line below a table: whose latencies are shown, what all files have in common, and all dates and commits."""
    about = [report["environment"] for report in reports]
    model, first = about[0]["model"], about[0]
    dates = dict.fromkeys(where["date"][:10] for where in about)
    commits = dict.fromkeys((where["commit"] or "unknown")[:10] for where in about)
    parts = [
        f"{model['layers']} layers of {model['model_type']}'s width with {model['experts']} experts",
        f"{first['settings']['kv_cache_dtype']} cache",
        " or ".join(dict.fromkeys(map(result_kinds.machine, about))),
        f"driver {first['driver']}",
        f"torch {first['torch']['version']}",
        f"{first['vllm']['distribution']} {first['vllm']['version']}",
        " and ".join(sorted(dates)),
        f"commit{'s' if len(commits) > 1 else ''} {' and '.join(commits)}",
    ]
    turns = {len(entry["rounds_s"]) for report in reports for entry in _ran(report)}
    count = sum(map(runs.interleaved, about))
    of = "" if count == len(reports) else f" in {count} of {len(reports)} files"
    narrow = max(turns) > runs.ALL_BETWEEN
    told = f"{latency.CONFIDENCE * 100:g} % confidence intervals" if narrow else "lowest to highest"
    paired = f"; backends took turns{of}, ratios ({told}) are of rounds of the same number" if count else ""
    rounds = " or ".join(map(str, sorted(turns))) if len(turns) < 3 else f"{min(turns)} to {max(turns)}"
    return f"Medians of {rounds} rounds{paired}; latencies {latencies}. {', '.join(parts)}."
