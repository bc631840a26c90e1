"""What the plugin replaces inside vLLM: only functions that it knows, and it says so where it doesn't."""

import importlib
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

import vllm_installed  # noqa: F401
from mla_backend import FORMATS, reference, tried_versions
from mla_backend.vllm_plugin import config as plugin_config
from mla_backend.vllm_plugin import models, register, replacements, versions
from mla_backend.vllm_plugin.replacements import (
    CANDIDATES,
    CONFIG,
    CPU_INDEXER,
    MXFP4_KEYS,
    NATIVE_ROWS,
    ROTATE,
    SELECT,
    SHARE,
    SPLIT,
    V4,
    V41,
)
from tests.ops.test_rotate_queries import random_queries
from tests.plugin.test_backend import made_on_a_gpu

FUSED_Q = ", ".join(replacements.FUSED_Q[:-3]) + ", has_indexer=True, index_rope_interleave=False, quantize_mqa=True"


def function_of(parameters: str):
    """One that returns its arguments."""
    return eval(f"lambda {parameters}: [{', '.join(one.split('=')[0] for one in parameters.split(', '))}]")


def model_with(monkeypatch, parameters: str):
    """vLLM's model of DeepSeek-V3.2, with such a function for queries."""
    model = SimpleNamespace(fused_q=function_of(parameters))
    monkeypatch.setitem(sys.modules, replacements.V32_ATTENTION, model)
    return model


def test_before_blackwell_vllms_model_rotates_queries_with_our_op(backend, monkeypatch):
    """What the op doesn't take stays vLLM's."""
    from vllm.platforms import current_platform

    model = model_with(monkeypatch, FUSED_Q)
    fused_q = model.fused_q
    with monkeypatch.context() as on_blackwell:
        on_blackwell.setattr(type(current_platform), "has_device_capability", lambda self, least: least <= 100)
        made_on_a_gpu(backend, monkeypatch)
    assert model.fused_q is fused_q
    made_on_a_gpu(backend, monkeypatch)
    fused_q = model.fused_q
    made_on_a_gpu(backend, monkeypatch)
    assert model.fused_q is fused_q

    given = random_queries(interleaved=True)
    q, index_q, weights, positions = (given[n] for n in ("queries", "index_queries", "weights", "positions"))
    first, scales = (positions, q, given["cos_sin"], index_q, given["index_cos_sin"], q, None), (0.5, 0.25)
    found = fused_q(*first, weights, *scales, index_rope_interleave=True, quantize_mqa=False)
    rotated, index_rotated, scaled = reference.rotate_queries(**given | {"weight_scale": 0.125})
    for a, b in zip(found, (index_rotated, scaled, rotated), strict=True):
        assert torch.equal(a.float(), b.float())

    shared = (positions, q, given["cos_sin"], None, None, q, None, None, 0.0, 0.0)
    assert fused_q(*shared, has_indexer=False, quantize_mqa=False) == [*shared, False, False, False]
    half = (positions, q.half(), *first[2:], weights, *scales)
    wide = (*first[:3], index_q.repeat(1, 1, 2), *first[4:], weights, *scales)
    for arguments, how in ((half, False), (wide, False), ((*first, weights, *scales), True)):
        kept = fused_q(*arguments, **({} if how else {"quantize_mqa": False}))
        assert all(a is b for a, b in zip(kept, (*arguments, True, False, how), strict=True))


def test_nvfp4_rows_are_written_by_our_op_in_vllms_model(backend, monkeypatch):
    """vLLM's kernel needs sm_100 for that. It still computes what is written, and the rest."""
    theirs, names = (
        [],
        "q_c, slot_mapping=None, mla_kv_cache=None, mla_kv_cache_dtype='auto', kv_c_out=None, k_pe_out=None",
    )
    function = function_of(names)
    model = SimpleNamespace(fused_norm_rope=lambda *a, **k: theirs.append(function(*a, **k)) or theirs[-1])
    model.fused_norm_rope.__signature__ = inspect.signature(function)
    monkeypatch.setitem(sys.modules, replacements.V32_ATTENTION, model)
    monkeypatch.setattr(replacements, "rotate_queries_if_possible", lambda: None)
    for _ in range(2):  # layers
        made_on_a_gpu(backend, monkeypatch, kv_cache_dtype="nvfp4_ds_mla")
    latent, rope, slots = torch.randn(5, 512).bfloat16(), torch.randn(5, 64).bfloat16(), torch.tensor([3, -1, 17])
    cache, want = (FORMATS["nvfp4_352"].new_cache(2, 16) for _ in range(2))
    out = dict(kv_c_out=latent, k_pe_out=rope)
    model.fused_norm_rope(1, slot_mapping=slots, mla_kv_cache=cache, mla_kv_cache_dtype="nvfp4_ds_mla", **out)
    reference.cache_write(latent[:3], rope[:3], want, slots)
    assert torch.equal(cache, want) and theirs == [[1, slots, None, "auto", latent, rope]]
    model.fused_norm_rope(1, slots, want, "fp8_ds_mla", **out)
    assert torch.equal(cache, want) and theirs[1][2:4] == [want, "fp8_ds_mla"], "other rows stay vLLM's"


