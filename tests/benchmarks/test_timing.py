"""The one timer: what is derived from rounds, and how candidates are interleaved. Times that a profiler sees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.ops.timing import Timing, cpu_clock, interleaved
from serving_benchmarks.results.kernel_times import own_times


def test_quartiles_of_few_rounds_lie_between_them():
    assert Timing.of([6, 1]) == Timing(1, 3.5, 2.25, 4.75, 2)
    assert Timing.of([1, 2, 9]) == Timing(1, 2, 1.5, 5.5, 3)


def test_each_candidate_is_timed_once_a_round():
    called = []

    def clock(name):
        return lambda number: called.append((name, number)) or number + 1.0

    timings = interleaved({"a": clock("a"), "b": clock("b")}, rounds=3, on_round=lambda: called.append("round"))
    assert called == [entry for n in range(3) for entry in (("a", n), ("b", n), "round")]
    assert timings == {name: Timing(1.0, 2.0, 1.5, 2.5, 3) for name in "ab"}


def test_the_first_call_of_a_burst_is_not_counted(monkeypatch):
    now = 0.0
    durations = iter([100.0, 3.0, 5.0])

    def call(number):
        nonlocal now
        assert number == 7
        now += next(durations)

    monkeypatch.setattr("serving_benchmarks.ops.timing.time.perf_counter", lambda: now)
    assert cpu_clock(call, burst_seconds=0)(7) == 4.0


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
