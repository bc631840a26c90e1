"""Libraries that tests build for tools that look at them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_library(name: str, **environment: str) -> Path:
    """Builds the library as setup.py does with these variables, into build/NAME-package, and says where it is."""
    build = ROOT / "build" / f"{name}-package"
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(build)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **environment})
    return build / "mla_backend" / "libmla_backend.so"
