"""What ops/ times: batches and suites, checks of results, peers, the timer, and the commands as far as a CPU goes."""

import ctypes
import functools
import itertools
import lzma
import math
import sys
import time
import types
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from commands import parsed
from serving_benchmarks.__main__ import main
from serving_benchmarks.ops import backward, dense, index, kernels, peer_kernels, peers, rows, timing
from serving_benchmarks.ops.batches import RequestBatch, positions
from serving_benchmarks.ops.timing import Timing, interleaved
from serving_benchmarks.results import kinds, tables
from serving_benchmarks.results.kernel_times import own_times

BATCHES = {"128q1s32k": [(1, 32768)] * 128, "q4k": [(4096, 4096)], "2q3s100_1q1s7": [(3, 100), (3, 100), (1, 7)]}


@pytest.mark.parametrize(("spec", "requests"), BATCHES.items())
def test_batches_are_read(spec, requests):
    batch = RequestBatch.parse(spec)
    assert list(batch.requests) == requests
    assert batch.tokens == sum(q for q, _ in requests) == len(batch.token_requests()) == len(batch.visible())


@pytest.mark.parametrize("spec", ["", "128", "q", "3q0", "0q1", "q5s4", "q1s1m", "q1__q1", "q-1", "q1 s2", "2000000q1"])
def test_what_is_no_batch_is_refused(spec):
    with pytest.raises(ValueError, match=repr(spec)):
        RequestBatch.parse(spec)


def test_lists_name_each_visible_position_at_most_once():
    batch = RequestBatch.parse("2q3s100_q40s40")
    for topk in (60, 120):  # less and more than the longest sequence
        picked = positions(batch.visible(), topk)
        assert picked.shape == (46, topk) and picked.dtype == torch.int32
        for row, visible in zip(picked.tolist(), batch.visible().tolist(), strict=True):
            valid = row[: min(topk, visible)]
            assert len(set(valid)) == len(valid) and 0 <= min(valid) and max(valid) < visible
            assert row[len(valid) :] == [-1] * (topk - len(valid))


def test_a_check_finds_wrong_results(monkeypatch):
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
    monkeypatch.setattr(kernels, "rounds_queries", lambda rounded: rounded)
    kernels.check_ours((want, lse + 0.0015), (want, lse), True, "exact")
    for off, rounded in ((0.0015, False), (0.003, True), (torch.nan, True)):
        with pytest.raises(kernels.WrongResult, match="wrong lse"):
            kernels.check_ours((want, lse + torch.tensor([off, 0.0])), (want, lse), rounded, "exact")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command",
    [*"kernels --suite headline,rows,dense,backward,ops index,ops sharing,ops tune --output x.csv,ops tune".split(",")],
)
def test_without_a_gpu_one_line_says_so(command, capsys):
    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and err.count("\n") == 1


def fake_wheel(folder, name="vllm-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl", without=None):
    with zipfile.ZipFile(folder / name, "w") as wheel:
        wheel.writestr("vllm/_C.abi3.so", "other kernels")
        for peer, path in peers.LIBRARIES.items():
            if peer != without:
                wheel.writestr(f"vllm/{path}", f"kernels of {peer}")
    return folder / name


def test_the_peers_libraries_are_packed_and_found(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.tempfile, "tempdir", str(tmp_path))
    assert main(["peers", str(tmp_path / "peers"), "--wheels", str(fake_wheel(tmp_path))]) == 0
    packed = sorted((tmp_path / "peers" / "vllm-1.2.3").iterdir())
    names = "_flashmla_C", "_flashmla_extension_C", "_vllm_fa3_C"
    assert [path.name for path in packed] == [f"{name}.abi3.so.xz" for name in names]
    assert lzma.decompress(packed[0].read_bytes()) == b"kernels of flashmla"
    for peer in (*peers.LIBRARIES, *peers.LIBRARIES):
        assert peers.find(peer, tmp_path / "peers", "1.2.3").read_text() == f"kernels of {peer}"


def test_wheels_that_are_not_what_they_should_be_are_refused_and_a_missing_peer_is_named(tmp_path, capsys):
    broken = tmp_path / "vllm-1-none.whl"
    broken.write_text("no wheel")
    for wheel in (fake_wheel(tmp_path, without="fa3"), broken, tmp_path / "vllm-2-nope.whl"):
        assert main(["peers", str(tmp_path / "peers"), "--wheels", str(wheel)]) == 2
        assert wheel.name in capsys.readouterr().err
    found = peer_kernels.load(tmp_path, "9")
    assert {*found} == {"flashmla", "flashmla_fp8", "fa3", "flashinfer", "q8kv8"}
    assert all(found[name].startswith("missing: ") for name in (*peers.LIBRARIES, "q8kv8"))


