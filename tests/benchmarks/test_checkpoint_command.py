"""`checkpoint` counts right answers, compares ways, and finds ways that differ by too much or fail."""

import json

import pytest
import torch

from commands import status_of
from mla_backend.engine import load_model
from serving_benchmarks.models import drafts
from serving_benchmarks.models.recall import CHECKPOINT
from serving_benchmarks.run import checkpoint


def answers(*rows: list[int], logprob: float = -1.0) -> checkpoint.Answers:
    return [{"tokens": row, "logprobs": [logprob] * len(row)} for row in rows]


def test_answers_are_compared_up_to_their_end_and_logprobs_up_to_the_first_difference():
    found = checkpoint.compare(answers([7, 9, 1, 2], [5, 5, 9, 5]), answers([7, 9, 3, 2], [5, 5, 9, 5]), 9)
    assert (found["answers_equal"], found["texts_equal"]) == (2, 1)
    assert found["tokens_until_first_difference"] == 3 and found["logprob_difference_max"] == 0
    other = checkpoint.compare(answers([7, 8, 9, 2]), answers([7, 9, 3, 2], logprob=-1.5), 9)
    assert other["answers_equal"] == 0 and other["logprob_difference_mean"] == 0.5


def test_a_way_is_good_within_its_bounds():
    good = {"error": None, "finite": True, "asked": 100, "right": 99, "answers_equal": 99}
    assert checkpoint.is_good(good) and checkpoint.is_good({**good, "right": None, "within_noise": True})
    for wrong in ({"right": 98}, {"answers_equal": 98}, {"finite": False}, {"error": "none came"}):
        assert not checkpoint.is_good({**good, **wrong})
    assert not checkpoint.is_good({**good, "right": None, "within_noise": False})


def test_random_prompts_find_a_backend_that_is_not_like_the_first_and_one_that_fails(small_model, fake_vllm):
    output = fake_vllm / "out.json"
    asked = ("--model", small_model, "--ways", "vllm", "--num-prompts", 3, "--input-len", 20, "--output-len", 4)
    assert status_of("checkpoint", *asked, "--backend", "ONE,TWO:bfloat16,NOISY,REFUSED", "--output", output) == 1
    report = json.loads(output.read_text())
    assert report["environment"]["benchmark"] == "checkpoint"
    one, two, noisy, refused = report["results"]
    assert [one["cache"] for one in report["results"]] == ["fp8", "bf16", "fp8", "fp8"]
    assert one["differs_from_itself"]["texts_equal"] == two["texts_equal"] == noisy["texts_equal"] == 3
    assert two["within_noise"] and not noisy["within_noise"]
    assert noisy["logprob_difference_mean"] == pytest.approx(0.8) and refused["error"] == "ValueError: no such backend"


def test_the_embedded_engine_answers_the_recall_checkpoints_questions(tmp_path):
    output = tmp_path / "out.json"
    asked = ("--ways", "embedded,embedded-bf16", "--num-prompts", 8, "--input-len", 300, "--output-len", 6)
    assert status_of("checkpoint", *asked, "--output", output) == 0
    results = json.loads(output.read_text())["results"]
    found = [(r["way"], r["engine"], r["cache"], r["asked"], r["right"]) for r in results]
    assert found == [("embedded", "embedded", "fp8", 8, 8), ("embedded-bf16", "embedded", "bf16", 8, 8)]


def test_an_mtp_layer_leaves_the_checkpoint_as_it_is(tmp_path, monkeypatch):
    from safetensors import safe_open

    monkeypatch.setattr(drafts, "CONTEXTS", 1)  # fitted badly, but soon
    drafts.add_mtp_layer(CHECKPOINT, tmp_path)
    layers = json.loads((CHECKPOINT / "config.json").read_text())["num_hidden_layers"]
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    before, after = (load_model(one).state_dict() for one in (CHECKPOINT, tmp_path))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.get_tensor(f"model.layers.{layers}.eh_proj.weight").shape == (256, 512)
