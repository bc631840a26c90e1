"""Our selection in vLLM's models on GPUs, with vLLM's metadata but without a model around it."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import mla_backend
import vllm_installed  # noqa: F401
from index_problems import random_candidates, random_index
from mla_backend import reference
from mla_backend.vllm_plugin import config as plugin_config
from mla_backend.vllm_plugin import gpu_indexer, mxfp4_keys, selection
from vllm_models import common_metadata, config_with

TOPK, KEYS = 16, "layers.0.indexer.k_cache"
BATCHES = {f"{n} drafted": ([n + 1] * 3, [n + 1, 300, 70]) for n in range(5)}
BATCHES["ragged drafts"] = [1, 3, 2], [40, 300, 2]
BATCHES["chunks, one of them after a prefix"] = [1, 2, 60, 40], [100, 200, 300, 40]
BATCHES["padding"] = [2, 2, 0, 0], [300, 70, 0, 0], 4


def step_of(query_lens, seq_lens, padding=0, ratio=1, device="cpu"):
    """A builder, the metadata that it makes, and a problem of tokens that see as much."""
    from vllm.v1.attention.backends.mla import indexer as theirs

    class Builder(theirs.DeepseekV32IndexerMetadataBuilder):
        def build(self, prefix, common, fast_build):  # vLLM's needs Triton
            lengths, table, none = common.seq_lens, common.block_table_tensor, torch.tensor([])
            decode = theirs.DeepSeekV32IndexerDecodeMetadata(table, lengths[:, None].clone(), none, False, none)
            given = lengths, 300, common.slot_mapping, *[common.num_actual_tokens] * 2, 0, 0, decode
            return theirs.DeepseekV32IndexerMetadata(*given, block_table=table)

    gpu_indexer.add_tokens_to_metadata_of(Builder)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    seen = [(r, seq_lens[r] - n + 1 + i) for r, n in enumerate(query_lens) for i in range(n)] + [(0, 0)] * padding
    requests, lengths = torch.tensor(seen, dtype=torch.int32).T.contiguous()
    problem = random_index(tokens=len(seen), requests=len(seq_lens), dtype=torch.float8_e4m3fn).to(device)
    context, on_host = torch.tensor(seq_lens, dtype=torch.int32), torch.cat([starts[:-1], torch.tensor([len(seen)])])
    builder, room = object.__new__(Builder), torch.arange(200, dtype=torch.int32, device=device)
    vars(builder).update(arange_buffer=room, compress_ratio=ratio, dcp_world_size=1)
    builder.common = common_metadata(starts.to(device), on_host, context.to(device), problem.block_table)
    metadata, seen = builder.build(0, builder.common), dict(requests=requests, lengths=lengths // ratio)
    return builder, metadata, problem.but(**{name: value.to(device) for name, value in seen.items()})


@pytest.mark.parametrize(("name", "ratio"), [*((name, 1) for name in BATCHES), ("ragged drafts", 4), ("padding", 4)])
def test_each_token_gets_the_best_of_what_it_sees(monkeypatch, name, ratio):
    """From the function that a model calls by its name, and from the layer."""
    torch.manual_seed(0)
    _, metadata, problem = step_of(*BATCHES[name], ratio=ratio)
    want, _ = reference.select_tokens(*problem.arguments(), TOPK)
    context = SimpleNamespace(attn_metadata={KEYS: metadata}, cudagraph_runtime_mode=None)
    monkeypatch.setattr(gpu_indexer, "get_forward_context", lambda: context)
    monkeypatch.setattr(torch.ops.vllm, "mla_backend_select", gpu_indexer.select, raising=False)
    function, q = gpu_indexer.in_place_of(gpu_indexer.indexer.sparse_attn_indexer), problem.queries
    same = dict(topk_tokens=TOPK, skip_k_cache_insert=True, dense_mha_metadata_layer_name="")
    given = dict.fromkeys(inspect.signature(function).parameters) | same
    given |= dict(hidden_states=q, q_quant=q, weights=problem.weights, k_cache_prefix=KEYS, kv_cache=problem.cache)
    layer, cache = object.__new__(gpu_indexer.GpuIndexer), SimpleNamespace(prefix=KEYS, kv_cache=problem.cache)
    vars(layer).update(same, k_cache=cache, quant_block_size=128, scale_fmt="ue8m0", candidate_write=False)
    vars(layer).update(candidate_blocks=None, candidate_block_size=0)
    for call in (lambda: function(**given), lambda: layer.forward_cuda(q, q, None, problem.weights)):
        buffer = torch.full((len(q) + 3, TOPK + 4), 7, dtype=torch.int32)
        vars(layer)["topk_indices_buffer"] = given["topk_indices_buffer"] = buffer
        assert call() is buffer and torch.equal(buffer[: len(q), :TOPK], want)
        assert (buffer[: len(q), TOPK:] == -1).all() and (buffer[len(q) :] == 7).all()


@pytest.mark.parametrize("name", BATCHES)
def test_later_layers_choose_among_the_blocks_that_one_keeps(monkeypatch, name):
    """vLLM's selection keeps them, in any order."""
    torch.manual_seed(0)
    _, metadata, problem = step_of(*BATCHES[name])
    context = SimpleNamespace(attn_metadata={KEYS: metadata}, cudagraph_runtime_mode=None)
    monkeypatch.setattr(gpu_indexer, "get_forward_context", lambda: context)
    monkeypatch.setattr(torch.ops.vllm, "mla_backend_select", gpu_indexer.select, raising=False)
    kept, size = random_candidates(problem, 8, 0.4)
    mixed = kept[:, torch.randperm(kept.shape[1])]
    monkeypatch.setattr(selection, "ORDERED_AT_ONCE", 2)
    monkeypatch.setattr(gpu_indexer.indexer.SparseAttnIndexer, "forward_cuda", lambda own, *_: own.keep())
    q, buffer = problem.queries, torch.full((len(problem.queries) + 3, TOPK), 7, dtype=torch.int32)
    blocks, layers = torch.full((len(buffer), kept.shape[1]), 5, dtype=torch.int32), []
    for writes in True, False:
        layer, cache = object.__new__(gpu_indexer.GpuIndexer), SimpleNamespace(prefix=KEYS, kv_cache=problem.cache)
        vars(layer).update(topk_tokens=TOPK, skip_k_cache_insert=True, dense_mha_metadata_layer_name="")
        vars(layer).update(k_cache=cache, quant_block_size=128, scale_fmt="ue8m0", topk_indices_buffer=buffer)
        vars(layer).update(candidate_blocks=blocks, candidate_block_size=size, candidate_write=writes)
        layer.keep = lambda: blocks[: len(q)].copy_(mixed)
        assert layer.forward_cuda(q, q, None, problem.weights) is buffer
        layers.append(buffer.clone())
    assert (layers[0] == 7).all() and torch.equal(blocks[: len(q)], kept) and (blocks[len(q) :] == 5).all()
    want, _ = reference.select_tokens(*problem.arguments(), TOPK, candidates=(kept, size))
    assert torch.equal(buffer[: len(q)], want)


