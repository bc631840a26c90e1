"""Attention of many heads on a GPU: flash-attn-4 and torch, against float64 and as FlashMLA tests its own."""

import pytest
import torch
from hypothesis import given, settings

from gpu_checks import nothing_waits
from mha_problems import MhaProblem, attention, mha_problems, odd_layouts, random_mha, starts
from mla_backend import doctor, flash_mla, mha
from mla_backend.mha_providers import why_not

pytestmark = pytest.mark.gpu
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
WITHOUT_FLASH_ATTN_4 = why_not("flash_attn_4", CAPABILITY, deterministic_gradients=False)
needs_flash_attn_4 = pytest.mark.skipif(WITHOUT_FLASH_ATTN_4 is not None, reason=f"{WITHOUT_FLASH_ATTN_4}")
providers = pytest.mark.parametrize("provider", [pytest.param("flash_attn_4", marks=needs_flash_attn_4), "sdpa"])


@providers
@settings(max_examples=10)
@given(problem=mha_problems(longest=200, device="cuda"))
def test_any_problem_and_its_gradients_agree_with_float64(provider, problem):
    problem.check(provider=provider)


@providers
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "kv_heads"), [(torch.bfloat16, 3), (torch.float16, 1)])
@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize(
    ("lengths", "keys"),
    [((700, 1, 0, 129, 64), None), ((57, 0, 300, 64), (190, 64, 411, 1000)), ((300, 64, 7, 1), (64, 0, 7, 129))],
    ids=["equal", "longer", "shorter"],
)
def test_ragged_and_empty_sequences(provider, lengths, keys, dim, dtype, kv_heads, causal):
    more = {"dim": dim, "dtype": dtype, "causal": causal, "device": "cuda"}
    problem = random_mha(lengths, keys, heads=3, kv_heads=kv_heads, **more)
    problem.check(provider=provider)


@providers
@pytest.mark.parametrize("dim", [128, 192])
def test_packed_tensors(provider, dim):
    problem = random_mha((300, 0, 129), heads=4, dim=dim, device="cuda")
    qkv = torch.cat((problem.q, problem.k, problem.v), dim=2).requires_grad_()
    cu = starts(problem.lengths, "cuda")
    got = flash_mla.flash_attn_varlen_qkvpacked_func(
        qkv, cu, 300, dim, softmax_scale=problem.scale, causal=True, provider=provider
    )
    (gradient,) = torch.autograd.grad(got[0], qkv, problem.d_out)
    problem.check((*got, *gradient.split((dim, dim, 128), dim=2)))


@providers
@pytest.mark.parametrize("dim", [128, 192])
def test_inputs_and_gradients_in_any_layout(provider, dim):
    """Of the same shapes, one after the other: what is kept of the first must not be taken for the next."""
    problem = random_mha((300, 0, 129), heads=4, dim=dim, device="cuda")
    for names in (("d_out",), ("q", "k", "v"), ("q", "k", "v", "d_out")):
        layouts = {name: odd_layouts(getattr(problem, name)) for name in names}
        for layout in layouts[names[0]]:
            problem.but(**{name: layouts[name][layout] for name in names}).check(provider=provider)
            problem.check(provider=provider)
    for one in (problem.d_out[:1], problem.d_out[:, :, :1]):
        problem.but(d_out=one.expand_as(problem.d_out)).check(provider=provider)


