"""Our selection in SGLang's indexer, with SGLang's own metadata, pools and batches."""

import logging
from types import SimpleNamespace

import pytest
import torch

import mla_backend
import sglang_installed  # noqa: F401
from index_problems import random_keys
from mla_backend import reference
from mla_backend.sglang_plugin import selection
from tests.plugin import test_sglang_backend as backends

with pytest.MonkeyPatch.context() as asked:
    asked.setenv(selection.VARIABLE, "1")
    selection.install()
backends.HookRegistry.apply_hooks()
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer  # noqa: E402
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend  # noqa: E402
from sglang.srt.layers.attention.dsa.paged_mqa_logits_backend import DSAPagedMQALogitsBackend  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402

lengths_on_a_cpu = backends.lengths_on_a_cpu
DEVICE, EXTEND, VERIFY = backends.DEVICE, backends.EXTEND, backends.VERIFY
TOPK, HEADS, PADDING = 16, 64, 2
BATCHES = {
    "decode": (backends.DECODE, (300, 5, 63), 1),
    "chunks after prefixes": (EXTEND, (20, 140, 0), (5, 70, 30)),
    **{f"{n} tokens verified": (VERIFY, (60, 200), n) for n in (1, 2, 5)},
    "drafts after verification": (backends.DRAFT, (60, 200), 3),
}


@pytest.fixture(autouse=True)
def on(monkeypatch):
    monkeypatch.setenv(selection.VARIABLE, "1")
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")


def fixture_of(name: str, **options):
    fixture = backends.batch_of(*BATCHES[name], index_topk=TOPK, **options)
    if BATCHES[name][0] is VERIFY:  # where SGLang counts the context without drafts
        for lengths in (fixture.forward_batch.seq_lens, fixture.forward_batch.seq_lens_cpu):
            lengths -= BATCHES[name][2]
    return fixture


def problem_of(fixture):
    """What the model hands its indexer, with queries that pad; the positions to find; and their slots."""
    pool, requests = fixture.runner.token_to_kv_pool, fixture.runner.req_to_token_pool
    keys = pool.get_index_k_with_scale_buffer(0)
    cache = random_keys("fp8", len(keys), 64, device=DEVICE)
    keys.copy_(cache.flatten(1))
    case = fixture.case
    seen = [(r, n + i) for r, n in enumerate(case.prefix_lens) for i in range(1, case.input_lens[r] + 1)]
    request, lengths = torch.tensor(seen, dtype=torch.int32, device=DEVICE).T.contiguous()
    slots = requests.req_to_token[fixture.forward_batch.req_pool_indices]
    q = torch.randn(len(seen) + PADDING, HEADS, 128, device=DEVICE).to(torch.float8_e4m3fn)
    weights = torch.randn(len(q), HEADS, 1, device=DEVICE)
    given = q[:-PADDING], weights[:-PADDING, :, 0], cache, slots[:, ::64] // 64, request, lengths
    exact = DEVICE == "cpu"  # a GPU rounds scores
    positions = reference.select_tokens(*given, TOPK)[0] if exact else mla_backend.select_tokens(*given, TOPK)
    positions = torch.nn.functional.pad(positions, (0, 0, 0, PADDING), value=-1)
    request = torch.nn.functional.pad(request, (0, PADDING)).long().unsqueeze(1)
    return q, weights, positions, slots[request, positions.clamp(min=0).long()].where(positions >= 0, -1)


def select(fixture, q, weights, out=None):
    indexer, batch = object.__new__(Indexer), fixture.forward_batch
    torch.nn.Module.__init__(indexer)
    vars(indexer).update(index_topk=TOPK, n_heads=HEADS, num_init_tokens=0, num_local_tokens=0)
    vars(indexer).update(logits_with_pp_recv=False, paged_mqa_logits_backend=DSAPagedMQALogitsBackend.DEEPGEMM)
    if DEVICE == "cuda":
        indexer.sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    metadata = fixture.backend.get_indexer_metadata(0, batch)
    with forward_context(ForwardContext(attn_backend=fixture.backend)):
        if batch.forward_mode is EXTEND:
            return indexer._get_topk_ragged(False, batch, 0, q, weights, metadata, topk_result=out)
        return indexer._get_topk_paged(batch, 0, q, weights, metadata)


@pytest.mark.parametrize("fused", [False, True], ids=["positions", "slots"])
@pytest.mark.parametrize("name", BATCHES)
def test_each_token_gets_the_best_of_what_it_sees(name, fused, monkeypatch, no_values_are_read):
    monkeypatch.setenv("SGLANG_DSA_FUSE_TOPK", str(int(fused)))
    fixture = fixture_of(name)
    q, weights, *found = problem_of(fixture)
    fixture.backend.init_forward_metadata(fixture.forward_batch)
    no_values_are_read()
    assert torch.equal(select(fixture, q, weights), found[fused])
    if BATCHES[name][0] is EXTEND:  # as a graph wants it
        out = torch.full_like(found[fused], -1)
        assert select(fixture, q, weights, out) is out and torch.equal(out, found[fused])


