"""What is built and installed. Building the library where something is missing says what."""

import json
import re
from pathlib import Path

import pytest
from setuptools import find_packages

from commands import in_python

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the source tree")


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"MLA_BACKEND_CUDA": "1", "CUDA_HOME": "/does/not/exist"}, "MLA_BACKEND_CUDA=1, but there is no nvcc"),
        ({"MLA_BACKEND_CUDA": "yes"}, "MLA_BACKEND_CUDA is 0, 1 or unset, not 'yes'"),
        ({"CXX": "no-such-compiler", "MLA_BACKEND_CUDA": "0"}, "needs a C++17 compiler; there is no no-such-compiler"),
    ],
)
def test_a_build_that_cannot_work_says_why(environment, text):
    done = in_python("setup.py", "build_ext", **environment)
    assert done.returncode != 0
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wheel_has_the_product_alone():
    include = json.loads(re.search(r"^include = (\[.*\])", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1])
    assert {name.partition(".")[0] for name in find_packages(ROOT, include=include)} == {"kv_cache", "mla_backend"}


def test_no_hint_tells_pip_to_take_this_package_from_an_index():
    for path in (path for folder in ("kv_cache", "mla_backend") for path in (ROOT / folder).rglob("*.py")):
        assert not re.search(r"pip install [^\n]*mla-backend", path.read_text()), path
