"""Comparing two result files finds what got slower, and nothing else."""

import copy
import itertools
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_benchmarks.results.result_kinds import FIELDS, NotUnderstood, ResultFile, load

import result_examples
from serving_benchmarks.results import compare

pytestmark = pytest.mark.skipif(not result_examples.COMMITTED["kernels"].is_file(), reason="needs the source tree")
ALL = result_examples.every_kind() if result_examples.COMMITTED["kernels"].is_file() else {}
UNTIMED = {"vllm_0.23_recall": "recall", "kernel_counters": "kernel_counters"}
"""Files without times to compare, and what they are of."""
FILES = {name: report for name, report in ALL.items() if name not in UNTIMED}
OURS = {"SPARSE_MLA", "embedded"}
TIMES = ("fastest", "median", "lower_quartile", "upper_quartile")


def file(report: dict, name: str = "x") -> ResultFile:
    about = report["environment"]
    kind = about.get("benchmark") or about["command"].split("-m serving_benchmarks.")[1].split()[0]
    return ResultFile(Path(f"{name}.json"), kind, report["environment"], report["results"])


def slow_down(entry: dict, times: float) -> None:
    """Makes ours take so many times as long in one entry of any kind."""
    seconds = entry.get("seconds", {})
    for timing in [seconds] if "median" in seconds else [v for k, v in seconds.items() if k in ("ours", "plan")]:
        for name in TIMES:
            timing[name] *= times
    if "rounds_s" in entry:
        entry["rounds_s"] = [value * times for value in entry["rounds_s"]]
    for name in ("ttft_s", "tpot_s", "e2e_s") if "requests" in entry else ():
        entry["requests"][name] = [value and value * times for value in entry["requests"][name]]
    if "prefills_s" in entry:
        entry["prefill_s"] *= times
        entry["prefills_s"] = [value * times for value in entry["prefills_s"]]
        entry["decode_ms_a_step_by_turn"] = [value * times for value in entry["decode_ms_a_step_by_turn"]]
    if "output_tokens_per_second" in entry:
        entry["output_tokens_per_second"] /= times


def ours(report: dict) -> list[int]:
    """The entries that are measurements of ours, not copies and backends they are held to."""
    return [
        number
        for number, entry in enumerate(report["results"])
        if not entry.get("op", "").startswith("copy") and entry.get("backend", "SPARSE_MLA") in OURS
    ]


def run(folder, old: dict, new: dict, *options: str, capsys) -> tuple[int, str, str]:
    paths = [str(result_examples.write(folder, name, report)) for name, report in (("old", old), ("new", new))]
    status = compare.main([*paths, *options])
    return status, *capsys.readouterr()


@pytest.mark.parametrize("name", FILES)
def test_a_file_and_itself_differ_in_nothing(name, tmp_path, capsys):
    status, out, err = run(tmp_path, FILES[name], FILES[name], "--limit", "0%", capsys=capsys)
    assert status == 0 and err == ""
    assert out.count("\n") == 1 and "times compared, limit 0%: nothing changed beyond its spread" in out
    assert not out.startswith("0 ")


@given(st.data())
def test_what_got_slower_is_found_and_nothing_else(data):
    name = data.draw(st.sampled_from(sorted(FILES)))
    old, new = FILES[name], copy.deepcopy(FILES[name])
    number = data.draw(st.sampled_from(ours(old)))
    slow_down(new["results"][number], 100.0)  # more than the spread of four turns that differ threefold
    one_entry = {**old, "results": [entry for i, entry in enumerate(old["results"]) if i in (number, *not_ours(old))]}
    expected = {case for case, _ in compare.measurements(file(one_entry))}
    for before, after, times in ((old, new, 100.0), (new, old, 0.01)):
        found = compare.compare(file(before), file(after))
        changed = [change for change in found.changes if change.times != 1]
        assert {change.case for change in changed} == expected
        assert all(change.times == pytest.approx(times) for change in changed)
        slower = found.slower(0.05)
        assert bool(slower) == (times > 1) and {change.case for change in slower} <= expected
        assert not (found.only_old or found.only_new or found.no_longer or found.warnings)


def not_ours(report: dict) -> list[int]:
    return [number for number in range(len(report["results"])) if number not in ours(report)]


