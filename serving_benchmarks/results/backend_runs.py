"""What the docs say of runs under vLLM: files of compare_backends.py and recall_answers.py."""

from typing import Any

from serving_benchmarks.results import kernel_times, result_file


def _ran(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry for entry in report["results"] if not entry.get("error")]


def markdown(*reports: dict[str, Any]) -> str:
    """A table of files of compare_backends: a line for each candidate and workload."""
    headings = ["heads", "requests x prompt + output", "backend", "prefill of all, s (of turns)"]
    headings += ["decode, ms a step (quartiles)", "fastest step", "tokens to the first difference"]
    headings += ["logprobs differ by (at most)", "finite"]
    rows = []
    for report in reports:
        for entry in _ran(report):
            row = [str(report["environment"]["settings"]["heads"])]
            row += [entry["workload"].replace("x", " x ").replace("+", " + "), entry["candidate"]]
            turns = entry["prefills_s"]
            row.append(f"{entry['prefill_s']:.3f}" + (f" ({min(turns):.3f} to {max(turns):.3f})" if turns[1:] else ""))
            if step := entry["decode_ms_a_step"]:
                row.append(f"{step['median']:.2f} ({step['lower_quartile']:.2f} to {step['upper_quartile']:.2f})")
                row.append(f"{step['fastest']:.2f}")
            else:
                row += ["-", "-"]
            other = entry.get("differs_from_first")
            if differs := other or entry.get("differs_from_itself"):
                row.append(f"{differs['tokens_until_first_difference']:.1f}{'' if other else ' (itself)'}")
                row.append(f"{differs['logprob_difference_mean']:.4f} ({differs['logprob_difference_max']:.3f})")
            else:
                row += ["-", "-"]
            row.append(f"all {entry['logprobs_looked_at']}" if entry["finite"] else "NOT ALL")
            rows.append(row)
    return "\n".join(result_file.table(headings, rows))


def step_profile(report: dict[str, Any]) -> str:
    """A table of what a decode step consists of: kernels, and what the host does besides the CUDA graph."""
    entries = [entry for entry in _ran(report) if entry.get("profile")]
    rows: list[list[str]] = [[name] for name in ("kernels", "their time, us", "of it attention, us")]
    rows += [[name] for name in ("CUDA graphs launched", "kernels launched besides", "waits for the device")]
    for entry in entries:
        kernels, calls = entry["profile"]["kernels"], entry["profile"]["calls"]
        attention = sum(time_us for name, _, time_us in kernels if kernel_times.is_attention(name))
        launches = sum(count for name, count in calls.items() if "LaunchKernel" in name)
        values = (
            f"{sum(count for _, count, _ in kernels):.0f}",
            f"{sum(time_us for _, _, time_us in kernels):.0f}",
            f"{attention:.0f}",
            f"{calls.get('cudaGraphLaunch', 0):g}",
            f"{launches:g}",
            f"{sum(entry['profile']['waits'].values()):g}",
        )
        for row, value in zip(rows, values, strict=True):
            row.append(value)
    return "\n".join(result_file.table(["a decode step", *(entry["candidate"] for entry in entries)], rows))


def recall(*reports: dict[str, Any]) -> str:
    """How many questions were answered, in each of the runs."""
    runs = [run for report in reports for run in _ran(report)]
    return " or ".join(dict.fromkeys(f"{run['right']} of {run['asked']}" for run in runs))


def recall_table(*reports: dict[str, Any]) -> str:
    """A table of files of recall_answers: a line for each way to answer."""
    headings = [
        "engine",
        "cache",
        "decode",
        "drafted tokens",
        "GPUs",
        "right",
        "answers equal to the embedded engine's",
    ]
    headings += ["all tokens equal", "drafts accepted"]
    rows, seen = [], set()
    for report in reports:
        for run in _ran(report):
            if run["way"] in seen and "than" not in run:  # what others are held to is measured beside each of them
                continue
            seen.add(run["way"])
            graphs = "without CUDA graphs" if run["eager"] else "CUDA graphs"
            held = "than" in run
            rows.append(
                [
                    "vLLM" if run["engine"] == "vllm" else "embedded",
                    run["cache"].upper(),
                    graphs,
                    str(run["drafts"] or "-"),
                    str(run["gpus"]),
                    f"{run['right']} of {run['asked']}",
                    str(run["answers_equal"]) if held else "-",
                    str(run["texts_equal"]) if held else "-",
                    f"{run['accepted']} of {run['drafted']}" if run["drafted"] else "-",
                ]
            )
    return "\n".join(result_file.table(headings, rows))