@pytest.mark.parametrize("name", kernels.SUITES)
def test_every_suite_has_each_case_once(name):
    cases = kernels.chosen_cases(parsed("kernels", "--suite", name))
    assert cases and len(set(cases)) == len(cases) and all(case.requests.tokens for case in cases)
    assert main(["kernels", "--suite", name, "--heads", "3"]) == 2


TIMING = {"fastest": 1e-5, "median": 2e-5, "lower_quartile": 1.5e-5, "upper_quartile": 3e-5, "rounds": 5}
MEASURED = {"useful_flops": 1e9, "bytes": 1e8, "floor_seconds": {"math": 1e-5, "memory": 4e-5, "l2": 2e-5}}
MEASURED |= {"accuracy": {}, "seconds": {"ours": TIMING, "plan": TIMING}, "failed": {}, "best_peer": None}


@pytest.fixture
def on_a_cpu(monkeypatch):
    """What needs a GPU, on a CPU: small caches, and calls in place of graphs."""
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(kernels, "SMALLEST_CACHE", 512)
    monkeypatch.setattr(kernels, "PRODUCT_WIDTH", 8)
    monkeypatch.setattr(kernels.opt, "require_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(timing, "captured", lambda calls, passes: timing.Burst([*calls] * passes))
    monkeypatch.setattr(timing.Burst, "seconds", lambda burst: burst.run() or time.perf_counter())


def measured(path, *words) -> list[dict]:
    assert main([*map(str, words), "--rounds", "2", "--output", str(path)]) == 0
    return kinds.load(path).results


def test_ours_and_peers_are_checked_before_they_are_timed(on_a_cpu, tmp_path, monkeypatch):
    def peer(problem, wrong):
        out, cache = torch.empty(*problem.q.shape[:2], 512).bfloat16(), caches[0].copied("fp8_ds_mla", 64, "bf16")
        attend = functools.partial(mla_backend.sparse_attention, problem.q, cache, problem.indices, scale=problem.scale)
        return peer_kernels.Prepared(lambda: out.zero_() if wrong else attend(out=out), out)

    caches, peers = [kernels.Caches(0)], {f"peer_{wrong}": functools.partial(peer, wrong=wrong) for wrong in (0, 1)}
    monkeypatch.setattr(kernels, "Caches", lambda _: caches[0])
    monkeypatch.setattr(kernels, "peers_for", lambda *_: peers)
    for result in measured(tmp_path / "out", *"kernels --batches 2q1s100_q2s70 --heads 3 --topk 90".split()):
        assert {*result["seconds"]} == {"ours", "plan", "peer_0"} and result["best_peer"] == "peer_0"
        assert {*result["in_situ"]["seconds"]} == {"ours", "peer_0"} and "kernel='cpu'" in result["launch"]
        assert "wrong result" in result["failed"]["peer_1"] and {*result["accuracy"]} == {"ours", "peer_0"}
        assert result["useful_flops"] == 2 * (90 + 90 + 69 + 70) * 3 * (576 + 512)
    more = "kernels --batches 2q1s100 --heads 33 --topk 90 --formats fp8_ds_mla".split()
    (result,) = measured(tmp_path / "more", *more)
    assert {*result["in_situ"]["seconds"]} == {"ours", "ours_fp8", "peer_0"}


def test_q8kv8_reads_its_own_rows_and_is_not_the_best_peer(on_a_cpu, tmp_path, monkeypatch):
    def attend(q, rows, lists, scales, out, lse, tokens, heads, count, topk, scale_log2, stream):
        def at(pointer, dtype, *shape):
            memory = (ctypes.c_char * (math.prod(shape) * dtype.itemsize)).from_address(pointer.value)
            return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)

        e4m3, (q_scale, scale) = torch.float8_e4m3fn, at(scales, torch.float32, 2)
        lists = at(lists, torch.int32, tokens, topk)
        q, kv = at(q, e4m3, tokens, heads, 576).float() * q_scale, at(rows, e4m3, count, 576)[lists].float() * scale
        scores = (q @ kv.mT * scale_log2.value).masked_fill(lists.unsqueeze(1) < 0, -torch.inf)
        p = (scores * math.log(2)).softmax(2)
        at(lse, torch.float32, 2, tokens, heads).fill_(0)
        at(out, torch.bfloat16, tokens, heads, 512).copy_(p @ kv[..., :512])
        assert heads == 64

    fake = types.SimpleNamespace
    monkeypatch.setattr(peers, "q8kv8", lambda: fake(q8kv8=attend))
    monkeypatch.setattr(peer_kernels, "load", lambda *_: {"q8kv8": "sglang 1"})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake(cuda_stream=None))
    how = "kernels --batches q1s200_q1s90 --heads 33 --topk 128 --formats fp8_tensor_576,fp8_ds_mla"
    for result in measured(tmp_path / "out", *how.split()):
        assert {*result["seconds"]} == {"ours", "ours_fp8", "plan", "q8kv8"} and result["best_peer"] is None
        assert result["accuracy"]["q8kv8"]["cosine_distance"] > kernels.COSINE
    assert "sglang 1" in tables.kernels(kinds.load(tmp_path / "out").report)


