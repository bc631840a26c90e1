"""Sequences get the blocks they need, share what they have in common, and leave nothing behind."""

import pytest
import torch

import kv_cache
from kv_cache import CacheManager, OutOfBlocks
from mla_backend import FORMATS, KEY_FORMATS

STORAGE = kv_cache.Storage(kv_cache.Layout(1, 2, FORMATS["bf16"]), 3)


def admitted(manager, tokens, **options):
    """A sequence whose tokens are all in the cache."""
    sequence = manager.sequence(tokens, **options)
    hits = manager.admit(sequence)
    manager.commit(sequence, len(sequence) - hits)
    return sequence


def test_names_differ_from_manager_to_manager():
    one, two = (CacheManager(2, 2).sequence([1, 2]).names(1) for _ in range(2))
    assert one != two and len(one[0]) == 16


def test_free_blocks_that_are_found_count_as_taken():
    manager = CacheManager(3, 2)
    manager.release(admitted(manager, range(5)))
    assert manager.statistics().free == 3
    longer = manager.sequence(range(7))
    with pytest.raises(OutOfBlocks, match="4 more blocks are needed; 3 of 3 are free"):
        manager.admit(longer)
    assert manager.admit(longer, 2) == 4


def test_the_watermark_holds_new_sequences_back_but_not_the_first():
    manager = CacheManager(10, 1, watermark=0.2)
    first = manager.sequence(range(9))
    manager.admit(first)  # leaves one free
    with pytest.raises(OutOfBlocks, match="3 more"):
        manager.admit(manager.sequence([50]))
    manager.allocate(first, 10)  # growing is what the blocks are kept for


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    manager = CacheManager(4, 2)
    manager.release(admitted(manager, range(8)))
    other = manager.sequence([99])
    manager.admit(other)
    assert manager.cached(manager.sequence(range(9))) == 6


def test_forks_share_until_one_of_them_writes():
    storage = kv_cache.Storage(kv_cache.Layout(2, 4, FORMATS["bf16"], KEY_FORMATS["bf16"]), 6)
    manager = CacheManager(6, 4, storage=storage)
    sequence = admitted(manager, range(6))
    storage.latent.copy_(torch.randn(storage.latent.shape))
    storage.keys.copy_(torch.randn(storage.keys.shape))
    fork = manager.fork(sequence)
    assert fork.blocks == sequence.blocks and fork.tokens == sequence.tokens and fork.computed == 6
    manager.allocate(fork)
    assert fork.blocks[0] == sequence.blocks[0] and fork.blocks[1] != sequence.blocks[1]
    for cache in (storage.latent, storage.keys):
        assert torch.equal(cache[:, fork.blocks[1]], cache[:, sequence.blocks[1]])
    last = sequence.blocks[1]
    manager.allocate(sequence)
    assert sequence.blocks[1] == last  # no other sequence has it any more
    assert manager.statistics().copied_blocks == 1


def test_a_fork_does_not_write_into_a_block_that_others_can_find():
    """Room was there before the fork, and the block is full and found before the fork gets to it."""
    manager = CacheManager(6, 4)
    sequence = manager.sequence([1, 2, 3, 4])
    manager.admit(sequence)
    manager.commit(sequence, 3)
    fork = manager.fork(sequence)
    manager.commit(sequence, 1)
    block = sequence.blocks[0]
    manager.release(sequence)
    manager.allocate(fork)
    assert fork.blocks[0] != block
    assert manager.cached(manager.sequence([1, 2, 3, 4, 5])) == 4


def test_statistics_say_what_happened():
    manager = CacheManager(4, 2)
    manager.release(admitted(manager, range(5)))
    sequence = admitted(manager, range(5))
    now = manager.statistics()
    assert (now.blocks, now.free, now.findable, now.sequences) == (4, 1, 2, 1)
    assert (now.asked_tokens, now.hit_tokens, now.hit_rate, now.usage) == (10, 4, 0.4, 0.75)
    manager.release(sequence)
    admitted(manager, range(50, 57))
    assert manager.statistics().evictions == 2
    assert CacheManager(1, 1).statistics().hit_rate == 0


def test_tables_have_a_row_for_each_sequence():
    manager = CacheManager(9, 2)
    one, two = admitted(manager, range(5)), admitted(manager, [50])
    table = kv_cache.block_table([one, two, manager.sequence([1])])
    assert table.dtype == torch.int32
    assert table.tolist() == [list(one.blocks), [two.blocks[0], -1, -1], [-1, -1, -1]]
    assert kv_cache.block_table([]).shape == (0, 0) and kv_cache.block_table([manager.sequence([1])]).shape == (1, 0)
    manager.allocate(one, 3)
    slots = kv_cache.slot_mapping([one, two], [3, 1]).tolist()
    assert slots == [one.blocks[2] * 2 + 1, one.blocks[3] * 2, one.blocks[3] * 2 + 1, two.blocks[0] * 2 + 1]
    assert kv_cache.slot_mapping([], []).tolist() == []


