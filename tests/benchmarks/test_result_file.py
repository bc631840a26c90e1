"""What is written is read again. What is read has what its kind needs, or is refused with the reason."""

import copy
import json
import math
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import result_examples
from serving_benchmarks.results import file, kinds, runs

pytestmark = pytest.mark.skipif(not result_examples.path("kernels").is_file(), reason="needs the source tree")
EIGHT_DIGITS = st.floats(allow_nan=False, allow_infinity=False).map(lambda value: float(f"{value:.8g}"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | EIGHT_DIGITS.filter(math.isfinite) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_what_is_written_is_read_again_and_a_list_of_numbers_has_one_line(report):
    assert json.loads(file.text(report)) == report
    assert ' "rounds_s": [1.5, null, 2e-07],' in file.text({"rounds_s": [1.5, None, 2e-7], "x": report}).splitlines()


def test_a_benchmark_writes_its_environment(tmp_path):
    file.write(None, [], Console(quiet=True))
    file.write(tmp_path / "x.json", result_examples.index()["results"], Console(quiet=True), benchmark="index")
    loaded = kinds.load(tmp_path / "x.json")
    assert loaded.kind == "index" and loaded.environment["torch"]["version"] and len(loaded.results) == 2


def test_a_file_that_can_not_be_written_whole_stays_as_it_was(tmp_path, monkeypatch):
    path, link = tmp_path / "x.json", tmp_path / "link.json"
    link.symlink_to(path)
    file.replace(link, "first")
    path.chmod(0o600)
    file.replace(link, "second \udcff")
    assert link.is_symlink() and path.read_text() == "second \\udcff" and path.stat().st_mode & 0o777 == 0o600

    def full(self, data):
        with open(self, "wb") as half:
            half.write(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        file.replace(path, "third")
    assert path.read_text() == "second \\udcff" and sorted(tmp_path.iterdir()) == [link, path]
    monkeypatch.undo()
    file.replace(Path("/dev/null"), "nothing")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_every_field_that_a_kind_needs_is_missed(kind, tmp_path):
    report = result_examples.every_kind()[kind]
    assert kinds.load(result_examples.write(tmp_path, "whole", report)).kind == kind
    for field in kinds.KINDS[kind].entry.model_fields:
        broken = copy.deepcopy(report)
        del broken["results"][-1][field]
        with pytest.raises(file.NotUnderstood, match=rf"results\[{len(report['results']) - 1}\] of {kind}: {field}: "):
            kinds.load(result_examples.write(tmp_path, "broken", broken))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda report: report.pop("environment"), "it has no 'environment'"),
        (lambda report: report.pop("results"), "has no 'results'"),
        (lambda report: report["environment"].update(benchmark="sums"), "'benchmark' in its environment is 'sums'"),
        (lambda report: report["results"].insert(1, 5), "results[1] of kernels: "),
        (lambda report: report["results"][0].update(bytes=float("nan")), "results[0] of kernels: bytes: "),
        (lambda report: report["results"][0].update(bytes=10**400), "results[0] of kernels: bytes: "),
        (lambda report: report["results"][0].update(bytes=True), "results[0] of kernels: bytes: "),
        (lambda report: report["results"][0]["seconds"]["ours"].update(median=0), "kernels: seconds.ours.median: "),
        (lambda report: report["results"][0]["seconds"].pop("plan"), "kernels: seconds: "),
    ],
)
def test_a_file_that_is_not_understood_is_explained(change, told, tmp_path):
    broken = result_examples.every_kind()["kernels"]
    change(broken)
    with pytest.raises(file.NotUnderstood) as refused:
        kinds.load(result_examples.write(tmp_path, "x", broken))
    assert str(refused.value).startswith(str(tmp_path / "x.json")) and told in str(refused.value)


@pytest.mark.parametrize("content", [b"not json", b"[" * 100_000, b"\xff", b"[]", b"3"])
def test_what_is_no_result_file_is_refused(content, tmp_path):
    (tmp_path / "x.json").write_bytes(content)
    for path in (tmp_path / "x.json", tmp_path / "gone.json", tmp_path):
        with pytest.raises(file.NotUnderstood):
            kinds.load(path)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=300))
def test_a_median_lies_within_its_bounds(samples):
    low, high = runs.median_bounds(samples)
    assert low in samples and high in samples and low <= statistics.median(samples) <= high
    if len(samples) < 9:  # too few to say more
        assert (low, high) == (min(samples), max(samples))
