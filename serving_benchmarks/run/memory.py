"""How much memory processes and GPUs hold."""

import contextlib
import os
import subprocess
from pathlib import Path

from serving_benchmarks.run import supervisor


def host_peak_bytes() -> int:
    """The most that this process and those below it have had resident, each at its own worst moment. What they share
    counts for each."""
    total = 0
    for pid in [os.getpid(), *supervisor.descendants(os.getpid())]:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


def device_used_bytes() -> int | None:
    """What is in use now of the GPU that holds the most, of those that may be used here; None without one. An engine
    takes its cache whole when it starts, so this says more about its settings than about the workload."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run([*command, *([f"--id={wanted}"] if wanted else [])], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    used = [int(line) for line in found.stdout.split() if line.isdigit()]
    return max(used) * 2**20 if found.returncode == 0 and used else None
