"""On a GPU: vLLM with our backend versus vLLM with its own, and versus the embedded engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vllm_installed  # noqa: F401
from mla_backend.vllm_plugin import versions
from serving_benchmarks.models import models

BOTH = ("--backend", "FLASHMLA_SPARSE,SPARSE_MLA")
PADDING = ("upconvert", "pad")  # what names of kernels have in them that widen heads or unpack the cache
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMalloc")

pytestmark = pytest.mark.gpu
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Makes a model of real width without experts, whose last layer drafts."""
    made: dict[tuple[int, str], Path] = {}

    def of(heads: int, like: str = "deepseek-v3.2") -> Path:
        if (heads, like) not in made:
            small = dict(vocab_size=32768, intermediate_size=4096, first_k_dense_replace=5, num_nextn_predict_layers=1)
            folder = made[heads, like] = tmp_path_factory.mktemp("model") / "made"
            models.write(folder, models.config(like, heads=heads, **small))
        return made[heads, like]

    return of


def results_of(tmp_path: Path, *words: object) -> list[dict]:
    """The entries of a command's result file; it must have found nothing wrong."""
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "serving_benchmarks", *map(str, words), "--output", output]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    return json.loads(output.read_text())["results"]


WAYS = [(heads, "--ways vllm --output-len 192") for heads in (16, 64, 128)]
WAYS += [(16, f"--ways {way} --output-len 64") for way in ("eager", "vllm-bf16")]
LONG = ("--num-prompts 2 --input-len 65536 --output-len 64", "--num-prompts 4 --input-len 1000 --output-len 4000")
WAYS += [(64, f"--ways vllm {lengths}") for lengths in LONG]


@pytest.mark.parametrize(("heads", "how"), WAYS)
def test_tokens_are_those_of_flashmla_within_its_own_noise(tmp_path, model, heads, how):
    """In every way to run, also over long contexts and thousands of steps, and there is no NaN."""
    results_of(tmp_path, "checkpoint", "--model", model(heads), *BOTH, *how.split())


@pytest.mark.parametrize("heads", [16, 128])
def test_tokens_of_a_dense_model_are_those_of_flashmla(tmp_path, model, heads):
    """Over a BF16 cache. Over an FP8 cache FlashMLA rounds queries too."""
    backends = ("--backend", "FLASHMLA,DENSE_MLA")
    folder = model(heads, "deepseek-v3")
    results_of(tmp_path, "checkpoint", "--model", folder, "--ways", "vllm-bf16", *backends, "--output-len", 192)
    results_of(tmp_path, "checkpoint", "--model", folder, "--ways", "vllm,mtp-1", "--backend", "DENSE_MLA")


@pytest.mark.parametrize("drafts", [0, 1])
def test_a_decode_step_pads_nothing_allocates_nothing_and_waits_no_more_often_than_vllms_own(tmp_path, model, drafts):
    how = ["--kv-cache-dtype", "fp8", "--no-compile", "--profile", "--loads", "4096+64", "--num-prompts", 16]
    how += ["--drafts", drafts] if drafts else []
    theirs, ours = results_of(tmp_path, "throughput", "--model", model(16), *BOTH, *how)
    names = [row["name"].lower() for row in ours["profile"]["kernels"]]
    assert any("mla" in name for name in names) and not [n for n in names if any(word in n for word in PADDING)]
    assert not [name for name in names if "flash_fwd" in name or "sparse_fp8" in name], "drafts are made by it, too"
    calls, their_calls = ours["profile"]["calls"], theirs["profile"]["calls"]
    assert calls and "cudaMalloc" not in calls
    assert sum(calls.get(name, 0) for name in WAITS) <= sum(their_calls.get(name, 0) for name in WAITS)


ASKED = ("--engine-args", '{"additional_config": {"mla_selection": true}}')


@pytest.mark.parametrize("how", [ASKED, *((*ASKED, "--drafts", n) for n in (1, 2))])  # of two DeepGEMM has no kernel
def test_our_selection_takes_the_place_of_vllms(tmp_path, model, how):
    load = ["--kv-cache-dtype", "fp8", "--no-compile", "--profile", "--loads", "4096+64", "--num-prompts", 16]
    (found,) = results_of(tmp_path, "throughput", "--model", model(16), "--backend", "SPARSE_MLA", *load, *how)
    names = " ".join(row["name"] for row in found["profile"]["kernels"])
    assert ("finish_kernel" in names or "select_kernel" in names) and "mqa_logits" not in names


def test_drafts_change_no_token(tmp_path, model):
    ways = ("--ways", "vllm,mtp-1,mtp-2,mtp-3", "--output-len", 64)
    found = results_of(tmp_path, "checkpoint", "--model", model(16), *ways)
    assert all(entry["drafted"] for entry in found if entry["drafts"])


@needs_two
def test_two_gpus_give_the_tokens_of_one(tmp_path, model):
    ways = "vllm,tp-2" + (",dcp-2" if versions.since_0_32() else "")
    results_of(tmp_path, "checkpoint", "--model", model(16), "--ways", ways, "--output-len", 64)


def test_the_recall_checkpoint_gives_the_embedded_engines_answers(tmp_path):
    found = results_of(tmp_path, "checkpoint", "--ways", "embedded,vllm,eager,mtp-1,mtp-3,embedded-bf16,vllm-bf16")
    assert all(entry["answers_equal"] == entry["asked"] for entry in found if "than" in entry)
    assert all(0 < entry["accepted"] < entry["drafted"] for entry in found if entry["drafts"])


@needs_two
def test_the_recall_checkpoint_gives_them_on_two_gpus(tmp_path):
    ways = "embedded,tp-2,tp-2-mtp-1" + (",dcp-2,dcp-2-mtp-1" if versions.since_0_32() else "")
    results_of(tmp_path, "checkpoint", "--ways", ways)
