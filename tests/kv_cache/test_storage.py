"""The bytes of the cache: sizes, layers that lie apart, copies of blocks."""

import pytest
import torch

import kv_cache
import mla_backend
from commands import in_python
from mla_backend import FORMATS, KEY_FORMATS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16 = FORMATS["bf16"]


def layout_of(layers, block_size, latent, keys=None):
    return kv_cache.Layout(layers, block_size, FORMATS[latent], None if keys is None else KEY_FORMATS[keys])


def random_tokens(latent, count, device="cpu"):
    """What cache_write takes as kv_c and k_pe."""
    fmt = FORMATS[latent]
    rows = torch.randn(count, fmt.latent + fmt.rope, device=device).to(fmt.number)
    return rows[:, : fmt.latent], rows[:, fmt.latent :] if fmt.rope else None


@pytest.mark.parametrize(
    ("latent", "keys", "block_size", "block_bytes"),
    [
        ("bf16", None, 3, 3 * 1152),
        ("bf16", "bf16", 64, 64 * (1152 + 256)),
        ("fp8_ds_mla", None, 1, 656),
        ("fp8_ds_mla", "fp8", 64, 64 * (656 + 132)),
        ("bf16_512", None, 3, 3 * 1024),
        ("fp8_528", None, 3, 3 * 528),
        ("fp8_tensor_576", None, 3, 3 * 576),
        ("fp8_tensor_512", None, 3, 3 * 512),
        ("fp8_model1", None, 1, 2 * 576),
        ("fp8_model1", None, 2, 3 * 576),  # 1168 bytes, padded
        ("fp8_model1", "fp8", 64, 65 * 576 + 64 * 132),  # 37376 bytes, padded
        ("fp8_model1", None, 72, 72 * 584),  # a multiple of 576
    ],
)
def test_blocks_are_as_large_as_their_tokens_and_their_padding(latent, keys, block_size, block_bytes):
    layout = layout_of(2, block_size, latent, keys)
    assert layout.block_bytes == 2 * block_bytes
    assert layout.blocks_in(10 * layout.block_bytes) == 10
    assert layout.blocks_in(10 * layout.block_bytes - 1) == 9
    storage = kv_cache.Storage(layout, blocks=5)
    assert sum(part.nbytes for part in storage.parts) == 5 * layout.block_bytes
    assert mla_backend.format_of(storage.latent[0]) is FORMATS[latent]
    assert (storage.keys is None) == (keys is None)
    assert all(torch.count_nonzero(part) == 0 for part in storage.parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("latent", FORMATS)
@pytest.mark.parametrize("keys", KEY_FORMATS)
def test_layers_are_written_on_their_own(device, latent, keys):
    storage = kv_cache.Storage(layout_of(3, 4, latent, keys), 5, device)
    slots = torch.randperm(20)[:12].to(device)
    rows = [random_tokens(latent, 12, device) for _ in range(3)]
    caches = [FORMATS[latent].new_cache(5, 4, device) for _ in rows]
    key_caches = [torch.zeros_like(storage.keys[0]) for _ in rows]
    for layer, (kv_c, k_pe) in enumerate(rows):
        for one in (storage.latent[layer], caches[layer]):
            mla_backend.cache_write(kv_c, k_pe, one, slots, format=latent)
        for one in (storage.keys[layer], key_caches[layer]):
            mla_backend.write_keys(kv_c[:, :128].bfloat16(), one, slots)
    assert torch.equal(storage.latent, torch.stack(caches))
    assert torch.equal(storage.keys, torch.stack(key_caches))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 69])
@pytest.mark.parametrize("latent", FORMATS)
def test_copies_of_blocks_have_the_same_bytes_in_all_layers(latent, block_size, device):
    storage = kv_cache.Storage(layout_of(3, block_size, latent, "fp8"), 6, device)
    for part in storage.parts:
        part.copy_(torch.randint(-(2**31), 2**31 - 1, part.shape))
    before = [part.clone() for part in storage.parts]
    storage.copy_blocks([0, 4, 5], [2, 0, 1])  # 0 is read before it is written
    for part, was in zip(storage.parts, before, strict=True):
        assert torch.equal(part, was[:, [4, 5, 0, 3, 4, 5]])
    storage.copy_blocks([], [])


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: kv_cache.Layout(0, 1, BF16), ValueError, "layers must be 1 or more; got 0"),
        (lambda: kv_cache.Layout(1, 0, BF16), ValueError, "block_size must be 1 or more; got 0"),
        (lambda: kv_cache.Layout(1, 1.5, BF16), TypeError, "block_size must be an int; got float"),
        (lambda: kv_cache.Layout(1, 1, "bf16"), TypeError, "latent must be one of mla_backend.FORMATS; got 'bf16'"),
        (lambda: kv_cache.Layout(1, 1, BF16, "fp8"), TypeError, "keys must be one of mla_backend.KEY_FORMATS or None"),
        (lambda: kv_cache.Layout(1, 1, BF16).blocks_in(-1), ValueError, "capacity must be 0 or more; got -1"),
        (lambda: small(blocks=0), ValueError, "blocks must be 1 or more; got 0"),
        (lambda: small(device="gpu"), ValueError, "device must be an available device"),
        (lambda: small().copy_blocks([1], []), ValueError, "targets must be 1 blocks"),
        (lambda: small().copy_blocks([1], [2]), ValueError, "blocks must be 0 to 1; got [2]"),
    ],
)
def test_wrong_arguments_are_named(call, kind, text):
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)


def small(blocks=2, device="cpu"):
    return kv_cache.Storage(kv_cache.Layout(1, 2, BF16), blocks, device)


def test_the_cache_manager_does_not_need_the_ops():
    code = "import sys, kv_cache; print([name for name in sys.modules if name.split('.')[0] == 'mla_backend'])"
    done = in_python("-c", code)
    assert done.stdout.strip() == "[]"