@pytest.mark.parametrize("on_cpu", [True, False])
def test_all_fit_the_vllm_that_is_installed_whether_it_is_read_or_imported(on_cpu, monkeypatch):
    for module in {where.partition(":")[0] for each in replacements.ALL for where in each.functions}:
        importlib.import_module(module)
        if not on_cpu:
            monkeypatch.delitem(sys.modules, module)
    unused = {each["name"]: each["why"] for each in replacements.report(on_cpu, True) if not each["in_use"]}
    asked = [SELECT, CANDIDATES, SHARE, MXFP4_KEYS, NATIVE_ROWS]
    others = [ROTATE, *asked, *([SPLIT, V4, V41] if on_cpu else [CPU_INDEXER])]
    new = [NATIVE_ROWS] if tried_versions.installed_vllm()[1].startswith("0.32") else []
    assert {*unused} == {each.name for each in others}
    assert [each for each in replacements.ALL if replacements.why_not(each) is not None] == new
    assert on_cpu or "Blackwell" in unused["rotate_queries"]


@pytest.mark.parametrize(
    ("replacement", "where", "parameters", "says"),
    [
        (ROTATE, "fused_q", FUSED_Q + ", more=None", "has other arguments (more new)"),
        (SPLIT, "MLAAttention._use_sparse_mha", "self, step", "(step new; attn_metadata gone)"),
        (SPLIT, "MLAAttention._use_sparse_mha", None, "has no vllm.model_executor.layers.attention.mla_"),
        (V4, "DeepseekV4FlashMLAAttention.forward_mqa", "self, kv, q, positions, output", "in another order"),
        (V41, "DeepseekV4Attention._compressed_kv_cache", None, "has no vllm.models.deepseek_v41.attention."),
        (CPU_INDEXER, "DeepseekV32IndexerCache.get_attn_backend", "self, size", "(size new)"),
        (CONFIG, "Platform.check_and_update_config", "vllm_config, more", "(more new)"),
    ],
)
def test_a_changed_function_stays_vllms_and_the_log_says_what_that_costs(
    backend, v4, monkeypatch, replacement, where, parameters, says
):
    model = model_with(monkeypatch, FUSED_Q)
    (module,) = (one.partition(":")[0] for one in replacement.functions if one.endswith(f":{where}"))
    *owner, name = where.split(".")
    owner = getattr(importlib.import_module(module), owner[0]) if owner else importlib.import_module(module)
    theirs = parameters and function_of(parameters)
    monkeypatch.setattr(owner, name, theirs) if theirs else monkeypatch.delattr(owner, name)
    said = []
    for level in ("warning", "error"):
        monkeypatch.setattr(versions.logger(), level, lambda text, *values: said.append(text % values))
    monkeypatch.setenv(f"MLA_BACKEND_WARNED_OF_{replacement.name.upper().replace(' ', '_')}", "")
    for _ in range(2):
        replacements.warn([replacement])
    (line,) = said
    assert replacement.name in line and says in line and line.endswith(f": {replacement.cost}.")
    (listed,) = [r for r in replacements.report(replacement is CPU_INDEXER, False) if f": {r['name']} is" in line]
    assert not listed["in_use"] and says in listed["why"] and replacement.cost in listed["why"]

    monkeypatch.setattr(plugin_config, "why_not", lambda *_: None)  # of the model
    family = {V4.name: models.V4, V41.name: models.V41}.get(replacement.name, models.FAMILIES[0])
    served = SimpleNamespace(architectures=family.architectures)
    refused = [str(plugin_config._model("SPARSE_MLA", served, on_cpu)) for on_cpu in (True, False)]
    assert [says in each for each in refused] == [replacement is CPU_INDEXER, replacement in (V4, V41)]
    register()
    assert [says in line for line in said[1:]] == [True] * (replacement is CONFIG)
    layer = made_on_a_gpu(backend, monkeypatch)
    assert layer.splits_prompts == (replacement is not SPLIT) and (model.fused_q is theirs) == (replacement is ROTATE)
    monkeypatch.setattr(versions, "since_0_32", lambda: False)
    assert replacement is CONFIG or "is older than 0.32" in replacements.why_not(replacement)


def test_the_log_names_those_alone_that_a_model_would_gain_by():
    for name, architecture, capability, told in (
        ("SPARSE_MLA", "DeepseekV32ForCausalLM", 90, [SPLIT, ROTATE]),
        ("SPARSE_MLA", "DeepseekV32ForCausalLM", 100, [SPLIT]),
        ("SPARSE_MLA", "Glm5NextForCausalLM", 90, [SPLIT]),
        ("SPARSE_MLA", "DeepseekV4ForCausalLM", 90, []),
        ("DENSE_MLA", "DeepseekV3ForCausalLM", 90, []),
    ):
        has = dict(is_cpu=lambda: False, has_device_capability=lambda least, capability=capability: capability >= least)
        model = SimpleNamespace(architectures=[architecture])
        assert plugin_config._optional(name, model, SimpleNamespace(**has)) == told
