"""Attention of many heads over ragged sequences: FlashMLA's functions, and who computes them."""

import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend.flash_mla as flash_mla
from mha_problems import assert_accurate, attention, mha_problems, odd_layouts, random_mha
from mla_backend import doctor, mha, mha_providers
from mla_backend.mha_providers import PROVIDERS

LAYOUTS = list(odd_layouts(torch.zeros(1, 1, 1)))


@given(mha_problems())
def test_any_problem_and_its_gradients_agree_with_float64(problem):
    problem.check()


@given(mha_problems())
def test_without_gradients_it_is_the_same(problem):
    out, lse, *_ = problem.solve()
    plain, plain_lse = problem.solve(gradients=False)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and not plain.requires_grad


@given(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20), st.booleans())
def test_equal_lengths_need_not_be_looked_up(batch, length, keys, causal):
    problem = random_mha((length,) * batch, (keys,) * batch, causal=causal)
    problem.check(is_varlen=False)


@pytest.mark.parametrize("packed", ["qkv", "kv"])
@pytest.mark.parametrize("dim", [128, 192])
def test_packed_tensors_give_the_same(packed, dim):
    problem = random_mha((5, 0, 30), dim=dim)
    want = problem.solve()
    arguments = problem.arguments()
    q, k, v = (arguments.pop(name) for name in "qkv")
    if packed == "qkv":
        leaf = torch.cat((q, k, v), dim=2).requires_grad_()
        cu, longest = arguments.pop("cu_seqlens_qo"), arguments.pop("max_seqlen_qo")
        del arguments["cu_seqlens_kv"], arguments["max_seqlen_kv"]
        out, lse = flash_mla.flash_attn_varlen_qkvpacked_func(leaf, cu, longest, dim, **arguments)
        gradients = torch.cat(want[2:], dim=2)
    else:
        leaf = torch.cat((k, v), dim=2).requires_grad_()
        out, lse = flash_mla.flash_attn_varlen_kvpacked_func(q, leaf, head_dim_qk=dim, **arguments)
        gradients = torch.cat(want[3:], dim=2)
    out.backward(problem.d_out)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1]) and torch.equal(leaf.grad, gradients)


def test_the_scale_left_out_is_of_the_head_dimension():
    problem = random_mha((9, 4))
    assert torch.equal(problem.solve(softmax_scale=None)[0], problem.solve(softmax_scale=192**-0.5)[0])


def test_lse_is_laid_out_as_flash_mla_has_it_and_has_no_gradient():
    problem = random_mha((9, 4), heads=3)
    _, lse = problem.but(q=problem.q.requires_grad_()).solve()[:2]
    assert lse.shape == (13, 3) and lse.stride() == (1, 13) and lse.dtype == torch.float32
    assert not lse.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_and_gradients_in_any_layout(layout):
    problem = random_mha((9, 4), (12, 4), heads=3)
    for names in (("q", "k", "v"), ("d_out",)):
        problem.but(**{name: odd_layouts(getattr(problem, name))[layout] for name in names}).check()


def test_gradients_reach_inputs_of_which_nothing_is_seen():
    for lengths, keys in (((), ()), ((3,), (0,)), ((0,), (4,)), ((3, 0), (0, 4))):
        out, lse, *gradients = random_mha(lengths, keys).solve()
        assert not out.any() and (lse == -torch.inf).all() and not any(x.any() for x in gradients)


def test_only_what_is_asked_for_has_gradients():
    problem = random_mha((5, 3))
    k = problem.k.requires_grad_()
    out, _ = flash_mla.flash_attn_varlen_func(**problem.arguments() | {"k": k})
    out.backward(problem.d_out)
    assert_accurate((k.grad,), (problem.oracle()[3],))


def test_the_same_bits_every_time_on_a_cpu():
    problem = random_mha((70, 33), heads=4)
    first = problem.solve(deterministic=True)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, problem.solve(deterministic=True), strict=True))


def with_flash_attn_4(patch, found):
    """As if it were installed, or missing if `found` says why."""
    patch.setattr(mha_providers, "_flash_attn_4", lambda: found)


@given(
    st.booleans(), st.sampled_from([None, (7, 5), (8, 0), (9, 0), (10, 0), (11, 0), (12, 0), (13, 0)]), st.booleans()
)
def test_flash_attn_4_comes_first_where_it_runs(installed, capability, deterministic_gradients):
    able = {
        "flash_attn_4": installed and capability is not None and 9 <= capability[0] <= 11,
        "sdpa": capability is None or not deterministic_gradients,
    }
    with pytest.MonkeyPatch.context() as patch:
        with_flash_attn_4(patch, (lambda: None) if installed else "not installed")
        if any(able.values()):
            first = "flash_attn_4" if able["flash_attn_4"] else "sdpa"
            assert mha.choose(capability, deterministic_gradients) == first
            assert mha.choose(capability, deterministic_gradients, "auto") == first
        else:
            with pytest.raises(ValueError, match="^deterministic must be False .* pip install"):
                mha.choose(capability, deterministic_gradients)
        for name in PROVIDERS:
            if able[name]:
                assert mha.choose(capability, deterministic_gradients, name) == name
            else:
                with pytest.raises(ValueError, match=f"^provider must be one that can do this; got '{name}'"):
                    mha.choose(capability, deterministic_gradients, name)


