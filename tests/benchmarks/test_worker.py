"""The requests that workers get, what a worker measures, and how workers are interleaved."""

import dataclasses
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_benchmarks.run import engine, rounds, worker, workloads
from serving_benchmarks.run.workloads import Workload


class OneTokenAStep:
    """An engine that gives each request a token in each step."""

    sees_steps = True

    def __init__(self, lie: int = 0):
        self.left: dict[str, int] = {}
        self.given: dict[str, int] = {}
        self.most, self.passes, self.lie = 0, 0, lie

    def forget_prefixes(self):
        self.passes += 1

    def counters(self):
        return self.passes, None, None

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
    told, words = io.StringIO(), io.StringIO("go\n" * (3 + warmup))
    measured = OneTokenAStep()
    spec = {"rounds": 3, "warmup": warmup, "requests": False}
    events = rounds.Events(told, words)
    found = worker.measure(measured, Workload([[1]] * 3, [4, 2, 3]), 2, spec, events)
    asked = [json.loads(line) for line in told.getvalue().splitlines()]
    assert [event.get("round") for event in asked] == [None] * warmup + [0, 1, 2]
    assert len(found["rounds_s"]) == 3 and found["total_output_tokens"] == 9 and "requests" not in found
    assert found["preemptions"] == 3, "what is counted begins after the warm-up"


@dataclasses.dataclass(eq=False)
class Waiting:
    """A worker that wants so many rounds."""

    wants: int
    done: int = 0

    @property
    def asks(self):
        return {"round": self.done} if self.done < self.wants else None

    def go(self):
        self.done += 1
        return self.done


@given(st.lists(st.integers(0, 4), max_size=4))
def test_rounds_go_there_and_back_until_no_worker_waits(wanted):
    workers = list(map(Waiting, wanted))
    had = [workers.index(one) for one, _ in rounds.interleaved(workers)]
    rows = [[index for index, wants in enumerate(wanted) if wants > number] for number in range(4)]
    assert had == [index for number, row in enumerate(rows) for index in row[:: -1 if number % 2 else 1]]


TOKENS = list(range(2, 50))


def test_random_prompts_are_the_same_each_time_and_have_nothing_in_common():
    config = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": None}
    assert workloads.usable_tokens(config) == [2, 3, 4, 6, 7, 8, 9]
    one, same, other = (workloads.fixed(5, 40, 3, TOKENS, seed=seed) for seed in (1, 1, 2))
    assert one == same != other and one.output_lens == [3] * 5 and {*map(len, one.prompts)} == {40}
    assert {len(prompt) for prompt in one.prompts} == {40} and set().union(*one.prompts) <= set(TOKENS)
    assert len({tuple(prompt[:20]) for prompt in one.prompts}) == 5
    few = workloads.fixed(2, 40, 3, TOKENS, seed=1)
    assert few.prompts == one.prompts[:2] and len(few) == 2


@given(st.integers(1, 40000))
def test_sizes_of_steps_are_the_round_numbers_up_to_the_most_and_those_beside_them(most):
    sizes = workloads.step_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    round_ones = {n << power for n in (1, 3) for power in range(16)}
    for less in (0, 1, 4, 12):
        assert {n - less for n in round_ones if 1 <= n - less <= most} <= set(sizes)
    assert len(sizes) <= 8 * most.bit_length()


@given(st.data(), st.integers(2, 700), st.integers(1, 70))
def test_requests_for_sizes_of_steps_have_these_sizes_and_keep_to_the_limits(data, longest_request, in_flight):
    most = data.draw(st.integers(1, min(5000, in_flight * (longest_request - 1))))
    made = workloads.of_step_sizes(most, in_flight, longest_request, TOKENS, seed=3)
    for requests in made:
        totals = map(sum, zip(map(len, requests.prompts), requests.output_lens, strict=True))
        assert max(totals) <= longest_request and min(requests.output_lens) >= 1
        assert min(map(len, requests.prompts)) >= 1 and set().union(*requests.prompts) <= set(TOKENS)
    # where there are several, the first one is there for the others to come in meanwhile
    steps = [requests.prompts[len(requests) > 1 :] for requests in made]
    assert max(map(len, steps)) <= in_flight
    decode = steps.pop() if in_flight > 1 else None
    assert [sum(map(len, prompts)) for prompts in steps] == workloads.step_sizes(most)
    assert all((len(prompts) == 1) == (sum(map(len, prompts)) < longest_request) for prompts in steps)
    if decode:
        assert len(decode) == in_flight
    long = [tuple(prompt[:64]) for requests in made for prompt in requests.prompts if len(prompt) >= 64]
    assert len(set(long)) == len(long), "nothing is found in the prefix cache"
    assert workloads.of_step_sizes(most, in_flight, longest_request, TOKENS, seed=3) == made
