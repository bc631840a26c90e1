"""Ranks that share selection choose what one of them would, whatever a step is like."""

import os
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_installed  # noqa: F401
from mla_backend import rank_shares
from mla_backend.vllm_plugin import config as plugin_config
from mla_backend.vllm_plugin import selection, sharing
from vllm_models import config_with

RANKS = 2
STEPS = {
    "decode": [([1] * 5, [300, 17, 200, 9, 64])],
    "one request": [([1], [300])],
    "padded for a graph": [([1] * 3 + [0], [300, 17, 20, 0])],
    "one draft": [([2] * 3, [300, 40, 150])],
    "three drafts": [([4] * 3, [300, 4, 150]), ([4] * 5, [300, 4, 150, 7, 70]), ([1] * 3, [300, 4, 150])],
    "two drafts, flattened": [([3] * 3, [300, 40, 150]), ([1, 3, 2], [40, 300, 2])],
    "prompts": [([60, 1, 40], [60, 1, 40]), ([100], [100])],
    "chunks after prefixes": [([90, 20], [300, 270])],
    "mixed": [([1, 1, 1, 60, 7], [200, 300, 9, 200, 70]), ([2, 2, 33], [8, 300, 40])],
}
"""Steps by what they are like: the tokens of each request, and the lengths of their contexts."""

DRAFTS = {"one draft": 1, "three drafts": 3, "two drafts, flattened": 2, "mixed": 1}


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=70), ranks=st.integers(2, 8), width=st.integers(1, 4))
def test_every_row_is_dealt_once_and_shares_are_equal(lengths, ranks, width):
    by = rank_shares.snake(70, ranks, torch.device("cpu"))
    dealt, places = rank_shares.deal(torch.tensor(lengths, dtype=torch.int32), by)
    assert torch.equal(dealt.flatten()[places], torch.arange(len(lengths)))
    mine = torch.zeros(dealt.numel(), dtype=torch.bool).scatter_(0, places, True).view(dealt.shape)
    counts, work = mine.sum(1), (torch.tensor(lengths)[dealt] * mine).sum(1)
    assert counts.max() - counts.min() <= 1 and work.max() - work.min() <= max(lengths)
    tokens = torch.arange(len(lengths) * width)
    rows, at = (rank_shares.rows_of(x.flatten(), width) for x in (dealt, places))
    assert torch.equal(rows[at], tokens)
    shares = [rank_shares.deal_in_turn(tokens, rank, ranks) for rank in range(ranks)]
    assert all(torch.equal(torch.cat([rows for rows, _ in shares])[places], tokens) for _, places in shares)


