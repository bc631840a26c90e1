"""What the README shows of the cache manager is what runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent.parent / "README.md"


@pytest.mark.skipif(not README.is_file(), reason="needs the source tree")
def test_the_cache_managers_example_prints_what_it_says():
    code = re.search(r"```python\n(import kv_cache\n.+?)```", README.read_text(), re.DOTALL)[1]
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    said = re.search(r"# (first .+)", code)[1]
    assert printed.splitlines() == said.split(", then ")
