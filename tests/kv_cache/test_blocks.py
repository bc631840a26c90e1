"""Blocks are free, held and findable as they should be, and what is wrong is refused."""

import pytest

from kv_cache import BlockPool, OutOfBlocks

A, B = b"a", b"b"


def named(pool, *names):
    blocks = pool.take(len(names))
    pool.name(blocks, names)
    return blocks


def test_all_blocks_can_be_taken_once():
    pool = BlockPool(5)
    assert sorted(pool.take(3) + pool.take(2)) == [0, 1, 2, 3, 4]
    assert pool.free == 0 and pool.take(0) == []


def test_too_many_are_refused_and_nothing_is_taken():
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(OutOfBlocks, match="3 more blocks are needed; 2 of 3 are free") as error:
        pool.take(3)
    assert (error.value.needed, error.value.free, pool.free) == (3, 2, 2)


def test_a_block_is_free_when_its_last_holder_releases_it():
    pool = BlockPool(1)
    [block] = pool.take(1)
    pool.share([block])
    pool.release([block])
    assert pool.free == 0
    pool.release([block])
    assert pool.free == 1


def test_released_prefixes_are_found_until_their_room_is_needed():
    pool = BlockPool(3)
    blocks = named(pool, A)
    pool.release(blocks)
    assert pool.free == 3 and pool.find([A]) == blocks
    pool.take(2)  # the blank ones
    assert pool.find([A]) == blocks and pool.evictions == 0
    pool.take(1)
    assert pool.find([A]) == [] and pool.evictions == 1


def test_the_least_recently_used_is_evicted_first():
    lost = []
    pool = BlockPool(3, lost.extend)
    first, second, third = named(pool, A, B, b"c")
    pool.release([second, first, third])
    pool.share([second])  # used again
    pool.release([second])
    assert [pool.take(1)[0] for _ in range(3)] == [first, third, second]
    assert lost == [(A, first), (b"c", third), (B, second)]


def test_prefixes_are_found_up_to_the_first_that_is_missing():
    pool = BlockPool(3)
    blocks = named(pool, A, B)
    assert pool.find([A, B, b"x", A]) == blocks and pool.find([b"x", A]) == [] and pool.find([]) == []


def test_the_next_block_of_a_name_is_found_when_the_first_is_gone():
    lost = []
    pool = BlockPool(3, lost.extend)
    one, two, three = named(pool, A, A, A)
    assert pool.find([A]) == [one] and pool.findable == 3
    pool.release([two])
    pool.release([one])
    assert pool.take(1) == [two] and pool.find([A]) == [one]
    assert pool.take(1) == [one] and pool.find([A]) == [three]
    assert not lost
    pool.release([three])
    assert pool.take(1) == [three] and pool.find([A]) == [] and lost == [(A, three)]


def test_blocks_may_be_written_by_a_sole_holder_while_nobody_finds_them():
    pool = BlockPool(2)
    block, other = pool.take(2)
    assert pool.writable(block)
    pool.share([block])
    assert not pool.writable(block) and pool.holders(block) == 2
    pool.release([block])
    assert pool.writable(block)
    pool.name([block], [A])
    assert not pool.writable(block) and pool.writable(other)


@pytest.mark.parametrize("method", ["release", "share"])
@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        ([0, 3], "{} is"),  # the second one is free and blank
        ([0, -1], "blocks must be 0 to 3; got -1"),
        ([4], "blocks must be 0 to 3; got 4"),
        ([0, 0], r"blocks must be different ones; got \[0, 0\]"),
    ],
)
def test_foreign_and_free_blocks_are_refused_and_nothing_changes(method, blocks, text):
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    with pytest.raises(ValueError, match=text.format(3)):
        getattr(pool, method)(blocks)
    assert [pool.holders(block) for block in range(4)] == [1, 1, 1, 0] and pool.free == 1


def test_a_findable_block_is_not_released_twice():
    pool = BlockPool(1)
    blocks = named(pool, A)
    pool.release(blocks)
    with pytest.raises(ValueError, match="blocks must be held to be released; 0 is free"):
        pool.release(blocks)


def test_names_are_given_once_and_to_held_blocks():
    pool = BlockPool(2)
    [block] = pool.take(1)
    with pytest.raises(ValueError, match="blocks must be held to be named"):
        pool.name([block, 1 - block], [A, A])
    pool.name([block], [A])
    with pytest.raises(ValueError, match="blocks must not have a name yet"):
        pool.name([block], [B])


def test_a_pool_needs_blocks():
    with pytest.raises(ValueError, match="blocks must be 1 or more; got 0"):
        BlockPool(0)
    with pytest.raises(TypeError, match="count must be an int"):
        BlockPool(1).take(0.5)
    with pytest.raises(ValueError, match="count must be 0 or more"):
        BlockPool(1).take(-1)
