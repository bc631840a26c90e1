"""What Triton compiles while the clock runs is told, and what a round of several processes waits for is not taken for
work."""

import io
import json
import sys
import types

import pytest
from rich.console import Console
from serving_benchmarks.run.compilations import Compilations
from serving_benchmarks.run.worker_extension import MeasuredWorker

from serving_benchmarks.run import compilations, engines, throughput, throughput_worker
from serving_benchmarks.run.workloads import Workload
from tests.benchmarks.test_throughput import OneTokenAStep, Told


class Triton(types.ModuleType):
    """As much of it as whoever listens to its compiler sees."""

    def __init__(self):
        super().__init__("triton")
        self.knobs = types.SimpleNamespace(compilation=types.SimpleNamespace(listener=None))

    def compile(self, name: str, seconds: float = 0.5, cache_hit: bool = False) -> None:
        if self.knobs.compilation.listener is not None:
            times = types.SimpleNamespace(total=round(seconds * 1e6))
            said = dict(metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)
            self.knobs.compilation.listener(src=types.SimpleNamespace(name=name), **said)


@pytest.fixture
def triton(monkeypatch):
    module = Triton()
    monkeypatch.setitem(sys.modules, "triton", module)
    return module


def test_what_is_compiled_is_taken_once_with_how_long_it_took(triton):
    compiling = Compilations()
    assert compiling.take() == []
    triton.compile("fused_moe_kernel", 0.25)
    triton.compile("other", 1.5)
    assert compiling.take() == [("fused_moe_kernel", 0.25), ("other", 1.5)]
    assert compiling.take() == []


def test_what_was_on_disk_is_not_compiled(triton):
    compiling = Compilations()
    triton.compile("fused_moe_kernel", 0.002, cache_hit=True)
    assert compiling.take() == []


def test_others_who_listen_go_on_being_told(triton):
    told = []
    triton.knobs.compilation.listener = lambda **named: told.append((named["src"].name, named["cache_hit"]))
    compiling = Compilations()
    triton.compile("new")
    triton.compile("old", cache_hit=True)
    assert told == [("new", False), ("old", True)] and compiling.take() == [("new", 0.5)]


@pytest.mark.parametrize("module", [None, types.ModuleType("triton")], ids=["none", "a stand-in of vLLM's"])
def test_without_triton_it_is_not_known(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "triton", module)
    assert Compilations().take() is None


class Compiles(OneTokenAStep):
    """A kernel with the first token of each round that is in `rounds`, all passes counted; one before each pass."""

    def __init__(self, rounds: set[int], known: bool = True):
        super().__init__()
        self.rounds, self.known, self.passes, self.new = rounds, known, 0, []

    def forget_prefixes(self):
        super().forget_prefixes()
        self.new.append(("before", 1.0))
        self.passes += 1

    def step(self):
        if self.passes in self.rounds and not any(name == "late" for name, _ in self.new):
            self.new.append(("late", 0.5))
        return super().step()

    def compiled(self):
        found, self.new = self.new, []
        return found if self.known else None


def measure(engine: OneTokenAStep) -> dict:
    events = throughput_worker.Events(io.StringIO(), Told([]))
    return throughput_worker.measure(engine, Workload([[1]] * 2, [3, 2]), None, 3, None, events)


def test_a_round_in_which_something_was_compiled_is_told_and_what_came_before_it_is_not():
    found = measure(Compiles({1, 3, 4}))["compiled"]  # the first pass is the warm-up
    assert found == [{"round": number, "kernel": "late", "seconds": 0.5} for number in (1, 2)]
    assert compilations.lines(found) == [
        "Compiled in round 2, while the clock ran: late (1 in 0.50 s)",
        "Compiled in round 3, while the clock ran: late (1 in 0.50 s)",
    ]
    assert measure(Compiles({1}))["compiled"] == compilations.lines([]) == []


def test_what_is_not_known_is_not_told_as_nothing():
    assert measure(Compiles({2}, known=False))["compiled"] is None and compilations.lines(None) == []
    assert compilations.of_rounds([[], None]) is None


def test_a_kernel_that_is_compiled_for_several_kinds_of_numbers_is_named_once():
    found = compilations.of_rounds([[], [("moe", 0.25), ("slots", 0.125), ("moe", 0.5)]])
    assert compilations.lines(found) == ["Compiled in round 2, while the clock ran: moe, slots (3 in 0.88 s)"]


def test_it_is_printed_below_the_lines_of_vllm(capsys):
    result = dict(requests_per_second=1.0, tokens_per_second=2.0, output_tokens_per_second=1.0, profile=None)
    result |= dict(total_input_tokens=1, total_output_tokens=1, backend="SPARSE_MLA", case={"concurrency": 4})
    out = Console(highlight=False, width=60)
    throughput.show({**result, "compiled": [{"round": 0, "kernel": "moe", "seconds": 1.0}]}, False, out)
    last = capsys.readouterr().out.splitlines()[-2:]
    assert last == ["Total num output tokens:  1", "Compiled in round 1, while the clock ran: moe (1 in 1.00 s)"]


class Workers:
    """vLLM's `LLM`, as far as it asks its workers."""

    def __init__(self, answers: dict[str, list]):
        self.answers = answers

    def collective_rpc(self, method: str) -> list[str]:
        return [json.dumps(answer) for answer in self.answers[method]]


def vllm_engine(**answers) -> engines.VllmEngine:
    engine = engines.VllmEngine.__new__(engines.VllmEngine)
    engine._llm = Workers(answers)
    return engine


def test_of_several_workers_the_one_that_waited_least_for_the_others_is_profiled():
    first = ["cuda", 8, [["gemm", 8, 100.0], ["all_reduce", 8, 900.0]]]
    last = ["cuda", 8, [["gemm", 8, 110.0], ["all_reduce", 8, 20.0]]]
    found = vllm_engine(measured_stop=[first, last]).stop_profile()
    assert found == ("cuda", 8, [("gemm", 8, 110.0), ("all_reduce", 8, 20.0)])


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([[["moe", 0.5]], [["moe", 0.75]]], [["moe", 0.75]]),
        ([[], [["moe", 0.25]]], [["moe", 0.25]]),
        ([[], []], []),
        ([None], None),
    ],
)
def test_of_several_workers_the_one_that_compiled_longest_is_told(answers, found):
    assert vllm_engine(measured_compiled=answers).compiled() == found


def test_a_worker_of_vllm_says_what_it_has_compiled_from_the_first_question_on(triton):
    worker = MeasuredWorker()
    triton.compile("before")
    assert json.loads(worker.measured_compiled()) == []
    triton.compile("moe")
    assert [name for name, _ in json.loads(worker.measured_compiled())] == ["moe"]
    assert json.loads(worker.measured_compiled()) == []


def test_a_worker_without_triton_says_that_it_does_not_know(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert json.loads(MeasuredWorker().measured_compiled()) is None
