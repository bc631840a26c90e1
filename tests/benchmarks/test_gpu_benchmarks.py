"""What the GPU benchmarks do before and after they measure: batches, lists, peers' libraries, checks, tables."""

import json
import lzma
import subprocess
import sys
import zipfile

import pytest
import torch

from serving_benchmarks.ops import kernels, peer_kernels, peers
from serving_benchmarks.ops.batches import PATTERNS, RECENT, Batch, positions
from serving_benchmarks.results import kernel_report

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.parametrize(
    ("spec", "requests"),
    [
        ("128q1s32k", [(1, 32768)] * 128),
        ("q4k", [(4096, 4096)]),
        ("2q3s100_1q1s7", [(3, 100), (3, 100), (1, 7)]),
        ("q1ks2k", [(1024, 2048)]),
    ],
)
def test_batches_are_read(spec, requests):
    batch = Batch.parse(spec)
    assert list(batch.requests) == requests
    assert batch.tokens == sum(q for q, _ in requests) == len(batch.token_requests()) == len(batch.visible())
    assert batch.cached == sum(n for _, n in requests)
    assert batch.queries == (requests[0][0] if len(set(requests)) == 1 else None)


@pytest.mark.parametrize("spec", ["", "128", "q", "3q0", "0q1", "q5s4", "q1s1m", "q1__q1", "q-1", "q1 s2"])
def test_what_is_no_batch_is_named(spec):
    with pytest.raises(ValueError, match="is no batch") as error:
        Batch.parse(spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_lists_name_each_visible_position_at_most_once(pattern):
    batch = Batch.parse("2q3s100_q40s40")
    picked = positions(batch, 60, pattern)
    assert picked.shape == (46, 60) and picked.dtype == torch.int32
    for row, visible in zip(picked.tolist(), batch.visible().tolist(), strict=True):
        valid = row[: min(60, visible)]
        assert len(set(valid)) == len(valid) and 0 <= min(valid) and max(valid) < visible
        assert row[len(valid) :] == [-1] * (60 - len(valid))


def test_lists_can_be_wider_than_the_longest_sequence():
    assert (positions(Batch.parse("2q1s5"), 8, "random") >= 0).sum(1).tolist() == [5, 5]


def test_sliding_lists_are_the_last_tokens():
    assert positions(Batch.parse("q2s10"), 3, "sliding").sort().values.tolist() == [[6, 7, 8], [7, 8, 9]]


def test_realistic_lists_are_mostly_recent_and_alike():
    first, second = positions(Batch.parse("q2s100000"), 2048, "realistic").tolist()
    assert 0.65 < sum(place >= 99999 - RECENT for place in first) / 2048 < 0.85
    assert len(set(first) & set(second)) > 1024


def test_decode_is_told_from_prefill():
    assert [c.decode for c in kernels.cases(["8q2s1k", "q512s1k"], [16], [64], ["bf16"])] == [True, False]


def test_a_check_finds_wrong_results():
    want = torch.randn(3, 2, 512) * 0.01
    assert kernels.check_out(want.bfloat16(), want)["cosine_distance"] < 5e-6
    for wrong in (want * torch.tensor([1.0, 1.0, 0.9]).view(3, 1, 1), want.roll(1, 0), want.clone().fill_(torch.nan)):
        for times in (1, kernels.PEERS_ALLOWED):
            with pytest.raises(kernels.WrongResult, match="largest_difference"):
                kernels.check_out(wrong, want, times)
    rounded_more = want * torch.tensor([1.0, 1.0, 1.008]).view(3, 1, 1)  # 1 - 3e-5
    kernels.check_out(rounded_more, want, kernels.PEERS_ALLOWED)
    with pytest.raises(kernels.WrongResult, match="cosine_distance"):
        kernels.check_out(rounded_more, want)
    lse = torch.tensor([0.0, 2.0])
    kernels.check_lse(lse + 0.0015, lse, rounded=True)
    for off, rounded in ((0.0015, False), (0.003, True), (torch.nan, True)):
        with pytest.raises(kernels.WrongResult, match="lse"):
            kernels.check_lse(lse + torch.tensor([off, 0.0]), lse, rounded=rounded)


def result(heads: int, ours: float, **others: float) -> dict:
    """One result of serving_benchmarks.ops.kernels, with medians in microseconds."""
    peer_names = [name for name in others if name != "plan"]
    best = min(peer_names, key=others.get, default=None)
    return {
        "case": {
            "batch": "128q1s32k",
            "tokens": 128,
            "heads": heads,
            "topk": 2048,
            "format": "fp8_ds_mla",
            "pattern": "random",
        },
        "useful_flops": 1e9,
        "bytes": 1e8,
        "floor_seconds": {"math": 1e-5, "memory": 4e-5, "l2": 2e-5},
        "seconds": {
            name: {
                "fastest": t * 1e-6,
                "median": t * 1e-6,
                "lower_quartile": t * 1e-6,
                "upper_quartile": t * 1e-6,
                "turns": 5,
            }
            for name, t in {"ours": ours, **others}.items()
        },
        "accuracy": {},
        "failed": {},
        "best_peer": best,
        "speed_up": others[best] / ours if best else None,
    }


@pytest.fixture
def report() -> dict:
    return {
        "environment": {
            "date": "2026-11-20T00:00:00+00:00",
            "commit": "0123456789abcdef",
            "gpus": [{"name": "NVIDIA H200"}],
            "driver": "580.1",
            "torch": {"version": "2.11.0"},
            "peers": {"flashmla": "vllm 0.23.0", "fa3": "vllm 0.23.0", "tilelang": "not installed"},
            "l2_flushed": False,
        },
        "results": [
            result(16, 80.0, plan=9, flashmla_fp8=120, flashmla_fp8_one_batch=110, fa3_bf16=100),
            result(128, 2000.0, plan=9),
        ],
    }


def test_the_readmes_table_says_who_is_how_fast(report, tmp_path, capsys):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert kernels.main(["--markdown", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| 128q1s32k | 16 | 2048 | fp8_ds_mla | 80.0 | 110.0 | - | 100.0 | 1.25 | 50% |"
    assert lines[3] == "| 128q1s32k | 128 | 2048 | fp8_ds_mla | 2000 | - | - | - | - | 2% |"
    assert len({line.count("|") for line in lines[:4]}) == 1
    assert lines[5].startswith("Microseconds") and "vllm 0.23.0, 2026-11-20, commit 0123456789." in lines[5]


def test_the_table_has_a_row_a_case(report):
    table = kernel_report.table(report["results"])
    assert table.row_count == 2
    assert list(table.columns[-3].cells) == ["FA3, BF16", ""]
    assert "portable us" not in [column.header for column in table.columns]


def test_the_portable_kernel_has_a_column_where_it_was_timed(report):
    for result in report["results"]:
        result["seconds"]["portable"] = {**result["seconds"]["ours"], "median": 400e-6}
    table = kernel_report.table(report["results"])
    column = next(column for column in table.columns if column.header == "portable us")
    assert list(column.cells) == ["400.0", "400.0"]
    assert list(table.columns[-3].cells) == ["FA3, BF16", ""]  # it is no peer


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "either --suite or --batches"),
        (["--suite", "decode_by_heads", "--batches", "q1"], "either --suite or --batches"),
        (["--suite", "nope"], "--suite: no suite is called 'nope': decode_by_batch, "),
        (["--batches", "seven"], "--batches: 'seven' is no batch"),
        (["--batches", "q1", "--heads", "0"], "--heads must be 1 or more"),
        (["--batches", "q1", "--heads", "300"], "--heads must be 256 or fewer"),
        (["--batches", "q1", "--rounds", "1"], "--rounds must be 2 or more"),
        (["--suite", "decode_by_heads", "--heads", "3"], "--suite decode_by_heads has no such heads"),
        (["--suite", "decode_by_heads", "--output", "/proc/nope/x.json"], "--output: "),
    ],
)
def test_wrong_arguments_are_explained(arguments, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        kernels.main(arguments)
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_a_file_that_is_no_result_is_explained(tmp_path, capsys):
    (tmp_path / "x.json").write_text("[]")
    for arguments in (["--markdown", "/nope.json"], ["--markdown", str(tmp_path / "x.json")]):
        assert kernels.main(arguments) == 2
        assert f"{arguments[1]} could not be shown" in capsys.readouterr().err


@no_gpu
@pytest.mark.parametrize("arguments", [["kernels", "--suite", "decode_by_heads"], ["cache_ops"], ["index_ops"]])
def test_without_a_gpu_one_line_says_so(arguments):
    done = subprocess.run(
        [sys.executable, "-m", f"serving_benchmarks.{arguments[0]}", *arguments[1:]], capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: no NVIDIA GPU to measure on: ") and done.stderr.count("\n") == 1


def fake_wheel(folder, name="vllm-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl", without=None):
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("vllm/_C.abi3.so", "other kernels")
        for peer, path in peers.LIBRARIES.items():
            if peer != without:
                wheel.writestr(f"vllm/{path}", f"kernels of {peer}")
    return folder / name


def test_the_peers_libraries_are_packed_and_found(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.tempfile, "tempdir", str(tmp_path))
    packed = peers.pack(fake_wheel(tmp_path), tmp_path / "peers")
    assert sorted(p.name for p in packed) == ["_flashmla_C.abi3.so.xz", "_vllm_fa3_C.abi3.so.xz"]
    assert all(p.parent == tmp_path / "peers" / "vllm-1.2.3" for p in packed)
    assert lzma.decompress(packed[0].read_bytes()) == b"kernels of flashmla"
    for peer in peers.LIBRARIES:
        for _ in range(2):
            assert peers.find(peer, tmp_path / "peers", "1.2.3").read_text() == f"kernels of {peer}"


def test_the_libraries_of_an_installed_vllm_are_found(tmp_path):
    with zipfile.ZipFile(fake_wheel(tmp_path)) as wheel:
        wheel.extractall(tmp_path)
    assert peers.find("fa3", tmp_path / "vllm", "1.2.3").read_text() == "kernels of fa3"


def test_wheels_that_are_not_what_they_should_be_are_explained(tmp_path, capsys):
    broken = tmp_path / "vllm-1-none.whl"
    broken.write_text("no wheel")
    for wheel, text in (
        (fake_wheel(tmp_path, without="fa3"), "has no vllm_flash_attn/_vllm_fa3_C.abi3.so"),
        (fake_wheel(tmp_path, name="other-1.2.3.whl"), "is no wheel of vllm"),
        (broken, "is broken"),
        (tmp_path / "vllm-2-nope.whl", "No such file"),
    ):
        assert peers.main([str(tmp_path / "peers"), "--wheels", str(wheel)]) == 1
        assert text in " ".join(capsys.readouterr().err.split())


def test_a_peer_that_is_missing_is_named(tmp_path):
    with pytest.raises(peers.PeerError, match="no _flashmla_C.abi3.so of vllm 9"):
        peers.find("flashmla", tmp_path, "9")
    found = peer_kernels.load(tmp_path, "9")
    assert found["fa3"].startswith("not loaded: ") and found["flashmla"].startswith("not loaded: ")
