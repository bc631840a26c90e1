"""The indexer's keys: written in every format, and read by the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_backend import KEY_FORMATS, reference, write_keys

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def new_cache(name, blocks, block_size, device="cpu"):
    fmt = KEY_FORMATS[name]
    return torch.zeros(blocks, block_size, fmt.width, dtype=fmt.dtype, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_keys_lie_as_vllm_lays_them(device):
    """In a block first the values of all tokens, then their scales, which are powers of two."""
    cache = new_cache("fp8", 3, 4, device)
    keys = torch.randn(12, 128) * torch.exp(torch.randn(12, 1) * 3)
    keys[3] = 0
    write_keys(keys.to(device), cache, torch.arange(12, device=device))
    for block in range(3):
        flat = cache[block].cpu().flatten()
        values = flat[: 4 * 128].view(torch.float8_e4m3fn).view(4, 128).float()
        scales = flat[4 * 128 :].view(torch.float32)
        mine = keys[4 * block : 4 * block + 4]
        assert torch.equal(scales, torch.exp2(torch.ceil(torch.log2(mine.abs().amax(1).clamp(min=1e-4) / 448))))
        assert torch.equal(values, (mine / scales.unsqueeze(1)).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_keys_have_the_bytes_that_vllm_writes(device, dtype):
    """By another way: the nearest of all 16 numbers, of two equally near ones that with an even code."""
    keys = torch.randn(60, 4, 32) * torch.exp(torch.randn(60, 4, 1) * 20)
    keys[:16] = torch.arange(-64, 64).view(4, 32) / 8 * torch.exp2(torch.arange(16) * 17 - 140.0).view(16, 1, 1)  # ties
    keys[16], keys[17, 1], keys[18, 2, 3] = 0, -0.0, -torch.inf
    keys = keys.to(dtype)
    cache = new_cache("mxfp4_68", 3, 20, device)
    write_keys(keys.flatten(1).to(device), cache, torch.arange(60, device=device))
    exact = keys.double()
    ratio = (exact.abs().amax(2).clamp(6 * 2.0**-126, 3.4e38).float() * (1 / 6)).double()
    powers = torch.ceil(torch.log2(ratio))
    scaled = (exact / torch.exp2(powers).unsqueeze(2)).clamp(-6, 6)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the first of equal ones wins
    codes = order[(scaled.abs().unsqueeze(-1) - values[order]).abs().min(-1).indices] + 8 * torch.signbit(exact)
    flat = cache.cpu().view(3, -1)
    assert torch.equal(flat[:, : 20 * 64].reshape(60, 4, 16), (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8))
    assert torch.equal(flat[:, 20 * 64 :].reshape(60, 4), (powers + 127).to(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", KEY_FORMATS)
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_keys_come_back_as_exactly_as_their_format_can(device, keys, block_size):
    cache = new_cache(keys, 4, block_size, device)
    slots = torch.randperm(4 * block_size, device=device)[: 2 * block_size + 1]
    written = torch.randn(len(slots), 128, device=device).bfloat16()
    write_keys(written, cache, slots.int())
    got = reference.dequantise_keys(cache).flatten(0, 1)
    amax = written.abs().amax(1, keepdim=True)
    allowed = {"bf16": 0, "fp8": written.abs() / 16 + amax / 448 * 2**-8, "mxfp4_68": written.abs() / 5 + amax / 12}
    assert ((got[slots] - written).abs() <= allowed[keys]).all()
    others = torch.ones(len(got), dtype=torch.bool, device=device).index_fill(0, slots, False)
    assert (got[others] == 0).all()


@pytest.mark.parametrize("keys", KEY_FORMATS)
@given(slots=st.lists(st.integers(-3, 8), max_size=6, unique=True), wide=st.booleans())
def test_keys_without_a_slot_leave_every_byte_alone(keys, slots, wide):
    cache = new_cache(keys, 2, 3)
    cache.view(torch.uint8)[:] = 77
    before = reference.dequantise_keys(cache).flatten(0, 1).clone()
    written = torch.randn(len(slots), 128)
    write_keys(written, cache, torch.tensor(slots, dtype=torch.int64 if wide else torch.int32))
    after = reference.dequantise_keys(cache).flatten(0, 1)
    for slot in range(6):
        if slot in slots:
            assert torch.allclose(after[slot], written[slots.index(slot)], atol=1.0 if keys == "mxfp4_68" else 0.2)
        else:
            assert torch.equal(after[slot], before[slot])


@pytest.mark.parametrize("fmt", ["fp8", "mxfp4_68"])
def test_infinite_and_missing_keys_disturb_nobody(fmt):
    cache = new_cache(fmt, 1, 2)
    keys = torch.ones(2, 128)
    keys[0, 5], keys[0, 6] = torch.inf, torch.nan
    write_keys(keys, cache, torch.tensor([0, 1]))
    assert torch.equal(reference.dequantise_keys(cache)[0, 1], torch.ones(128))
    write_keys(keys[:0], cache, torch.tensor([], dtype=torch.int64))
