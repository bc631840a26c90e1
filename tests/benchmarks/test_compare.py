"""Comparing two result files finds what became slower, and nothing else."""

import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import result_examples
from serving_benchmarks.__main__ import main
from serving_benchmarks.results import compare, kinds, tables

pytestmark = pytest.mark.skipif(not result_examples.path("kernels").is_file(), reason="needs the source tree")
ALL = result_examples.every_kind() if result_examples.path("kernels").is_file() else {}
FILES = {kind: report for kind, report in ALL.items() if kinds.KINDS[kind].timed}
TIMES = ("fastest", "median", "lower_quartile", "upper_quartile")


def file(report: dict) -> kinds.ResultFile:
    return kinds.checked(report, result_examples.ROOT / "x.json")


def slow_down(entry: dict, times: float) -> None:
    """Makes ours take so many times as long in an entry of any kind."""
    seconds = entry.get("seconds", {})
    for timing in [seconds] if "median" in seconds else [seconds[name] for name in seconds if name in tables.NOT_PEERS]:
        timing.update({name: timing[name] * times for name in TIMES})
    if "rounds_s" in entry:
        entry["rounds_s"] = [value * times for value in entry["rounds_s"]]
    for name in ("ttft_s", "itl_s") if "backend" in entry else ():
        entry[name] = {percentile: value * times for percentile, value in entry[name].items()}
    if "output_tokens_per_second" in entry:
        entry["output_tokens_per_second"] /= times


def run(folder, old: dict, new: dict, *options: str, capsys) -> tuple[int, str, str]:
    paths = [str(result_examples.write(folder, name, report)) for name, report in (("old", old), ("new", new))]
    return main(["compare", *paths, *options]), *capsys.readouterr()


@pytest.mark.parametrize("kind", FILES)
def test_a_file_and_itself_differ_in_nothing(kind, tmp_path, capsys):
    status, out, err = run(tmp_path, FILES[kind], FILES[kind], "--limit", "0%", capsys=capsys)
    assert (status, err, out.count("\n")) == (0, "", 1) and not out.startswith("0 ")


@given(st.data())
def test_what_became_slower_is_found_and_nothing_else(data):
    kind = data.draw(st.sampled_from(sorted(FILES)))
    old, new = FILES[kind], copy.deepcopy(FILES[kind])
    ours = [i for i, entry in enumerate(old["results"]) if entry.get("backend") != "FLASHMLA_SPARSE"]
    number = data.draw(st.sampled_from(ours))
    slow_down(new["results"][number], 1e6)  # more than any spread
    expected = kinds.KINDS[kind].name_of(old["results"][number])
    for before, after, times in ((old, new, 1e6), (new, old, 1e-6)):
        found = compare.compare(file(before), file(after))
        changed = [change for change in found.changes if change.ratio != pytest.approx(1)]
        assert changed and {change.case for change in changed} == {expected}
        assert all(change.ratio == pytest.approx(times) for change in changed)
        assert any(change.sure for change in changed) == (kind != "serve"), "what was measured once is never sure"
        assert not (found.only_old or found.only_new or found.no_longer or found.warnings)


@given(st.floats(0.5, 2))
def test_a_machine_that_is_slower_throughout_changes_no_share(times):
    old, new = FILES["kernels"], copy.deepcopy(FILES["kernels"])
    for entry in new["results"]:
        for timing in entry["seconds"].values():
            timing.update({name: timing[name] * times for name in TIMES})
    changes = compare.compare(file(old), file(new)).changes
    assert all(change.ratio == pytest.approx(times if change.what == "plan" else 1) for change in changes)
    assert all((change.peer is None) == (change.what == "plan") for change in changes)


