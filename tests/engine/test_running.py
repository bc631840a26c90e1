"""A request gets the same tokens, whatever it shares steps, chunks and the cache with, and also in passes run ahead."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import engine_models
from engine_models import BLOCK_SIZE, TOPK, prompt_of
from mla_backend.engine import Collector, Engine, Result, SamplingParams
from mla_backend.engine.runner import INVARIANT_ROWS

LENGTHS = (1, TOPK, TOPK + 1, 100, 3 * BLOCK_SIZE)
PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2, temperature=0.8, top_p=0.9, seed=5)
FORKED = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.9, seed=7, n=3)
PENALISED = SamplingParams(max_tokens=9, ignore_eos=True, repetition_penalty=1.3)
UNEQUAL = [SamplingParams(max_tokens=3 + 4 * i, ignore_eos=True) for i in range(len(PROMPTS))]
LONGEST = 128


def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory, **more) -> Path:
    torch.manual_seed(0)
    model = engine_models.theirs(name, num_hidden_layers=3, **more)
    return engine_models.save(model, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("deepseek_v32", tmp_path_factory)


@pytest.fixture(scope="module")
def glm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("glm_moe_dsa_shared", tmp_path_factory, indexer_types=["full", "shared", "full"])


@pytest.fixture
def engine(device):
    """Makes an engine of a folder and options; `ahead` as on a GPU, unless said otherwise."""

    def new(folder: Path, ahead: bool | None = None, **options) -> Engine:
        given = dict(device=device, block_size=BLOCK_SIZE, max_model_len=LONGEST, most_running=16, batch_invariant=True)
        given["dtype"] = torch.float32  # in bf16 most differences would be rounded away
        made = Engine(folder, **{**given, **options})
        made.runs_ahead = made.runs_ahead if ahead is None else ahead
        return made

    return new


def bits(results: list[Result]) -> list:
    """All that was computed of each sample: tokens and, to the last bit, logprobs."""
    return [[(c.tokens, c.logprobs, c.finish_reason) for c in result.completions] for result in results]


def alone(engine, folder: Path, params: SamplingParams) -> list[Result]:
    """Each in an engine that has seen nothing else."""
    return [engine(folder).generate([prompt], params)[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    "family, params",
    [("folder", GREEDY), ("folder", SAMPLED), ("glm_folder", SAMPLED)],
    ids=["greedy", "sampled", "glm"],
)
def test_bits_are_the_same_alone_batched_and_in_chunks(engine, family, params, request):
    folder = request.getfixturevalue(family)
    want = bits(alone(engine, folder, params))
    assert bits(engine(folder).generate(PROMPTS, params)) == want
    assert bits(engine(folder).generate(PROMPTS[::-1], params))[::-1] == want
    for chunk in (1, 7, 64):
        assert bits(engine(folder, chunk=chunk).generate(PROMPTS, params)) == want, f"chunks of {chunk}"


@pytest.mark.parametrize("kv_cache, dtype", [("bf16", torch.float32), ("fp8", torch.bfloat16)])
def test_bits_are_the_same_in_every_format(engine, folder, kv_cache, dtype):
    options = dict(kv_cache=kv_cache, dtype=dtype)
    want = bits(engine(folder, **options).generate(PROMPTS, GREEDY))
    assert bits(engine(folder, chunk=7, tokens_a_step=29, **options).generate(PROMPTS[::-1], GREEDY))[::-1] == want


@pytest.mark.parametrize("ahead", [False, True])
def test_bits_are_the_same_for_requests_that_are_preempted(engine, folder, ahead):
    want = bits(engine(folder).generate(PROMPTS, GREEDY))
    block_bytes = engine(folder).storage.layout.block_bytes
    short = engine(folder, ahead, memory=LONGEST // BLOCK_SIZE * block_bytes)
    # prompts of a block each, which all fit at first and outgrow the cache together
    grow = [prompt_of(BLOCK_SIZE - 1, seed=seed) for seed in range(6)]
    longer = SamplingParams(max_tokens=2 * BLOCK_SIZE, ignore_eos=True, logprobs=2)
    assert bits(short.generate(grow, longer)) == bits(engine(folder).generate(grow, longer))
    assert short.status.preemptions > 1
    assert bits(short.generate(PROMPTS, GREEDY)) == want


@pytest.mark.parametrize("options", [{}, {"most_running": 3}, {"chunk": 5}], ids=["all", "few at a time", "chunks"])
@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, FORKED, PENALISED, UNEQUAL], ids=["greedy", "sampled", "forked", "penalised", "unequal"]
)
def test_bits_of_passes_that_are_launched_ahead_are_those_of_a_step_at_a_time(engine, folder, params, options):
    want = bits(engine(folder, False, **options).generate(PROMPTS, params))
    assert bits(engine(folder, True, **options).generate(PROMPTS, params)) == want


def test_stops_that_nobody_foresaw_end_samples(engine, folder):
    ends = [result.tokens[4] for result in engine(folder, False).generate(PROMPTS, GREEDY)]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1, stop_tokens=(end,)) for end in ends]
    want = engine(folder, False).generate(PROMPTS, params)
    assert {result.completions[0].finish_reason for result in want} == {"stop"}
    ahead = engine(folder, True)
    for _ in range(2):  # what was computed ahead and dropped is in no prefix that others find
        assert bits(ahead.generate(PROMPTS, params)) == bits(want)
    assert ahead.status.cache.sequences == 0 and ahead.status.cache.free == ahead.status.cache.blocks


def test_requests_that_come_and_go_between_steps_disturb_nobody(engine, folder):
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
    want = bits(engine(folder, False).generate(PROMPTS, params))
    ahead, collector, results = engine(folder, True), Collector(), {}
    given_up = [ahead.add(prompt_of(20, seed=77 + i), params) for i in range(2)]
    waiting = list(enumerate(PROMPTS))
    while ahead.has_work or waiting:
        if waiting:
            number, prompt = waiting.pop(0)
            ahead.add(prompt, params, id=f"kept {number}")
        for update in ahead.step():
            if result := collector.add(update):
                results[update.id] = result
        if given_up and len(waiting) < 3:
            ahead.abort(given_up.pop())
    assert bits([results[f"kept {number}"] for number in range(len(PROMPTS))]) == want
    assert ahead.status.cache.free == ahead.status.cache.blocks


def test_bits_are_the_same_from_a_cached_prefix(engine, folder):
    want = bits(engine(folder).generate(PROMPTS, GREEDY))
    warm = engine(folder)
    assert bits(warm.generate(PROMPTS, GREEDY)) == want
    again = warm.generate(PROMPTS, GREEDY)
    assert bits(again) == want
    assert [result.cached_tokens for result in again] == [(n - 1) // BLOCK_SIZE * BLOCK_SIZE for n in LENGTHS]
    # a prefix that another prompt has left there
    other = PROMPTS[3][:60] + prompt_of(30, seed=99)
    result = warm.generate([other], GREEDY)
    assert result[0].cached_tokens == 60 // BLOCK_SIZE * BLOCK_SIZE
    assert bits(result) == bits(engine(folder).generate([other], GREEDY))


def test_bits_are_the_same_from_host_memory(engine, folder):
    block_bytes = engine(folder).storage.layout.block_bytes
    small = engine(folder, memory=9 * block_bytes, host_memory=100 * block_bytes)
    want = bits(engine(folder).generate(PROMPTS, GREEDY))
    assert bits(small.generate(PROMPTS, GREEDY)) == want
    assert bits(small.generate(PROMPTS, GREEDY)) == want
    assert small.status.cache.host_hit_tokens > 0


def test_bits_of_a_forked_sample_are_those_of_a_request_of_its_own(engine, folder):
    params = dict(max_tokens=8, ignore_eos=True, logprobs=2, temperature=0.9)
    forked = engine(folder).generate(PROMPTS[2:4], SamplingParams(**params, seed=7, n=3))
    for prompt, result, got in zip(PROMPTS[2:4], forked, bits(forked), strict=True):
        assert len({tuple(completion.tokens) for completion in result.completions}) == 3  # they do differ
        for i, own in enumerate(got):
            assert bits(engine(folder).generate([prompt], SamplingParams(**params, seed=7 + i)))[0][0] == own


def test_forked_samples_survive_preemption(engine, folder):
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1, temperature=0.9, seed=7, n=6)
    prompts = [prompt_of(BLOCK_SIZE + 3, seed=seed) for seed in range(2)]
    want = bits(engine(folder).generate(prompts, params))
    short = engine(folder, memory=LONGEST // BLOCK_SIZE * engine(folder).storage.layout.block_bytes)
    assert bits(short.generate(prompts, params)) == want
    assert short.status.preemptions > 0 and short.status.cache.free == short.status.cache.blocks


def test_without_batch_invariance_tokens_are_the_same_where_the_choice_is_clear(engine, folder):
    """Sums in another order differ in their last bits; a margin of 0.05 between the best two is more than that."""
    plain = engine(folder, batch_invariant=False, kv_cache="bf16").generate(PROMPTS, GREEDY)
    exact = engine(folder, kv_cache="bf16").generate(PROMPTS, GREEDY)
    compared = 0
    for ours, theirs in zip(plain, exact, strict=True):
        for token, other, logprobs in zip(ours.tokens, theirs.tokens, theirs.completions[0].logprobs, strict=True):
            best, second = (logprob for _, logprob in logprobs.top)
            if best - second < 0.05:
                break  # what follows may differ
            assert token == other
            compared += 1
    assert compared >= 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "out"), [(64, 96), (192, 128), (128, 320), (513, 259), (576, 128), (1024, 2816)])
def test_a_row_of_a_product_has_the_same_bits_at_every_place(size, out, dtype):
    """What the batch-invariant mode rests on, and torch doesn't promise: alone, of experts, and added to a residual."""
    weight, rows = torch.randn(out, size, dtype=dtype), torch.randn(INVARIANT_ROWS, size, dtype=dtype)
    residual = torch.randn(INVARIANT_ROWS, out, dtype=dtype)
    experts = torch.randn(3, out, size, dtype=dtype).transpose(1, 2)
    for product in (
        lambda i: torch.nn.functional.linear(rows.roll(i, 0), weight).roll(-i, 0),
        lambda i: (rows.roll(i, 0).expand(3, *rows.shape) @ experts).roll(-i, 1),
        lambda i: residual.roll(i, 0).addmm_(rows.roll(i, 0), weight.t()).roll(-i, 0),
    ):
        assert all(torch.equal(a, b) for a, b in pairwise(map(product, range(INVARIANT_ROWS))))
