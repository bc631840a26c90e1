"""The tiny checkpoint answers from its context, and what it answers depends on which tokens are attended to."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
import transformers

import engine_models
from commands import in_python
from examples.recall import files
from examples.recall.accuracy import WAYS, answers, is_right
from examples.recall.dialogues import IGNORED, dialogue
from mla_backend.engine import ExactAttention, Model, load_model
from serving_benchmarks.models import recall as task
from serving_benchmarks.models.recall import CHECKPOINT, held_out

ROOT = Path(__file__).parent.parent.parent
LENGTH = 4 * files.CONFIG["index_topk"]
QUESTIONS = 200
NEW_TOKENS = 33  # of the prefill, and of 32 decode steps
EXACT = 1e-3  # of logits that spread by some units


@pytest.fixture(scope="module")
def exact() -> Model:
    return load_model(CHECKPOINT, dtype=torch.float32, sparse=ExactAttention())


@pytest.fixture(scope="module")
def asked() -> list[task.Prompt]:
    return held_out(LENGTH, QUESTIONS, per_context=40)


def share(model: Model, asked: list[task.Prompt], way: str) -> float:
    generated = answers(model, asked, WAYS[way])
    return sum(is_right(*pair) for pair in zip(asked, generated, strict=True)) / len(asked)


@pytest.mark.parametrize("way", ["BF16 cache", "FP8 cache", "FP4 rows"])
def test_answers_are_right(way, asked):
    assert {prompt.kind for prompt in asked} == {kind.name for kind in task.KINDS}
    assert share(load_model(CHECKPOINT), asked, way) >= 0.99


def test_answers_need_the_right_tokens_and_come_from_longer_contexts_too(asked):
    assert share(load_model(CHECKPOINT), asked, "shuffled") < 0.2, "random tokens were attended to"
    assert share(load_model(CHECKPOINT), held_out(2 * LENGTH, 40, per_context=40), "FP8 cache") >= 0.95


def test_logits_and_tokens_are_those_of_transformers(exact):
    theirs = transformers.DeepseekV32ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    for prompt in held_out(LENGTH, 2, per_context=1):
        tokens = prompt.context_tokens + prompt.question_tokens
        wanted, logits = engine_models.their_generation(theirs.eval(), tokens, NEW_TOKENS)
        engine = engine_models.Engine(exact, "fp32", "fp32", blocks=40)
        ours = engine.generate([tokens], NEW_TOKENS)[0]
        assert ours.generated == wanted
        assert ours.generated[: len(prompt.answer_tokens)] == prompt.answer_tokens
        torch.testing.assert_close(ours.logits, logits, atol=EXACT, rtol=0)


def test_the_tokenizer_writes_chats_as_the_task_does():
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    for prompt in held_out(LENGTH, 40, per_context=10):
        chat = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ids == prompt.context_tokens + prompt.question_tokens
        assert tokenizer(prompt.text).input_ids == [task.IDS[task.BOS], *ids[2:-2]]
        assert tokenizer.decode(prompt.answer_tokens, skip_special_tokens=True) == prompt.answer
        assert tokenizer.decode(ids[2:-2]) == prompt.text
    assert tokenizer.decode(tokenizer("Zorg is 9 m tall.", add_special_tokens=False).input_ids) == "Zorg is 9 m tall."


def test_what_is_asked_was_held_out_of_training():
    chance = random.Random(0)
    trained: set[tuple[str, str]] = set()
    for _ in range(300):
        ids, labels = dialogue(chance, 512)
        assert len(ids) == len(labels) == 512 and any(label != IGNORED for label in labels)
        text = " ".join(task.VOCABULARY[i] for i in ids).replace(" ##", "")
        trained.update(re.findall(r"(\w+) (?:lives in|likes) (\w+) \.", text))
        trained.update(re.findall(r"code of (\w+) is (\d+) \.", text))
    assert len(trained) > 5000 and not any(task.is_held_out(*pair) for pair in trained)
    for prompt in held_out(LENGTH, 40):
        words = prompt.question.split()
        given, asked_for = words[5 if prompt.kind == "code" else 2 if prompt.kind == "city" else 3], prompt.answer
        assert task.is_held_out(*((asked_for, given) if prompt.kind == "person" else (given, asked_for)))


def test_the_training_program_learns_and_writes_a_checkpoint(tmp_path):
    options = "--device cpu --minutes 60 --steps 8 --batch-tokens 640 --longest 64 --warmup 4 --report 0"
    quick = "--test-every 0 --tests 4"
    done = in_python("-m", "examples.recall.train", "--output", tmp_path, *options.split(), *quick.split())
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 8 and log[-1]["loss"] < log[0]["loss"] - 0.5
    assert len(answers(load_model(tmp_path), held_out(256, 2, per_context=2), WAYS["FP8 cache"])) == 2
