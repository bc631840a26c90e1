"""Runs compute-sanitizer's four tools over small cases of every op. Needs a GPU and the CUDA toolkit.

python tests/support/run_compute_sanitizer.py [--racecheck-library LIBRARY] [TOOL ...]

racecheck sees a library of its own, as it looks at the thread alone that arrives at an mbarrier, not at what __syncwarp
or a named barrier had put before that: there every lane arrives for itself, and two warpgroups meet at an mbarrier. It
is built here, or elsewhere with MLA_BACKEND_RACECHECK=1 and named with --racecheck-library. Nor does racecheck follow
barriers between CTAs of a cluster (mbarriers that other CTAs arrive at) or that a CTA waits at one before it
ends, so it sees the kernels without clusters. The other three tools see the kernels as they are.

initcheck sees no masks: their lists end before their memory does, and attention loads a token's first slots before it
knows the list's length. What lies past the end is not used.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mla_backend import library  # noqa: E402
from special_builds import build_library  # noqa: E402

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def build_racecheck_library() -> Path:
    """For this machine's GPU alone."""
    print("building a library for racecheck", flush=True)
    major, minor = torch.cuda.get_device_capability()
    flags = {"CUDA": "1", "CUDA_ARCHS": "90a" if major == 9 else f"{major}{minor}", "RACECHECK": "1", "SANITIZE": "0"}
    return build_library("racecheck", **{f"MLA_BACKEND_{name}": flag for name, flag in flags.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)} (default: all)")
    told = "built with MLA_BACKEND_RACECHECK=1 (default: built now)"
    parser.add_argument("--racecheck-library", type=lambda path: Path(path).resolve(), metavar="LIBRARY", help=told)
    arguments = parser.parse_args()
    if unknown := [tool for tool in arguments.tools if tool not in TOOLS]:
        parser.error(f"no such tool: {unknown[0]}; there are {', '.join(TOOLS)}")
    if arguments.racecheck_library and not arguments.racecheck_library.is_file():
        parser.error(f"--racecheck-library: {arguments.racecheck_library} does not exist")
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        sys.exit("compute-sanitizer is not installed; it comes with the CUDA toolkit.")
    if not torch.cuda.is_available():
        sys.exit("compute-sanitizer needs a GPU, and torch sees none here.")
    if not library.about()["cuda_archs"]:
        sys.exit(f"{library.library_path()} was built without CUDA: there is nothing for compute-sanitizer to see.")
    findings = []
    for tool in arguments.tools or TOOLS:
        environment = {**os.environ, "MLA_TEST_CUDA_KERNEL": "auto"}
        if tool == "racecheck":
            environment["MLA_BACKEND_LIBRARY"] = str(arguments.racecheck_library or build_racecheck_library())
            environment["MLA_TEST_CUDA_KERNEL"] = "unclustered"
        cases = "small_case and not of_a_mask" if tool == "initcheck" else "small_case"
        # only our own kernels are of interest: initcheck would complain of torch's copies of memory with gaps
        words = [sanitizer, "--tool", tool, "--error-exitcode", "1", "--kernel-name-exclude", "kernel_substring=at::"]
        words += [sys.executable, "-m", "pytest", "-q", "-k", cases]
        words += [f"tests/gpu/test_{name}.py" for name in ("attention", "backward", "flex", "index", "select")]
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        print(f"{tool}: {'clean' if done.returncode == 0 else 'FOUND SOMETHING'}", flush=True)
        if done.returncode:
            findings.append(tool)
            print("\n".join((done.stdout + done.stderr).splitlines()[-60:]))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