@given(st.floats(0.5, 2))
def test_a_machine_that_is_slower_throughout_changes_no_share(times):
    old, new = FILES["kernels"], copy.deepcopy(FILES["kernels"])
    for entry in new["results"]:
        for timing in entry["seconds"].values():
            for name in ("median", "lower_quartile", "upper_quartile"):
                timing[name] *= times
    found = compare.compare(file(old), file(new))
    assert all(change.times == pytest.approx(1) for change in found.changes if change.what == "attention")
    assert all(change.yardstick for change in found.changes if change.what == "attention")
    assert all(change.times == pytest.approx(times) for change in found.changes if change.what == "plan")


def test_our_portable_kernel_is_no_peer_to_be_held_to():
    old = copy.deepcopy(FILES["kernels"])
    for entry in old["results"]:  # faster than any peer
        entry["seconds"]["portable"] = {name: value * 0.01 for name, value in entry["seconds"]["ours"].items()}
    found = compare.compare(file(old), file(copy.deepcopy(old)))
    plain = compare.compare(file(FILES["kernels"]), file(FILES["kernels"]))
    assert [change.yardstick for change in found.changes] == [change.yardstick for change in plain.changes]


@pytest.mark.parametrize(
    ("times", "limit", "status", "text"),
    [
        (1.2, "5%", 1, "1 slower"),
        (1.2, "30%", 0, "1 slower, within the limit"),
        (0.5, "5%", 0, "1 faster"),
        (1.03, "5%", 0, "1 slower, within the limit"),
        (1.03, "2.5 %", 1, "1 slower"),
    ],
)
def test_the_limit_decides_the_exit_status(times, limit, status, text, tmp_path, capsys):
    new = copy.deepcopy(FILES["sweep"])
    entry = new["results"][30]
    for name in TIMES:
        entry["seconds"]["ours"][name] *= times
    found, out, _ = run(tmp_path, FILES["sweep"], new, "--limit", limit, capsys=capsys)
    assert found == status and out.rstrip().endswith(text)
    assert f"{entry['case']['batch']}, h {entry['case']['heads']}" in out and f"{times - 1:+.1%}" in out


def test_a_change_within_the_spread_is_no_failure_but_is_told(tmp_path, capsys):
    old = copy.deepcopy(FILES["sweep"])
    timing = old["results"][0]["seconds"]["ours"]
    timing["upper_quartile"] = timing["median"] * 1.5
    new = copy.deepcopy(old)
    new["results"][0]["seconds"]["ours"]["median"] *= 1.4
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert status == 0 and "1 not sure: beyond the limit, within the spread" in out


def part(report: dict, rounds: tuple[int, ...]) -> dict:
    """A file of throughput as if only these rounds had been measured."""
    found = copy.deepcopy(report)
    for entry in found["results"]:
        requests = entry["requests"]
        kept = [place for place, number in enumerate(requests["round"]) if number in rounds]
        entry["requests"] = {name: [values[place] for place in kept] for name, values in requests.items()}
        entry["rounds_s"] = [entry["rounds_s"][number] for number in rounds]
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "throughput_h16",
            marks=pytest.mark.xfail(
                raises=AssertionError,
                strict=True,
                reason="the host drifted after three rounds, farther than they spread",
            ),
        ),
        "throughput_h128",
    ],
)
def test_one_half_of_the_rounds_of_a_file_is_not_slower_than_the_other(name):
    report = result_examples.committed(name)
    alone = {**report, "results": [entry for entry in report["results"] if entry["backend"] in OURS]}
    times = 4 * len(alone["results"])
    for halves in ((0, 1, 2), (3, 4, 5)), ((0, 2, 4), (1, 3, 5)):
        for one, other in (halves, halves[::-1]):
            found = compare.compare(file(part(report, one)), file(part(report, other)))
            assert len(found.changes) == times and all(change.yardstick for change in found.changes)
            assert not found.slower(0.05)
            assert not compare.compare(file(part(alone, one)), file(part(alone, other))).slower(0.05)
    splits = [(one, tuple(set(range(6)) - set(one))) for one in itertools.combinations(range(6), 3)]
    slower = [len(compare.compare(*(file(part(report, half)) for half in pair)).slower(0.05)) for pair in splits]
    assert sum(slower) <= 0.02 * times * len(splits)