def test_later_drafts_see_what_earlier_ones_wrote_where_a_graph_looks():
    builder, metadata, problem = step_of(*BATCHES["0 drafted"])
    where = metadata.lengths.data_ptr()
    metadata.seq_lens += 1
    builder.update_draft_decode_metadata(metadata)
    assert torch.equal(metadata.lengths, problem.lengths + 1) and metadata.lengths.data_ptr() == where


def config_of(
    asked=None, keys="fp8", worker=selection.WORKERS[0], ranks=1, architectures=("DeepseekV32ForCausalLM",), **dims
):
    text = SimpleNamespace(**dict(index_head_dim=128, index_n_heads=64, index_topk=2048) | dims)
    given = dict(attention=dict(resolve_indexer_kv_dtype=lambda default: keys))
    given |= dict(model=dict(hf_text_config=text, architectures=architectures))
    given |= dict(parallel=dict(decode_context_parallel_size=ranks, worker_cls=worker))
    config = config_with(**given)
    config.additional_config = {} if asked is None else {selection.OPTION: asked}
    return config


def test_it_is_on_where_it_is_asked_for_or_there_is_no_deep_gemm_and_it_can_be(monkeypatch):
    impossible = [dict(ranks=2), dict(worker="another.Worker"), dict(keys="nvfp4"), dict(index_kpool=4)]
    impossible.append(dict(keys="mxfp4", architectures=["DeepseekV4ForCausalLM"]))
    impossible += [dict([d]) for d in (("index_head_dim", 64), ("index_n_heads", 129), ("index_topk", 8192))]
    for has_deep_gemm in (True, False):
        monkeypatch.setattr("vllm.utils.deep_gemm.has_deep_gemm", lambda has=has_deep_gemm: has)
        assert selection.is_on(config_of()) == (not has_deep_gemm)
        assert not any(selection.is_on(config_of(**given)) for given in impossible)
        assert selection.is_on(config_of(True)) and not selection.is_on(config_of(False))
        assert selection.is_on(config_of(keys="mxfp4")), "vLLM can't"
        assert selection.is_on(config_of(True, candidate_source_layer_id=3)) == has_deep_gemm
    refuse = lambda *asked, **given: plugin_config._selection("SPARSE_MLA", config_of(*asked, **given), False)  # noqa: E731
    assert all("vLLM's own indexer selects" in refuse(True, **given) for given in impossible)
    assert refuse() is refuse(True) is refuse(False, ranks=2) is None and "must be true or false" in refuse("yes")
    monkeypatch.setattr("vllm.models.deepseek_v32.attention.sparse_attn_indexer", lambda hidden_states, fresh: None)
    assert "has other arguments (fresh new" in refuse(True)


