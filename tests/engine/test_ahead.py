"""Passes that are launched before the tokens that they begin with are read change nothing but the time."""

from pathlib import Path

import pytest
import torch

import engine_models
from engine_models import BLOCK_SIZE, TOPK, prompt_of
from mla_backend.engine import Collector, Engine, Result, SamplingParams

LENGTHS = (1, 7, TOPK, TOPK + 1, 3 * BLOCK_SIZE)
PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]
LONGEST = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = engine_models.theirs("deepseek_v32", num_hidden_layers=2)
    return engine_models.save(model, tmp_path_factory.mktemp("model"))


def new_engine(folder: Path, ahead: bool, **options) -> Engine:
    engine = Engine(
        folder,
        **{
            "device": "cpu",
            "dtype": torch.float32,
            "block_size": BLOCK_SIZE,
            "max_model_len": LONGEST,
            "most_running": 8,
            "batch_invariant": True,
            **options,
        },
    )
    engine.runs_ahead = ahead
    return engine


def bits(results: list[Result]) -> list:
    return [[(c.tokens, c.logprobs, c.finish_reason) for c in result.completions] for result in results]


def passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each pass, as they come."""
    found, run = [], engine.runner.run_rows

    def counted(rows):
        found.append(len(rows))
        return run(rows)

    monkeypatch.setattr(engine.runner, "run_rows", counted)
    return found


GREEDY = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(max_tokens=9, ignore_eos=True, logprobs=1, temperature=0.8, top_p=0.9, seed=5)
FORKED = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.9, seed=7, n=3)
PENALISED = SamplingParams(max_tokens=9, ignore_eos=True, repetition_penalty=1.3)
UNEQUAL = [SamplingParams(max_tokens=3 + 4 * i, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("options", [{}, {"most_running": 3}, {"chunk": 5}], ids=["all", "few at a time", "chunks"])
@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, FORKED, PENALISED, UNEQUAL], ids=["greedy", "sampled", "forked", "penalised", "unequal"]
)
def test_bits_are_those_of_a_step_at_a_time(folder, params, options):
    want = bits(new_engine(folder, False, **options).generate(PROMPTS, params))
    assert bits(new_engine(folder, True, **options).generate(PROMPTS, params)) == want


def test_no_pass_is_wasted_where_only_lengths_end_samples(folder, monkeypatch):
    plain, ahead = new_engine(folder, False), new_engine(folder, True)
    want, got = passes(plain, monkeypatch), passes(ahead, monkeypatch)
    plain.generate(PROMPTS, UNEQUAL)
    ahead.generate(PROMPTS, UNEQUAL)
    assert want == got


def test_the_next_pass_is_launched_before_a_token_is_read(folder, monkeypatch):
    engine = new_engine(folder, True)
    found = passes(engine, monkeypatch)
    engine.add(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True))
    counts = []
    while engine.has_work:
        engine.step()
        counts.append(len(found))
    assert counts == [2, 3, 4, 4]


def test_stops_that_nobody_foresaw_end_samples(folder):
    ends = [result.tokens[4] for result in new_engine(folder, False).generate(PROMPTS, GREEDY)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1, stop_tokens=(end,)) for end in ends]
    want = new_engine(folder, False).generate(PROMPTS, params)
    assert {result.completions[0].finish_reason for result in want} == {"stop"}
    engine = new_engine(folder, True)
    assert bits(engine.generate(PROMPTS, params)) == bits(want)
    # what was computed ahead and dropped is in no prefix that others find
    assert bits(engine.generate(PROMPTS, params)) == bits(want)
    assert engine.status.cache.sequences == 0 and engine.status.cache.free == engine.status.cache.blocks


def test_bits_are_the_same_where_samples_are_preempted(folder):
    block_bytes = new_engine(folder, False).storage.layout.block_bytes
    grow = [prompt_of(BLOCK_SIZE - 1, seed=seed) for seed in range(6)]
    longer = SamplingParams(max_tokens=2 * BLOCK_SIZE, ignore_eos=True, logprobs=2)
    want = bits(new_engine(folder, False).generate(grow, longer))
    short = new_engine(folder, True, memory=LONGEST // BLOCK_SIZE * block_bytes)
    assert bits(short.generate(grow, longer)) == want
    assert short.status.preemptions > 1


def test_requests_that_come_and_go_between_steps_disturb_nobody(folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
    want = bits(new_engine(folder, False).generate(PROMPTS, params))
    engine, collector, results = new_engine(folder, True), Collector(), {}
    given_up = [engine.add(prompt_of(20, seed=77 + i), params) for i in range(2)]
    waiting = list(enumerate(PROMPTS))
    while engine.has_work or waiting:
        if waiting:
            number, prompt = waiting.pop(0)
            engine.add(prompt, params, id=f"kept {number}")
        for update in engine.step():
            if result := collector.add(update):
                results[update.id] = result
        if given_up and len(waiting) < 3:
            engine.abort(given_up.pop())
    assert bits([results[f"kept {number}"] for number in range(len(PROMPTS))]) == want
    assert engine.status.cache.free == engine.status.cache.blocks
