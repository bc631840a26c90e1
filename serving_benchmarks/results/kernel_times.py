"""Where the time of a model's steps goes, kernel by kernel, as torch's profiler sees it."""

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

KERNELS_KEPT = 40  # in a result file, the longest ones; the rest is summed up in one line
ATTENTION = re.compile(
    r"mla::cuda::.*(attention_kernel|combine_split_tokens_kernel|combine_kernel)"  # ours on a GPU
    r"|mla_backend::(sparse_attention|combine_partials)"  # ours on a CPU
    r"|sparse_attn_fwd|flash_fwd|flash_bwd|fwd_mla_combine|FlashAttn|fmha|scaled_dot_product|mla_decode|paged_attention"
)
"""Names of kernels that attend, or combine splits. What prepares attention is not among them: planning,
indices, the indexer, cache writes, concatenation."""
GROUPS = {
    "attention": ATTENTION,
    "its plan and slots": re.compile(r"mla::cuda::.*(plan|convert|stage)_kernel|prepare_varlen|index_remap"),
    "rows on the host": re.compile(r"hisparse_(resolve|invalidate)"),  # which rows are missing
    "copies from the host": re.compile(r"hisparse_gather"),
    "indexer": re.compile(r"mqa_logits"),
    "experts": re.compile(r"moe"),  # before top-k: they have one, too
    "top-k": re.compile(r"top_?k", re.IGNORECASE),
    "matrix products": re.compile(r"nvjet|gemm|splitK|cutlass", re.IGNORECASE),
}
"""What kernels do, by their names: the first that matches. What matches none is the rest."""
REST = "the rest"


class KernelTimes:
    """A profiler of this process: of kernels on a GPU, in CUDA graphs too, or of operators of its thread on a CPU."""

    def __init__(self):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        activity = torch.profiler.ProfilerActivity
        self._profile = torch.profiler.profile(activities=[activity.CUDA if self.device == "cuda" else activity.CPU])
        self.runtime_calls: dict[str, int] = {}  # calls of the CUDA runtime by name, once it has been stopped

    def start(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()  # what was asked for before is not to be seen
        self._profile.start()

    def stop(self) -> list[tuple[str, int, float]]:
        """Kernels: name, calls, microseconds of its own."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        self._profile.stop()
        if self.device == "cuda":
            events, on_device = self._profile.events(), torch.autograd.DeviceType.CUDA
            host = (event.name for event in events if event.device_type != on_device)
            self.runtime_calls = Counter(name for name in host if name.startswith(("cuda", "cuLaunch")))
            device = (event for event in events if event.device_type == on_device)
            kernels = (event for event in device if not getattr(event, "is_user_annotation", False))
            return own_times((one.name, one.time_range.start, one.time_range.end) for one in kernels)
        events = [event for event in self._profile.key_averages() if event.self_cpu_time_total > 0]
        return [(event.key, event.count, float(event.self_cpu_time_total)) for event in events]


def own_times(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, int, float]]:
    """Name, calls and time of kernels, from when each began and ended. Of one that began before those before it had
    ended, only the time after them counts: launched early (programmatic dependent launch), it has waited for them."""
    found: dict[str, tuple[int, float]] = {}
    busy_until = float("-inf")
    for name, begin, end in sorted(spans, key=lambda span: span[1:]):
        calls, time = found.get(name, (0, 0.0))
        found[name] = calls + 1, time + max(0.0, end - max(begin, busy_until))
        busy_until = max(busy_until, end)
    return [(name, calls, time) for name, (calls, time) in found.items()]


def table(kernels: Iterable[tuple[str, int, float]]) -> dict[str, Any]:
    """What a result file says of kernels: totals, and by falling time the longest of them and those that attend."""
    rows = [
        {"name": name, "calls": calls, "total_us": time, "attention": bool(ATTENTION.search(name))}
        for name, calls, time in sorted(kernels, key=lambda kernel: -kernel[2])
    ]
    kept = [row for place, row in enumerate(rows) if place < KERNELS_KEPT or row["attention"]]
    rest = [row for row in rows if row not in kept]
    if rest:
        sums = {name: sum(row[name] for row in rest) for name in ("calls", "total_us")}
        kept.append({"name": "all others", **sums, "attention": False})
    attention = sum(row["total_us"] for row in rows if row["attention"])
    return {"total_us": sum(row["total_us"] for row in rows), "attention_us": attention, "kernels": kept}


def by_group(profile: dict[str, Any]) -> dict[str, float]:
    """Microseconds a step of each of GROUPS, and of the rest."""
    found = dict.fromkeys([*GROUPS, REST], 0.0)
    for row in profile["kernels"]:
        group = next((name for name, pattern in GROUPS.items() if pattern.search(row["name"])), REST)
        found[group] += row["total_us"] / profile["steps"]
    return found
