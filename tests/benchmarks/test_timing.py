"""The one timer: what is derived from rounds, and how candidates are interleaved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.ops.timing import Timing, cpu_clock, interleaved


def test_quartiles_of_few_rounds_lie_between_them():
    assert Timing.of([6, 1]) == Timing(1, 3.5, 2.25, 4.75, 2)
    assert Timing.of([1, 2, 9]) == Timing(1, 2, 1.5, 5.5, 3)


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30))
def test_quartiles_lie_within_what_was_measured(samples):
    found = Timing.of(samples)
    ordered = [found.fastest, found.lower_quartile, found.median, found.upper_quartile, max(samples)]
    assert found.fastest == min(samples) and found.rounds == len(samples)
    assert all(one <= other or one == pytest.approx(other) for one, other in zip(ordered, ordered[1:], strict=False))


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
