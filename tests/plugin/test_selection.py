"""Our selection in vLLM's models on GPUs, with vLLM's metadata but without a model around it."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import vllm_installed  # noqa: F401
from index_problems import random_index
from mla_backend import reference
from mla_backend.vllm_plugin import config as plugin_config
from mla_backend.vllm_plugin import selection
from vllm_models import common_metadata, config_with

TOPK, KEYS = 16, "layers.0.indexer.k_cache"
BATCHES = {f"{n} drafted": ([n + 1] * 3, [n + 1, 300, 70]) for n in range(5)}
BATCHES["ragged drafts"] = [1, 3, 2], [40, 300, 2]
BATCHES["chunks, one of them after a prefix"] = [1, 2, 60, 40], [100, 200, 300, 40]
BATCHES["padding"] = [2, 2, 0, 0], [300, 70, 0, 0], 4


@pytest.fixture(scope="module")
def gpu_indexer():
    """Installed, and taken away afterwards. vLLM's own `build` needs Triton."""
    from vllm.model_executor import custom_op
    from vllm.v1.attention.backends.mla import indexer as metadata

    from mla_backend.vllm_plugin import gpu_indexer

    def build(self, common_prefix_len, common_attn_metadata, fast_build):
        given, empty, counts = common_attn_metadata, torch.tensor([]), dict(num_prefills=0, num_prefill_tokens=0)
        counts |= dict.fromkeys(("num_decodes", "num_decode_tokens"), given.num_actual_tokens)
        table, seq_lens = given.block_table_tensor, given.seq_lens
        decode = metadata.DeepSeekV32IndexerDecodeMetadata(table, seq_lens[:, None].clone(), empty, False, empty)
        step = dict(seq_lens=seq_lens, max_seq_len=300, slot_mapping=given.slot_mapping, block_table=table)
        return metadata.DeepseekV32IndexerMetadata(**step, **counts, decode=decode)

    with pytest.MonkeyPatch.context() as patch:
        builder, update = metadata.DeepseekV32IndexerMetadataBuilder, "update_draft_decode_metadata"
        patch.setattr(builder, "build", build)
        changed = (gpu_indexer.indexer, "has_deep_gemm"), (gpu_indexer.deepseek_v32, "sparse_attn_indexer")
        for owner, name in (*changed, (builder, update)):
            patch.setattr(owner, name, getattr(owner, name))
        for module, registry in zip((custom_op, gpu_indexer), [{}] * 2, strict=True):
            patch.setattr(module, "op_registry_oot", registry)
        gpu_indexer.install()
        assert custom_op.op_registry_oot == {"SparseAttnIndexer": gpu_indexer.GpuIndexer}
        yield gpu_indexer


