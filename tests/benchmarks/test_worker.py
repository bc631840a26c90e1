"""What a worker measures, which pieces of work it waits for, and how workers are interleaved."""

import dataclasses
import io
import json
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.run import engine, rounds, worker
from serving_benchmarks.run.workloads import Workload


class OneTokenAStep:
    """An engine that gives each request a token in each step."""

    def __init__(self, lie: int = 0):
        self.left: dict[str, int] = {}
        self.given: dict[str, int] = {}
        self.most, self.passes, self.lie = 0, 0, lie

    def forget_prefixes(self):
        self.passes += 1

    def counters(self):
        return engine.Counters(self.passes, None, None)

    def submit(self, id, prompt, new_tokens, *, streamed=False):
        self.left[id] = self.given[id] = new_tokens
        self.most = max(self.most, len(self.left))

    def step(self):
        self.left = {id: left - 1 for id, left in self.left.items()}
        ended = [id for id, left in self.left.items() if not left]
        for id in ended:
            del self.left[id]
        return [engine.Ended(id, None, self.given[id] - self.lie, None) for id in ended]


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (20, 9), (None, 9)])
def test_no_more_requests_are_in_flight_than_allowed(concurrency, most):
    measured, workload = OneTokenAStep(), Workload([[1]] * 9, [1, 2, 3, 1, 5, 1, 1, 2, 2])
    done = worker.run_round(measured, workload, concurrency)
    assert measured.most == most and done.requests["output_tokens"] == workload.output_lens
    assert all(0 < e2e <= done.elapsed for e2e in done.requests["e2e_s"]) and done.gaps == []


def test_a_request_that_ends_early_is_an_error():
    with pytest.raises(RuntimeError, match="request 0"):
        worker.run_round(OneTokenAStep(lie=1), Workload([[1]], [3]), None)


def test_gaps_between_tokens_are_those_of_the_steps_in_which_a_request_decodes():
    ends = [1.0, 3.0, 6.0, 10.0]
    # the first gets tokens in all steps, the second in the last two, the third only one, the fourth is not known
    found = worker.gaps_between_tokens(ends, [0.9, 5.9, 2.5, None], [3, 3, 1, 2])
    assert sorted(found) == [2.0, 3.0, 4.0, 4.0]


@pytest.mark.parametrize("warmup", [True, False])
def test_rounds_are_asked_for_and_their_results_told(warmup):
    told, words = io.StringIO(), io.StringIO("go\n" * (4 if warmup else 3) + "enough\n")
    measured = OneTokenAStep()
    spec = {"rounds": 2, "more_rounds": True, "warmup": warmup, "requests": False}
    events = rounds.Events(told, words)
    found = worker.measure(measured, Workload([[1]] * 3, [4, 2, 3]), {"concurrency": 2}, spec, events)
    asked = [json.loads(line) for line in told.getvalue().splitlines()]
    assert [event.get("round") for event in asked] == [None] * warmup + [0, 1, 2, 3]
    assert [event["optional"] for event in asked[warmup:]] == [False, False, True, True]
    assert len(found["rounds_s"]) == 3 and found["total_output_tokens"] == 9 and "requests" not in found
    assert found["preemptions"] == 3, "what is counted begins after the warm-up"


@dataclasses.dataclass(eq=False)
class Waiting:
    """A worker whose rounds last so long. It wants two of them, and asks for more."""

    lasts: float
    rounds: int = 0
    asks: dict | None = None

    def __post_init__(self):
        self.asks = {"round": self.rounds, "optional": self.rounds >= 2, "timed_s": self.rounds * self.lasts}

    def tell(self, word):
        self.rounds += word == rounds.GO
        self.__post_init__() if word == rounds.GO else setattr(self, "asks", None)
        return word


@given(st.lists(st.floats(0.1, 3), min_size=1, max_size=4), st.floats(0, 9))
def test_rounds_go_there_and_back_until_all_workers_have_been_timed_for_long_enough(lasts, seconds):
    workers = list(map(Waiting, lasts))
    had = [workers.index(one) for one, word in rounds.interleaved(workers, seconds) if word == rounds.GO]
    done, there = workers[0].rounds, list(range(len(workers)))
    assert had == [index for number in range(done) for index in there[:: -1 if number % 2 else 1]]
    assert done >= 2 and done * min(lasts) >= seconds and (done == 2 or (done - 1) * min(lasts) < seconds)


def test_of_several_workers_of_vllm_the_one_that_waited_least_is_profiled():
    first = ["cuda", 8, [["gemm", 8, 100.0], ["all_reduce", 8, 900.0]], {}]
    last = ["cuda", 8, [["gemm", 8, 110.0], ["all_reduce", 8, 20.0]], {}]
    asked = engine.VllmEngine.__new__(engine.VllmEngine)
    asked._llm = types.SimpleNamespace(collective_rpc=lambda method: list(map(json.dumps, (first, last))))
    assert asked.stop_profile() == engine.Profile(*last)