def windows(report: dict, rounds: int) -> Iterator[tuple[dict, dict]]:
    """Files of so many rounds and of as many after them, of all loads that have them."""
    for first in range(0, max(len(entry["rounds_s"]) for entry in report["results"]) - 2 * rounds + 1):
        some = {**report, "results": [e for e in report["results"] if len(e["rounds_s"]) >= first + 2 * rounds]}
        one, other = (tuple(range(begin, begin + rounds)) for begin in (first, first + rounds))
        yield part(some, one), part(some, other)


@pytest.mark.parametrize(("rounds", "share"), [(2, 0.005), (3, 0.004), (4, 0.003), (5, 0.01), (6, 0.015)])
def test_rounds_are_rarely_slower_than_those_after_or_before_them(rounds, share):
    """On hosts that drift."""
    measured = slower = 0
    for name in (
        "throughput_h16",
        "throughput_h128",
        "throughput_h16_one",
        "throughput_h16_512",
        "throughput_h128_512",
        "old_merge_h128_512",
        "throughput_tp2_h128_h100",
        "throughput_tp2_h128_512_h100",
        "throughput_tp2_h16_h100",
    ):
        report = result_examples.committed(name)
        for pair in windows(report, rounds):
            for old, new in (pair, pair[::-1]):
                found = compare.compare(file(old), file(new))
                assert all(change.yardstick for change in found.changes)
                measured, slower = measured + len(found.changes), slower + len(found.slower(0.05))
    assert measured > 2000 and slower <= share * measured


def run_of(rng: random.Random, rounds: int, requests: int, seconds: float = 1.0) -> dict:
    """A file of throughput, or if it is one round of serve: rounds spread by 3 %, their requests with them."""
    if rounds == 1:
        report = result_examples.serve(backends=("SPARSE_MLA",), rates=(None,))
    else:
        report = result_examples.throughput(backends=("SPARSE_MLA",), loads=(16,))
    (entry,) = report["results"]
    luck = [seconds * rng.gauss(1, 0.03) for _ in range(rounds)]
    entry["rounds_s"] = [10 * times for times in luck]
    entry["output_tokens_per_second"] = 100 / luck[0]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        entry["requests"][name] = [
            (times if rounds > 1 else seconds) * rng.lognormvariate(0, 0.2) for times in luck for _ in range(requests)
        ]
    entry["requests"]["round"] = [number for number in range(rounds) for _ in range(requests)]
    return report


@pytest.mark.parametrize("requests", [16, 32, 96, 256])
@pytest.mark.parametrize("rounds", [1, 3, 6])
def test_what_is_the_same_is_rarely_found_to_differ(rounds, requests):
    rng = random.Random(f"{rounds} {requests}")
    changes = [
        change
        for _ in range(100)
        for change in compare.compare(*(file(run_of(rng, rounds, requests)) for _ in range(2))).changes
    ]
    assert sum(change.sure for change in changes) <= 0.05 * len(changes)
    assert sum(change.sure and change.beyond(0.05) for change in changes) <= 0.02 * len(changes)


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 6, 9, 11, 12, 15])
def test_rounds_of_one_kind_are_rarely_found_to_differ(rounds):
    rng = random.Random(rounds)
    spans = [compare.Span.of_rounds([rng.gauss(1, 0.1) for _ in range(rounds)], False) for _ in range(4000)]
    pairs = zip(spans[::2], spans[1::2], strict=True)
    assert sum(one.low > other.high or other.low > one.high for one, other in pairs) <= 0.035 * 2000


@pytest.mark.parametrize("requests", [16, 96, 256])
def test_what_takes_an_eighth_longer_is_found(requests):
    rng = random.Random(requests)
    found = [
        {change.what for change in compare.compare(*map(file, pair)).slower(0.05)}
        for pair in ((run_of(rng, 6, requests), run_of(rng, 6, requests, 1.12)) for _ in range(40))
    ]
    assert sum("all requests" in slower for slower in found) >= 34
    assert requests < 256 or sum("later token, p50" in slower for slower in found) >= 30


@pytest.mark.parametrize(("rounds", "times"), [(3, 1.4), (4, 1.3), (5, 1.3)])
def test_few_rounds_find_what_is_much_slower(rounds, times):
    rng = random.Random(f"{rounds} {times}")
    pairs = ((run_of(rng, rounds, 96), run_of(rng, rounds, 96, times)) for _ in range(100))
    found = [{change.what for change in compare.compare(*map(file, pair)).slower(0.05)} for pair in pairs]
    assert sum("all requests" in slower for slower in found) >= 90


