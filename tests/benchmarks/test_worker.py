"""The requests that workers get, what a worker measures, and how workers are interleaved."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from serving_benchmarks.run import engine, worker, workloads


class OneTokenAStep:
    """An engine that gives each request a token in each step."""

    sees_steps = True

    def __init__(self, lie: int = 0):
        self.left: dict[str, int] = {}
        self.given: dict[str, int] = {}
        self.most, self.lie = 0, lie

    def forget_prefixes(self):
        pass

    def submit(self, id, prompt, new_tokens, *, streamed=False):
        self.left[id] = self.given[id] = new_tokens
        self.most = max(self.most, len(self.left))

    def step(self):
        self.left = {id: left - 1 for id, left in self.left.items()}
        ended = [id for id, left in self.left.items() if not left]
        for id in ended:
            del self.left[id]
        return [engine.Ended(id, None, self.given[id] - self.lie) for id in ended]


@pytest.mark.parametrize(("concurrency", "most"), [(1, 1), (3, 3), (20, 9), (None, 9)])
def test_no_more_requests_are_in_flight_than_allowed(concurrency, most):
    measured = OneTokenAStep()
    done = worker.run_round(measured, [[1]] * 9, 3, concurrency)
    assert measured.most == most and done.output_tokens == [3] * 9 and done.input_tokens == [1] * 9
    assert all(0 < e2e <= done.elapsed for e2e in done.e2e_s) and done.gaps == []


def test_a_request_that_ends_early_is_an_error():
    with pytest.raises(RuntimeError, match="request 0"):
        worker.run_round(OneTokenAStep(lie=1), [[1]], 3, None)


def test_gaps_between_tokens_are_those_of_the_steps_in_which_a_request_decodes():
    ends = [1.0, 3.0, 6.0, 10.0]
    # the first gets tokens in all steps, the second in the last two, the third only one, the fourth is not known
    found = worker.gaps_between_tokens(ends, [0.9, 5.9, 2.5, None], [3, 3, 1, 2])
    assert sorted(found) == [2.0, 3.0, 4.0, 4.0]


def test_random_prompts_are_the_same_each_time_and_have_nothing_in_common():
    config = {"vocab_size": 10, "bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": None}
    assert workloads.usable_tokens(config) == [2, 3, 4, 6, 7, 8, 9]
    tokens = list(range(2, 50))
    one, same, other = (workloads.random_prompts(5, 40, tokens, seed=seed) for seed in (1, 1, 2))
    assert one == same != other and {*map(len, one)} == {40} and set().union(*one) <= set(tokens)
    assert len({tuple(prompt[:20]) for prompt in one}) == 5
    assert workloads.random_prompts(2, 40, tokens, seed=1) == one[:2]


def test_rows_from_the_host_are_counted_once_for_layers_that_share_a_selection(monkeypatch):
    theirs = SimpleNamespace(_METRICS_INTERVAL=2000)
    monkeypatch.setitem(
        sys.modules, "vllm.distributed.kv_transfer.kv_connector.v1.hisparse", SimpleNamespace(worker=theirs)
    )
    first, second = (SimpleNamespace(swap_stats=torch.tensor(counts)) for counts in ([30, 10], [5, 1]))
    pairs = ((first, True), (first, False), (second, True))
    layers = [
        SimpleNamespace(
            hisparse_cache=SimpleNamespace(runtime=SimpleNamespace(index_group=group, is_group_leader=leads))
        )
        for group, leads in pairs
    ]
    layers += [SimpleNamespace(hisparse_cache=None), SimpleNamespace()]
    measured = engine.MeasuredWorker()
    measured.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict(enumerate(layers)))
    )
    assert json.loads(measured.measured_host_rows()) == {"hot": 35, "from_host": 11, "groups": 2}
    assert json.loads(measured.measured_host_rows()) == {"hot": 0, "from_host": 0, "groups": 2}, "since the last call"
    measured.vllm_config.compilation_config.static_forward_context = {"a": layers[-1]}
    assert json.loads(measured.measured_host_rows()) is None
