"""`LLM(...)` on a CPU against the embedded engine's model: the same tokens, however vLLM batches them."""

import json
import random

import pytest
import torch

import vllm_installed  # noqa: F401
from commands import in_python
from vllm_models import assert_follows, gauge, generate, greedy, logits_of, make_checkpoint, running, tokens


@pytest.fixture(scope="module")
def llm(checkpoint):
    """Prompts are cut into chunks of at most 64 tokens a step, and prefixes are kept."""
    with running(checkpoint) as llm:
        yield llm


def test_many_at_a_time_give_the_embedded_engines_tokens(llm, checkpoint, prompts):
    many = prompts * (32 // len(prompts))
    llm.reset_prefix_cache()
    assert_follows(checkpoint, many, tokens(generate(llm, many)))


def test_a_warm_prefix_cache_gives_them_too(llm, checkpoint, prompts):
    llm.reset_prefix_cache()
    cold, warm = generate(llm, prompts[-1:]), generate(llm, prompts[-1:])
    assert cold[0].num_cached_tokens == 0 and warm[0].num_cached_tokens == 128, "two blocks of 64 of 150 tokens"
    for outputs in (cold, warm):
        assert_follows(checkpoint, prompts[-1:], tokens(outputs))


def test_aborted_requests_leave_the_others_right_and_no_block_behind(llm, checkpoint, prompts):
    chance, core = random.Random(0), llm.llm_engine
    for round in range(3):
        names = [core.add_request(f"{round}-{i}", {"prompt_token_ids": p}, greedy()) for i, p in enumerate(prompts)]
        aborted = chance.sample(range(len(names)), len(names) // 2)
        to_abort, finished = list(aborted), {}
        while core.has_unfinished_requests():
            if to_abort and chance.random() < 0.4:
                core.abort_request([names[to_abort.pop()]], internal=True)
            for output in core.step():
                if output.finished:
                    finished[int(output.request_id.split("-")[1])] = list(output.outputs[0].token_ids)
        assert not to_abort, "there was time to abort all that were to be"
        rest = [i for i in range(len(names)) if i not in aborted]
        assert_follows(checkpoint, [prompts[i] for i in rest], [finished[i] for i in rest])
    assert_follows(checkpoint, prompts[:1], tokens(generate(llm, prompts[:1])))
    assert gauge(llm, "vllm:num_requests_running") == gauge(llm, "vllm:num_requests_waiting") == 0
    assert gauge(llm, "vllm:kv_cache_usage_perc") == 0


def test_tensor_parallelism_gives_them_too(checkpoint, prompts, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by itself vLLM wants a NUMA node for each process
    with running(checkpoint, tensor_parallel_size=2) as llm:
        assert_follows(checkpoint, prompts, tokens(generate(llm, prompts)))


@pytest.mark.parametrize(
    ("given", "meant", "latent", "tolerance", "asked", "keys"),
    [
        ("fp8", "fp8_ds_mla", "fp8_ds_mla", 0.05, "auto", "fp8"),
        ("fp8", "fp8_ds_mla", "fp8_ds_mla", 0.05, "mxfp4", "mxfp4_68"),
        ("nvfp4_ds_mla", "nvfp4_ds_mla", "nvfp4_352", 0.2, "auto", "fp8"),
    ],
)
def test_whole_prompts_over_a_quantised_cache_give_the_embedded_engines_probabilities(
    tmp_path, prompts, given, meant, latent, tolerance, asked, keys
):
    """Without chunks and without a prefix cache."""
    folder = make_checkpoint("deepseek_v32_smooth", tmp_path)
    options = dict(kv_cache_dtype=given, enable_chunked_prefill=False, enable_prefix_caching=False)
    options |= dict(max_num_batched_tokens=256, attention_config={"indexer_kv_dtype": asked})
    with running(folder, **options) as llm:
        assert llm.llm_engine.vllm_config.cache_config.cache_dtype == meant
        outputs = generate(llm, prompts, logprobs=0)
    got = tokens(outputs)
    assert_follows(folder, prompts, got, latent, tolerance, keys)
    for output, row, logits in zip(outputs, got, logits_of(folder, prompts, got, latent, keys), strict=True):
        steps = zip(output.outputs[0].logprobs, row, strict=True)
        ours = torch.tensor([step[token].logprob for step, token in steps])
        exact = logits.log_softmax(dim=-1).gather(1, torch.tensor(row).unsqueeze(1)).squeeze(1)
        assert (ours - exact).abs().max() < tolerance


@pytest.mark.parametrize(
    ("cache_dtype", "masked", "tolerance"),
    [("auto", 90, 0.02), ("fp8", 0, 0.05), ("fp8", 90, 0.1)],  # dense attention reads rows before they are rounded
)
def test_prompts_that_begin_densely_give_them_too(checkpoint, prompts, monkeypatch, cache_dtype, masked, tolerance):
    """As on a GPU. Requests that decode and later parts of prompts are in the same steps."""
    monkeypatch.setenv("LONGEST_MASKED", str(masked))
    latent, step = ("fp8_ds_mla", 1024) if cache_dtype == "fp8" else ("bf16", 200)
    options = dict(kv_cache_dtype=cache_dtype, max_num_batched_tokens=step, enable_prefix_caching=False)
    with running(checkpoint, worker_extension_cls="dense_on_cpu.Extension", **options) as llm:
        got = tokens(generate(llm, prompts[:6]) + generate(llm, prompts[6:]))
        (counted,) = llm.collective_rpc("counted_tokens")
    assert counted["dense"] > 0 and counted["sparse"] > 0 and (counted["masked"] > 0) == (masked > 0)
    assert_follows(checkpoint, prompts, got, latent, tolerance)


def test_the_recall_checkpoint_gives_the_embedded_engines_answers_with_and_without_drafts(tmp_path):
    """In bf16, over an FP8 cache; every layer selects."""
    asked = "--ways embedded,vllm,mtp-2 --num-prompts 60 --input-len 500 --output-len 8".split()
    done = in_python("-m", "serving_benchmarks", "checkpoint", *asked, "--output", tmp_path / "found.json")
    assert done.returncode == 0, done.stdout + done.stderr
    embedded, plain, drafted = json.loads((tmp_path / "found.json").read_text())["results"]
    for way in (embedded, plain, drafted):
        assert way["right"] >= 0.99 * way["asked"] == 0.99 * 60
    assert plain["answers_equal"] == drafted["answers_equal"] == 60
    assert 0 < drafted["accepted"] < drafted["drafted"], "some drafts are right, some are not"