def test_what_was_measured_once_is_never_sure(tmp_path, capsys):
    old = result_examples.serve(backends=("SPARSE_MLA",), rates=(None,))
    new = copy.deepcopy(old)
    new["results"][0]["output_tokens_per_second"] /= 3
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert status == 0 and "1 not sure: beyond the limit, too few measured" in out and "+200.0%" in out


@given(st.lists(st.floats(0.5, 2), min_size=3, max_size=8))
def test_a_machine_that_slows_down_between_rounds_changes_no_share(slow):
    """Of backends that took turns."""
    report = result_examples.throughput(backends=("SPARSE_MLA", "FLASHMLA_SPARSE"), loads=(1,))
    report["environment"]["settings"] = {"interleaved": True}
    for entry in report["results"]:
        entry["rounds_s"] = [5.0 + i % 3 for i in range(len(slow))]
    slowed = copy.deepcopy(report)
    for entry in slowed["results"]:
        entry["rounds_s"] = [a * b for a, b in zip(entry["rounds_s"], slow, strict=True)]
    (plain, change) = (
        {change.what: change for change in compare.compare(file(report), file(other)).changes}["all requests"]
        for other in (report, slowed)
    )
    assert change.times == pytest.approx(plain.times) and change.shares == pytest.approx(plain.shares)


def test_cases_of_one_file_only_are_named(tmp_path, capsys):
    old, new = copy.deepcopy(FILES["kernels"]), copy.deepcopy(FILES["kernels"])
    del new["results"][0], old["results"][3]
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert status == 0
    assert "only in the old file: 128q1s32k, h 8, topk 2048, fp8_ds_mla\n" in out
    assert "only in the new file: 128q1s32k, h 64, topk 2048, fp8_ds_mla\n" in out


def test_a_timing_of_one_file_only_is_named():
    new = copy.deepcopy(FILES["cpu_attention"])
    del new["results"][0]["seconds"]["ours on one thread"]
    found = compare.compare(file(FILES["cpu_attention"]), file(new))
    assert found.only_old == ["b 1, h 16, 1024 slots, bf16: attention on one thread"] and not found.only_new


def test_what_no_longer_runs_fails(tmp_path, capsys):
    old, new = FILES["throughput"], copy.deepcopy(FILES["throughput"])
    new["results"][0] = result_examples.failed(new["results"][0], "out of memory")
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert status == 1
    assert "no longer runs: SPARSE_MLA, 4096 + 64 tokens, fixed, 64 requests, fp8 cache, 1 in flight: out" in out
    assert "only in" not in out


def test_each_workload_of_a_file_is_held_to_the_same_one(tmp_path, capsys):
    """Of a new file with several lengths and of an old one that has one of them."""
    backends = {"backends": ("SPARSE_MLA", "FLASHMLA_SPARSE"), "loads": (16,)}
    new = result_examples.throughput(**backends, lengths=((4096, 64), (512, 512)))
    old = {**new, "results": [new["results"][i] for i in (1, 3)]}
    assert [entry["case"]["input_len"] for entry in old["results"]] == [512, 512]
    new = copy.deepcopy(new)
    for i in (0, 2):  # what the old file doesn't have
        slow_down(new["results"][i], 9.0)
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    only = "only in the new file: SPARSE_MLA, 4096 + 64 tokens, fixed, 64 requests, fp8 cache, 16 in flight\n"
    assert status == 0 and only in out and "4 times compared, limit 5%: nothing changed" in out
    slow_down(new["results"][1], 4.0)
    found = compare.compare(file(old), file(new))
    assert {change.case for change in found.slower(0.05)} == {
        "SPARSE_MLA, 512 + 512 tokens, fixed, 64 requests, fp8 cache, 16 in flight"
    }
    assert all(change.times == pytest.approx(4) and change.yardstick for change in found.changes)


def test_a_candidate_that_no_longer_starts_is_told(tmp_path, capsys):
    old, new = FILES["vllm_0.23_heads_16"], copy.deepcopy(FILES["vllm_0.23_heads_16"])
    new["results"][1] = {"candidate": "SPARSE_MLA", "backend": "SPARSE_MLA", "workload": None, "error": "no memory"}
    new["results"].append({**new["results"][1], "candidate": "SPARSE_MLA+1"})  # which the old file has not, either
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert status == 1
    assert out.startswith("no longer runs: SPARSE_MLA 16x4096+192, 16 heads: no memory\n")
    assert out.count("no longer runs") == 1 and "only in the old" not in out


