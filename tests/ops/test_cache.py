"""Writing and reading the paged cache, and turning positions into slots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import reference
from problems import FORMATS


def bits(x):
    return x.contiguous().view(torch.uint8)


@st.composite
def tokens_to_write(draw):
    """Latent and rope values from tiny to huge, some zero, NaN or infinite, of either dtype."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    n = draw(st.integers(0, 20))
    latent = torch.randn(n, 512) * torch.exp(
        torch.randn(n, 4) * draw(st.sampled_from([0.0, 2.0, 30.0]))
    ).repeat_interleave(128, 1)
    rope = torch.randn(n, 64) * 10
    special = draw(st.sampled_from([None, 0.0, torch.inf, -torch.inf, torch.nan]))
    if special is not None and n:
        latent[torch.rand(n, 512) < draw(st.sampled_from([0.01, 0.9]))] = special
        rope[torch.rand(n, 64) < 0.1] = special
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return latent.to(dtype), rope.to(dtype)


@pytest.mark.parametrize("fmt", FORMATS)
@given(tokens=tokens_to_write(), data=st.data())
def test_writing_has_the_bits_of_the_oracle(fmt, tokens, data):
    blocks, block_size = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([1, 3, 16]))
    slots = torch.randperm(blocks * block_size + 10)[: len(tokens[0])] - 5  # some outside of the cache
    tokens = [t[: len(slots)] for t in tokens]
    power_of_two = data.draw(st.booleans())
    cache = torch.randint(0, 255, (blocks, block_size, mla_backend.FORMATS[fmt].token_bytes), dtype=torch.uint8)
    cache = cache.view(mla_backend.FORMATS[fmt].dtype)
    want = cache.clone()
    reference.cache_write(*tokens, want, slots, power_of_two)
    mla_backend.cache_write(
        *tokens, cache, slots.to(data.draw(st.sampled_from([torch.int32, torch.int64]))), power_of_two=power_of_two
    )
    assert torch.equal(bits(cache), bits(want))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_group_of_zeros_has_a_usable_scale(power_of_two):
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(1, 1)
    mla_backend.cache_write(
        torch.zeros(1, 512), torch.zeros(1, 64), cache, torch.tensor([0]), power_of_two=power_of_two
    )
    scales = cache[0, 0, 512:528].view(torch.float32)
    assert (scales == torch.finfo(torch.float32).tiny).all()
    assert (mla_backend.cache_gather(cache, torch.tensor([0])) == 0).all()


def test_infinity_saturates_and_leaves_other_groups_alone():
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(1, 1)
    latent = torch.randn(1, 512)
    latent[0, 5], latent[0, 6] = torch.inf, -torch.inf
    mla_backend.cache_write(latent, torch.zeros(1, 64), cache, torch.tensor([0]))
    rows = reference.dequantise(cache[0])
    assert rows.isfinite().all() and rows[0, 5] > 3.3e38 and rows[0, 6] < -3.3e38
    assert torch.allclose(rows[0, 128:512], latent[0, 128:], atol=0.2)


def test_nan_stays_nan_and_its_group_keeps_its_scale():
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(1, 1)
    latent = torch.randn(1, 512)
    latent[0, 7] = torch.nan
    mla_backend.cache_write(latent, torch.zeros(1, 64), cache, torch.tensor([0]))
    rows = reference.dequantise(cache[0])
    assert rows[0, 7].isnan() and rows.isnan().sum() == 1


@given(st.integers(0, 2**31))
def test_powers_of_two_are_powers_of_two_and_never_smaller(seed):
    torch.manual_seed(seed)
    latent = torch.randn(3, 512) * torch.exp(torch.randn(3, 1) * 20)
    scales = []
    for power_of_two in (False, True):
        cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(1, 3)
        mla_backend.cache_write(latent, torch.zeros(3, 64), cache, torch.arange(3), power_of_two=power_of_two)
        scales.append(cache[0, :, 512:528].contiguous().view(torch.float32))
    mantissas, _ = torch.frexp(scales[1])
    assert (mantissas == 0.5).all()
    assert (scales[1] >= scales[0]).all() and (scales[1] < 2 * scales[0]).all()