def test_keys_are_written_in_mxfp4_where_vllm_would_write_them_in_fp8():
    def theirs(index_k, slot_mapping=None, indexer_slot_mapping=None, indexer_k_cache=None, index_k_out=None):
        seen.append(indexer_k_cache)
        if index_k_out is not None:
            index_k_out.copy_(2 * index_k)
        return "q"

    seen, model = [], SimpleNamespace(fused_norm_rope=theirs)
    mxfp4_keys.write_in(model)
    keys, slots = torch.randn(5, 192).bfloat16()[:, :128], torch.tensor([7, -1, 0, 3])  # one of padding
    old, new, want = (torch.zeros(2, 4, width, dtype=torch.uint8) for width in (132, 68, 68))
    for cache in None, old, new:
        assert model.fused_norm_rope(keys, torch.full((4,), 5), slots, cache) == "q"
    assert seen[0] is None and seen[1] is old and seen[2] is None
    mla_backend.write_keys(2 * keys[:4], want, slots)
    assert torch.equal(new, want)
    gpu_indexer.insert(2 * keys, new.zero_(), slots, 128, "ue8m0")
    assert torch.equal(new, want)


@pytest.mark.gpu
def test_a_graph_follows_the_next_step(monkeypatch):
    builder, metadata, problem = step_of(*BATCHES["2 drafted"], device="cuda")
    context = SimpleNamespace(attn_metadata={KEYS: metadata}, cudagraph_runtime_mode=None)
    monkeypatch.setattr(gpu_indexer, "get_forward_context", lambda: context)
    q, buffer = problem.queries, torch.zeros(9, TOPK, dtype=torch.int32, device="cuda")
    given = q, KEYS, problem.cache, q, None, problem.weights, 128, "ue8m0", TOPK, buffer, ""
    gpu_indexer.select(*given)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        gpu_indexer.select(*given)
    builder.common.seq_lens -= 2
    builder.build(0, builder.common)
    graph.replay()
    following = problem.but(lengths=problem.lengths - 2)
    assert torch.equal(buffer, mla_backend.select_tokens(*following.arguments(), TOPK))