def test_backends_that_did_not_take_turns_are_as_in_files_that_do_not_say(tmp_path, capsys):
    old, new = FILES["throughput"], copy.deepcopy(FILES["throughput"])
    settings = {**old["environment"]["settings"], "interleaved": False}
    new["environment"]["settings"] = settings
    for entry in new["results"]:
        entry["over_first"] = None
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert status == 0 and "warning" not in out
    settings["interleaved"] = True
    status, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert status == 0 and "warning: different settings: interleaved False and interleaved True\n" in out


def test_what_older_files_do_not_say_of_a_model_is_no_difference(tmp_path, capsys):
    old, new = FILES["throughput"], copy.deepcopy(FILES["throughput"])
    new["environment"]["model"] |= {"vocab_size": 129280, "dense_layers": 1, "random_weights_seed": 0}
    _, out, _ = run(tmp_path, old, new, capsys=capsys)
    assert "warning" not in out
    newer = copy.deepcopy(new)
    newer["environment"]["model"]["random_weights_seed"] = 1
    _, out, _ = run(tmp_path, new, newer, capsys=capsys)
    assert "warning: different model: random_weights_seed 0 and random_weights_seed 1\n" in out


def test_another_machine_and_other_peers_are_warned_of(tmp_path, capsys):
    new = copy.deepcopy(FILES["kernels"])
    new["environment"]["gpus"][0]["name"] = "NVIDIA H100"
    new["environment"]["peers"]["fa3"] = "vllm 0.33.0"
    status, out, _ = run(tmp_path, FILES["kernels"], new, capsys=capsys)
    assert status == 0
    assert "warning: different machine: NVIDIA H200 and NVIDIA H100\n" in out
    assert "warning: different peers: fa3 vllm 0.23.0 and fa3 vllm 0.33.0\n" in out


def test_another_cpu_is_warned_of_once():
    new = copy.deepcopy(FILES["cpu_attention"])
    new["environment"]["cpu"]["model"] = "other"
    found = compare.compare(file(FILES["cpu_attention"]), file(new))
    assert found.warnings == [f"different machine: {FILES['cpu_attention']['environment']['cpu']['model']} and other"]


def test_a_peer_of_another_version_is_no_yardstick():
    new = copy.deepcopy(FILES["kernels"])
    new["environment"]["peers"]["fa3"] = "vllm 0.33.0"
    found = compare.compare(file(FILES["kernels"]), file(new))
    used = {change.yardstick for change in found.changes if change.what == "attention"}
    assert used and all(name.startswith("FlashMLA") for name in used)


def test_backends_of_others_are_compared_where_none_is_ours():
    theirs = result_examples.throughput(backends=("FLASHMLA_SPARSE",))
    found = compare.compare(file(theirs), file(theirs))
    assert found.changes and all(change.yardstick is None for change in found.changes)


def test_the_spread_of_a_percentile_narrows_with_more_samples():
    few, many = (compare.Span.of_percentile([i / n for i in range(n)], 0.5) for n in (20, 20000))
    assert few.low < few.value < few.high and many.low < many.value < many.high
    assert many.high - many.low < (few.high - few.low) / 10


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=500), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_percentile_lies_in_its_spread_whose_ends_were_measured_or_are_not_known(samples, share):
    span = compare.Span.of_percentile(samples, share)
    assert span.low <= span.value <= span.high
    assert {span.low, span.high} <= {0.0, *samples, math.inf} or (len(samples) < 3 and span.low == span.value)
    if share ** len(samples) > 0.025:  # all samples may well be below it
        assert span.high == math.inf


@pytest.mark.parametrize(("requests", "share"), [(n, p) for n in (16, 32, 96, 256) for p in (0.5, 0.99)])
def test_the_spread_of_a_percentile_holds_the_true_one(requests, share):
    rng = random.Random(requests)
    spans = [compare.Span.of_percentile([rng.random() for _ in range(requests)], share) for _ in range(400)]
    assert sum(span.low <= share <= span.high for span in spans) >= 0.93 * len(spans)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30), st.floats(0.1, 10))
