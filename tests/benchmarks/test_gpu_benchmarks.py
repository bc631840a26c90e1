"""What GPU benchmarks do on a CPU: batches, lists, checks of results, the peers' libraries, counts of operations."""

import lzma
import subprocess
import sys
import types
import zipfile

import pytest
import torch

from serving_benchmarks.__main__ import main
from serving_benchmarks.ops import index, kernels, peer_kernels, peers
from serving_benchmarks.ops.batches import PATTERNS, RECENT, Batch, positions

BATCHES = {"128q1s32k": [(1, 32768)] * 128, "q4k": [(4096, 4096)], "2q3s100_1q1s7": [(3, 100), (3, 100), (1, 7)]}


@pytest.mark.parametrize(("spec", "requests"), BATCHES.items())
def test_batches_are_read(spec, requests):
    batch = Batch.parse(spec)
    assert list(batch.requests) == requests
    assert batch.tokens == sum(q for q, _ in requests) == len(batch.token_requests()) == len(batch.visible())
    assert batch.cached == sum(n for _, n in requests)
    assert batch.queries == (requests[0][0] if len(set(requests)) == 1 else None)


@pytest.mark.parametrize("spec", ["", "128", "q", "3q0", "0q1", "q5s4", "q1s1m", "q1__q1", "q-1", "q1 s2"])
def test_what_is_no_batch_is_refused(spec):
    with pytest.raises(ValueError) as error:
        Batch.parse(spec)
    assert repr(spec) in str(error.value)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_lists_name_each_visible_position_at_most_once(pattern):
    batch = Batch.parse("2q3s100_q40s40")
    for topk in (60, 120):  # less and more than the longest sequence
        picked = positions(batch, topk, pattern)
        assert picked.shape == (46, topk) and picked.dtype == torch.int32
        for row, visible in zip(picked.tolist(), batch.visible().tolist(), strict=True):
            valid = row[: min(topk, visible)]
            assert len(set(valid)) == len(valid) and 0 <= min(valid) and max(valid) < visible
            assert row[len(valid) :] == [-1] * (topk - len(valid))


def test_sliding_lists_are_the_last_tokens_and_realistic_ones_mostly_recent_and_alike():
    assert positions(Batch.parse("q2s10"), 3, "sliding").sort().values.tolist() == [[6, 7, 8], [7, 8, 9]]
    first, second = positions(Batch.parse("q2s100000"), 2048, "realistic").tolist()
    assert 0.65 < sum(position >= 99999 - RECENT for position in first) / 2048 < 0.85
    assert len(set(first) & set(second)) > 1024


def test_a_check_finds_wrong_results():
    want = torch.randn(3, 2, 512) * 0.01
    assert kernels.check_out(want.bfloat16(), want)["cosine_distance"] < 5e-6
    for wrong in (want * torch.tensor([1.0, 1.0, 0.9]).view(3, 1, 1), want.roll(1, 0), want.clone().fill_(torch.nan)):
        for times in (1, kernels.PEERS_ALLOWED):
            with pytest.raises(kernels.WrongResult):
                kernels.check_out(wrong, want, times)
    rounded_more = want * torch.tensor([1.0, 1.0, 1.008]).view(3, 1, 1)  # 1 - 3e-5
    kernels.check_out(rounded_more, want, kernels.PEERS_ALLOWED)
    with pytest.raises(kernels.WrongResult):
        kernels.check_out(rounded_more, want)
    lse = torch.tensor([0.0, 2.0])
    kernels.check_lse(lse + 0.0015, lse, rounded=True)
    for off, rounded in ((0.0015, False), (0.003, True), (torch.nan, True)):
        with pytest.raises(kernels.WrongResult):
            kernels.check_lse(lse + torch.tensor([off, 0.0]), lse, rounded=rounded)


