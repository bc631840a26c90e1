"""vLLM's model of DeepSeek-V3.2 rotates queries with our op where that can do it."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import vllm_installed  # noqa: F401
from mla_backend import reference
from mla_backend.vllm_plugin import versions
from tests.ops.test_rotate_queries import random_queries
from tests.plugin.test_backend import made_on_a_gpu


@pytest.fixture
def make_layer(backend, monkeypatch):
    return lambda: made_on_a_gpu(backend, monkeypatch)


def model_with(monkeypatch, parameters: str):
    """vLLM's model of DeepSeek-V3.2, whose function for queries returns its arguments."""
    names = ", ".join(one.split("=")[0] for one in parameters.split(", "))
    model = SimpleNamespace(fused_q=eval(f"lambda {parameters}: [{names}]"))
    monkeypatch.setitem(sys.modules, versions.V32_ATTENTION, model)
    return model


FUSED_Q = ", ".join(versions.FUSED_Q[:-3]) + ", has_indexer=True, index_rope_interleave=False, quantize_mqa=True"


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


@pytest.mark.parametrize(("parameters", "capability"), [(FUSED_Q + ", more=None", 90), (FUSED_Q, 100)])
def test_another_function_for_queries_stays(make_layer, monkeypatch, parameters, capability):
    """One of unknown arguments, and the one for Blackwell."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "has_device_capability", lambda self, least: capability >= least)
    model = model_with(monkeypatch, parameters)
    theirs = model.fused_q
    make_layer()
    assert model.fused_q is theirs


def test_the_arguments_of_vllms_function_for_queries_are_known():
    path = Path(importlib.util.find_spec("vllm").origin).parent / "models/deepseek_v32/common/kernels.py"
    if not path.is_file():
        pytest.skip("this vLLM has no such function")
    found = [one for one in ast.parse(path.read_text()).body if getattr(one, "name", None) == "fused_q"]
    assert [tuple(argument.arg for argument in one.args.args) for one in found] == [versions.FUSED_Q]
