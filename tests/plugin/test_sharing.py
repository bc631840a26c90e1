"""Ranks that share selection choose what one of them would, whatever a step is like."""

import os
import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_installed  # noqa: F401
from mla_backend.vllm_plugin import config as plugin_config
from mla_backend.vllm_plugin import selection, sharing
from vllm_models import config_with

RANKS, HEADS, TOPK, KEYS = 2, 4, 16, "layers.0.indexer.k_cache"
STEPS = {
    "decode": [([1] * 5, [300, 17, 200, 9, 64])],
    "one request": [([1], [300])],
    "padded for a graph": [([1] * 3 + [0], [300, 17, 20, 0])],
    "one draft": [([2] * 3, [300, 40, 150])],
    "three drafts": [([4] * 3, [300, 4, 150])],
    "two drafts, flattened": [([3] * 3, [300, 40, 150]), ([1, 3, 2], [40, 300, 2])],
    "prompts": [([60, 1, 40], [60, 1, 40]), ([100], [100])],
    "chunks after prefixes": [([90, 20], [300, 270])],
    "mixed": [([1, 1, 1, 60, 7], [200, 300, 9, 200, 70]), ([2, 2, 33], [8, 300, 40])],
}
"""Steps by what they are like: the tokens of each request, and the lengths of their contexts."""

DRAFTS = {"one draft": 1, "three drafts": 3, "two drafts, flattened": 2, "mixed": 1}


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=70), ranks=st.integers(2, 8), width=st.integers(1, 4))
def test_every_row_is_dealt_once_and_shares_are_equal(lengths, ranks, width):
    dealt, places = sharing.deal(torch.tensor(lengths, dtype=torch.int32), ranks)
    assert torch.equal(dealt.flatten()[places], torch.arange(len(lengths)))
    mine = torch.zeros(dealt.numel(), dtype=torch.bool).scatter_(0, places, True).view(dealt.shape)
    counts, work = mine.sum(1), (torch.tensor(lengths)[dealt] * mine).sum(1)
    assert counts.max() - counts.min() <= 1 and work.max() - work.min() <= max(lengths)
    tokens = torch.arange(len(lengths) * width)
    rows, at = (sharing.rows_of(x.flatten(), width) for x in (dealt, places))
    assert torch.equal(rows[at], tokens)
    shares = [sharing.deal_in_turn(tokens, rank, ranks) for rank in range(ranks)]
    assert all(torch.equal(torch.cat([rows for rows, _ in shares])[places], tokens) for _, places in shares)


def select_in_shares(rank: int, meeting: str, own: bool) -> None:
    """One of two ranks: what vLLM's function, and its op, choose in shares is what the function chose before."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    from vllm.config import CUDAGraphMode
    from vllm.model_executor.layers import sparse_attn_indexer as layer
    from vllm.models.deepseek_v32 import attention as model

    import indexer_on_cpu
    from index_problems import random_index
    from mla_backend.vllm_plugin import gpu_indexer, shared_indexer

    def all_gather(own, dim):
        torch.distributed.all_gather(found := [torch.empty_like(own) for _ in range(RANKS)], own)
        return torch.cat(found)

    torch.manual_seed(0)
    indexer_on_cpu.on_cpu()
    group = SimpleNamespace(rank_in_group=rank, world_size=RANKS, device=torch.device("cpu"), device_communicator=None)
    group.all_gather, exchanges = all_gather, []
    text = SimpleNamespace(index_n_heads=HEADS, index_topk=TOPK)
    config = config_with(model=dict(hf_text_config=text), scheduler=dict(max_num_batched_tokens=37))
    config.additional_config = {sharing.OPTION: True}
    shared_indexer.get_tp_group, selection.is_on = lambda: group, lambda config: own
    function = gpu_indexer.in_place_of(layer.sparse_attn_indexer) if own else layer.sparse_attn_indexer
    shared_indexer.install(config)
    shared = [model.sparse_attn_indexer] if own else [model.sparse_attn_indexer, torch.ops.vllm.sparse_attn_indexer]
    exchange, context = shared_indexer.Room.exchange, SimpleNamespace()
    shared_indexer.Room.exchange = lambda *given: exchanges.append(given) or exchange(*given)
    for module in (layer, gpu_indexer, shared_indexer):
        module.get_forward_context = lambda: context
    for name, steps in STEPS.items():
        builder = indexer_on_cpu.new_builder(DRAFTS.get(name, 0), "flattened" in name, room=700, budget=40 * 300 * 4)
        for query_lens, seq_lens in steps:
            table = torch.randint(0, 40, (5, 5), dtype=torch.int32)
            step = indexer_on_cpu.step_of(query_lens, seq_lens, table)
            batch, tokens = builder.build(0, step), step.num_actual_tokens
            if name == "decode":  # further drafts, in a graph of another batch
                batch.seq_lens += torch.randperm(tokens, dtype=torch.int32)
                table.copy_(table.flip(0))
                builder.update_draft_decode_metadata(batch)
            context.attn_metadata = {KEYS: batch}
            context.cudagraph_runtime_mode = CUDAGraphMode.FULL if "graph" in name else CUDAGraphMode.NONE
            problem = random_index(tokens=tokens, heads=HEADS, dtype=torch.float8_e4m3fn)
            q, later = problem.queries, [True, False, False, ""]
            given = q, KEYS, problem.cache, q, None, None, problem.weights, 128, "ue8m0", TOPK, 128, 320, 2048
            want = torch.full((tokens + 2, TOPK), 7, dtype=torch.int32)
            function(*given, want, *later)
            for one in shared:
                got, before = torch.full_like(want, 7), len(exchanges)
                one(*given, got, *later)
                assert len(exchanges) - before >= (3 if "chunks" in name else 1), f"{name}: not shared"
                assert torch.equal(got, want), f"{name}: {(got != want).any(1).nonzero().flatten().tolist()}"
                assert context.attn_metadata == {KEYS: batch}
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("own", [False, True])
def test_two_ranks_choose_what_one_would(own):
    """vLLM's function, with its own metadata and stand-ins for its kernels; or ours, with `select_tokens`."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(select_in_shares, (f"{folder}/meeting", own), nprocs=RANKS)


