"""With rows on the host a step attends to what it would attend to without: the layers' own code, over a simulation of
vLLM's index groups. And what can't be is refused before weights are loaded."""

import sys
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vllm_installed  # noqa: F401
from hisparse_sim import SimulatedGroup, Traffic
from mla_backend import reference
from mla_backend.vllm_plugin import host_tier
from mla_backend.vllm_plugin.step import SparseStep, StepBatch, StepBuffers
from problems import assert_accurate, random_cache
from tests.plugin.test_backend import HEADS, SCALE, layer_of, made_builder
from vllm_models import config_with

TOPK, BLOCK_SIZE, LAYERS, QUERIES = 12, 8, 3, 2


def pick(random: Random, length: int, query: int, gaps: bool) -> torch.Tensor:
    """What an indexer picks for a request's last tokens: some near ones, and some of all."""
    picked = torch.full((query, TOPK), -1, dtype=torch.int32)
    for i in range(query):
        seen = length - query + i + 1
        chosen = torch.tensor(random.sample(range(seen), min(seen, TOPK)), dtype=torch.int32)
        at = sorted(random.sample(range(TOPK), len(chosen))) if gaps else range(len(chosen))
        picked[i, list(at)] = chosen
    return picked


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "bf16"])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**31), captured=st.sampled_from([0, 64]), gaps=st.booleans())
def test_answers_are_those_of_a_cache_that_is_all_on_the_gpu(backend, fmt, seed, captured, gaps):
    random, sample = Random(seed), random_cache(fmt, 64, BLOCK_SIZE).flatten(0, 1)
    torch.manual_seed(seed)
    group = SimulatedGroup(LAYERS, sample[0], blocks=64, block_size=BLOCK_SIZE, hot_blocks=3)

    def rows(count: int) -> list[torch.Tensor]:
        return [sample[torch.randint(len(sample), (count,))] for _ in range(LAYERS)]

    traffic, picked = Traffic(random, group, rows, QUERIES), torch.full((256, TOPK), 7, dtype=torch.int32)
    shape = dict(topk=TOPK, heads=HEADS, device=torch.device("cpu"), batch_invariant=False, cache_format=fmt)
    room = StepBuffers(max_tokens=256, captured_tokens=captured, **shape)
    layers = [layer_of(backend, picked, indexer=object() if i == 0 else None) for i in range(LAYERS)]
    for i, layer in enumerate(layers):
        layer.host_tier = host_tier.HostTier(group, i, gaps)
    for _ in range(8):
        query_lens = traffic.step()
        decodes = sum(query <= QUERIES for query in query_lens)
        padding = random.randint(0, 2) if decodes == len(query_lens) else 0
        starts, tokens = torch.tensor([0, *query_lens]).cumsum(0).int(), sum(query_lens) + padding
        lengths = torch.tensor([one.length for one in group.batch], dtype=torch.int32)
        for one, start, query in zip(group.batch, starts.tolist(), query_lens, strict=False):
            picked[start : start + query] = pick(random, one.length, query, gaps)
        picked[tokens - padding : tokens] = 3  # of padding, which has request 0, as vLLM has it
        requests = torch.zeros(tokens, dtype=torch.int32)
        requests[: tokens - padding] = torch.arange(len(query_lens)).repeat_interleave(torch.tensor(query_lens)).int()
        counts = dict(num_decodes=decodes, num_actual_tokens=tokens)
        counts["num_decode_tokens"] = tokens if decodes == len(query_lens) else sum(query_lens[:decodes])
        metadata = SimpleNamespace(**counts, req_id_per_token=requests, block_table=None, dense=(), masked=())
        spans = host_tier.keep_plans(None, metadata)
        metadata.step = SparseStep(room, StepBatch(starts, lengths, tokens), tokens, None, None, spans)
        q = (torch.randn(tokens, HEADS, 576) * 10).bfloat16()
        begins = torch.tensor([0, *lengths.tolist()]).cumsum(0).int()[requests.long()].unsqueeze(1)
        slots = torch.where(picked[:tokens] < 0, -1, picked[:tokens] + begins)
        slots[tokens - padding :] = -1
        for i, layer in enumerate(layers):
            out, _ = layer.forward_mqa(q, group.host[i], metadata, None)
            whole = torch.cat([one.rows[i] for one in group.batch]).unsqueeze(1)
            want = reference.sparse_attention(q, whole, slots, scale=SCALE)
            assert_accurate((out,), want[:1], distance=1e-5)  # of few slots
            assert not out[tokens - padding :].any(), "padding attends to nothing"


def test_the_simulation_evicts_hits_and_stages():
    """Or the test above would promise less than it says."""
    sample = torch.randint(0, 255, (64, 16), dtype=torch.uint8)
    group = SimulatedGroup(1, sample[0], blocks=64, block_size=BLOCK_SIZE, hot_blocks=2)
    random = Random(1)
    traffic = Traffic(random, group, lambda n: [sample[torch.randint(64, (n,))]], 1)
    for _ in range(40):
        query_lens = traffic.step()
        ids = torch.arange(len(query_lens)).repeat_interleave(torch.tensor(query_lens)).int()
        decode = [one for one in query_lens if one == 1]
        picked = torch.cat(
            [pick(random, one.length, 1, False) for one in group.batch[: len(decode)]] or [ids[:0, None]]
        )
        metadata = SimpleNamespace(req_id_per_token=ids, num_decodes=len(decode), num_decode_tokens=len(decode))
        group.convert_logical_to_physical_topk(0, picked, metadata, block_stride_rows=None, return_valid_counts=True)
    assert group.hits > 50 and group.misses > 100 and any(0 in one.pages for one in group.batch)
    assert any(one.length and 0 in one.pages[:1] for one in traffic.running) and len(traffic.ended) > 3


