"""What the plugin replaces inside vLLM: only functions that it knows, and it says so where it doesn't."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

import vllm_installed  # noqa: F401
from mla_backend import doctor, reference
from mla_backend.vllm_plugin import config as plugin_config
from mla_backend.vllm_plugin import register, replacements, versions
from tests.ops.test_rotate_queries import random_queries
from tests.plugin.test_backend import made_on_a_gpu

PLATFORM = "vllm.platforms.interface"


@pytest.fixture
def make_layer(backend, monkeypatch):
    return lambda: made_on_a_gpu(backend, monkeypatch)


def function_of(parameters: str):
    """One that returns its arguments."""
    return eval(f"lambda {parameters}: [{', '.join(one.split('=')[0] for one in parameters.split(', '))}]")


def model_with(monkeypatch, parameters: str):
    """vLLM's model of DeepSeek-V3.2, with such a function for queries."""
    model = SimpleNamespace(fused_q=function_of(parameters))
    monkeypatch.setitem(sys.modules, replacements.V32_ATTENTION, model)
    return model


FUSED_Q = ", ".join(replacements.FUSED_Q[:-3]) + ", has_indexer=True, index_rope_interleave=False, quantize_mqa=True"


def test_on_a_gpu_vllms_model_rotates_queries_with_our_op(make_layer, monkeypatch):
    """What the op doesn't take stays vLLM's."""
    model = model_with(monkeypatch, FUSED_Q)
    make_layer()
    fused_q = model.fused_q
    make_layer()
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


def test_blackwell_keeps_vllms_function_for_queries(make_layer, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "has_device_capability", lambda self, least: least <= 100)
    model = model_with(monkeypatch, FUSED_Q)
    theirs = model.fused_q
    make_layer()
    assert model.fused_q is theirs


@pytest.mark.parametrize("on_cpu", [True, False])
def test_all_fit_the_vllm_that_is_installed_whether_it_is_read_or_imported(on_cpu):
    for each in replacements.ALL:
        assert replacements.why_not(each) is None
        for where in each.functions:
            module, _, name = where.partition(":")
            assert (*replacements._read(module, name),)[-len(each.functions[where]) or 9 :] == each.functions[where]
    unused = {each["name"]: each["why"] for each in replacements.report(on_cpu, True) if not each["in_use"]}
    others = [each for each in replacements.ALL if each.on == ("a GPU" if on_cpu else "a CPU")]
    assert {*unused} == {each.name for each in others} | {"rotate_queries"}
    assert on_cpu or "Blackwell" in unused["rotate_queries"]


@pytest.mark.parametrize(
    ("replacement", "where", "parameters", "says"),
    [
        (replacements.ROTATE, None, FUSED_Q + ", more=None", "has other arguments (more new)"),
        (replacements.ROTATE, None, FUSED_Q[11:], "has other arguments (positions gone)"),
        (replacements.SPLIT, "MLAAttention._use_sparse_mha", "self, step", "(step new; attn_metadata gone)"),
        (replacements.SPLIT, "MLAAttention._use_sparse_mha", None, "has no vllm.model_executor.layers.attention.mla_"),
        (replacements.V4, "DeepseekV4FlashMLAAttention.forward_mqa", "self, kv, q, positions, output", "another order"),
    ],
)
def test_a_changed_function_stays_vllms_and_the_log_says_once_what_that_costs(
    v4, monkeypatch, make_layer, replacement, where, parameters, says
):
    if where is None:
        model = model_with(monkeypatch, parameters)
        theirs = model.fused_q
    else:
        module = next(iter(f for f in replacement.functions if f.endswith(f":{where}"))).partition(":")[0]
        owner, name = where.split(".")
        owner = getattr(importlib.import_module(module), owner)
        if parameters is None:
            monkeypatch.delattr(owner, name)
        else:
            monkeypatch.setattr(owner, name, function_of(parameters))
    said = []
    monkeypatch.setattr(versions.logger(), "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setenv(f"MLA_BACKEND_WARNED_OF_{replacement.name.upper().replace(' ', '_')}", "")
    for _ in range(2):
        replacements.warn([replacement])
    (line,) = said
    assert replacement.name in line and says in line and line.endswith(f": {replacement.cost}.")
    (row,) = [each for each in replacements.report(False, False) if each["name"] == replacement.name]
    assert not row["in_use"] and says in row["why"] and replacement.cost in row["why"]
    if replacement is replacements.V4:
        model_config = SimpleNamespace(architectures=["DeepseekV4ForCausalLM"])
        assert "another order" in plugin_config._model("SPARSE_MLA", model_config, on_cpu=False)
    elif replacement is replacements.ROTATE:
        make_layer()
        assert model.fused_q is theirs
    else:
        assert not make_layer().splits_prompts
    monkeypatch.setattr(versions, "since_0_32", lambda: False)
    replacements.warn([replacement])  # what an old version never had is no news
    assert len(said) == 1 and "is older than 0.32" in replacements.why_not(replacement)


def test_of_models_that_would_gain_by_one_the_log_says_that_it_is_not_in_use():
    for name, architecture, capability, told in (
        ("SPARSE_MLA", "DeepseekV32ForCausalLM", 90, [replacements.SPLIT, replacements.ROTATE]),
        ("SPARSE_MLA", "DeepseekV32ForCausalLM", 100, [replacements.SPLIT]),
        ("SPARSE_MLA", "Glm5NextForCausalLM", 90, [replacements.SPLIT]),
        ("SPARSE_MLA", "DeepseekV4ForCausalLM", 90, []),
        ("DENSE_MLA", "DeepseekV3ForCausalLM", 90, []),
    ):
        has = dict(is_cpu=lambda: False, has_device_capability=lambda least, capability=capability: capability >= least)
        model = SimpleNamespace(architectures=[architecture])
        assert plugin_config._optional(name, model, SimpleNamespace(**has)) == told


def test_without_its_checks_of_the_configuration_the_plugin_stays_out(monkeypatch):
    interface, said = importlib.import_module(PLATFORM), []
    monkeypatch.setattr(interface.Platform, "check_and_update_config", lambda vllm_config, more: None)
    monkeypatch.setattr(versions.logger(), "error", lambda text, *values: said.append(text % values))
    register()
    assert len(said) == 1 and "(more new)" in said[0] and "Install vllm 0.23, 0.32 or 0.33." in said[0]


def test_a_cpu_needs_the_functions_that_its_indexer_takes_the_place_of(monkeypatch):
    model = importlib.import_module("vllm.model_executor.models.deepseek_v2")
    monkeypatch.setattr(model, "per_token_group_quant_fp8", function_of("x, size"))
    monkeypatch.setattr(plugin_config, "why_not", lambda *_: None)
    served = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"])
    assert "(size new; " in plugin_config._model("SPARSE_MLA", served, on_cpu=True)
    assert plugin_config._model("SPARSE_MLA", served, on_cpu=False) is None


def test_doctor_lists_them_all():
    listed = doctor.examine()["vllm"]["replaces"]
    assert [each["name"] for each in listed] == [each.name for each in replacements.ALL]
    assert all(each["in_use"] or each["why"] for each in listed)
