"""The bytes of the cache: sizes, writing and reading in every format, copies of blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kv_cache
import mla_backend
from mla_backend import reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(
    ("latent", "keys", "token_bytes"),
    [("bf16", None, 1152), ("fp8_ds_mla", None, 656), ("fp8_ds_mla", "fp8", 656 + 132), ("bf16", "bf16", 1152 + 256)],
)
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_blocks_are_as_large_as_their_tokens(latent, keys, token_bytes, block_size):
    layout = kv_cache.Layout(layers=2, block_size=block_size, latent=latent, keys=keys)
    assert layout.token_bytes == 2 * token_bytes and layout.block_bytes == 2 * token_bytes * block_size
    assert layout.blocks_in(10 * layout.block_bytes) == 10
    assert layout.blocks_in(10 * layout.block_bytes - 1) == 9
    storage = kv_cache.Storage(layout, blocks=5)
    assert sum(part.nbytes for part in storage.parts) == 5 * layout.block_bytes
    assert mla_backend.format_of(storage.latent[0]) is mla_backend.FORMATS[latent]
    assert all(torch.count_nonzero(part) == 0 for part in storage.parts)


def test_how_many_blocks_of_a_model_fit_into_memory():
    layout = kv_cache.Layout(layers=61, block_size=64, keys="fp8")
    assert layout.blocks_in(100 * 2**30) == 107374182400 // 3076352 == 34903


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("latent", mla_backend.FORMATS)
def test_layers_are_written_and_read_on_their_own(device, latent):
    storage = kv_cache.Storage(kv_cache.Layout(3, 4, latent), 5, device)
    slots = torch.randperm(20)[:12].to(device)
    rows = [torch.randn(12, 576).bfloat16().to(device) for _ in range(3)]
    for layer, row in enumerate(rows):
        storage.write(layer, row[:, :512], row[:, 512:], slots)
    for layer, row in enumerate(rows):
        want = mla_backend.FORMATS[latent].new_cache(5, 4)
        reference.cache_write(row[:, :512].cpu(), row[:, 512:].cpu(), want, slots.cpu())
        assert torch.equal(storage.latent[layer].cpu(), want)
        assert torch.equal(storage.gather(layer, slots), mla_backend.cache_gather(storage.latent[layer], slots))


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_keys_lie_as_vllm_lays_them(device):
    """In a block first the values of all tokens, then their scales, which are powers of two."""
    storage = kv_cache.Storage(kv_cache.Layout(2, 4, keys="fp8"), 3, device)
    keys = torch.randn(12, 128) * torch.exp(torch.randn(12, 1) * 3)
    keys[3] = 0
    storage.write_keys(1, keys.to(device), torch.arange(12, device=device))
    assert torch.count_nonzero(storage.keys[0]) == 0
    for block in range(3):
        flat = storage.keys[1, block].cpu().flatten()
        values = flat[: 4 * 128].view(torch.float8_e4m3fn).view(4, 128).float()
        scales = flat[4 * 128 :].view(torch.float32)
        mine = keys[4 * block : 4 * block + 4]
        assert torch.equal(scales, torch.exp2(torch.ceil(torch.log2(mine.abs().amax(1).clamp(min=1e-4) / 448))))
        assert torch.equal(values, (mine / scales.unsqueeze(1)).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keys", kv_cache.KEY_FORMATS)
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_keys_come_back_as_exactly_as_their_format_can(device, keys, block_size):
    storage = kv_cache.Storage(kv_cache.Layout(1, block_size, keys=keys), 4, device)
    capacity = 4 * block_size
    slots = torch.randperm(capacity, device=device)[: capacity // 2 + 1]
    written = torch.randn(len(slots), 128, device=device).bfloat16()
    storage.write_keys(0, written, slots)
    got = storage.gather_keys(0, torch.cat([slots, torch.tensor([-1, capacity], device=device)]).int())
    assert torch.equal(got[-2:], torch.zeros(2, 128, device=device))
    allowed = 0 if keys == "bf16" else written.abs() / 16 + written.abs().amax(1, keepdim=True) / 448 * 2**-8
    assert ((got[:-2] - written).abs() <= allowed).all()


@pytest.mark.parametrize("keys", kv_cache.KEY_FORMATS)
@given(slots=st.lists(st.integers(-3, 8), max_size=6, unique=True), wide=st.booleans())
def test_keys_without_a_slot_leave_every_byte_alone(keys, slots, wide):
    storage = kv_cache.Storage(kv_cache.Layout(1, 3, keys=keys), 2)
    storage.keys.view(torch.uint8)[:] = 77
    before = storage.gather_keys(0, torch.arange(6))
    written = torch.randn(len(slots), 128)
    storage.write_keys(0, written, torch.tensor(slots, dtype=torch.int64 if wide else torch.int32))
    after = storage.gather_keys(0, torch.arange(6))
    for slot in range(6):
        if slot in slots:
            assert torch.allclose(after[slot], written[slots.index(slot)], atol=0.2)
        else:
            assert torch.equal(after[slot], before[slot])


def test_infinite_and_missing_keys_disturb_nobody():
    storage = kv_cache.Storage(kv_cache.Layout(1, 2, keys="fp8"), 1)
    keys = torch.ones(2, 128)
    keys[0, 5], keys[0, 6] = torch.inf, torch.nan
    storage.write_keys(0, keys, torch.tensor([0, 1]))
    assert torch.equal(storage.gather_keys(0, torch.tensor([1]))[0], torch.ones(128))
    storage.write_keys(0, keys[:0], torch.tensor([], dtype=torch.int64))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [3, 16])
@pytest.mark.parametrize("latent", mla_backend.FORMATS)
def test_copies_of_blocks_have_the_same_bytes_in_all_layers(device, latent, block_size):
    storage = kv_cache.Storage(kv_cache.Layout(3, block_size, latent, "fp8"), 6, device)
    for part in storage.parts:
        part.copy_(torch.randint(-(2**31), 2**31 - 1, part.shape))
    before = [part.clone() for part in storage.parts]
    storage.copy_blocks([0, 4, 5], [2, 0, 1])  # 0 is read before it is written
    for part, was in zip(storage.parts, before, strict=True):
        assert torch.equal(part, was[:, [4, 5, 0, 3, 4, 5]])
    storage.copy_blocks([], [])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: kv_cache.Layout(0), "layers must be 1 or more; got 0"),
        (lambda: kv_cache.Layout(1, 0), "block_size must be 1 or more; got 0"),
        (lambda: kv_cache.Layout(1, latent="fp4"), "latent must be one of bf16, fp8_ds_mla; got 'fp4'"),
        (lambda: kv_cache.Layout(1, keys="fp4"), "keys must be one of bf16, fp8 or None; got 'fp4'"),
        (lambda: kv_cache.Layout(1).blocks_in(-1), "capacity must be 0 or more; got -1"),
        (lambda: kv_cache.Storage(kv_cache.Layout(1), 0), "blocks must be 1 or more; got 0"),
        (lambda: small().copy_blocks([1], []), "targets must be 1 blocks"),
        (lambda: small().copy_blocks([1], [2]), "blocks must be 0 to 1; got [2]"),
        (lambda: small().gather_keys(0, torch.zeros(1, dtype=torch.int64)), "the layout has none"),
        (lambda: small("fp8").write_keys(0, torch.zeros(1, 64), torch.zeros(1).long()), "keys must be bf16 or fp32"),
        (lambda: small("fp8").write_keys(0, torch.zeros(1, 128), torch.zeros(1)), "slots must be int32 or int64"),
        (lambda: kv_cache.keys.gather_keys(torch.zeros(1, 1, 7), torch.zeros(1).long()), "cache must be of a known"),
    ],
)
def test_wrong_arguments_are_named(call, text):
    with pytest.raises(ValueError) as error:
        call()
    assert text in str(error.value)


def small(keys=None):
    return kv_cache.Storage(kv_cache.Layout(1, 2, keys=keys), 2)
