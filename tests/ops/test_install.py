"""Building the library where something is missing says what."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")


def build(**environment):
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"MLA_BACKEND_CUDA": "1", "CUDA_HOME": "/does/not/exist"}, "MLA_BACKEND_CUDA=1, but there is no nvcc"),
        ({"MLA_BACKEND_CUDA": "yes"}, "MLA_BACKEND_CUDA is 0, 1 or unset, not 'yes'"),
        ({"CXX": "no-such-compiler", "MLA_BACKEND_CUDA": "0"}, "needs a C++17 compiler; there is no no-such-compiler"),
    ],
)
def test_a_build_that_cannot_work_says_why(environment, text):
    done = build(**environment)
    assert done.returncode != 0
    assert text in done.stderr
    assert "Traceback" not in done.stderr
