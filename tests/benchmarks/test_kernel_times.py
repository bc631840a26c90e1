"""Times of kernels, as a profiler sees them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.results.kernel_times import own_times

spans = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 20)), max_size=20)


@given(spans)
def test_own_times_are_together_the_time_in_which_anything_ran(kernels):
    ran = {tick for _, begin, ticks in kernels for tick in range(begin, begin + ticks)}
    found = own_times((name, begin, begin + ticks) for name, begin, ticks in kernels)
    assert sum(time for *_, time in found) == len(ran)
    assert sum(calls for _, calls, _ in found) == len(kernels)


def test_a_kernel_that_began_early_is_not_charged_for_its_waiting():
    found = own_times([("attention", 0.0, 100.0), ("merge", 2.0, 103.0), ("next", 110.0, 115.0)])
    assert found == [("attention", 1, 100.0), ("merge", 1, pytest.approx(3.0)), ("next", 1, 5.0)]
