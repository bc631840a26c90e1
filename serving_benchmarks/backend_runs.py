"""What the docs say of runs under vLLM: files of tests/vllm/compare_backends.py and tests/vllm/recall_answers.py."""

from typing import Any

from serving_benchmarks import result_file

ATTENTION = ("flash_fwd", "sparse_attn_fwd", "few_heads", "many_heads", "merge_cut_tokens", "mla_combine")
"""What the names of attention kernels and of those that merge their results have in them."""


def markdown(*reports: dict[str, Any]) -> str:
    """A table of files of compare_backends, which have the same two backends."""
    first, other = reports[0]["options"]["backends"]
    rows = []
    for report in reports:
        runs = [report["runs"][first], report["runs"][other]]
        agree = [report["noise"], report["against_first"][other]]
        until = [f"{one['tokens_until_first_difference']:.1f}" for one in agree]
        apart = [f"{one['logprob_difference_mean']:.4f}" for one in agree]
        rows += [
            ["prefill of all prompts, s", *(f"{run['prefill_s']:.3f}" for run in runs)],
            ["decode, ms a step", *(f"{run['decode_ms_a_step']:.2f}" for run in runs)],
            [
                "tokens until the first difference / mean difference of logprobs",
                f"{until[0]} / {apart[0]} (itself)",
                f"{until[1]} / {apart[1]}",
            ],
        ]
        rows[-3:] = [[str(report["options"]["heads"]), *row] for row in rows[-3:]]
    return "\n".join(result_file.table(["heads", "", first, other], rows))


def attention_times(report: dict[str, Any]) -> str:
    """The time of the attention kernels of a whole run, ours and the other backend's."""
    theirs, ours = (
        sum(ms for name, ms in report["runs"][backend]["kernels_ms"] if any(part in name for part in ATTENTION))
        for backend in report["options"]["backends"]
    )
    return f"{ours:.0f} ms of attention instead of {theirs:.0f}"


def step_change(report: dict[str, Any]) -> str:
    """How much longer or shorter a decode step is with ours."""
    theirs, ours = (report["runs"][backend]["decode_ms_a_step"] for backend in report["options"]["backends"])
    return f"{abs(ours / theirs - 1) * 100:.0f} % {'slower' if ours > theirs else 'faster'}"


def recall(report: dict[str, Any]) -> str:
    """How many questions were answered, in each of the runs."""
    return " or ".join(dict.fromkeys(f"{run['right']} of {run['asked']}" for run in report["runs"]))
