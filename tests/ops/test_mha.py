"""Attention of many heads over ragged sequences: FlashMLA's functions, and who computes them."""

import inspect
import math
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend.flash_mla as flash_mla
from mha_problems import assert_accurate, mha_problems, random_mha
from mla_backend import doctor, mha, mha_providers
from mla_backend.mha_providers import PROVIDERS, Call, Problem

HOPPER = (9, 0)
TRAINING = Problem(HOPPER, backward=True, deterministic=True)


def with_only(*names):
    """A `why_missing` where these are installed."""
    return lambda name: None if name in names else "not installed"


@given(mha_problems())
def test_any_problem_and_its_gradients_agree_with_float64(problem):
    problem.check()


@given(mha_problems())
def test_without_gradients_it_is_the_same(problem):
    out, lse, *_ = problem.solve()
    plain, plain_lse = problem.solve(gradients=False)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse) and not plain.requires_grad


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 1)])
def test_longer_sequences(heads, kv_heads, dim, causal):
    """The cases of FlashMLA's own test, shorter."""
    for lengths, keys in (((256, 256), (256, 256)), ((57, 300), (190, 411))):
        random_mha(lengths, keys, heads=heads, kv_heads=kv_heads, dim=dim, causal=causal).check()


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


def test_strided_inputs_give_the_same():
    problem = random_mha((9, 4), (12, 4))
    strided = {name: getattr(problem, name).transpose(0, 1).contiguous().transpose(0, 1) for name in "qkv"}
    assert_accurate(problem.but(**strided).solve(), problem.oracle())


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


@given(st.data())
def test_the_first_provider_that_can_is_chosen(data):
    installed = data.draw(st.sets(st.sampled_from(list(PROVIDERS)))) | {"sdpa"}
    capability = data.draw(st.sampled_from([None, (7, 5), (8, 0), (9, 0), (10, 0), (12, 0)]))
    problem = Problem(capability, data.draw(st.booleans()), data.draw(st.booleans()))
    can = [name for name in PROVIDERS if name in installed and PROVIDERS[name].refuses(problem) is None]
    if can:
        assert mha.choose(problem, with_only(*installed)) == can[0]
        assert all(mha.choose(problem, with_only(*installed), name) == name for name in can)
    for name in set(PROVIDERS) - set(can):
        with pytest.raises(ValueError, match=f"^provider must be one that can do this; got '{name}'"):
            mha.choose(problem, with_only(*installed), name)


def test_everything_but_deterministic_training_on_a_gpu_runs_with_torch_alone():
    for capability in (None, (8, 0), HOPPER):
        for backward in (False, True):
            for deterministic in (False, True):
                problem = Problem(capability, backward, deterministic)
                if capability and backward and deterministic:
                    with pytest.raises(ValueError, match="^deterministic must be False .* pip install"):
                        mha.choose(problem, with_only("sdpa"))
                else:
                    assert mha.choose(problem, with_only("sdpa")) == "sdpa"


def test_without_a_gpu_no_other_library_is_imported():
    def imported(name):
        assert name == "sdpa"

    assert mha.choose(Problem(None, True, True), imported) == "sdpa"


def test_each_provider_says_what_is_missing():
    for name, provider in PROVIDERS.items():
        why = mha_providers.why_missing(name)
        assert why is None or "not installed" in why or provider.package in why


def test_the_argument_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("MLA_BACKEND_MHA", "cudnn")
    with pytest.raises(ValueError, match="^the environment variable MLA_BACKEND_MHA: provider must be one that"):
        random_mha((3,)).solve()
    random_mha((3,)).check(provider="sdpa")
    random_mha((3,)).check(provider="auto")
    monkeypatch.setenv("MLA_BACKEND_MHA", "sdpa")
    random_mha((3,)).check()


def test_torchs_own_setting_asks_for_determinism(monkeypatch):
    asked = []
    monkeypatch.setattr(mha, "chosen", lambda problem, provider: asked.append(problem) or "sdpa")
    torch.use_deterministic_algorithms(True)
    try:
        random_mha((3,)).solve()
    finally:
        torch.use_deterministic_algorithms(False)
    random_mha((3,)).solve(gradients=False)
    assert asked == [Problem(None, True, True), Problem(None, False, False)]


def flash_attn_of(problem, **takes):
    """A function that flash-attn packages have: it checks the sequences that it gets, and returns lse by heads."""

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, deterministic, **more):
        assert cu_seqlens_q.diff().tolist() == list(problem.lengths) and max_seqlen_q == max(problem.lengths)
        assert cu_seqlens_k.diff().tolist() == list(problem.keys) and max_seqlen_k == max(problem.keys)
        assert deterministic and more == {"softmax_scale": problem.scale, "causal": problem.causal, **takes}
        out, lse = problem.oracle()[:2]
        return out.to(q.dtype), lse.float().T.contiguous()

    names = ("cu_seqlens_q", "max_seqlen_k", "deterministic", *takes)
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    flash_attn_varlen_func.__signature__ = inspect.Signature(parameters)
    return flash_attn_varlen_func