@needs_flash_attn_4
@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_gradients_are_the_same_20_times(causal, dim, kv_heads):
    problem = random_mha((2048, 700), (2048, 1500), heads=16, kv_heads=kv_heads, dim=dim, causal=causal, device="cuda")
    options = {"provider": "flash_attn_4", "deterministic": True}
    first = problem.solve(**options)
    problem.check(first)
    for _ in range(20):
        again = problem.solve(**options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_determinism_that_is_not_kept_is_refused():
    with pytest.raises(ValueError, match="^provider must be one that can do this; got 'sdpa'.*deterministic=True"):
        random_mha((9,), device="cuda").solve(provider="sdpa", deterministic=True)


@needs_flash_attn_4
@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("keys", [(300, 0, 129), (300, 64, 500)])
def test_the_host_waits_for_nothing(keys, kv_heads):
    problem = random_mha((300, 0, 129), keys, kv_heads=kv_heads, device="cuda")
    arguments = problem.arguments()
    leaves = [arguments[name].requires_grad_() for name in "qkv"]

    def train():
        out, _ = flash_mla.flash_attn_varlen_func(**arguments, provider="flash_attn_4")
        return torch.autograd.grad(out, leaves, problem.d_out)

    train()  # kernels are compiled and loaded
    with nothing_waits():
        train()


def test_doctor_names_the_provider_that_is_taken():
    taken = doctor.examine()["mha"]["taken"]
    assert taken["all else"]["provider"] == mha.choose(CAPABILITY, False)


def flash_mlas_problem(mean: int, varlen: bool, heads: int, kv_heads: int, dim: int, causal: bool) -> MhaProblem:
    """Inputs as FlashMLA's test for sm_100 has them: small numbers, two sequences, at least as many keys as queries."""
    lengths = keys = (mean, mean)
    if varlen:
        spread = lambda: max(int(mean + mean / 2 * torch.randn(()).item()), 1)  # noqa: E731
        lengths = (spread(), spread())
        keys = tuple(max(spread(), length) for length in lengths)
    made = random_mha(lengths, keys, heads=heads, kv_heads=kv_heads, dim=dim, causal=causal, device="cuda")
    small = {name: getattr(made, name) / 10 for name in ("q", "k", "v", "d_out")}
    return made.but(**small, scale=(dim + 100) ** -0.5)


def sdpa_math(problem: MhaProblem, gradients: bool) -> list[torch.Tensor]:
    """out, lse and gradients in fp32, a few KV heads at a time, as whole scores are large."""
    group = problem.q.shape[1] // problem.k.shape[1]
    parts = []
    for first in range(0, problem.k.shape[1], max(8 // group, 1)):
        kv = slice(first, first + max(8 // group, 1))
        queries = slice(kv.start * group, kv.stop * group)
        leaves = [problem.q[:, queries], problem.k[:, kv], problem.v[:, kv]]
        leaves = [x.detach().float().requires_grad_(gradients) for x in leaves]
        out, lse = attention(*leaves, problem.lengths, problem.keys, problem.causal, problem.scale)
        d_out = problem.d_out[:, queries].float()
        parts.append([out.detach(), lse, *(torch.autograd.grad(out, leaves, d_out) if gradients else ())])
    return [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]


def assert_as_flash_mla_has_it(name, got, want):
    got, want = got.float(), want.float()
    off = (got - want).abs()
    if name == "lse":
        assert ((off < 1e-6) | (off / (want.abs() + 1e-6) < 2.01 / 65536)).all(), name
        return
    assert ((off < 1e-3) | (off / (want.abs() + 1e-6) < 8.01 / 128)).all(), name
    got, want = got.double(), want.double()
    assert 1 - 2 * (got * want).sum() / (got.square() + want.square()).sum() < 7e-6, name


@providers
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize(("heads", "kv_heads"), [(128, 128), (32, 4)])
@pytest.mark.parametrize("varlen", [False, True])
def test_the_cases_of_flash_mla(provider, device, varlen, heads, kv_heads, dim, causal):
    problem = flash_mlas_problem(4096, varlen, heads, kv_heads, dim, causal)
    gradients = heads == kv_heads
    got = problem.solve(provider=provider, gradients=gradients, is_varlen=varlen)
    for name, own, exact in zip(("out", "lse", "d_q", "d_k", "d_v"), got, sdpa_math(problem, gradients), strict=False):
        assert_as_flash_mla_has_it(name, own, exact)
    for _ in range(5):  # all but d_q, which may be added up in any order
        again = problem.solve(provider=provider, gradients=gradients, is_varlen=varlen)
        same = [torch.equal(a, b) for a, b in zip(got, again, strict=True)]
        assert all(same[:2] + same[3:])
