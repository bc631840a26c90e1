"""Builds the CPU kernels with AddressSanitizer and UBSan and runs the CPU tests on that build.

python tests/support/run_sanitized.py [pytest arguments]
"""

import os
import subprocess
import sys
from pathlib import Path

from special_builds import build_library

ROOT = Path(__file__).parents[2]
# torch.compile and the doctor start compilers and interpreters, which would inherit the preloaded sanitizer
SKIPPED = ("test_torch_integration.py", "test_doctor.py", "test_install.py", "test_training_examples.py")


def runtime(name: str) -> str:
    """Where the compiler keeps a sanitizer's runtime, which has to be in the process before anything else."""
    command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(path):
        sys.exit(f"The compiler has no {name}; install GCC's sanitizer libraries.")
    return path


def environment() -> dict[str, str]:
    """Builds the library, and says which environment variables make a process use it."""
    return {
        **os.environ,
        "MLA_BACKEND_LIBRARY": str(build_library("sanitize", MLA_BACKEND_SANITIZE="1")),
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libubsan.so')}",
        # Python keeps memory until it ends; new and delete of torch's libraries are not always matched
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0:detect_odr_violation=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }


def main(arguments: list[str]) -> int:
    targets = [a for a in arguments if not a.startswith("-") and (ROOT / a.split("::")[0]).exists()] or ["tests/ops"]
    options = [a for a in arguments if a not in targets]
    ignored = [f"--ignore=tests/ops/{name}" for name in SKIPPED]
    # pytest must not hold back what the sanitizers print: it is gone when they stop the process
    command = [sys.executable, "-m", "pytest", "--capture=sys", *targets, *ignored, *options]
    return subprocess.run(command, cwd=ROOT, env=environment()).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
