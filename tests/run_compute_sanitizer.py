"""Runs compute-sanitizer's four tools over one small case of every op. Needs a GPU and the CUDA toolkit.

python tests/run_compute_sanitizer.py

racecheck follows neither barriers between blocks of a cluster (mbarriers that other blocks arrive at) nor that a block
waits at one before it ends, and takes what they order for hazards. So it sees the kernels without clusters; the other
three tools see them as they are. Of reads in write_row it still says that they race with sums that are put there later,
or before: docs/kernels.md says what orders them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def main() -> int:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        sys.exit("compute-sanitizer is not installed; it comes with the CUDA toolkit.")
    findings = []
    for tool in TOOLS:
        # only our own kernels are of interest: initcheck would complain of torch's copies of memory with gaps
        done = subprocess.run(
            [
                sanitizer,
                "--tool",
                tool,
                "--error-exitcode",
                "1",
                "--kernel-name-exclude",
                "kernel_substring=at::",
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "tests/gpu/test_attention.py",
                "tests/gpu/test_index.py",
                "-k",
                "small_case",
            ],
            cwd=ROOT,
            env={**os.environ, "MLA_TEST_CUDA_KERNEL": "unclustered" if tool == "racecheck" else "auto"},
            capture_output=True,
            text=True,
        )
        print(f"{tool}: {'clean' if done.returncode == 0 else 'FOUND SOMETHING'}", flush=True)
        if done.returncode:
            findings.append(tool)
            print("\n".join((done.stdout + done.stderr).splitlines()[-60:]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