def test_the_spread_of_rounds_holds_their_median_and_grows_with_them(rounds, times):
    span, longer = (compare.Span.of_rounds([value * by for value in rounds], False) for by in (1, times))
    assert 0 <= span.low <= span.value <= span.high
    assert (longer.low, longer.value, longer.high) == pytest.approx(
        [v * times for v in (span.low, span.value, span.high)]
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda report: report.pop("environment"), "it has no 'environment'"),
        (lambda report: report.pop("results"), "has no 'results'"),
        (lambda report: report["environment"].update(command="python x.py"), "its environment names no benchmark"),
        (lambda report: report["results"].insert(1, 5), "results[1] is no object"),
        (lambda report: report["results"][2]["case"].pop("heads"), "results[2] of kernels has no case.heads"),
        (lambda report: report["results"][2]["seconds"].pop("ours"), "results[2] of kernels: seconds can't be {"),
        (lambda report: report["results"][0].update(bytes=float("nan")), "results[0] of kernels: bytes can't be NaN"),
        (
            lambda report: report["results"][0]["seconds"]["ours"].update(median=0),
            "results[0] of kernels: seconds can't",
        ),
    ],
)
def test_a_file_that_is_not_understood_is_explained(change, told, tmp_path, capsys):
    broken = copy.deepcopy(FILES["kernels"])
    change(broken)
    status, out, err = run(tmp_path, FILES["kernels"], broken, capsys=capsys)
    assert status == 2 and not out and err.startswith(f"error: {tmp_path / 'new.json'}") and told in err


def test_every_field_that_a_kind_needs_is_missed_if_it_is_not_there(tmp_path):
    for name, report in ALL.items():
        for field in FIELDS[load(result_examples.write(tmp_path, name, report)).kind]:
            broken = copy.deepcopy(report)
            at = broken["results"][-1]
            *path, last = field.split(".")
            for part in path:
                at = at[part]
            del at[last]
            with pytest.raises(NotUnderstood, match=rf"results\[{len(report['results']) - 1}\].*has no {field}"):
                load(result_examples.write(tmp_path, "broken", broken))


def test_files_that_cannot_be_compared_are_explained(tmp_path, capsys):
    (tmp_path / "text.json").write_text("not json")
    for old, new, told in (
        ("kernels", "cache_ops", "only files of one benchmark compare"),
        ("kernels", tmp_path / "nope.json", "nope.json: No such file"),
        ("kernels", tmp_path / "text.json", "text.json is no JSON"),
        *((file, file, f"files of {kind} have no times to compare") for file, kind in UNTIMED.items()),
    ):
        paths = [result_examples.COMMITTED.get(name, name) for name in (old, new)]
        assert compare.main([str(path) for path in paths]) == 2
        assert told in capsys.readouterr().err
    other = copy.deepcopy(FILES["kernels"])
    other["results"] = [{**entry, "case": {**entry["case"], "topk": 3}} for entry in other["results"]]
    status, _, err = run(tmp_path, FILES["kernels"], other, capsys=capsys)
    assert status == 2 and "have no case in common" in err


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (["0.05"], "--limit: must say what it is, 5% or 0.05%; got '0.05'"),
        (["-5%"], "--limit: must be a percentage from 0 up, such as 5%; got '-5%'"),
        (["-5"], "--limit: must be a percentage from 0 up, such as 5%; got '-5'"),
        (["five"], "--limit: must be a percentage from 0 up, such as 5%; got 'five'"),
        ([], "--limit: expected one argument"),
    ],
)
def test_a_wrong_limit_is_explained(limit, told, capsys):
    with pytest.raises(SystemExit) as stopped:
        compare.main(["a", "b", "--limit", *limit])
    assert stopped.value.code == 2 and told in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "said"), [("5", "5%"), ("2.5", "2.5%"), ("0", "0%"), ("0.5%", "0.5%")])
def test_a_limit_needs_no_sign_where_it_can_only_be_a_percentage(limit, said, tmp_path, capsys):
    _, out, _ = run(tmp_path, FILES["kernels"], FILES["kernels"], "--limit", limit, capsys=capsys)
    assert f"limit {said}: nothing" in out


def test_it_runs_as_a_program():
    paths = [result_examples.COMMITTED["cache_ops"]] * 2
    done = subprocess.run(
        [sys.executable, "-m", "serving_benchmarks.results.compare", *paths], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("19 times compared, limit 5%: nothing")