def select_in_shares(rank: int, meeting: str, own: bool, on_gpus: bool) -> None:
    """One of two ranks: what vLLM's function, and its op, choose in shares is what the function chose before."""
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import override_forward_context
    from vllm.model_executor.layers import sparse_attn_indexer as layer
    from vllm.models.deepseek_v32 import attention as model
    from vllm.v1.attention.backends.mla import indexer

    import indexer_on_cpu
    from index_problems import random_index
    from mla_backend.vllm_plugin import gpu_indexer, shared_indexer
    from serving_benchmarks.ops.sharing import LAYER, join, leave, new_builder, new_step

    heads, topk, scale = (64, 2048, 16) if on_gpus else (4, 16, 1)
    if on_gpus:
        group = join(rank, RANKS, meeting)
    else:
        indexer_on_cpu.on_cpu()
        group = gloo(rank, meeting)
        shared_indexer.get_tp_group = lambda: group

    def same(got, want):  # vLLM's kernels choose in any order
        return got.equal(want) if own or not on_gpus else got.sort(1).values.equal(want.sort(1).values)

    torch.manual_seed(0)
    device, longest, exchanges, exchange = group.device, 320 * scale, [], shared_indexer.Room.exchange
    text = SimpleNamespace(index_n_heads=heads, index_topk=topk)
    config = config_with(model=dict(hf_text_config=text), scheduler=dict(max_num_batched_tokens=20))
    selection.is_on = lambda config: own
    function = gpu_indexer.in_place_of(layer.sparse_attn_indexer) if own else layer.sparse_attn_indexer
    if not on_gpus and not own:
        near = SimpleNamespace(disabled=False, mnnvl_only=False, fully_connected=True)
        group.device_communicator = SimpleNamespace(ca_comm=near if rank == 0 else None)
        shared_indexer.install(config)
        assert not shared_indexer.is_ours(model.sparse_attn_indexer), "shared, though one rank lacks NVLink"
    shared_indexer.install(config, forced=True)
    shared = [model.sparse_attn_indexer] if own else [model.sparse_attn_indexer, torch.ops.vllm.sparse_attn_indexer]
    shared_indexer.Room.exchange = lambda *given: exchanges.append(given) or exchange(*given)
    sizes = 128, "ue8m0", topk, 128, longest, 7 * longest
    indexer.envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB = Fraction(40 * longest * 4, 2**20)
    for name, steps in STEPS.items():
        builder = new_builder(indexer.DeepseekV32IndexerMetadataBuilder, 256, longest, DRAFTS.get(name, 0), device)
        builder.max_prefill_buffer_size = 700 * scale
        for query_lens, seq_lens in steps:
            table = torch.randperm(25 * scale, dtype=torch.int32).view(5, -1)[: len(seq_lens)].to(device)
            step = new_step(torch.tensor(query_lens), torch.tensor(seq_lens) * scale, table)
            tokens = step.num_actual_tokens
            how = dict(tokens=tokens, heads=heads, blocks=25 * scale, dtype=torch.float8_e4m3fn)
            problem, batch = random_index(**how, device=device), builder.build(0, step)
            if name == "decode":  # further drafts, in a graph of another batch
                batch.seq_lens += torch.randperm(tokens, dtype=torch.int32, device=device)
                table.copy_(table.flip(0))
                builder.update_draft_decode_metadata(batch)
            mode = CUDAGraphMode.FULL if "graph" in name else CUDAGraphMode.NONE
            context = SimpleNamespace(attn_metadata={LAYER: batch}, cudagraph_runtime_mode=mode)
            q, later = problem.queries, (True, False, False, "")
            given = q, LAYER, problem.cache, q, None, None, problem.weights, *sizes
            want = torch.full((tokens + 2, topk), 7, dtype=torch.int32, device=device)
            with override_forward_context(context):
                function(*given, want, *later)
                for one in shared:
                    got, before = torch.full_like(want, 7), len(exchanges)
                    one(*given, got, *later)
                    assert len(exchanges) - before >= (3 if "chunks" in name else 1), f"{name}: not shared"
                    assert same(got, want), f"{name}: {(got != want).any(1).nonzero().flatten().tolist()}"
                    assert context.attn_metadata == {LAYER: batch}
                if on_gpus and name in ("decode", "padded for a graph"):
                    context.cudagraph_runtime_mode = CUDAGraphMode.FULL
                    torch.cuda.synchronize()
                    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                        if name == "decode":
                            builder.update_draft_decode_metadata(batch)
                        shared[0](*given, got, *later)
                    step.seq_lens.sub_(torch.tensor([100, 0, 7, 0, 0][: len(seq_lens)], device=device))
                    if name != "decode":
                        context.attn_metadata[LAYER] = builder.build(0, step)
                    graph.replay()
                    function(*given, want, *later)
                    assert same(got, want), f"{name}: a graph does not follow the next step"
    leave() if on_gpus else torch.distributed.destroy_process_group()


def gloo(rank: int, meeting: str) -> SimpleNamespace:
    """What is used of vLLM's group."""

    def all_gather(own, dim):
        torch.distributed.all_gather(found := [torch.empty_like(own) for _ in range(RANKS)], own)
        return torch.cat(found)

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    group = SimpleNamespace(rank_in_group=rank, world_size=RANKS, device_communicator=None, all_gather=all_gather)
    group.device, group.cpu_group = torch.device("cpu"), torch.distributed.group.WORLD
    return group


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("on_gpus", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_two_ranks_choose_what_one_would(own, on_gpus, tmp_path):
    """vLLM's function, with its metadata and, on a CPU, stand-ins for its kernels; or ours, with `select_tokens`."""
    if on_gpus and torch.cuda.device_count() < RANKS:
        pytest.skip("needs two GPUs")
    torch.multiprocessing.spawn(select_in_shares, (f"{tmp_path}/meeting", own, on_gpus), nprocs=RANKS)


def config_of(asked=None, ranks=2, keys="fp8", graphs="FULL_AND_PIECEWISE", text=None, draft=None, **parallel):
    from vllm.config import CUDAGraphMode

    given = dict(tensor_parallel_size=ranks, decode_context_parallel_size=1, use_ubatching=False)
    given |= dict(worker_cls=selection.WORKERS[0])
    given = dict(parallel=given | parallel, compilation=dict(cudagraph_mode=CUDAGraphMode[graphs]))
    given |= dict(attention=dict(resolve_indexer_kv_dtype=lambda default: keys))
    sizes = dict(index_topk=2048, index_n_heads=64, index_head_dim=128)
    config = config_with(**given, model=dict(hf_text_config=SimpleNamespace(**sizes | (text or {}))))
    drafting = SimpleNamespace(hf_text_config=SimpleNamespace(**sizes | (draft or {})))
    config.speculative_config = SimpleNamespace(draft_model_config=drafting)
    config.additional_config = {} if asked is None else {sharing.OPTION: asked}
    return config


def test_they_share_where_they_are_told_to_and_can(monkeypatch):
    from vllm.models.deepseek_v32 import attention as model
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(9, 0))
    impossible = [dict(ranks=1), dict(keys="mxfp4"), dict(graphs="FULL"), dict(text=dict(index_kpool=4))]
    impossible += [dict(decode_context_parallel_size=2), dict(prefill_context_parallel_size=2)]
    impossible += [
        dict(worker_cls="another.Worker"),
        dict(use_ubatching=True),
        dict(text=dict(candidate_source_layer_id=0)),
        dict(text=dict(index_head_dim=64)),
        dict(draft=dict(index_n_heads=32)),
    ]
    refuse = lambda *asked, **given: plugin_config._sharing("SPARSE_MLA", config_of(*asked, **given), False)  # noqa: E731
    assert [sharing.is_on(config_of(asked)) for asked in (None, False, True)] == [False, False, True]
    for one in impossible:
        assert not sharing.is_on(config_of(True, **one))
        assert "each GPU selects for all tokens" in refuse(True, **one) and refuse(**one) is None
    assert refuse() is refuse(True) is refuse(False, ranks=1) is None
    assert all("must be true or false" in refuse(asked) for asked in ("true", 1, {}))
    monkeypatch.setattr(model, "sparse_attn_indexer", lambda hidden_states, fresh: None)
    assert "has other arguments (fresh new" in refuse(True)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(10, 0))
    assert not sharing.is_on(config_of(True))


