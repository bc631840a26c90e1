"""On a GPU: our backend beside vLLM's own and beside the embedded engine. Two programs of this folder do the work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_installed  # noqa: F401

FOLDER = Path(__file__).parents[2] / "serving_benchmarks" / "run"
PADDING = ("upconvert", "pad")
"""What names of kernels have in them that widen heads or unpack the cache."""
SLOWER = 1.02

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def results_of(program: str, tmp_path: Path, *options: str) -> list[dict]:
    """The entries of a program's result file; it must have found nothing wrong."""
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, FOLDER / program, *options, "--output", output], stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0, done.stdout
    return json.loads(output.read_text())["results"]


@pytest.mark.parametrize("heads", [16, 64, 128])
def test_tokens_are_those_of_flashmla_within_its_own_noise_and_as_fast(tmp_path, heads):
    theirs, ours = results_of("compare_backends.py", tmp_path, "--heads", str(heads), "--profile")
    assert ours["prefill_s"] <= SLOWER * theirs["prefill_s"]
    assert ours["decode_ms_a_step"]["median"] <= SLOWER * theirs["decode_ms_a_step"]["median"]
    kernels = [name.lower() for name, _, _ in ours["profile"]["kernels"]]
    assert any("mla" in name for name in kernels)
    assert not [name for name in kernels if any(word in name for word in PADDING)]
    calls, their_calls = ours["profile"]["waits"], theirs["profile"]["waits"]
    assert "cudaMalloc" not in calls, "a decode step allocates nothing"
    assert sum(calls.values()) <= sum(their_calls.values()), "and waits no more often than vLLM does by itself"


@pytest.mark.parametrize("options", [("--eager",), ("--kv-cache-dtype", "auto")])
def test_other_ways_to_run_give_the_same_tokens(tmp_path, options):
    results_of("compare_backends.py", tmp_path, "--heads", "16", "--workloads", "16x4096+64/1", *options)


def test_long_contexts_and_thousands_of_steps_give_the_same_tokens_and_no_nan(tmp_path):
    workloads = ("2x65536+64/1", "4x1000+4000/1")
    found = results_of("compare_backends.py", tmp_path, "--heads", "64", "--workloads", *workloads)
    assert [len(entry["tokens"][0]) for entry in found] == [64, 64, 4000, 4000]


def test_drafts_change_no_token_and_are_made_with_this_backend_too(tmp_path):
    candidates = ("--candidates", "SPARSE_MLA", "SPARSE_MLA+1", "SPARSE_MLA+3")
    found = results_of(
        "compare_backends.py", tmp_path, *candidates, "--heads", "16", "--workloads", "16x4096+64/1", "--profile"
    )
    assert all(entry["drafted"] for entry in found if entry["drafts"])
    for entry in found:
        assert not [name for name, _, _ in entry["profile"]["kernels"] if "flash_fwd" in name or "sparse_fp8" in name]


@needs_two
def test_two_gpus_give_the_tokens_of_one(tmp_path):
    candidates = ("--candidates", "SPARSE_MLA", "SPARSE_MLA@2")
    results_of("compare_backends.py", tmp_path, *candidates, "--heads", "16", "--workloads", "16x4096+64/1")


def test_the_tiny_checkpoint_gives_the_embedded_engines_answers(tmp_path):
    fp8 = ("embedded", "vllm", "eager", "mtp-1", "mtp-3")
    found = results_of("recall_answers.py", tmp_path, "--ways", *fp8, "embedded-bf16", "vllm-bf16")
    assert all(entry["answers_equal"] == entry["asked"] for entry in found if "than" in entry)
    assert all(0 < entry["accepted"] < entry["drafted"] for entry in found if entry["drafts"])


@needs_two
def test_the_tiny_checkpoint_gives_them_on_two_gpus(tmp_path):
    results_of("recall_answers.py", tmp_path, "--ways", "embedded", "tp-2", "tp-2-mtp-1")
