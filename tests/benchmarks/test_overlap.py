"""The selection that repeats itself."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.run import overlap


@given(st.integers(0, 2**21), st.sampled_from([1, 7, 64, 128]), st.floats(0, 1))
def test_a_token_selects_all_that_it_sees_or_as_many_as_it_may_none_twice_and_itself(position, width, share):
    (row,) = overlap.selected(position, position + 1, width, share).tolist()
    valid = [one for one in row if one >= 0]
    assert len(valid) == len({*valid}) == min(position + 1, width) and max(valid) == position
    assert valid == row[: len(valid)]


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
def test_the_share_stays_from_token_to_token_and_is_what_a_cache_of_twice_the_width_finds(share):
    width, tokens = 256, 400
    rows = overlap.selected(4096, 4096 + tokens, width, share).tolist()
    kept = [len({*one} & {*other}) / width for one, other in zip(rows, rows[1:], strict=False)]
    assert max(kept) == min(kept) == pytest.approx(share, abs=0.01)
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in rows:
        hits += sum(one in cache for one in row)
        for one in row:
            cache[one] = None
            cache.move_to_end(one)
        while len(cache) > 2 * width:
            cache.popitem(last=False)
    assert hits / (tokens * width) == pytest.approx(share, abs=0.02)
