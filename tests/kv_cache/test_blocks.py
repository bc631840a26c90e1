"""Blocks are free, held and findable as they should be, and what is wrong is refused."""

import pytest

from kv_cache import BlockPool

A, B = b"a", b"b"


def named(pool, *names):
    blocks = pool.take(len(names))
    pool.name(blocks, names)
    return blocks


def test_the_least_recently_used_is_evicted_first():
    lost = []
    pool = BlockPool(3, lost.extend)
    first, second, third = named(pool, A, B, b"c")
    pool.release([second, first, third])
    pool.share([second])  # used again
    pool.release([second])
    assert [pool.take(1)[0] for _ in range(3)] == [first, third, second]
    assert lost == [(A, first), (b"c", third), (B, second)]


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