def test_dense_decode_is_measured(on_a_cpu, tmp_path, monkeypatch):
    formats = ["bf16", "fp8_ds_mla", "fp8_tensor_576"]
    monkeypatch.setattr(dense, "cases", lambda: [dense.Case("2q3s200", 11, fmt) for fmt in formats])
    how = "dense", "--cases", "h11", "--ours-only"
    for result, fmt in zip(measured(tmp_path / "out", *how), formats, strict=True):
        assert result["case"] == {"batch": "2q3s200", "heads": 11, "format": fmt, "tokens": 6}
        assert {*result["seconds"]} == {"ours", "plan"}
        assert result["useful_flops"] == 2 * 2 * (198 + 199 + 200) * 11 * (576 + 512)
    assert main([*how, "--limit-s", "1e-9"]) == 1 and main(["dense", "--cases", "h11 fp4"]) == 2


@pytest.mark.parametrize("lists", backward.LISTS)
def test_the_backward_is_measured_versus_cudnn_and_in_parts(lists, on_a_cpu, tmp_path, monkeypatch):
    def cudnn(q, kv, out, d_out, lse, sink, lists, scale, dq, dkv):
        given = q, kv, lists, out, lse, d_out
        mla_backend.sparse_mla_backward(*given, scale=scale, sink=sink, d_q=dq, d_kv=dkv)

    functions = types.SimpleNamespace(sparse_attention_backward_wrapper=cudnn)
    monkeypatch.setitem(sys.modules, backward.CUDNN, functions)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    monkeypatch.setattr(backward, "cases", lambda: [backward.Case(3, 90, lists, queries=70, topk=40)])
    found = backward.new_lists(backward.cases()[0]).tolist()
    assert all(len({*one}) == 40 and 0 <= min(one) <= max(one) < 90 for one in found)
    shared = {len({*one} & {*other}) for one, other in itertools.pairwise(found)}
    assert (shared == {36}) == (lists == "overlapping")
    (result,) = measured(tmp_path / "out", "backward")
    assert {*result["seconds"]} == {"ours", "atomic", "cudnn"} and not result["failed"]
    assert all(result["parts"].values())
    assert "nvidia-cudnn-frontend 1" in tables.backward(kinds.load(tmp_path / "out").report)


