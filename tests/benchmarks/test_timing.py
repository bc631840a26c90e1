"""Timings of turns: what is derived from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.ops.timing import Timing


def test_quartiles_of_few_turns_lie_between_them():
    assert Timing.of([6, 1]) == Timing(1, 3.5, 2.25, 4.75, 2)
    assert Timing.of([1, 2, 9]) == Timing(1, 2, 1.5, 5.5, 3)


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30))
def test_quartiles_lie_within_what_was_measured(turns):
    found = Timing.of(turns)
    ordered = [found.fastest, found.lower_quartile, found.median, found.upper_quartile, max(turns)]
    assert found.fastest == min(turns) and found.turns == len(turns)
    assert all(one <= other or one == pytest.approx(other) for one, other in zip(ordered, ordered[1:], strict=False))