def step_of(gpu_indexer, query_lens, seq_lens, padding=0, ratio=1):
    """A builder, its metadata, and a problem of tokens that see as much."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    seen = [(r, seq_lens[r] - n + 1 + i) for r, n in enumerate(query_lens) for i in range(n)] + [(0, 0)] * padding
    requests, lengths = torch.tensor(seen, dtype=torch.int32).T.contiguous()
    problem = random_index(tokens=len(seen), requests=len(seq_lens), dtype=torch.float8_e4m3fn)
    context, on_host = torch.tensor(seq_lens, dtype=torch.int32), torch.cat([starts[:-1], torch.tensor([len(seen)])])
    builder = object.__new__(gpu_indexer.DeepseekV32IndexerMetadataBuilder)
    room = torch.arange(200, dtype=torch.int32)
    vars(builder).update(arange_buffer=room, compress_ratio=ratio, dcp_world_size=1)
    metadata = builder.build(0, common_metadata(starts, on_host, context, problem.block_table))
    return builder, metadata, problem.but(requests=requests, lengths=lengths // ratio)


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("name", BATCHES)
def test_each_token_gets_the_best_of_what_it_sees(gpu_indexer, monkeypatch, name, ratio):
    torch.manual_seed(0)
    _, metadata, problem = step_of(gpu_indexer, *BATCHES[name], ratio=ratio)
    want, _ = reference.select_tokens(*problem.arguments(), TOPK)
    context = SimpleNamespace(attn_metadata={KEYS: metadata}, cudagraph_runtime_mode=None)
    monkeypatch.setattr(gpu_indexer, "get_forward_context", lambda: context)
    function, q = gpu_indexer.deepseek_v32.sparse_attn_indexer, problem.queries
    given = dict.fromkeys(inspect.signature(function).parameters) | dict(k_cache_prefix=KEYS, kv_cache=problem.cache)
    given |= dict(hidden_states=q, q_quant=q, weights=problem.weights, topk_tokens=TOPK, skip_k_cache_insert=True)
    layer, cache = object.__new__(gpu_indexer.GpuIndexer), SimpleNamespace(prefix=KEYS, kv_cache=problem.cache)
    vars(layer).update(k_cache=cache, topk_tokens=TOPK, skip_k_cache_insert=True, dense_mha_metadata_layer_name="")
    vars(layer).update(quant_block_size=128, scale_fmt="ue8m0")
    for call in ("the function", "the layer"):
        buffer = torch.full((len(q) + 3, TOPK + 4), 7, dtype=torch.int32)
        vars(layer)["topk_indices_buffer"] = given["topk_indices_buffer"] = buffer
        found = function(**given) if call == "the function" else layer.forward_cuda(q, q, None, problem.weights)
        assert found is buffer and torch.equal(buffer[: len(q), :TOPK], want)
        assert (buffer[: len(q), TOPK:] == -1).all() and (buffer[len(q) :] == 7).all()


def test_later_drafts_see_what_earlier_ones_wrote_where_a_graph_looks(gpu_indexer):
    builder, metadata, problem = step_of(gpu_indexer, *BATCHES["0 drafted"])
    where = metadata.lengths.data_ptr()
    metadata.seq_lens += 1
    builder.update_draft_decode_metadata(metadata)
    assert torch.equal(metadata.lengths, problem.lengths + 1) and metadata.lengths.data_ptr() == where


def config_of(ranks=1, worker=selection.WORKERS[0], keys="fp8", drafts=0, **more):
    parallel = dict(decode_context_parallel_size=ranks, worker_cls=worker)
    config = config_with(parallel=parallel, attention=dict(resolve_indexer_kv_dtype=lambda default: keys))
    dims = dict(index_head_dim=128, index_n_heads=64, index_topk=2048)
    config.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(**dims | more))
    config.speculative_config, config.additional_config = SimpleNamespace(num_speculative_tokens=drafts), {}
    return config


REFUSED = [
    (dict(ranks=2), "leave out --decode-context-parallel-size"),
    (dict(worker="another.Worker"), "needs vLLM's own worker class"),
    (dict(keys="mxfp4"), "leave out indexer_kv_dtype"),
    (dict(index_kpool=4), "pooled keys"),
    (dict(index_head_dim=64), "an index_head_dim of 128"),
    (dict(index_topk=8192), "an index_topk of up to 4096"),
]


@pytest.mark.parametrize(("given", "reason"), [*REFUSED, ({}, None)])
def test_selection_is_on_where_it_is_asked_for_and_can_be(given, reason):
    config = config_of(**given)
    for choice, told in ((True, reason), (False, None), ("yes", "must be true or false; got 'yes'")):
        config.additional_config = {selection.OPTION: choice}
        assert (told or "None") in str(plugin_config._selection("SPARSE_MLA", config, False))
        assert selection.is_on(config) == (bool(choice) and reason is None)


def test_by_default_it_is_on_where_vllms_own_lacks_kernels(monkeypatch):
    for has_deep_gemm, drafts, on in ((True, 1, False), (True, 2, True), (True, 3, False), (False, 0, True)):
        monkeypatch.setattr("vllm.utils.deep_gemm.has_deep_gemm", lambda has=has_deep_gemm: has)
        monkeypatch.setattr("vllm.utils.deep_gemm.native_next_n_supported", lambda n: n in (1, 2, 4))
        assert selection.is_on(config_of(drafts=drafts)) == on
        assert not selection.is_on(config_of(drafts=drafts, ranks=2))


def test_another_function_than_the_known_one_is_not_replaced(monkeypatch):
    monkeypatch.setattr("vllm.models.deepseek_v32.attention.sparse_attn_indexer", lambda hidden_states, fresh: None)
    assert "sparse_attn_indexer of this vLLM has other parameters" in selection.why_not(config_of())