@pytest.mark.parametrize("candidates", [0, 56])
@pytest.mark.parametrize("batch", ["3q1s70", "3q3s100", "3q4s100", "3q40s90"])
def test_selection_is_measured_versus_two_steps(batch, candidates, on_a_cpu, monkeypatch, tmp_path):
    def paged(q, cache, weights, lengths, table, schedule, longest):
        ids = torch.arange(lengths.numel(), dtype=torch.int32) // q[0].shape[1]
        given = q[0].flatten(0, 1).float(), weights, cache.squeeze(-2), table, ids, lengths.flatten()
        return mla_backend.index_scores(*given, longest)

    def gather(cache, values, scales, table, starts):
        for row, begin, end in zip(table, starts, starts[1:], strict=False):
            blocks = cache[row.long()].flatten(1)
            values[begin:end] = blocks[:, :8192].reshape(-1, 128)[: end - begin].view(torch.float8_e4m3fn)
            scales[begin:end] = blocks[:, 8192:].reshape(-1, 4)[: end - begin]

    def gathered(q, keys, weights, begin, end, longest):
        scores = (q[0].float() @ (keys[0].float() * keys[1].unsqueeze(1)).T).relu_().mul_(weights.unsqueeze(2)).sum(1)
        return scores.gather(1, (begin.unsqueeze(1) + torch.arange(longest)).clamp(max=len(keys[0]) - 1))

    def mask(scores, starts, ends, blocks, size):
        kept = (torch.arange(scores.shape[1]) // size == blocks.unsqueeze(2)).any(1)
        scores.masked_fill_(~kept, -torch.inf)

    def top(scores, lengths, out, *_):
        mla_backend.select_top(scores, lengths.flatten(), chosen=out)

    fake = types.SimpleNamespace
    gemm = fake(fp8_fp4_paged_mqa_logits=paged, fp8_fp4_mqa_logits=gathered, set_pdl=bool)
    gemm.get_paged_mqa_logits_metadata = lambda lengths, block, slots: None
    ops = fake(cooperative_topk=top, top_k_per_row_prefill=lambda scores, begin, *rest: top(scores, *rest))
    modules = {index.DEEP_GEMM: gemm, index.VLLM_OPS: fake(), index.MASK: fake(apply_candidate_mask=mask)}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, has in (("_C", ops), ("_C_cache_ops", fake(cp_gather_indexer_k_quant_cache=gather))):
        monkeypatch.setattr(torch.ops, name, has, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: fake(multi_processor_count=132))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    monkeypatch.setattr(index, "SMALLEST_CACHE", 512)
    monkeypatch.setattr(index, "LOGITS", 40 * 90 * 5)  # of two requests at once
    how = "ops", "index", "--batches", batch, "--heads", "4", "--topk", "50"
    how += ("--candidates", str(candidates)) if candidates else ()
    (result,) = measured(tmp_path / "out", *how)
    assert result["best_peer"] == "deepgemm" and {*result["accuracy"]} == {"ours", "deepgemm"}
    assert result["case"]["candidates"] == candidates
    seen = RequestBatch.parse(batch).visible().clamp(max=candidates or 100)
    assert result["useful_flops"] == 2 * 128 * 4 * int(seen.sum())
    told = kinds.KINDS["index"].name_of(result) + tables.dense(kinds.load(tmp_path / "out").report)
    assert told.count("candidates") == 2 * bool(candidates)
    monkeypatch.setattr(mla_backend, "select_tokens", lambda *_, out, **__: out.copy_(torch.arange(50)))
    assert main([*how, "--rounds", "2"]) == 1


def test_every_case_of_rows_is_there_once_and_has_a_name_of_its_own():
    cases = rows.cases()
    assert len({tables.kernel_name(case.as_dict()) for case in cases}) == len(cases) == len(set(cases))
    assert {case.format for case in cases} == {*mla_backend.FORMATS} - {"fp8_ds_mla"} == {*rows.PEERS}


def test_rows_measures_what_was_asked_for_and_goes_on_after_a_failure(on_a_cpu, tmp_path, monkeypatch, capsys):
    def measure(case, **_):
        if case.heads == 8:
            raise kernels.WrongResult("wrong result")
        return MEASURED

    monkeypatch.setattr(rows, "measure", measure)
    wanted = [f"CONFIG1, {requests}q2s16k, h {heads}," for heads in (8, 16) for requests in (2, 128)]
    options = ["--cases", "|".join([*wanted, "V4-Pro, 128q1s16k"]), "--ours-only"]
    assert main(["rows", *options, "--output", str(tmp_path / "out.json")]) == 1
    results = kinds.load(tmp_path / "out.json").results
    found = [(r["case"]["name"], r["case"]["batch"], r["case"]["heads"], "error" in r) for r in results]
    asked = [("CONFIG1", batch, heads, heads == 8) for heads in (8, 16) for batch in ("2q2s16k", "128q2s16k")]
    assert found == [*asked, ("V4-Pro", "128q1s16k", 16, False)]
    assert capsys.readouterr().err.count("mla_backend failed for CONFIG1, ") == 2
    assert main(["rows", "--cases", "long h 3"]) == 2


def test_quartiles_of_few_rounds_lie_between_them():
    assert Timing.of([6, 1]) == Timing(1, 3.5, 2.25, 4.75, 2)
    assert Timing.of([1, 2, 9]) == Timing(1, 2, 1.5, 5.5, 3)


def test_each_candidate_is_timed_once_a_round():
    called = []

    def clock(name):
        return lambda number: called.append((name, number)) or number + 1.0

    timings = interleaved({"a": clock("a"), "b": clock("b")}, rounds=3)
    assert called == [entry for n in range(3) for entry in (("a", n), ("b", n))]
    assert timings == {name: Timing(1.0, 2.0, 1.5, 2.5, 3) for name in "ab"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.integers(0, 20)), max_size=20))
def test_own_times_are_together_the_time_in_which_anything_ran(ran_at):
    ran = {tick for _, begin, ticks in ran_at for tick in range(begin, begin + ticks)}
    found = own_times((name, begin, begin + ticks) for name, begin, ticks in ran_at)
    assert sum(time for *_, time in found) == len(ran)
    assert sum(calls for _, calls, _ in found) == len(ran_at)