def test_pieces_of_decode_fit_steps_of_any_width_and_padding():
    from vllm.v1.attention.backends.mla import indexer

    from mla_backend.vllm_plugin import shared_indexer

    schedule, table = torch.zeros(9, 2, dtype=torch.int32), torch.zeros(5, 3, dtype=torch.int32)
    config = config_with(scheduler=dict(max_num_seqs=5), model=dict(max_model_len=2**17))
    builder = SimpleNamespace(vllm_config=config, decode_threshold=4, compress_ratio=1)
    builder.scheduler_metadata_buffer = schedule
    room = SimpleNamespace(ranks=RANKS, tokens=28, decode_tokens=20, heads=64, topk=2048, forced=True)
    for width, rows in ((4, 5), (1, 9)):  # vLLM's schedule is shorter where requests have 4 tokens
        lengths = torch.zeros(5, width, dtype=torch.int32)
        decode = indexer.DeepSeekV32IndexerDecodeMetadata(table, lengths, lengths[:, 0], False, schedule[:rows])
        step = indexer.DeepseekV32IndexerMetadata(lengths[:, 0], 9, lengths, 5, 5 * width, 0, 0, decode)
        piece = shared_indexer.decode_piece(builder, step, room)
        assert piece.step.decode.schedule_metadata.shape == (rows, 2)
        assert len(piece.rows) == 3 * width == len(piece.step.decode.block_table) * width
    shares = shared_indexer.Shares(decode=piece, pays=True, pays_in_graphs=True)
    assert shares.of_call(step, True) == shares.of_call(step, False) == [piece]
    step.prefill = object()
    assert shares.of_call(step, True) == [], "a graph's prefill would stay unselected"
    common = SimpleNamespace(seq_lens_cpu_upper_bound=torch.full((6,), 9))
    for requests, padded in ((5, 20), (3, 20), (3, 24)):
        starts = torch.arange(7).clamp(max=requests) * 4
        common.query_start_loc_cpu, common.num_actual_tokens = starts, padded
        assert {*shared_indexer.weigh(builder, common, room).values()} == {padded <= room.decode_tokens}


def test_steps_are_shared_that_get_faster():
    def pays(tokens, context, ranks=2, prefill=False, **sizes):
        keys = tokens * context * 1024
        return rank_shares.pays(*((0, keys) if prefill else (keys, 0)), tokens, tokens * prefill, ranks, **sizes)

    assert all(pays(*step) for step in ((64, 32), (64, 128), (16, 128), (16, 32, 8)))
    assert not any(pays(*step) for step in ((16, 32), (64, 4), (1, 128)))
    assert pays(20, 32, topk=512) and not any((pays(20, 32, topk=4096), pays(16, 128, heads=16)))
    assert all(pays(*step, prefill=True) for step in ((8192, 32), (8192, 128), (512, 32)))
    assert not any(pays(*step, prefill=True) for step in ((8192, 1), (256, 32)))
