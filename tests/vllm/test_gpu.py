"""On a GPU: our backend beside vLLM's own on layers of DeepSeek-V3.2's width. compare_backends.py does the work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_installed  # noqa: F401

SCRIPT = Path(__file__).parent / "compare_backends.py"
PADDING = ("upconvert", "pad")
"""What names of kernels have in them that widen heads or unpack the cache."""


def compared(tmp_path: Path, *options: str) -> dict:
    result = tmp_path / "result.json"
    subprocess.run([sys.executable, SCRIPT, *options, "--json", result], check=True)
    return json.loads(result.read_text())


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 128])
def test_tokens_are_those_of_flashmla_within_its_own_noise_and_as_fast(tmp_path, heads):
    found = compared(tmp_path, "--heads", str(heads), "--kv-cache-dtype", "fp8")
    noise, ours = found["noise"], found["against_first"]["SPARSE_MLA"]
    assert ours["finite"] and noise["finite"]
    assert ours["logprob_difference_mean"] <= 2 * noise["logprob_difference_mean"] + 1e-3
    assert ours["tokens_until_first_difference"] >= 0.5 * noise["tokens_until_first_difference"]
    theirs, mine = found["runs"]["FLASHMLA_SPARSE"], found["runs"]["SPARSE_MLA"]
    for phase in ("prefill_s", "decode_s"):
        assert mine[phase] <= 1.02 * theirs[phase], phase
    kernels = [name.lower() for name, _ in mine["kernels_ms"]]
    assert any("mla" in name for name in kernels)
    assert not [name for name in kernels if any(word in name for word in PADDING)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [("--eager",), ("--kv-cache-dtype", "auto"), ("--context", "65536", "--prompts", "2")]
)
def test_other_ways_to_run_give_the_same_tokens(tmp_path, options):
    found = compared(tmp_path, "--heads", "16", *options, "--repeats", "1")
    noise, ours = found["noise"], found["against_first"]["SPARSE_MLA"]
    assert ours["finite"]
    assert ours["logprob_difference_mean"] <= 2 * noise["logprob_difference_mean"] + 1e-3
    assert ours["tokens_until_first_difference"] >= 0.5 * noise["tokens_until_first_difference"]


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--eager",), ("--kv-cache-dtype", "auto")])
def test_the_tiny_checkpoint_answers(options):
    script = SCRIPT.with_name("recall_answers.py")
    assert subprocess.run([sys.executable, script, *options]).returncode == 0