def config_of(asked=None, ranks=2, keys="fp8", graphs="FULL_AND_PIECEWISE", text=None, **parallel):
    from vllm.config import CUDAGraphMode

    given = dict(tensor_parallel_size=ranks, decode_context_parallel_size=1, worker_cls=selection.WORKERS[0])
    given = dict(parallel=given | parallel, compilation=dict(cudagraph_mode=CUDAGraphMode[graphs]))
    given |= dict(attention=dict(resolve_indexer_kv_dtype=lambda default: keys))
    config = config_with(**given, model=dict(hf_text_config=SimpleNamespace(**{"index_topk": 2048} | (text or {}))))
    config.additional_config = {} if asked is None else {sharing.OPTION: asked}
    return config


def test_they_share_where_they_can_unless_told_not_to(monkeypatch):
    from vllm.platforms import current_platform

    major = partial(SimpleNamespace, minor=0)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: major(major=9))
    impossible = [dict(ranks=1), dict(keys="mxfp4"), dict(graphs="FULL"), dict(text=dict(index_kpool=4))]
    impossible += [dict(decode_context_parallel_size=2), dict(prefill_context_parallel_size=2)]
    impossible += [
        dict(worker_cls="another.Worker"),
        dict(enable_dbo=True),
        dict(text=dict(candidate_source_layer_id=0)),
    ]
    refuse = lambda *asked, **given: plugin_config._sharing("SPARSE_MLA", config_of(*asked, **given), False)  # noqa: E731
    assert sharing.is_on(config_of()) and sharing.is_on(config_of(True)) and not sharing.is_on(config_of(False))
    assert sharing.is_on(config_of(True, ranks=16)) and not sharing.is_on(config_of(ranks=16))
    for one in impossible:
        assert not any(sharing.is_on(config_of(asked, **one)) for asked in (None, True))
        assert "each GPU selects for all tokens" in refuse(True, **one) and refuse(**one) is None
    assert refuse() is refuse(True) is refuse(False, ranks=1) is None
    assert all("must be true or false" in refuse(asked) for asked in ("true", 1, {}))
    monkeypatch.setattr("vllm.models.deepseek_v32.attention.sparse_attn_indexer", lambda hidden_states, fresh: None)
    assert "has other arguments (fresh new" in refuse(True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: major(major=10))
    assert not sharing.is_on(config_of())


def test_steps_are_shared_that_get_faster():
    def pays(tokens, context, ranks=2, prefill=False):
        keys = tokens * context * 1024
        return sharing.pays(*((0, keys) if prefill else (keys, 0)), tokens, tokens * prefill, ranks)

    assert all(pays(*step) for step in ((64, 32), (64, 128), (16, 128), (16, 32, 8)))
    assert not any(pays(*step) for step in ((16, 32), (64, 4), (1, 128)))
    assert all(pays(*step, prefill=True) for step in ((8192, 32), (8192, 128), (512, 32)))
    assert not any(pays(*step, prefill=True) for step in ((8192, 1), (256, 32)))