class FlashInfer:
    """The wrapper that FlashInfer has. Its lse is to base 2, by tokens."""

    problem = None

    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(self, qo_indptr, kv_indptr, *shape, causal, sm_scale, q_data_type):
        assert qo_indptr.diff().tolist() == list(self.problem.lengths)
        assert kv_indptr.diff().tolist() == list(self.problem.keys)
        assert shape == (4, 2, 192, 128) and (causal, sm_scale) == (self.problem.causal, self.problem.scale)

    def run(self, q, k, v, return_lse):
        out, lse = self.problem.oracle()[:2]
        return out.to(q.dtype), lse.float() / math.log(2)


@pytest.mark.parametrize(
    ("name", "module", "taken", "made"),
    [
        ("flash_attn_4", "flash_attn.cute", "flash_attn_varlen_func", lambda p: flash_attn_of(p, return_lse=True)),
        (
            "flash_attn_3",
            "flash_attn_interface",
            "flash_attn_varlen_func",
            lambda p: flash_attn_of(p, return_attn_probs=True),
        ),
        (
            "flashinfer",
            "flashinfer.prefill",
            "BatchPrefillWithRaggedKVCacheWrapper",
            lambda p: type("Wrapper", (FlashInfer,), {"problem": p}),
        ),
    ],
)
def test_other_libraries_are_called_as_they_want_it(monkeypatch, name, module, taken, made):
    problem = random_mha((5, 0, 9), (5, 3, 12), heads=4, kv_heads=2)
    given = problem.arguments()
    cu = given["cu_seqlens_qo"], given["cu_seqlens_kv"]
    package = module.split(".")[0]
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{taken: made(problem)}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))
    call = Call(*cu, 9, 12, problem.scale, problem.causal, True, True)
    out, lse = PROVIDERS[name].load()(problem.q, problem.k, problem.v, call)
    assert lse.is_contiguous()
    assert_accurate((out, lse.T), problem.oracle())


def test_an_older_version_says_what_it_lacks(monkeypatch):
    old = types.SimpleNamespace(flash_attn_varlen_func=lambda q, k, v, cu_seqlens_q: None)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", old)
    mha_providers._loaded.cache_clear()
    why = mha_providers.why_missing("flash_attn_4")
    mha_providers._loaded.cache_clear()
    assert why.startswith("flash-attn-4 does not import") and "deterministic, max_seqlen_k, return_lse" in why


class Cudnn:
    """Stands for cuDNN's ops, which leave rows garbage that see nothing, or that nothing sees."""

    def __init__(self, problem):
        self.problem = problem
        out, lse, *self.gradients = problem.oracle()
        self.unseeing = (lse == -torch.inf).all(1)
        seen = zip(problem.lengths, problem.keys, strict=True)
        self.unseen = torch.tensor([not queries for queries, keys in seen for _ in range(keys)], dtype=torch.bool)
        self.out, self.lse = self.with_garbage(out, self.unseeing), self.with_garbage(lse, self.unseeing)

    def with_garbage(self, x, rows):
        x = x.clone()
        x[rows] = torch.nan
        return x

    def check_options(self, causal_bottom_right, is_causal, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv):
        assert is_causal == self.problem.causal
        if self.problem.lengths != self.problem.keys:
            assert causal_bottom_right == is_causal
        assert cu_seqlens_q.diff().tolist() == list(self.problem.lengths)
        assert cu_seqlens_kv.diff().tolist() == list(self.problem.keys)

    def sdpa_fwd(self, q, k, v, attn_scale, return_lse, **options):
        self.check_options(**options)
        return self.out.to(q.dtype), self.lse.float().unsqueeze(2)

    def sdpa_bwd(self, d_out, q, k, v, out, lse, attn_scale, is_deterministic, **options):
        self.check_options(**options)
        assert is_deterministic and not out.isnan().any() and lse.isfinite().all()
        rows = (self.unseeing, self.unseen, self.unseen)
        return tuple(self.with_garbage(x, r).to(q.dtype) for x, r in zip(self.gradients, rows, strict=True))


@given(mha_problems(longest=9))
def test_cudnn_gets_no_lengths_on_the_host_and_rows_that_see_nothing_are_filled_in(problem):
    if not len(problem.q) or not len(problem.k):
        return
    given = problem.arguments()
    leaves = [given[name].requires_grad_() for name in "qkv"]
    cu = given["cu_seqlens_qo"], given["cu_seqlens_kv"]
    call = Call(*cu, max(problem.lengths), max(problem.keys), problem.scale, problem.causal, True, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.ops, "cudnn", Cudnn(problem), raising=False)
        out, lse = mha_providers._Cudnn.apply(*leaves, call, lambda lse, cu, longest: lse)
        gradients = torch.autograd.grad(out, leaves, problem.d_out)
    assert_accurate((out, lse.T, *gradients), problem.oracle())


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
