"""Evicted prefixes go to host memory and come back with the bytes they had."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kv_cache
from kv_cache import CacheManager, HostTier
from mla_backend import FORMATS, KEY_FORMATS
from tests.kv_cache.test_manager import admitted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUT = kv_cache.Layout(3, 4, FORMATS["fp8_ds_mla"], KEY_FORMATS["fp8"])


def random_storage(blocks, device="cpu", layout=LAYOUT):
    storage = kv_cache.Storage(layout, blocks, device)
    for part in storage.parts:
        part.copy_(torch.randint(-(2**31), 2**31 - 1, part.shape))
    return storage


def contents(storage, blocks):
    return [part[:, list(blocks)].cpu() for part in storage.parts]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_come_back_with_the_bytes_they_had(device):
    storage = random_storage(6, device)
    host = HostTier(storage, 4 * LAYOUT.block_bytes)
    was = contents(storage, [5, 0, 3])
    host.save([(b"a", 5), (b"b", 0), (b"c", 3)])
    for part in storage.parts:
        part.zero_()  # at once, as the device may go on without waiting
    assert len(host) == 3 and b"a" in host
    slots = host.take([b"c", b"a", b"b"])
    assert len(host) == 0 and b"a" not in host
    host.load(slots, [1, 2, 4])
    assert same(contents(storage, [2, 4, 1]), was)
    assert not any(part[:, [0, 3, 5]].any() for part in storage.parts)


@given(st.sampled_from(list(FORMATS)), st.sampled_from([1, 2, 61, 69]), st.integers(1, 3))
def test_blocks_of_every_format_come_back_whole(latent, block_size, layers):
    storage = random_storage(3, layout=kv_cache.Layout(layers, block_size, FORMATS[latent]))
    host = HostTier(storage, 2 * storage.layout.block_bytes)
    was = storage.latent[:, [2, 0]].clone()
    host.save([(b"a", 2), (b"b", 0)])
    storage.parts[0].zero_()
    host.load(host.take([b"a", b"b"]), [1, 2])
    assert torch.equal(storage.latent[:, [1, 2]].view(torch.uint8), was.view(torch.uint8))
    assert not storage.parts[0][:, 0].any()


@pytest.mark.parametrize("device", DEVICES)
def test_the_least_recently_saved_make_room(device):
    storage = random_storage(6, device)
    with pytest.raises(ValueError, match="host_bytes must be 9456 or more; got 100"):
        HostTier(storage, 100)
    host = HostTier(storage, 2 * LAYOUT.block_bytes + 1)
    assert host.blocks == 2
    host.save([(b"a", 0), (b"b", 1)])
    host.save([(b"a", 0), (b"c", 2)])
    assert [name in host for name in (b"a", b"b", b"c")] == [True, False, True]
    was = contents(storage, [4, 5])
    host.save([(bytes([i]), i) for i in range(6)])  # more than there is room for
    assert len(host) == 2 and bytes([4]) in host and bytes([5]) in host
    host.load(host.take([bytes([4]), bytes([5])]), [0, 1])
    assert same(contents(storage, [0, 1]), was)


def test_what_is_on_its_way_back_is_not_overwritten():
    storage = random_storage(4)
    host = HostTier(storage, LAYOUT.block_bytes)
    was = contents(storage, [0])
    host.save([(b"a", 0)])
    slots = host.take([b"a"])
    host.save([(b"b", 1)])
    assert b"b" not in host
    host.load(slots, [3])
    assert same(contents(storage, [3]), was)
    host.save([(b"b", 1)])
    assert b"b" in host


@pytest.mark.parametrize("device", DEVICES)
def test_evicted_prefixes_are_found_in_host_memory(device):
    storage = random_storage(4, device)
    manager = CacheManager(4, 4, storage=storage, host_bytes=8 * LAYOUT.block_bytes)
    sequence = admitted(manager, range(13))
    was = contents(storage, sequence.blocks[:3])
    manager.release(sequence)
    manager.release(admitted(manager, range(100, 116)))  # takes all blocks
    for part in storage.parts:
        part.zero_()
    assert manager.statistics().host_used == 3
    again = manager.sequence(range(13))
    assert manager.cached(again) == 12 == manager.admit(again)
    assert same(contents(storage, again.blocks[:3]), was)
    now = manager.statistics()
    assert now.host_hit_tokens == now.hit_tokens == 12 and now.host_used == 4  # of the other, which had to go
    assert manager.cached(manager.sequence(range(13))) == 12


def test_prefixes_may_lie_partly_on_the_device():
    storage = random_storage(4)
    manager = CacheManager(4, 4, storage=storage, host_bytes=8 * LAYOUT.block_bytes)
    sequence = admitted(manager, range(13))
    was = contents(storage, sequence.blocks[:3])
    manager.release(sequence)
    other = admitted(manager, range(100, 108))  # one blank block, and the prefix's last
    again = manager.sequence(range(13))
    assert manager.cached(again) == 12
    with pytest.raises(kv_cache.OutOfBlocks):
        manager.admit(again)
    manager.release(other)
    assert manager.admit(again) == 12 and manager.statistics().host_hit_tokens == 4
    assert same(contents(storage, again.blocks[:3]), was)


def test_host_memory_is_off_unless_asked_for():
    manager = CacheManager(2, 1, storage=kv_cache.Storage(kv_cache.Layout(1, 1, FORMATS["bf16"]), 2))
    manager.release(admitted(manager, [1, 2]))
    manager.release(admitted(manager, [3, 4]))
    assert manager.statistics().host_blocks == 0 and manager.cached(manager.sequence([1, 2])) == 0


@pytest.mark.gpu
def test_host_memory_of_a_gpu_is_pinned():
    host = HostTier(kv_cache.Storage(LAYOUT, 1, "cuda"), 3 * LAYOUT.block_bytes)
    assert all(part.is_pinned() for part in host._parts)
