"""The engine on a GPU: graphs compute what passes without them do, and bits don't depend on the schedule there."""

from pathlib import Path

import pytest
import torch

import engine_models
from engine_models import BLOCK_SIZE, TOPK, prompt_of
from gpu_checks import nothing_waits
from mla_backend.engine import Engine, Result, SamplingParams
from mla_backend.engine.rows import Rows

pytestmark = pytest.mark.gpu

LENGTHS = (1, 20, TOPK - 1, TOPK, TOPK + 1, 2 * TOPK + 1, 100)
PROMPTS = [prompt_of(length, seed=length) for length in LENGTHS]
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=2, temperature=0.7, top_p=0.95, seed=3)


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa_shared"])
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return engine_models.save(engine_models.theirs(request.param), tmp_path_factory.mktemp(request.param))


def engine(folder: Path, **options) -> Engine:
    return Engine(
        folder, **{"device": "cuda", "block_size": BLOCK_SIZE, "memory": 2**24, "max_model_len": 256, **options}
    )


def needs_grouped_products() -> None:
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("torch's grouped products ask the device for counts on GPUs other than Hopper and Blackwell")


def decoding(engine: Engine, prompts: list[list[int]]) -> list:
    """The work of a step in which all of them decode."""
    for prompt in prompts:
        engine.add(prompt, SamplingParams(max_tokens=100, ignore_eos=True))
    while engine.scheduler.waiting or any(sample.left > 1 for sample in engine.scheduler.running):
        engine.step()
    return [(sample.sequence, count) for sample, count in engine.scheduler.schedule()]


def bits(results: list[Result]) -> list:
    return [[(c.tokens, c.logprobs) for c in result.completions] for result in results]


def test_a_decode_pass_waits_for_nothing(folder):
    needs_grouped_products()
    own = engine(folder, cuda_graphs=False)
    work = decoding(own, PROMPTS)
    own.runner.run(work)  # libraries set themselves up
    with nothing_waits():
        own.runner.run(work)


@pytest.mark.parametrize("kv_cache", ["fp8", "bf16"])
def test_graphs_give_the_logits_of_passes_without_them(folder, kv_cache):
    needs_grouped_products()
    own = engine(folder, kv_cache=kv_cache, cuda_graphs=True)
    for number in (1, 3, len(PROMPTS)):  # sizes with and without rows that are padding
        work = decoding(own, PROMPTS[:number])
        captured = own.runner.run(work)
        replayed = own.runner.run(work)
        graphs, own.runner.graphs = own.runner.graphs, None
        plain = own.runner.run(work)
        own.runner.graphs = graphs
        assert torch.equal(captured, replayed)
        # another number of rows may be summed up in another order
        torch.testing.assert_close(captured, plain, atol=0.1, rtol=0)
        assert captured.std() > 0.5
        for id in list(own._requests):
            own.abort(id)
    assert own.runner.graphs._captured


def test_graphs_follow_contexts_that_grow_past_the_top_k(folder):
    needs_grouped_products()
    own = engine(folder, cuda_graphs=True)
    work = decoding(own, PROMPTS)
    lengths = {own.runner.graphs._context(Rows.of(work).contexts[i]) for i in range(len(work))}
    assert len(lengths) > 1
    params = SamplingParams(max_tokens=3 * TOPK, ignore_eos=True)
    with_graphs = engine(folder, cuda_graphs=True, batch_invariant=True).generate(PROMPTS, params)
    without = engine(folder, cuda_graphs=False, batch_invariant=True).generate(PROMPTS, params)
    assert [r.tokens for r in with_graphs] == [r.tokens for r in without]


@pytest.mark.parametrize("graphs", [False, True])
def test_bits_are_the_same_however_requests_are_scheduled(folder, graphs):
    options = dict(batch_invariant=True, cuda_graphs=graphs)
    want = [bits(engine(folder, **options).generate([prompt], PARAMS))[0] for prompt in PROMPTS]
    assert bits(engine(folder, **options).generate(PROMPTS, PARAMS)) == want
    for chunk in (1, 7, 64):
        assert bits(engine(folder, chunk=chunk, **options).generate(PROMPTS, PARAMS)) == want
    warm = engine(folder, **options)
    assert bits(warm.generate(PROMPTS, PARAMS)) == bits(warm.generate(PROMPTS, PARAMS)) == want
    blocks = -(-256 // BLOCK_SIZE)
    block_bytes = warm.storage.layout.block_bytes
    short = engine(folder, **options, **{"memory": blocks * block_bytes})
    assert bits(short.generate(PROMPTS, PARAMS)) == want and short.status.preemptions > 0


def test_cpu_and_gpu_agree_where_the_choice_is_clear(folder):
    greedy = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    ours = engine(folder, dtype=torch.float32, kv_cache="bf16", cuda_graphs=False).generate(PROMPTS, greedy)
    theirs = engine(folder, dtype=torch.float32, kv_cache="bf16", device="cpu").generate(PROMPTS, greedy)
    compared = 0
    for a, b in zip(ours, theirs, strict=True):
        for token, other, logprobs in zip(a.tokens, b.tokens, b.completions[0].logprobs, strict=True):
            best, second = (logprob for _, logprob in logprobs.top)
            if best - second < 0.1:
                break  # what follows may differ
            assert token == other
            compared += 1
    assert compared >= len(PROMPTS)


def test_samples_are_those_of_the_cpu_for_the_same_logits():
    from mla_backend.engine.sampler import Draw, pick

    logits = torch.randn(64, 1000)
    draws = [
        Draw(SamplingParams(temperature=t, top_p=p, repetition_penalty=r), seed, seed, seen=[1, 2])
        for seed, (t, p, r) in enumerate([(0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.8, 0.9, 1.2), (1.0, 0.5, 1.0)] * 16)
    ]
    assert pick(logits, draws).read()[0] == pick(logits.cuda(), draws).read()[0]