def test_without_a_gpu_no_other_library_is_imported(monkeypatch):
    monkeypatch.setattr(mha_providers, "_flash_attn_4", None)
    random_mha((3,)).check(deterministic=True)


def test_the_argument_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_MHA", "flash_attn_4")
    with pytest.raises(ValueError, match="^the environment variable MLA_BACKEND_MHA: provider must be one that"):
        random_mha((3,)).solve()
    random_mha((3,)).check(provider="sdpa")
    random_mha((3,)).check(provider="auto")
    monkeypatch.setenv("MLA_BACKEND_MHA", "sdpa")
    random_mha((3,)).check()


def test_torchs_own_setting_asks_for_determinism(monkeypatch):
    asked = []
    monkeypatch.setattr(mha, "choose", lambda *problem: asked.append(problem) or "sdpa")
    torch.use_deterministic_algorithms(True)
    try:
        random_mha((3,)).solve()
        random_mha((3,)).solve(gradients=False)
    finally:
        torch.use_deterministic_algorithms(False)
    random_mha((3,)).solve()
    assert asked == [(None, True, None), (None, False, None), (None, False, None)]


def flash_attn_4_for(problem):
    """Stands for flash-attn-4's function. On Hopper its backward takes no groups of heads if keys are wider."""

    def flash_attn_varlen_func(q, k, v, **given):
        assert given.pop("cu_seqlens_q").diff().tolist() == list(problem.lengths)
        assert given.pop("cu_seqlens_k").diff().tolist() == list(problem.keys)
        want = {"max_seqlen_q": max(problem.lengths), "max_seqlen_k": max(problem.keys), "causal": problem.causal}
        assert given == want | {"softmax_scale": problem.scale, "deterministic": True, "return_lse": True}
        groups = q.shape[1] != k.shape[1]
        assert not (groups and q.shape[2] != v.shape[2] and any(x.requires_grad for x in (q, k, v)))
        doubles = (x.double() for x in (q, k, v))
        out, lse = attention(*doubles, problem.lengths, problem.keys, problem.causal, problem.scale)
        return out.to(q.dtype), lse.float().T.contiguous()

    return flash_attn_varlen_func


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dim", [128, 192])
def test_flash_attn_4_gets_what_it_takes(monkeypatch, dim, kv_heads, gradients):
    problem = random_mha((5, 0, 9), (5, 3, 12), heads=4, kv_heads=kv_heads, dim=dim)
    with_flash_attn_4(monkeypatch, flash_attn_4_for(problem))
    monkeypatch.setattr(mha, "choose", lambda *problem: "flash_attn_4")
    problem.check(gradients=gradients, deterministic=True)


def test_flash_attn_4_says_what_it_lacks(monkeypatch):
    def why():
        mha_providers._flash_attn_4.cache_clear()
        try:
            return mha_providers.why_not("flash_attn_4", (9, 0), False)
        finally:
            mha_providers._flash_attn_4.cache_clear()

    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    assert "flash_attn.cute is not installed" in why()
    old = types.SimpleNamespace(flash_attn_varlen_func=lambda q, k, v, cu_seqlens_q: None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", old)
    assert "deterministic, max_seqlen_k, return_lse" in why()


def test_doctor_says_who_takes_what(monkeypatch):
    report = doctor.examine()
    assert {taken["provider"] for taken in report["mha"]["taken"].values()} == {"sdpa"}
    (verdict,) = [v for v in report["can_run"] if "192/128" in v["what"]]
    assert verdict["runs"] and f"sdpa {torch.__version__}" in verdict["why"]
    monkeypatch.setenv("MLA_BACKEND_MHA", "flash_attn_4")
    (verdict,) = [v for v in doctor.examine()["can_run"] if "192/128" in v["what"]]
    assert not verdict["runs"] and "flash_attn_4: runs on GPUs only" in verdict["why"]


def test_torch_compile_leaves_it_out_of_its_graph():
    problem = random_mha((5, 0, 9), (5, 3, 12))
    arguments = problem.arguments()
    q = arguments.pop("q").requires_grad_()
    doubled = torch.compile(lambda q: flash_mla.flash_attn_varlen_func(q, **arguments)[0] * 2, backend="eager")
    out = doubled(q)
    (gradient,) = torch.autograd.grad(out, q, problem.d_out / 2)
    assert_accurate((out / 2, *problem.oracle()[1:2], gradient), problem.oracle())