def config(monkeypatch, host_gib: float, memory_gib: float = 100.0, hot_rows: int | None = None, **text):
    """With HiSparse, on a machine with so much memory left."""
    from vllm.v1.hisparse import runtime

    monkeypatch.setattr(host_tier.signatures, "change", lambda *_: None)  # as in vLLM 0.33
    left = SimpleNamespace(available=int(memory_gib * 2**30))
    monkeypatch.setattr(runtime, "psutil", SimpleNamespace(virtual_memory=lambda: left))
    extra = {"host_pool_gib": host_gib}
    given = config_with(
        attention=dict(hisparse_config=SimpleNamespace(device_buffer_size=hot_rows, eager_host_mirror=True)),
        kv_transfer=dict(kv_connector="HiSparseConnector", kv_connector_extra_config=extra),
        cache=dict(cache_dtype="fp8_ds_mla"),
        model=dict(
            hf_text_config=SimpleNamespace(model_type="deepseek_v32", index_topk=2048, **text),
            architectures=["Deepseek"],
        ),
    )
    given.model_config.hf_config = given.model_config.hf_text_config
    return given


def test_a_host_pool_that_memory_does_not_hold_is_refused_in_vllms_words(monkeypatch):
    assert host_tier.why_not(config(monkeypatch, 64)) is None
    assert "host pool needs ~128 GiB but only 100 GiB" in host_tier.why_not(config(monkeypatch, 128))
    assert "must be positive" in host_tier.why_not(config(monkeypatch, -1))


def test_hot_rows_for_less_than_a_selection_are_refused_in_vllms_words(monkeypatch):
    assert host_tier.why_not(config(monkeypatch, 64, hot_rows=2048)) is None
    assert "device_buffer_size=2047" in host_tier.why_not(config(monkeypatch, 64, hot_rows=2047))
    drafting = config(monkeypatch, 64, hot_rows=4096)
    drafting.speculative_config = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
    assert "expected at least 6144" in host_tier.why_not(drafting)
    assert "maximum is 32768" in host_tier.why_not(config(monkeypatch, 64, hot_rows=32769))


@pytest.mark.parametrize("selected", [512, 2048, 8192, 16384])  # of a request in a step
@pytest.mark.parametrize("spare", [0, 1, 512, 2048, 16384])
def test_vllms_table_of_rows_gets_no_larger_than_its_kernel_takes(monkeypatch, selected, spare):
    from vllm.v1.hisparse import runtime

    monkeypatch.setattr(runtime, "get_max_shared_memory_bytes", lambda _: 227 << 10)
    hot = min(selected + spare, 32768)
    given = SimpleNamespace(max_union_rows=selected, region_stride=hot, device_buffer_size=hot)
    host_tier.widen_table(given)
    assert selected <= given.max_union_rows <= hot, "what its kernel takes"
    runtime._check_residency_shared_memory(torch.device("cuda", 0), given)
    if selected == 2048:
        assert given.max_union_rows == min(4096, hot)


def test_other_models_and_another_hisparse_are_refused(monkeypatch):
    monkeypatch.setattr(host_tier, "has_v4_attention", lambda _: True)
    monkeypatch.setattr(host_tier, "v4_family", lambda _: SimpleNamespace(models="DeepSeek-V4"))
    assert "no rows of DeepSeek-V4 on the host. Leave out" in host_tier.why_not(config(monkeypatch, 64))
    monkeypatch.undo()
    here = config(monkeypatch, 64)
    here.cache_config.cache_dtype = "nvfp4_ds_mla"
    assert "no nvfp4_ds_mla rows. Use --kv-cache-dtype fp8" in host_tier.why_not(here)
    monkeypatch.setattr(host_tier.signatures, "change", lambda *_: "this vLLM has no such thing")
    here.cache_config.cache_dtype = "fp8_ds_mla"
    assert "Install vllm 0.33, or leave out" in host_tier.why_not(here)
    here.attention_config.hisparse_config = None
    assert host_tier.why_not(here) is None


def test_a_layer_takes_vllms_index_group_and_its_plan_of_what_comes_from_the_host(backend, monkeypatch):
    """vLLM makes that plan only for layers that might attend densely."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    whole = VllmConfig(device_config=DeviceConfig("cpu"))
    whole.attention_config.hisparse_config = object()
    whole.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=TOPK))
    module = sys.modules[backend.LayerBase.__module__]
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    sizes = dict(q_lora_rank=24, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, qk_head_dim=80)
    for width in (TOPK, TOPK + 3):
        runtime = SimpleNamespace(max_union_rows=width, region_stride=2 * width)
        group = {2: SimpleNamespace(runtime=runtime)}
        builder = SimpleNamespace(register_layer=lambda *args, g=group, **kwargs: (SimpleNamespace(cache=g.get), 2))
        picked = torch.empty(7, width, dtype=torch.int32)
        with set_current_vllm_config(whole):
            given = dict(sizes, v_head_dim=16, kv_b_proj=None, topk_indices_buffer=picked, index_group_builder=builder)
            layer = backend.SparseMLALayer(HEADS, 576, SCALE, 1, None, None, "auto", None, "decoder", None, **given)
        assert layer.host_tier[1:] == (2, width > TOPK) and layer.supports_dense_mha_prefill
        assert layer.host_tier.group.cache(2).runtime.max_union_rows == 2 * width, "it looks for rows in a larger table"
        assert not layer.splits_prompts, "as on every CPU"


def test_a_builder_without_such_a_plan_refuses(backend, monkeypatch):
    with pytest.raises(ValueError, match="HiSparse needs one of vLLM's backends for MLA prefill.* Leave out"):
        made_builder(backend, monkeypatch, hisparse=object())