def test_peers_are_called_where_vllm_would_call_them():
    caches = types.SimpleNamespace(by_format={"fp8_ds_mla": None, "bf16": None})

    def called(spec, heads, fmt):
        (case,) = kernels.cases([spec], [heads], [64], [fmt])
        q = torch.empty(case.batch.tokens, heads, 576)
        problem = peer_kernels.Problem(q, None, None, 1.0, case.batch.queries)
        return set(kernels.peers_for(case, problem, caches, {"flashmla", "fa3"}))

    bf16 = {"flashmla_bf16", "fa3_bf16"}
    assert called("8q1s1k", 16, "fp8_ds_mla") == bf16 | {"flashmla_fp8", "flashmla_fp8_one_batch"}
    assert called("8q1s1k", 64, "fp8_ds_mla") == bf16 | {"flashmla_fp8"}
    assert called("8q1s1k_2q2s1k", 64, "fp8_ds_mla") == called("q512s1k", 64, "fp8_ds_mla") == bf16
    assert called("8q1s1k", 16, "bf16") == bf16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["kernels --suite headline", "ops cache", "ops index"])
def test_without_a_gpu_one_line_says_so(command):
    done = subprocess.run(
        [sys.executable, "-m", "serving_benchmarks", *command.split()], capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_a_token_sees_the_keys_before_it_and_its_own():
    assert index.Case(64, 1, 4096, 64, 2048).seen == 64 * 4096
    assert index.Case(1, 5, 5, 64, 2048).seen == 1 + 2 + 3 + 4 + 5
    assert index.Case(2, 3, 10, 64, 2048).seen == 2 * (8 + 9 + 10)


def test_index_results_are_shown_as_rates():
    seconds = {"fastest": 9e-6, "median": 1e-5, "lower_quartile": 9.5e-6, "upper_quartile": 1.1e-5, "rounds": 21}
    scores = {"op": "index_scores", "format": "fp8", "case": {"name": "decode", "heads": 64}, "seconds": seconds}
    (row,) = index.rows([{**scores, "flops": 4 * 10**9, "bytes": 35 * 10**6}])
    assert row == ["index_scores", "decode", "64", "fp8", "10.0", "9.5 to 11.0", "400", "3.50"]


def fake_wheel(folder, name="vllm-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl", without=None):
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("vllm/_C.abi3.so", "other kernels")
        for peer, path in peers.LIBRARIES.items():
            if peer != without:
                wheel.writestr(f"vllm/{path}", f"kernels of {peer}")
    return folder / name


def test_the_peers_libraries_are_packed_and_found(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.tempfile, "tempdir", str(tmp_path))
    wheel = fake_wheel(tmp_path)
    assert main(["peers", str(tmp_path / "peers"), "--wheels", str(wheel)]) == 0
    packed = sorted((tmp_path / "peers" / "vllm-1.2.3").iterdir())
    assert [path.name for path in packed] == ["_flashmla_C.abi3.so.xz", "_vllm_fa3_C.abi3.so.xz"]
    assert lzma.decompress(packed[0].read_bytes()) == b"kernels of flashmla"
    for peer in peers.LIBRARIES:
        for _ in range(2):
            assert peers.find(peer, tmp_path / "peers", "1.2.3").read_text() == f"kernels of {peer}"
    with zipfile.ZipFile(wheel) as installed:
        installed.extractall(tmp_path)
    assert peers.find("fa3", tmp_path / "vllm", "1.2.3").read_text() == "kernels of fa3"


def test_wheels_that_are_not_what_they_should_be_are_refused(tmp_path, capsys):
    broken = tmp_path / "vllm-1-none.whl"
    broken.write_text("no wheel")
    wheels = [fake_wheel(tmp_path, without="fa3"), fake_wheel(tmp_path, name="other-1.2.3.whl")]
    for wheel in (*wheels, broken, tmp_path / "vllm-2-nope.whl"):
        assert main(["peers", str(tmp_path / "peers"), "--wheels", str(wheel)]) == 2
        assert wheel.name in capsys.readouterr().err


def test_a_peer_that_is_missing_is_named(tmp_path):
    with pytest.raises(peers.PeerError, match="_flashmla_C.abi3.so of vllm 9"):
        peers.find("flashmla", tmp_path, "9")
    found = peer_kernels.load(tmp_path, "9")
    assert {*found} == {"flashmla", "fa3", "flashinfer"}
    assert all(found[name].startswith("missing: ") for name in peers.LIBRARIES)
