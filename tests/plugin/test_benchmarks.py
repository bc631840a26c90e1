"""Commands with the true vLLM, on a CPU: they measure our backend."""

import functools
import json
from types import SimpleNamespace

import pytest
import torch

import vllm_installed  # noqa: F401
from commands import in_python
from serving_benchmarks.models import models
from serving_benchmarks.models.recall import CHECKPOINT
from serving_benchmarks.results import kinds

SMALL_CACHE = ("--kv-cache-dtype", "fp8", "--kv-cache-memory-bytes", 1 << 27)
NARROW = dict(hidden_size=128, intermediate_size=192, moe_intermediate_size=64, q_lora_rank=96, qk_nope_head_dim=32)
NARROW |= dict(v_head_dim=48, index_topk=64, vocab_size=320, max_position_embeddings=512)


@pytest.mark.skipif(not CHECKPOINT.is_dir(), reason=f"there is no trained checkpoint in {CHECKPOINT}")
def test_throughput_of_our_backend_and_of_one_that_vllm_does_not_know(tmp_path):
    output = tmp_path / "out.json"
    loads = ["--loads", "200+8/1,200+8/3,40+4/1,40+4/3", "--num-prompts", 6, "--rounds", 2, "--interleave"]
    how = ["--backend", "NO_SUCH,SPARSE_MLA", "--profile", *SMALL_CACHE, "--output", output]
    done = in_python("-m", "serving_benchmarks", "throughput", "--model", CHECKPOINT, *loads, *how)
    assert done.returncode == 1, done.stderr[-4000:]
    results = json.loads(output.read_text())["results"]
    asked = [(r["backend"], r["case"]["input_len"], r["case"]["concurrency"]) for r in results]
    assert asked == [(name, length, n) for name in ("NO_SUCH", "SPARSE_MLA") for length in (200, 40) for n in (1, 3)]
    assert all("Unknown attention backend: 'NO_SUCH'" in r["error"] for r in results[:4])
    for result in results[4:]:
        length, new = result["case"]["input_len"], result["case"]["output_len"]
        assert result["error"] is None
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * length, 6 * new)
        assert 0 < result["ttft_s"]["p50"] < max(result["rounds_s"]) and result["cache"]["tokens"] > 1000
        if result["case"]["concurrency"] == 1:  # alone, a request's gaps are on average its time per token
            assert result["tpot_s"]["p50"] / 2 < result["itl_s"]["p50"] < result["tpot_s"]["p50"] * 2
    profile = results[4]["profile"]
    (attention,) = [row for row in profile["kernels"] if row["name"] == "mla_backend::sparse_attention"]
    assert attention["attention"] and attention["calls"] == profile["steps"] * 3, "one call a layer and step"
    assert [bool(result["profile"]) for result in results[4:]] == [True, False, True, False]


def test_the_server_with_dummy_weights_answers_vllms_client(tmp_path):
    output, logs, model = tmp_path / "out.json", tmp_path / "logs", tmp_path / "model"
    models.write(model, models.config("deepseek-v3.2", layers=2, heads=4, **NARROW), seed=None)
    dummy = {"load_format": "dummy", "hf_overrides": {"quantization_config": None}}  # a CPU has no blocks of FP8
    how = ("--engine-args", json.dumps(dummy), "--output", output, "--logs", logs)
    prompts = ("--dtype", "float32", "--loads", "100+8/4,40+4/4", "--num-prompts", 8, "--no-warmup", "--rounds", 2)
    done = in_python("-m", "serving_benchmarks", "serve", "--model", model, *prompts, *SMALL_CACHE, *how)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "SPARSE_MLA" in (logs / "SPARSE_MLA-2-server.log").read_text()
    found = kinds.load(output)
    for result, (length, new) in zip(found.results, ((100, 8), (40, 4)), strict=True):
        assert result["failed"] == 0 and len(result["rounds_s"]) == 2
        assert (result["total_input_tokens"], result["total_output_tokens"]) == (8 * length, 8 * new)


def test_each_engine_draws_the_same_weights(tmp_path):
    """HY V4's, which no other program writes."""
    output, model = tmp_path / "out.json", tmp_path / "model"
    models.write(model, models.config("hy-v4", layers=4, heads=4, dense_layers=3, **NARROW), seed=None)
    args = {"kv_cache_memory_bytes": 1 << 27, "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    how = ["--random-weights", 1, "--engine-args", json.dumps(args), "--output", output]
    lengths = ["--num-prompts", 4, "--input-len", 200, "--output-len", 8]
    backends = ["--ways", "vllm", "--backend", "SPARSE_MLA:fp8,SPARSE_MLA"]
    done = in_python("-m", "serving_benchmarks", "checkpoint", "--model", model, *backends, *lengths, *how)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = json.loads(output.read_text())["results"]
    assert first["finite"] and second["logprob_difference_max"] < 1e-3  # other weights: 1, about


def test_layers_select_what_repeats_itself_in_place_of_what_the_indexer_found(monkeypatch):
    from vllm.models.deepseek_v32 import attention

    from serving_benchmarks.run import overlap

    buffer, seen = torch.full((8, 64), -1, dtype=torch.int32), []

    def attend(layer, positions, queries):
        attention.sparse_attn_indexer(queries)
        seen.append((layer, queries, buffer.clone()))

    monkeypatch.setattr(attention, "sparse_attn_indexer", lambda queries: buffer)
    monkeypatch.setattr(
        attention.DeepseekV32Attention, "_sparse_indexer_and_attn", functools.wraps(attend)(lambda *args: attend(*args))
    )
    config = SimpleNamespace(
        max_model_len=2500, hf_text_config=SimpleNamespace(index_topk=64, model_type="deepseek_v32")
    )
    for topk, model in ((64, "glm5"), (48, "deepseek_v32")):
        other = SimpleNamespace(max_model_len=2500, hf_text_config=SimpleNamespace(index_topk=topk, model_type=model))
        with pytest.raises(ValueError, match="^--overlap needs"):
            overlap.install(other, 0.75, torch.device("cpu"))
    for _ in range(2):  # again for a model that drafts
        overlap.install(config, 0.75, torch.device("cpu"))
    positions = torch.tensor([2300, 7, 2499])
    attention.DeepseekV32Attention._sparse_indexer_and_attn("a layer", positions, "queries")
    ((layer, queries, found),) = seen
    assert (layer, queries) == ("a layer", "queries") and (found[3:] == -1).all()
    wanted = [overlap.selected(position, position + 1, 64, 0.75) for position in positions.tolist()]
    assert torch.equal(found[:3], torch.cat(wanted))