@given(st.lists(st.floats(0.5, 2), min_size=3, max_size=8))
def test_a_machine_that_slows_down_between_rounds_changes_no_share(slow):
    """Of interleaved backends."""
    report = result_examples.throughput(loads=(1,), rounds=len(slow))
    slowed = copy.deepcopy(report)
    for entry in slowed["results"]:
        entry["rounds_s"] = [a * b for a, b in zip(entry["rounds_s"], slow, strict=True)]
    found = {change.what: change for change in compare.compare(file(report), file(slowed)).changes}
    assert found["all requests"].ratio == pytest.approx(1) and found["all requests"].peer


def test_a_peer_of_another_version_is_no_yardstick_and_is_warned_of():
    new = copy.deepcopy(FILES["kernels"])
    old_fa3, new["environment"]["peers"]["fa3"] = new["environment"]["peers"]["fa3"], "vllm 9.9.9"
    old_gpu = new["environment"]["gpus"][0].pop("name")
    new["environment"]["gpus"][0]["name"] = "another"
    found = compare.compare(file(FILES["kernels"]), file(new))
    used = {change.peer for change in found.changes if change.what == "ours"}
    assert used and not any(name.startswith("FA3") for name in used)
    peers = f"different peers: fa3 {old_fa3} and fa3 vllm 9.9.9"
    assert found.warnings == [f"different machine: {old_gpu} and another", peers]


@pytest.mark.parametrize(
    ("times", "limit", "status"), [(1.2, "5%", 1), (1.2, "30%", 0), (0.5, "5%", 0), (1.03, "5", 0), (1.03, "2.5 %", 1)]
)
def test_the_limit_and_the_spread_decide_the_exit_status(times, limit, status, tmp_path, capsys):
    old, new = copy.deepcopy(FILES["kernels"]), copy.deepcopy(FILES["kernels"])
    for report in (old, new):
        timing = report["results"][0]["seconds"]["ours"]
        timing |= {name: timing["median"] for name in TIMES}
    timing.update({name: timing[name] * times for name in TIMES})
    assert run(tmp_path, old, new, "--limit", limit, capsys=capsys)[0] == status
    for report in (old, new):
        timing = report["results"][0]["seconds"]["ours"]
        timing |= {"lower_quartile": timing["median"] / 2, "upper_quartile": timing["median"] * 2}
    assert run(tmp_path, old, new, "--limit", limit, capsys=capsys)[0] == 0


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 6, 9, 12, 15])
def test_rounds_of_one_kind_are_rarely_found_to_differ(rounds):
    rng = random.Random(rounds)
    spans = [compare.Span.of([rng.gauss(1, 0.1) for _ in range(rounds)]) for _ in range(2000)]
    pairs = list(zip(spans[::2], spans[1::2], strict=True))
    assert sum(one.low > other.high or other.low > one.high for one, other in pairs) <= 0.035 * 1000
    times = 10 if rounds == 2 else 4 if rounds < 6 else 1.7
    assert sum(times * one.low > other.high for one, other in pairs) > 900, "what is much slower is found"


def test_cases_of_one_file_only_and_what_no_longer_runs_are_told(tmp_path, capsys):
    old, new = copy.deepcopy(FILES["kernels"]), copy.deepcopy(FILES["kernels"])
    del new["results"][0], old["results"][3]
    found, name = compare.compare(file(old), file(new)), "128q1s32k, h {}, topk 2048, fp8_ds_mla"
    assert (found.only_old, found.only_new) == ([name.format(8)], [name.format(64)])
    old, new = FILES["throughput"], copy.deepcopy(FILES["throughput"])
    new["results"][0] = result_examples.failed(new["results"][0], "[red]out of memory")
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert status == 1 and "1 in flight: [red]out of memory" in out and "only in" not in out


def test_files_that_cannot_be_compared_are_refused(tmp_path, capsys):
    other = copy.deepcopy(FILES["kernels"])
    for entry in other["results"]:
        entry["case"]["topk"] = 3
    for old, new in ((FILES["kernels"], FILES["index"]), (FILES["kernels"], other), (ALL["checkpoint"],) * 2):
        status, out, err = run(tmp_path, old, new, capsys=capsys)
        assert status == 2 and not out and err.startswith("error: ") and err.count("\n") == 1