class Group:
    """GPUs that take turns, twice: in the second turn each gets what the others said in the first."""

    def __init__(self, rank: int, said: dict[int, torch.Tensor]):
        self.rank_in_group, self.world_size, self.said = rank, 3, said

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.said[self.rank_in_group] = input.clone()
        output.copy_(torch.cat([self.said.get(rank, torch.zeros_like(input)) for rank in range(self.world_size)]))


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_gpus_that_share_get_what_one_gets(name, pays, monkeypatch):
    monkeypatch.setattr(selection.rank_shares, "pays", lambda *_: pays)
    fixture, said, counts = fixture_of(name), {}, []
    q, weights, positions, _ = problem_of(fixture)
    fixture.backend.init_forward_metadata(fixture.forward_batch)
    monkeypatch.setattr(
        selection, "select_tokens", lambda *a, **k: counts.append(len(a[0])) or mla_backend.select_tokens(*a, **k)
    )
    for turn in range(2):
        for rank in range(3):
            fixture.backend.selector.shares = selection.Shares(Group(rank, said))
            found = select(fixture, q, weights)
            assert turn == 0 or torch.equal(found, positions)
    requests, tokens = len(fixture.forward_batch.seq_lens), len(q) - PADDING
    each = -(-tokens // 3) if BATCHES[name][0] is EXTEND else -(-requests // 3) * tokens // requests
    assert {*counts} == {each if pays else tokens} and bool(said) == pays


@pytest.mark.gpu
@pytest.mark.parametrize("name", BATCHES)
def test_sglangs_own_functions_select_the_same_but_for_rounding(name):
    fixture = fixture_of(name)
    q, weights, *_ = problem_of(fixture)
    fixture.backend.init_forward_metadata(fixture.forward_batch)
    ours = select(fixture, q, weights)
    fixture.backend.selector, fixture.backend.dsa_topk_backend = None, DSATopKBackend.TORCH
    theirs = select(fixture, q, weights)
    assert torch.equal((ours >= 0).sum(1), (theirs >= 0).sum(1))
    assert (ours.unsqueeze(2) == theirs.unsqueeze(1)).any(2)[ours >= 0].float().mean() > 0.98


@pytest.mark.parametrize("name", ["decode", "2 tokens verified", "drafts after verification"])
def test_a_captured_pass_selects_for_its_replay(name):
    fixture = fixture_of(name, disable_cuda_graph=False)
    q, weights, positions, _ = problem_of(fixture)
    whole, out = fixture.forward_batch.seq_lens.clone(), torch.empty_like(positions)
    fixture.backend.init_cuda_graph_state(max_bs=len(whole), max_num_tokens=fixture.case.num_input_tokens)

    def run() -> None:
        fixture.backend.init_forward_metadata_in_graph(fixture.forward_batch)
        for _ in range(2):  # layers
            out.copy_(select(fixture, q, weights))

    backends.prepare(fixture, torch.ones_like(whole), in_capture=True)
    replay = backends.captured(run)
    backends.prepare(fixture, whole, in_capture=False)
    replay()
    assert torch.equal(out, positions)


def test_it_is_on_where_it_is_asked_for_or_there_is_no_deep_gemm_and_it_can_be(monkeypatch):
    runner = backends.batch_of(backends.DECODE, (64,)).runner
    for without in (True, False):
        monkeypatch.setenv(selection.WITHOUT_DEEP_GEMM, str(without))
        for value, expected in (("1", True), ("0", False), (None, without)):
            monkeypatch.setenv(selection.VARIABLE, value) if value else monkeypatch.delenv(selection.VARIABLE)
            assert (backends.SparseMLABackend(runner).selector is not None) == expected
    wrong = [("1", "leave out --attn-cp-size"), ("yes", "must be 0, 1 or shared; got 'yes'"), ("0", None)]
    wrong += [("shared", "MLA_SELECTION=shared needs attention on several GPUs")]
    for value, word in wrong:
        sizes = SimpleNamespace(attn_cp_size=1 if value == "shared" else 2, attn_tp_size=1)
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda sizes=sizes: sizes)
        monkeypatch.setenv(selection.VARIABLE, value)
        assert (word or "") in (selection.why_refused(runner) or "") and not selection.is_on(runner)


def test_a_changed_function_stays_sglangs_and_the_log_says_what_that_costs(monkeypatch, caplog):
    monkeypatch.setenv("MLA_BACKEND_WARNED_OF_SELECT_TOKENS", "")
    monkeypatch.setattr(f"{selection._INDEXER.replace(':', '.')}._get_topk_paged", lambda self, fresh: None)
    monkeypatch.setattr(backends.HookRegistry, "register", lambda *_: pytest.fail("it was replaced"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            selection.install()
    (said,) = caplog.messages
    assert "other arguments (fresh new; " in said and said.endswith(f": {selection.COST}.")
    assert backends.batch_of(backends.DECODE, (64,)).backend.selector is None
