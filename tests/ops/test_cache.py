"""Writing and reading the paged cache, and turning positions into slots."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import reference
from problems import FORMATS, all_bytes, copy_with_gaps, random_cache

GAPS = (0, 16, 8, 1)
"""Elements more from a page, or from a row where a format allows that, to the next one. Of bytes 8, and of all 1, make
rows that no 16-byte access may touch."""


def bits(x):
    return x.contiguous().view(torch.uint8)


def tokens_for(fmt, n, dtype=torch.float32):
    """Latent and rope values, the latter None where the format has none."""
    rows = reference.FORMATS[fmt]
    return torch.randn(n, rows.latent).to(dtype), torch.randn(n, rows.rope).to(dtype) if rows.rope else None


@st.composite
def tokens_to_write(draw, fmt):
    """Latent and rope values from tiny to huge, some zero, NaN or infinite, of either dtype."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    rows, n = reference.FORMATS[fmt], draw(st.sampled_from([0, 1, 7, 8, 9, 20, 1000]))
    group = rows.group or 64
    spread = draw(st.sampled_from([0.0, 2.0, 30.0]))
    latent, rope = tokens_for(fmt, n)
    latent *= torch.exp(torch.randn(n, rows.latent // group) * spread).repeat_interleave(group, 1)
    values = [latent] if rope is None else [latent, rope * 10]
    special = draw(st.sampled_from([None, 0.0, torch.inf, -torch.inf, torch.nan]))
    if special is not None and n:
        for value, share in zip(values, (draw(st.sampled_from([0.01, 0.9])), 0.1), strict=False):
            value[torch.rand(value.shape) < share] = special
    dtype = draw(st.sampled_from([torch.float32, rows.number]))
    return values[0].to(dtype), None if rope is None else values[1].to(dtype)


def strided(values, gap):
    """The same rows, with `gap` elements between them."""
    return None if values is None else torch.nn.functional.pad(values, (0, gap))[:, : values.shape[1]]


def cache_with_gaps(draw, fmt, blocks, block_size):
    """A cache of random values with any gap between its pages, and between its rows where the format allows that."""
    form, gap = mla_backend.FORMATS[fmt], draw(st.sampled_from(GAPS))
    cache = random_cache(fmt, blocks, block_size, gap=gap)
    if form.scales_at == "end_of_page" or draw(st.booleans()):
        return cache
    wide = torch.full((blocks, block_size + 1, form.width + gap), 255, dtype=torch.uint8).to(form.dtype)
    wide[:, :block_size, : form.width] = cache
    return wide[:, :block_size, : form.width]


@pytest.mark.parametrize("fmt", FORMATS)
@given(data=st.data())
def test_writing_has_the_bits_of_the_oracle(device, fmt, data):
    values, between = data.draw(tokens_to_write(fmt)), data.draw(st.sampled_from([0, 0, 8, 1]))
    blocks, block_size = data.draw(st.sampled_from([(0, 1), (6, 1), (3, 16), (2, 61), (70, 16), (400, 3)]))
    slots = torch.randperm(blocks * block_size + 20)[: len(values[0])] - 10  # some outside of the cache
    values = [strided(v if v is None else v[: len(slots)], between) for v in values]
    slots = slots.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    power_of_two, name = data.draw(st.booleans()), data.draw(st.sampled_from([None, fmt]))
    scale = data.draw(st.sampled_from([1.0, 0.037, -3e5])) if fmt.startswith("fp8_tensor") else 1.0
    want = cache_with_gaps(data.draw, fmt, blocks, block_size)
    cache = copy_with_gaps(want, device)
    reference.cache_write(*values, want, slots, power_of_two, format=fmt, scale=scale)
    there = [v if v is None else copy_with_gaps(v, device) for v in values]
    mla_backend.cache_write(*there, cache, slots.to(device), power_of_two=power_of_two, format=name, scale=scale)
    assert torch.equal(all_bytes(cache).cpu(), all_bytes(want)), "gaps and padding included"


@pytest.mark.parametrize("fmt", ["fp8_model1", "fp8_528"])
def test_scale_bytes_are_never_0_or_255_and_padding_is_0(fmt):
    rows = reference.FORMATS[fmt]
    sizes = torch.tensor([0.0, 1e-44, 1e-38, 1.0, 3e38, torch.inf, -torch.inf, torch.nan])
    kv_c, k_pe = sizes.view(8, 1) * torch.ones(rows.latent), torch.zeros(8, 64) if rows.rope else None
    cache = random_cache(fmt, 1, 8)
    mla_backend.cache_write(kv_c, k_pe, cache, torch.arange(8))
    tokens = cache[reference.token_address(rows, cache, torch.arange(8))]
    parts = rows.split(tokens)
    exponents = torch.tensor([1, 1, 1, 127 - 8, 127 + 120, 127 + 120, 127 + 120, 1], dtype=torch.uint8)
    assert torch.equal(parts["scales"], exponents.view(8, 1).expand_as(parts["scales"]))
    assert "padding" not in parts or not parts["padding"].any()


def nearest(x, values):
    """Which of the values is nearest to each x, of two equally near ones that with the even number."""
    even_first = torch.cat([torch.arange(0, len(values), 2), torch.arange(1, len(values), 2)])
    apart = (x.double().unsqueeze(-1) - values.double()).abs()
    return even_first[apart[..., even_first].argmin(-1)]


def test_nvfp4_rows_are_those_of_vllm(device):
    """Scales are e4m3(max(amax / 6, 2^-9)), and numbers rounded as cvt.rn.satfinite.e2m1x2.f32 does."""
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (e2m1[1:] + e2m1[:-1]) / 2
    ties = torch.cat([ties, -ties, torch.tensor([6.0, -0.0])])
    rows = torch.randn(64, 32, 16) * torch.exp2(torch.randint(-20, 20, (64, 32, 1)).float())
    rows[:8] = ties * torch.exp2(torch.arange(-14, 18).float()).unsqueeze(1)  # scales below 2^-9 and above 448, too
    rows[8] = ties * e4m3[20:52].unsqueeze(1)
    rows[9] = 6 * (e4m3[16:48] + e4m3[17:49]).unsqueeze(1) / 2  # scales between two e4m3 numbers
    rows[10], rows[11], rows[12], rows[13, :, 3] = 0.0, -0.0, 1e-40, -3e38
    rows[14, ::2, 5], rows[14, 1::2, 5], rows[15, :, 7] = torch.inf, -torch.inf, torch.nan
    rows[16:24] = rows[16:24].bfloat16()
    amax = rows.nan_to_num(0.0, torch.inf, -torch.inf).abs().amax(-1)
    scales = nearest((amax * (1 / 6)).clamp(2**-9, 448), e4m3)
    scaled = rows * (1 / e4m3[scales]).unsqueeze(-1)
    numbers = nearest(scaled.abs().nan_to_num(6.0).clamp(max=6), e2m1) + 8 * (scaled.signbit() & ~scaled.isnan())
    rope = torch.randn(64, 64)
    cache = mla_backend.FORMATS["nvfp4_352"].new_cache(4, 16, device)
    mla_backend.cache_write(rows.flatten(1).to(device), rope.to(device), cache, torch.arange(64, device=device))
    got = cache.view(64, 352).cpu()
    numbers = numbers.flatten(1)
    assert torch.equal(got[:, :256].int(), (numbers[:, ::2] + 16 * numbers[:, 1::2]).int())
    assert torch.equal(got[:, 256:320], rope.to(torch.float8_e4m3fn).view(torch.uint8))
    assert all(torch.equal(got[:, 320 + 8 * (s % 4) + s // 4].int(), scales[:, s].int()) for s in range(32))


@pytest.mark.parametrize("source", [torch.float32, torch.float16])
def test_numbers_of_fp16_rows(source):
    # to nearest, ties to even; too large is infinite; NaN is quiet, and one that is fp16 already keeps its bits
    rounded = {65519.0: 65504.0, 65520.0: torch.inf, -7e4: -torch.inf, 1 + 2**-11: 1.0, 1 + 3 * 2**-11: 1 + 2**-9}
    rounded |= {2**-25: 0.0, 1.5 * 2**-24: 2**-23, -(2**-26): -0.0}
    kv_c = torch.zeros(1, 512)
    kv_c[0, : len(rounded)] = torch.tensor(list(rounded))
    kv_c[0, 10] = torch.nan
    want = torch.zeros(1, 576).half()
    want[0, : len(rounded)] = torch.tensor(list(rounded.values())).half()
    want.view(torch.int16)[0, 10] = 0x7E00
    if source == torch.float16:
        kv_c, k_pe = want[:, :512].clone(), torch.zeros(1, 64).half()
        kv_c.view(torch.int16)[0, 10] = want.view(torch.int16)[0, 10] = 0x7C01
    else:
        k_pe = torch.zeros(1, 64)
    cache = mla_backend.FORMATS["fp16"].new_cache(1, 1)
    mla_backend.cache_write(kv_c, k_pe, cache, torch.tensor([0]))
    assert torch.equal(bits(cache[0]), bits(want))
    assert torch.equal(bits(mla_backend.cache_gather(cache, torch.tensor([0]))), bits(want))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_group_of_zeros_has_a_usable_scale(power_of_two):
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(1, 1)
    mla_backend.cache_write(
        torch.zeros(1, 512), torch.zeros(1, 64), cache, torch.tensor([0]), power_of_two=power_of_two
    )
    scales = cache[0, 0, 512:528].view(torch.float32)
    assert (scales == torch.finfo(torch.float32).tiny).all()
    assert (mla_backend.cache_gather(cache, torch.tensor([0])) == 0).all()


def test_infinity_saturates_nan_stays_and_other_groups_are_left_alone():
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(1, 2)
    latent = torch.randn(2, 512)
    latent[0, 5], latent[0, 6], latent[1, 7] = torch.inf, -torch.inf, torch.nan
    mla_backend.cache_write(latent, torch.zeros(2, 64), cache, torch.arange(2))
    infinite, missing = reference.dequantise(cache[0])
    assert infinite.isfinite().all() and infinite[5] > 3.3e38 and infinite[6] < -3.3e38
    assert torch.allclose(infinite[128:512], latent[0, 128:], atol=0.2)
    assert missing[7].isnan() and missing.isnan().sum() == 1


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
    cache = random_cache(fmt, 2, 4)
    before = all_bytes(cache).clone()
    slots = torch.tensor([-1, -9, 8, 2**40, -(2**40)])
    mla_backend.cache_write(*tokens_for(fmt, 5), cache, slots)
    assert torch.equal(all_bytes(cache), before)


def test_rope_may_have_a_head_dimension():
    a, b = (mla_backend.FORMATS["bf16"].new_cache(1, 4) for _ in range(2))
    kv_c, k_pe = torch.randn(4, 512).bfloat16(), torch.randn(4, 1, 64).bfloat16()
    mla_backend.cache_write(kv_c, k_pe, a, torch.arange(4))
    mla_backend.cache_write(kv_c, k_pe.squeeze(1), b, torch.arange(4))
    assert torch.equal(a, b)


@pytest.mark.parametrize("fmt", FORMATS)
@given(data=st.data())
def test_gathered_rows_are_the_dequantised_ones(device, fmt, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    form = mla_backend.FORMATS[fmt]
    cache = cache_with_gaps(data.draw, fmt, 50, 7)
    if data.draw(st.booleans()):  # every number there is, NaN too, and every scale
        cache.copy_(torch.randint(0, 256, (50, 7, form.token_bytes), dtype=torch.uint8).view(form.dtype))
    wide, n = data.draw(st.sampled_from([torch.int32, torch.int64])), data.draw(st.sampled_from([0, 1, 300]))
    slots, gap = torch.randint(-30, 380, (n,), dtype=wide), data.draw(st.sampled_from([0, 8, 3]))
    whole = torch.full((n, form.head_dim + gap), torch.nan, dtype=form.number, device=device)
    out = whole[:, : form.head_dim]
    more = {"format": data.draw(st.sampled_from([None, fmt])), "scale": -0.37 if form.scale == "tensor" else 1.0}
    assert mla_backend.cache_gather(copy_with_gaps(cache, device), slots.to(device), out=out, **more) is out
    got, want = out.cpu(), reference.cache_gather(cache, slots, **more)
    if device == "cuda" and form.scale != "none":  # there NaN times a scale is a NaN of either sign
        nan = want.isnan()
        assert torch.equal(got.isnan(), nan)
        got, want = got.masked_fill(nan, 0), want.masked_fill(nan, 0)
    assert torch.equal(bits(got), bits(want))
    assert whole[:, form.head_dim :].isnan().all(), "nothing beside the rows is written"


@given(st.data())
def test_positions_become_slots(device, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    requests, max_blocks = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 60))
    tokens, topk = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([0, 1, 40, 100, 1024, 2500, 2501]))
    block_size = data.draw(st.sampled_from([1, 3, 64, 1000, 2**25 + 1]))
    table = torch.randint(-1, 2**25 if block_size < 1000 else 2 * 60, (requests, max_blocks), dtype=torch.int32)
    positions = torch.randint(-3, max_blocks * block_size + 5, (tokens, topk), dtype=torch.int32)
    request_ids = torch.randint(-1, requests + 1, (tokens,), dtype=torch.int32)
    ranks, interleave = data.draw(st.sampled_from([1, 2, 5, 8])), data.draw(st.sampled_from([1, 4, 64, 1000]))
    how = dict(compact=data.draw(st.booleans()), ranks=ranks, interleave=interleave)
    how["rank"] = data.draw(st.integers(0, ranks - 1))
    slots = torch.full((tokens, topk), -7, dtype=torch.int32, device=device)
    there = (x.to(device) for x in (positions, table, request_ids))
    got = mla_backend.convert_indices(*there, block_size, **how, slots=slots)
    want = reference.convert_indices(positions, table, request_ids, block_size, **how)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


@given(ranks=st.integers(1, 9), interleave=st.integers(1, 70), start=st.sampled_from([0, 1000, 2**31 - 401]))
def test_each_position_has_a_slot_on_one_rank_and_a_rank_keeps_its_positions_in_order(ranks, interleave, start):
    positions = torch.arange(start, start + 400, dtype=torch.int32).view(1, -1)
    table, request = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    found = [
        mla_backend.convert_indices(positions, table, request, 2**31 - 1, ranks=ranks, rank=rank, interleave=interleave)
        for rank in range(ranks)
    ]
    assert sum(slots >= 0 for slots, _ in found).eq(1).all() and sum(counts for _, counts in found) == 400
    assert all((slots[slots >= 0].diff() == 1).all() for slots, _ in found)