def test_quantisation_error_is_that_of_e4m3():
    latent = torch.randn(64, 512)
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(4, 16)
    mla_backend.cache_write(latent, torch.zeros(64, 64), cache, torch.arange(64))
    got = mla_backend.cache_gather(cache, torch.arange(64))[:, :512].float()
    largest = latent.view(64, 4, 128).abs().amax(-1).repeat_interleave(128, 1)
    assert ((got - latent).abs() <= latent.abs() / 15 + largest / 448 * 2**-9).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_skipped_tokens_leave_every_byte_alone(fmt):
    cache = mla_backend.FORMATS[fmt].new_cache(2, 4)
    bits(cache)[:] = 77
    slots = torch.tensor([-1, -9, 8, 2**40, -(2**40)])
    mla_backend.cache_write(torch.randn(5, 512), torch.randn(5, 64), cache, slots)
    assert (bits(cache) == 77).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_strided_sources_and_caches(fmt):
    source = torch.randn(6, 700).bfloat16()
    padded = torch.zeros(4, 5, mla_backend.FORMATS[fmt].width + 8, dtype=mla_backend.FORMATS[fmt].dtype)
    cache = padded[:, :3, :-8]
    slots = torch.tensor([11, 0, 5, 3, 7, -1])
    mla_backend.cache_write(source[:, 3:515], source[:, 600:664], cache, slots)
    want = mla_backend.FORMATS[fmt].new_cache(4, 3)
    reference.cache_write(source[:, 3:515], source[:, 600:664], want, slots)
    assert torch.equal(bits(cache), bits(want))
    assert (padded[:, 3:] == 0).all() and (padded[..., -8:] == 0).all()


def test_rope_may_have_a_head_dimension():
    a, b = (mla_backend.FORMATS["bf16"].new_cache(1, 4) for _ in range(2))
    kv_c, k_pe = torch.randn(4, 512).bfloat16(), torch.randn(4, 1, 64).bfloat16()
    mla_backend.cache_write(kv_c, k_pe, a, torch.arange(4))
    mla_backend.cache_write(kv_c, k_pe.squeeze(1), b, torch.arange(4))
    assert torch.equal(a, b)


@pytest.mark.parametrize("fmt", FORMATS)
@given(seed=st.integers(0, 2**31), n=st.integers(0, 50), wide=st.booleans())
def test_gathered_rows_are_the_dequantised_ones(fmt, seed, n, wide):
    torch.manual_seed(seed)
    cache = mla_backend.FORMATS[fmt].new_cache(5, 7)
    mla_backend.cache_write(torch.randn(35, 512), torch.randn(35, 64), cache, torch.arange(35))
    slots = torch.randint(-3, 40, (n,), dtype=torch.int64 if wide else torch.int32)
    out = torch.full((n, 600), torch.nan).bfloat16()[:, 10:586]
    assert mla_backend.cache_gather(cache, slots, out=out) is out
    want, _ = reference.cache_rows(cache, slots)
    assert torch.equal(bits(out), bits(want.bfloat16()))


@given(st.data())
def test_positions_become_slots(data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    requests, max_blocks = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 9))
    tokens, topk = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 40))
    block_size = data.draw(st.sampled_from([1, 3, 64]))
    table = torch.randint(-1, 1000, (requests, max_blocks), dtype=torch.int32)
    positions = torch.randint(-3, max_blocks * block_size + 5, (tokens, topk), dtype=torch.int32)
    request_ids = torch.randint(-1, requests + 1, (tokens,), dtype=torch.int32)
    compact = data.draw(st.booleans())
    got = mla_backend.convert_indices(
        positions,
        table,
        request_ids,
        block_size,
        compact=compact,
        slots=torch.full((tokens, topk), -7, dtype=torch.int32),
    )
    want = reference.convert_indices(positions, table, request_ids, block_size, compact)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_slot_that_does_not_fit_32_bits_is_no_slot():
    table = torch.tensor([[2**31 - 1, 2**24]], dtype=torch.int32)
    slots, counts = mla_backend.convert_indices(
        torch.tensor([[1, 128, 5]], dtype=torch.int32), table, torch.zeros(1, dtype=torch.int32), 64
    )
    assert slots.tolist() == [[-1, -1, -1]] and counts.tolist() == [0]


def test_compact_counts_serve_as_lengths():
    from problems import assert_accurate, random_problem

    problem = random_problem(tokens=3, heads=2, topk=50)
    table = torch.randperm(8).int().view(1, 8)
    positions = torch.randint(-20, 8 * 16 + 20, (3, 50), dtype=torch.int32)
    requests = torch.zeros(3, dtype=torch.int32)
    plain, _ = mla_backend.convert_indices(positions, table, requests, 16)
    compact, counts = mla_backend.convert_indices(positions, table, requests, 16, compact=True)
    assert_accurate(problem.but(indices=compact, topk_length=counts).solve(), problem.but(indices=plain).oracle())
