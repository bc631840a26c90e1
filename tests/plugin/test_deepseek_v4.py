"""The layers of DeepSeek-V4 and V4.1 against the reference, with vLLM's metadata but without a model around them."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import vllm_installed  # noqa: F401
from mla_backend import FORMATS, reference
from mla_backend.vllm_plugin import config as plugin_config
from mla_backend.vllm_plugin import models, native_rows, replacements, versions
from problems import assert_accurate, random_cache
from tests.plugin.test_registration import gpu
from vllm_models import config_with

HEADS, PADDED, WINDOW, TOPK = 5, 8, 12, 16
WINDOW_BLOCK, BLOCK, BLOCKS, REQUESTS = 16, 256, 20, 4
SCALE = 512**-0.5
ARCHITECTURES = {name: one.models for one in (models.V4, models.V41) for name in sorted(one.architectures)}
ARCHITECTURES |= {name: one.models for name, one in models.V4_DRAFTS.items()}


class V4Batch:
    """Tokens that decode, the last ones of which may be padding, then tokens of prefill."""

    def __init__(self, decodes: int, prefills: int, padding: int = 0):
        self.decodes, self.prefills, self.tokens = decodes, prefills, decodes + prefills
        self.valid = torch.ones(self.tokens, dtype=torch.bool)
        self.valid[decodes - padding : decodes] = False
        self.requests = torch.randint(0, REQUESTS, (self.tokens,), dtype=torch.int32) * self.valid
        self.window_slots = torch.randint(0, BLOCKS * WINDOW_BLOCK, (self.tokens, 1, WINDOW), dtype=torch.int32)
        self.window_lengths = torch.randint(1, WINDOW + 1, (self.tokens,), dtype=torch.int32) * self.valid
        self.block_table = torch.randperm(BLOCKS).int().view(REQUESTS, -1)

    def window(self) -> SimpleNamespace:
        slots, lengths = ((x[: self.decodes], x[self.decodes :]) for x in (self.window_slots, self.window_lengths))
        given = dict(num_decode_tokens=self.decodes, num_prefill_tokens=self.prefills, num_prefills=1)
        given |= dict(num_decodes=min(self.decodes, 1), decode_swa_indices=slots[0], decode_swa_lens=lengths[0])
        prefill = (slots[1], lengths[1]) if self.prefills else (None, None)
        given |= dict(zip(("prefill_swa_indices", "prefill_swa_lens"), prefill, strict=True))
        given |= dict(is_valid_token=self.valid, token_to_req_indices=self.requests, flashinfer_sparse_index_cache={})
        return SimpleNamespace(**given)

    def picked(self, states: int) -> Tensor:
        """Compressed positions of each token's request, and -1 after some of them, int32 `[T, TOPK]`."""
        positions = torch.randint(0, BLOCKS // REQUESTS * states, (self.tokens, TOPK), dtype=torch.int32)
        counts = torch.randint(0, TOPK + 1, (self.tokens, 1))
        return torch.where(torch.arange(TOPK) < counts, positions, -1)

    def slots(self, positions: Tensor, states: int) -> Tensor:
        blocks = self.block_table[self.requests.long()].gather(1, (positions.clamp(min=0) // states).long())
        return torch.where((positions < 0) | ~self.valid[:, None], -1, blocks * states + positions % states).int()

    def compressed(self, positions: Tensor, states: int) -> SimpleNamespace:
        slots = self.slots(positions, states)
        given = dict(c128a_global_decode_topk_indices=slots[: self.decodes].unsqueeze(1))
        given["c128a_decode_topk_lens"] = (slots >= 0).sum(1).int()[: self.decodes]
        given["c128a_prefill_topk_indices"] = positions[self.decodes :]
        return SimpleNamespace(block_table=self.block_table, block_size=BLOCK, **given)


KINDS = {("DeepSeek-V4", 1): 0, ("DeepSeek-V4", 4): 4, ("DeepSeek-V4", 128): 1}
KINDS |= {("DeepSeek-V4.1", 0): 0, ("DeepSeek-V4.1", 1): 2, ("DeepSeek-V4.1", 2): 2}
"""By model and ratio: how often two layers convert indices, in a step of decode and prefill."""
ALONE = {("DeepSeek-V4", 1), ("DeepSeek-V4.1", 0)}
"""Layers that attend to the window alone."""
BATCHES = {"decode": (6, 0), "padded": (6, 0, 2), "prefill": (0, 7), "mixed": (5, 6), "no tokens": (0, 0)}


def layer_of(v4, ratio: int, picked: Tensor | None, name: str = "DeepSeek-V4", rows: str = "fp8_model1") -> object:
    layer, window = object.__new__(class_of(v4, name)), random_cache(rows, BLOCKS, WINDOW_BLOCK)
    sink = torch.cat([torch.linspace(-2, 4, HEADS), torch.full((PADDED - HEADS,), -torch.inf)])
    cache = random_cache(rows, BLOCKS, BLOCK // max(ratio, 1)) if (name, ratio) not in ALONE else torch.tensor([])
    vars(layer).update(prefix="layers.0.attn", n_local_heads=HEADS, scale=SCALE, compress_ratio=ratio, attn_sink=sink)
    vars(layer).update(swa_cache_layer=SimpleNamespace(prefix="layers.0.attn.swa_cache", kv_cache=window))
    vars(layer).update(kv_cache=cache, topk_indices_buffer=picked, products="fp8")
    if name == "DeepSeek-V4.1":  # another layer has the cache of compressed tokens
        layers = {"layers.0.attn": SimpleNamespace(kv_cache=cache)}
        vars(layer).update(prefix="layers.2.attn", compressed_cache_prefix="layers.0.attn", is_kv_source=False)
        vars(layer).update(_static_forward_context=layers, index_source_layer_id=1, kv_mxfp8=rows == "fp8_528")
    return layer


def class_of(v4, name: str) -> type:
    v41 = importlib.import_module("mla_backend.vllm_plugin.deepseek_v41")
    return v4.SparseMLAV4Attention if name == "DeepSeek-V4" else v41.SparseMLAV41Attention


def attend(v4, monkeypatch, layer, window, compressed, q) -> Tensor:
    metadata = {layer.swa_cache_layer.prefix: window, "layers.0.attn": compressed}
    monkeypatch.setattr(v4, "get_forward_context", lambda: SimpleNamespace(attn_metadata=metadata))
    out = torch.full_like(q, 7)
    layer.forward_mqa(q, None, None, out)
    assert (out[:, HEADS:] == 7).all(), "padding heads are nobody's"
    return out[:, :HEADS]


def queries(tokens: int) -> Tensor:
    q = (torch.randn(tokens, PADDED, 512) * 10).bfloat16()
    q[:, HEADS:] = torch.nan
    return q


@pytest.mark.parametrize(
    "model, ratio, rows", [(*kind, "fp8_model1") for kind in KINDS] + [("DeepSeek-V4.1", 2, "fp8_528")]
)
@pytest.mark.parametrize("name", BATCHES)
def test_tokens_attend_to_their_window_and_to_what_is_compressed(v4, monkeypatch, name, model, ratio, rows):
    batch, states = V4Batch(*BATCHES[name]), BLOCK // max(ratio, 1)
    positions, alone = batch.picked(states), (model, ratio) in ALONE
    layer, q = layer_of(v4, ratio, positions, model, rows), queries(batch.tokens)
    window, compressed = batch.window(), None if alone else batch.compressed(positions, states)
    out = attend(v4, monkeypatch, layer, window, compressed, q)
    how = dict(scale=SCALE, topk_length=batch.window_lengths, sink=layer.attn_sink[:HEADS])
    if not alone:
        how |= dict(extra_cache=layer.second_cache({"layers.0.attn": None})[0])
        how |= dict(extra_indices=batch.slots(positions, states))
    slots = batch.window_slots.squeeze(1)
    want = reference.sparse_attention(q[:, :HEADS], layer.swa_cache_layer.kv_cache, slots, **how)
    assert_accurate((out,), want[:1])
    assert not out[~batch.valid].any(), "padding attends to nothing"


@pytest.mark.parametrize(("model", "ratio"), KINDS)
def test_layers_share_a_plan_and_what_one_selected_until_lengths_change(v4, monkeypatch, model, ratio):
    batch, states = V4Batch(5, 6), BLOCK // max(ratio, 1)
    first, made, converted = batch.picked(states), [], []
    second = torch.where(first < 0, -1, (first + 1) % (BLOCKS // REQUESTS * states)).int()
    window, compressed = batch.window(), batch.compressed(first, states)
    for name, calls in (("plan", made), ("convert_indices", converted)):
        theirs = getattr(v4.mla_backend, name)

        def count(*args, theirs=theirs, calls=calls, **more):
            calls.append(more.get("products"))
            return theirs(*args, **more)

        monkeypatch.setattr(v4.mla_backend, name, count)
    layer, q = layer_of(v4, ratio, first, model), queries(batch.tokens)
    assert torch.equal(*(attend(v4, monkeypatch, layer, window, compressed, q) for _ in range(2)))
    assert made == ["fp8"] * 2, "one for decode and one for prefill"
    assert len(converted) == KINDS[model, ratio]
    vars(layer).update(index_source_layer_id=5, topk_indices_buffer=second)
    after_another = attend(v4, monkeypatch, layer, window, compressed, q)
    assert len(made) == 2
    assert torch.equal(after_another, attend(v4, monkeypatch, layer, batch.window(), compressed, q))
    window.flashinfer_sparse_index_cache.clear()
    attend(v4, monkeypatch, layer, window, compressed, q)
    assert len(made) == 6


def test_a_run_that_measures_memory_gives_zeros(v4, monkeypatch):
    monkeypatch.setattr(v4, "get_forward_context", lambda: SimpleNamespace(attn_metadata=None))
    out = torch.ones(3, PADDED, 512).bfloat16()
    layer_of(v4, 4, None).forward_mqa(queries(3), None, None, out)
    assert not out.any()


def test_heads_are_padded_to_what_vllms_kernel_is_compiled_for(v4):
    assert [v4.SparseMLAV4Attention.get_padded_num_q_heads(n) for n in (1, 8, 9, 64, 128)] == [8, 8, 16, 64, 128]
    with pytest.raises(ValueError, match="up to 128 heads"):
        v4.SparseMLAV4Attention.get_padded_num_q_heads(129)


@pytest.mark.parametrize(("architecture", "name"), ARCHITECTURES.items())
def test_the_model_chooses_the_layer_where_the_backend_is_asked_for(v4, monkeypatch, name, architecture):
    from mla_backend.vllm_plugin.gpu_worker import SparseMLAWorker

    model = importlib.import_module(replacements.V41_MODEL if name == "DeepSeek-V4.1" else replacements.V4_MODEL)
    theirs = model._select_dsv4_attn_cls
    monkeypatch.setattr(model, "_select_dsv4_attn_cls", theirs)  # put back afterwards
    worker = object.__new__(SparseMLAWorker)
    monkeypatch.setattr(SparseMLAWorker.__base__, "load_model", lambda self: None)
    monkeypatch.setattr("mla_backend.vllm_plugin.selection.is_on", lambda config: False)
    worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(architectures=[architecture]))
    for _ in range(2):
        worker.load_model()
    named = lambda backend: SimpleNamespace(attention_config=SimpleNamespace(backend=backend))  # noqa: E731
    assert model._select_dsv4_attn_cls(named(versions.add_backend(versions.SPARSE))) is class_of(v4, name)
    assert model._select_dsv4_attn_cls(named(None)) is theirs(named(None))


def test_the_worker_is_the_one_that_the_configuration_names():
    from mla_backend.vllm_plugin.gpu_worker import SparseMLAWorker

    named = [f"{c.__module__}.{c.__name__}" for c in (*SparseMLAWorker.__bases__, SparseMLAWorker)]
    assert named == list(plugin_config.WORKERS)


def v4_config(architecture: str = "DeepseekV4ForCausalLM", **cache) -> SimpleNamespace:
    model = SimpleNamespace(architectures=[architecture], dtype=torch.bfloat16, hf_text_config=None)
    worker = dict(worker_cls=plugin_config.WORKERS[0], decode_context_parallel_size=1, data_parallel_size=1)
    named = dict(backend=versions.add_backend(versions.SPARSE), hisparse_config=None)
    cache = {"cache_dtype": "auto", "user_specified_block_size": False, **cache}
    config = config_with(attention=named, cache=cache, parallel=worker)
    config.model_config, config.speculative_config = model, None
    return config


@pytest.mark.parametrize("name", ["DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"])
def test_on_a_gpu_a_worker_of_ours_builds_the_model(monkeypatch, name):
    monkeypatch.setattr("vllm.platforms.current_platform", gpu(9, 0))
    monkeypatch.setattr("mla_backend.library.about", lambda: {"cuda_archs": "90a"})
    for given, settled in (("auto", "auto"), ("fp8", "fp8_ds_mla")):
        config = v4_config(name, cache_dtype=given)
        plugin_config.settle(config)
        assert config.parallel_config.worker_cls == plugin_config.WORKERS[1]
        assert config.cache_config.cache_dtype == settled
    config = v4_config(name)
    config.parallel_config.worker_cls = "another.Worker"
    with pytest.raises(ValueError, match="needs vLLM's own worker class"):
        plugin_config.settle(config)
    with pytest.raises(ValueError, match="--kv-cache-dtype must be one of auto, fp8, .*; got bfloat16"):
        plugin_config.settle(v4_config(name, cache_dtype="bfloat16"))


def test_rows_of_v41_are_native_where_asked_for(v4, monkeypatch):
    attention = importlib.import_module(replacements.V41_ATTENTION)
    records = importlib.import_module("vllm.models.deepseek_v41.common.ops.cache_utils")
    monkeypatch.setattr("vllm.platforms.current_platform", gpu(9, 0))
    monkeypatch.setattr("mla_backend.library.about", lambda: {"cuda_archs": "90a"})
    monkeypatch.setattr(attention, "_use_v41_mxfp8_kv_record", lambda: False)

    def settle(name, rows):
        config = v4_config(name)
        config.additional_config = {native_rows.OPTION: rows}
        plugin_config.settle(config)

    def pages() -> list[int]:
        cache = object.__new__(attention.DeepseekV4IndexerCache)
        vars(cache).update(
            head_dim=132, dtype=torch.uint8, compress_ratio=1, cache_config=SimpleNamespace(block_size=64)
        )
        vars(cache).update(sparse_logits=False, rocm_mxfp4=False)
        layer = object.__new__(class_of(v4, "DeepSeek-V4.1"))
        native = attention._use_v41_mxfp8_kv_record()
        vars(layer).update(is_kv_source=True, kv_cache_dtype="fp8_ds_mla", head_dim=512, compress_ratio=1)
        vars(layer).update(compressed_bytes_per_token=records.V41_BYTES_PER_TOKEN if native else 584)
        vars(layer).update(kv_page_alignment=512 if native else 576, kv_mxfp8=native)
        config = config_with(cache=dict(cache_dtype="fp8_ds_mla", block_size=64))
        assert FORMATS[layer.row_format].token_bytes == layer.compressed_bytes_per_token
        return [one.get_kv_cache_spec(config).page_size_bytes for one in (cache, layer)]

    with pytest.raises(ValueError, match="mla_v41_rows .* must be native; got 'v4'"):
        settle("DeepseekV41ForCausalLM", "v4")
    with pytest.raises(ValueError, match="mla_v41_rows .* is for DeepSeek-V4.1. Leave it out"):
        settle("DeepseekV4ForCausalLM", "native")
    if replacements.why_not(replacements.NATIVE_ROWS) is not None:  # vLLM 0.32 lays them out otherwise
        with pytest.raises(ValueError, match="mla_v41_rows .* does not fit: .*SWACache.* has other arguments"):
            settle("DeepseekV41ForCausalLM", "native")
        with monkeypatch.context() as on_blackwell:
            on_blackwell.setattr("vllm.platforms.current_platform", gpu(10, 0))
            on_blackwell.setattr("mla_backend.library.about", lambda: {"cuda_archs": "100"})
            with pytest.raises(ValueError, match="needs vllm 0.33 for DeepSeek-V4.1 on sm_100"):
                settle("DeepseekV41ForCausalLM", None)
        monkeypatch.setattr(replacements, "NATIVE_ROWS", replacements.V41)
    settle("DeepseekV41ForCausalLM", "native")
    before = pages()
    for _ in range(2):
        native_rows.install()
    assert (before, pages()) == ([15 * 576, 65 * 576], [17 * 512, 64 * 528])


def test_on_a_cpu_vllm_serves_deepseek_v4_by_itself():
    config = v4_config()
    assert models.has_v4_attention(config.model_config)
    with pytest.raises(ValueError, match="vLLM itself serves DeepSeek-V4 on a CPU. Leave out --attention-backend"):
        plugin_config.settle(config)
    with pytest.raises(ValueError, match="vLLM serves DeepSeek-V4.1 on GPUs alone. Leave out"):
        plugin_config.settle(v4_config("DeepseekV41ForCausalLM"))