def held():
    manager = CacheManager(4, 2)
    return manager, admitted(manager, [1, 2, 3])


def not_computed():
    manager = CacheManager(4, 2)
    manager.admit(sequence := manager.sequence([1, 2, 3]))
    return manager, sequence


def released():
    manager, sequence = held()
    manager.release(sequence)
    return manager, sequence


def foreign():
    return CacheManager(4, 2), held()[1]


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: CacheManager(0, 1), ValueError, "blocks must be 1 or more; got 0"),
        (lambda: CacheManager(1, 0), ValueError, "block_size must be 1 or more; got 0"),
        (lambda: CacheManager(1, 1, watermark=1), ValueError, "watermark must be at least 0 and less than 1; got 1"),
        (lambda: CacheManager(1, 1, watermark="1"), TypeError, "watermark must be a number; got str"),
        (lambda: CacheManager(1, 1, storage=1), TypeError, "storage must be a kv_cache.Storage; got int"),
        (lambda: CacheManager(1, 1, host_bytes=-1), ValueError, "host_bytes must be 0 or more"),
        (lambda: CacheManager(1, 1, host_bytes=9), ValueError, "storage must be given with host_bytes"),
        (lambda: CacheManager(1, 1, storage=STORAGE), ValueError, "storage must have 1 blocks of 1 tokens; got 3 of 2"),
        (lambda: held()[0].sequence([]), ValueError, "tokens must be 1 or more; got none"),
        (lambda: held()[0].sequence(["a"]), TypeError, "tokens must be ints of 32 bits"),
        (lambda: held()[0].sequence(5), TypeError, "tokens must be ints of 32 bits"),
        (lambda: held()[0].sequence([2**31]), TypeError, "tokens must be ints of 32 bits"),
        (lambda: held()[0].sequence([1], salt=5), TypeError, "salt must be a str or bytes; got int"),
        (lambda: held()[0].admit("x"), TypeError, "sequence must be a kv_cache.Sequence; got str"),
        (lambda: call("admit", held()), ValueError, "sequence must hold no blocks; it holds 2"),
        (lambda: call("cached", held()), ValueError, "sequence must hold no blocks; it holds 2"),
        (lambda: call("admit", released(), 0), ValueError, "count must be 1 or more; got 0"),
        (lambda: call("allocate", held(), 0), ValueError, "count must be 1 or more; got 0"),
        (lambda: call("allocate", held(), 1.5), TypeError, "count must be an int; got float"),
        (lambda: call("commit", held(), 1), ValueError, "count must be at most 0, the tokens that are known"),
        (lambda: call("commit", held(), -1), ValueError, "count must be 1 or more; got -1"),
        (lambda: call("release", released()), ValueError, "it was released, or never admitted"),
        (lambda: call("allocate", released()), ValueError, "it was released, or never admitted"),
        (lambda: call("commit", released()), ValueError, "it was released, or never admitted"),
        (lambda: call("fork", released()), ValueError, "it was released, or never admitted"),
        (lambda: call("fork", not_computed()), ValueError, "sequence must have computed tokens to be forked"),
        (lambda: call("release", foreign()), ValueError, "sequence must be this manager's"),
        (lambda: call("admit", foreign()), ValueError, "sequence must be this manager's"),
        (lambda: call("allocate", foreign()), ValueError, "sequence must be this manager's"),
        (lambda: held()[0].release(7), TypeError, "sequence must be a kv_cache.Sequence; got int"),
        (lambda: kv_cache.slot_mapping([held()[1]], [2]), ValueError, "counts must have room: 0 to 1 tokens; got 2"),
        (lambda: kv_cache.slot_mapping([held()[1]], [1, 1]), ValueError, "counts must be 1 numbers, one a sequence"),
        (lambda: kv_cache.slot_mapping([held()[1]], None), TypeError, "counts must be a sequence of ints; got None"),
        (lambda: kv_cache.slot_mapping(None, [1]), TypeError, "sequences must be a sequence of kv_cache.Sequence"),
        (lambda: kv_cache.block_table([3]), TypeError, "sequences must be a sequence of kv_cache.Sequence; got one of"),
    ],
)
def test_wrong_calls_are_refused(call, kind, text):
    with pytest.raises(kind) as error:
        call()
    assert text in str(error.value)


def call(method, manager_and_sequence, *arguments):
    manager, sequence = manager_and_sequence
    return getattr(manager, method)(sequence, *arguments)


@pytest.mark.parametrize("token", ["x", 1.0, 2**31])
def test_wrong_tokens_are_not_appended(token):
    sequence = admitted(CacheManager(4, 2), [1])
    with pytest.raises(TypeError, match="tokens must be ints of 32 bits; got "):
        sequence.append(2, token)
    assert len(sequence) == 1
