"""The classes of the dense backend against the reference, without a server around them."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import mla_backend
import vllm_installed  # noqa: F401
from mla_backend import reference
from problems import assert_accurate, random_cache, scale_of
from vllm_models import common_metadata, config_with

HEADS, BLOCK_SIZE, BLOCKS, SCALE = 5, 16, 24, 0.04
FORMATS = ("bf16", "fp8_tensor_576")


class DenseBatch:
    """Decode requests with so many query tokens each, the last ones of sequences of these lengths; then tokens that are
    padding. A request without query tokens and length is padding too."""

    def __init__(self, queries: list[int], lengths: list[int], tokens: int | None = None):
        self.queries = queries
        self.tokens = sum(queries) if tokens is None else tokens
        self.starts = torch.tensor([0, *queries]).cumsum(0).int()
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        order = torch.randperm(BLOCKS).int()
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        self.block_table = torch.full((len(lengths), max(counts) + 2), 2147480000, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.block_table[row, :count], order = order[:count], order[count:]

    def slots(self) -> Tensor:
        """What each token attends to, `[tokens, longest]`."""
        found = torch.full((self.tokens, int(self.lengths.max())), -1, dtype=torch.int32)
        for row, (start, queries) in enumerate(zip(self.starts.tolist(), self.queries, strict=False)):
            for i in range(queries):
                positions = torch.arange(int(self.lengths[row]) - queries + 1 + i)
                blocks = self.block_table[row, positions // BLOCK_SIZE]
                found[start + i, : len(positions)] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        return found


BATCHES = {
    "decode": DenseBatch([1, 1, 1], [40, 3, 77]),
    "verification": DenseBatch([3, 3, 3], [40, 30, 77]),
    "short extends": DenseBatch([1, 1, 4, 4, 20], [40, 3, 4, 50, 60]),
    "a graph's padding": DenseBatch([2, 2, 0, 0], [40, 30, 0, 0], tokens=8),
    "padding behind": DenseBatch([2, 1, 0], [40, 30, 0], tokens=5),
}


def buffers(dense, **more):
    given = dict(most_queries=64, slots=128, heads=HEADS, device=torch.device("cpu"), batch_invariant=False)
    return dense.DenseBuffers(**{**given, **more})


def layer_of(dense, cache_dtype: str = "auto"):
    """A layer without the model around it."""
    layer = object.__new__(dense.DenseMLALayer)
    layer.scale, layer.kv_cache_dtype, layer.dcp_world_size = SCALE, cache_dtype, 1
    return layer


def metadata_of(dense, batch: DenseBatch, room, leaders: tuple[str, ...] = ()) -> SimpleNamespace:
    step = dense.DenseStep(room, dense.groups_of(batch.starts.tolist(), batch.tokens), leaders)
    return SimpleNamespace(decode=SimpleNamespace(block_table=batch.block_table, seq_lens=batch.lengths), step=step)


def model_layer(name: str = "first", scale: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(layer_name=name, _k_scale_float=scale)


def queries_of(tokens: int) -> tuple[Tensor, Tensor]:
    """As vLLM has them: the first part head by head."""
    first, rest = torch.randn(HEADS, tokens, 512) * 10, torch.randn(tokens, HEADS, 64) * 10
    return first.bfloat16().transpose(0, 1), rest.bfloat16()


def test_requests_with_equally_many_tokens_attend_together(dense):
    expected = [[(3, 1)], [(3, 3)], [(2, 1), (2, 4), (1, 20)], [(4, 2)], [(1, 2), (1, 1)]]
    for batch, wanted in zip(BATCHES.values(), expected, strict=True):
        groups = dense.groups_of(batch.starts.tolist(), batch.tokens)
        assert [(group.requests, group.queries) for group in groups] == wanted


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_attends_to_its_sequences(dense, name, parts, fmt):
    batch, scale = BATCHES[name], scale_of(fmt)
    wide = random_cache(fmt, BLOCKS, 2 * BLOCK_SIZE)
    cache = wide[:, :BLOCK_SIZE]  # blocks lie apart, as where layers share them
    q = queries_of(batch.tokens)
    layer = layer_of(dense, "fp8" if fmt == "fp8_tensor_576" else "auto")
    given = cache.view(torch.float8_e4m3fn) if fmt == "fp8_tensor_576" else cache
    metadata = metadata_of(dense, batch, buffers(dense))
    out, lse = layer.forward_mqa(q if parts == 2 else torch.cat(q, dim=-1), given, metadata, model_layer(scale=scale))
    assert lse is None, "it is wanted with context parallelism alone"
    how = dict(scale=SCALE, cache_format=fmt, cache_scale=scale)
    assert_accurate((out,), reference.sparse_attention(torch.cat(q, dim=-1), cache, batch.slots(), **how)[:1])
    assert not out[sum(batch.queries) :].any(), "padding attends to nothing"


def test_layers_pass_the_products_on(dense):
    batch, q, room = BATCHES["decode"], queries_of(3), buffers(dense, products="fp8")
    with pytest.raises(ValueError, match="^products must be 'exact' with bf16 rows"):  # the op's word for it
        layer_of(dense).forward_mqa(
            q, random_cache("bf16", BLOCKS, BLOCK_SIZE), metadata_of(dense, batch, room), model_layer()
        )


def test_the_leading_layers_make_the_plan_anew_at_the_same_address(dense):
    """As in a captured graph, under which lengths change in place; vLLM may give drafts the metadata of a step."""
    batch, room = DenseBatch([1, 1, 1], [40, 3, 77]), buffers(dense)
    cache, q = random_cache("bf16", BLOCKS, BLOCK_SIZE), queries_of(3)
    layer, metadata = layer_of(dense), metadata_of(dense, batch, room, leaders=("first", "draft"))
    layer.forward_mqa(q, cache, metadata, model_layer("first"))
    (plan,) = metadata.step.plans
    assert plan.table.data_ptr() == room.plan_table.data_ptr()
    made = room.plan_table.clone()
    batch.lengths[2] = 5
    layer.forward_mqa(q, cache, metadata, model_layer("second"))
    assert torch.equal(room.plan_table, made), "a layer that follows takes the plan as it is"
    for leader in ("first", "draft"):
        room.plan_table.fill_(-7)
        layer.forward_mqa(q, cache, metadata, model_layer(leader))
        assert not (room.plan_table == -7).all()
    room.plan_table.fill_(-7)
    layer.forward_mqa(q, cache, metadata_of(dense, batch, room, leaders=("first",)), model_layer("second"))
    assert not (room.plan_table == -7).all(), "without a leading layer the first one makes it"


def test_no_step_waits_for_the_device(dense, no_values_are_read):
    batch, cache = BATCHES["short extends"], random_cache("bf16", BLOCKS, BLOCK_SIZE)
    metadata, q = metadata_of(dense, batch, buffers(dense)), queries_of(batch.tokens)
    no_values_are_read()
    layer_of(dense).forward_mqa(q, cache, metadata, model_layer())


def test_ranks_of_decode_context_parallelism_combine_to_the_whole(dense):
    """Each keeps every third token of each request, and vLLM tells it how many those are."""
    ranks, lengths = 3, torch.tensor([40, 2, 77], dtype=torch.int32)
    keys, q = random_cache("bf16", 3, 96), queries_of(3)  # row r holds the tokens of request r, in order
    parts = []
    for rank in range(ranks):
        batch = DenseBatch([1, 1, 1], [32, 32, 32])
        batch.block_table = torch.arange(6, dtype=torch.int32).view(3, 2)
        batch.lengths = (lengths - rank + ranks - 1) // ranks
        layer = layer_of(dense)
        layer.dcp_world_size = ranks
        cache = keys[:, rank::ranks].reshape(-1, BLOCK_SIZE, 576)
        parts.append(layer.forward_mqa(q, cache, metadata_of(dense, batch, buffers(dense)), model_layer()))
    out, lse = mla_backend.combine_partials([out.float() for out, _ in parts], [lse for _, lse in parts])
    positions = torch.arange(96, dtype=torch.int32)
    slots = torch.where(positions < lengths[:, None], positions + 96 * torch.arange(3)[:, None], -1).int()
    want = reference.sparse_attention(torch.cat(q, dim=-1), keys, slots, scale=SCALE)
    assert_accurate((out.bfloat16(), lse), want[:2])


def test_batch_invariance_gives_a_request_the_same_bits_alone_and_in_a_batch(dense):
    batch, cache, q = BATCHES["decode"], random_cache("bf16", BLOCKS, BLOCK_SIZE), queries_of(3)
    room, layer = buffers(dense, batch_invariant=True), layer_of(dense)
    together, _ = layer.forward_mqa(q, cache, metadata_of(dense, batch, room), model_layer())
    last = DenseBatch([1], [77])
    last.block_table = batch.block_table[2:]
    alone, _ = layer.forward_mqa(tuple(x[2:] for x in q), cache, metadata_of(dense, last, room), model_layer())
    assert torch.equal(alone[0], together[2])


def test_building_the_metadata_of_a_decode_step_reads_nothing_from_the_device(dense):
    builder, model = object.__new__(dense.DenseMLAMetadataBuilder), SimpleNamespace(get_head_size=lambda: 576)
    vars(builder).update(buffers=buffers(dense), leaders=frozenset(["first"]), metadata_cls=dense.DenseMLAMetadata)
    vars(builder).update(reorder_batch_threshold=3, device=torch.device("meta"), dcp_world_size=1, use_pcp=False)
    vars(builder).update(non_causal_multi_token_decode=False, model_config=model)
    # on this device whoever reads a value gets an error
    starts, lengths, table = (torch.empty(size, device="meta", dtype=torch.int32) for size in (4, 3, (3, 5)))
    common = common_metadata(starts, torch.tensor([0, 3, 6, 7], dtype=torch.int32), lengths, table)
    metadata = builder.build(0, common)
    assert metadata.num_decodes == 3 and metadata.num_decode_tokens == 7 and metadata.prefill is None
    assert [(group.requests, group.queries) for group in metadata.step.groups] == [(2, 3), (1, 1)]
    assert metadata.step.leaders == {"first"} and not metadata.step.plans


def test_buffers_are_for_the_heads_of_the_builders_layers(dense, monkeypatch):
    """A draft model may have more than the model that it drafts for."""
    monkeypatch.setattr(dense.MLACommonMetadataBuilder, "__init__", lambda *args, **kwargs: None)
    layers = {"draft": SimpleNamespace(impl=SimpleNamespace(num_heads=24, kv_cache_dtype="fp8"))}
    model = dict(max_model_len=128, hf_text_config=SimpleNamespace(num_hidden_layers=1))
    config = config_with(
        parallel=dict(decode_context_parallel_size=2),
        scheduler=dict(max_num_seqs=2),
        cache=dict(cache_dtype="auto"),
        compilation=dict(static_forward_context=layers),
        model={**model, "get_num_attention_heads": lambda parallel: 16},
    )
    builder = dense.DenseMLAMetadataBuilder(None, ["draft"], config, torch.device("cpu"))
    assert builder.buffers.heads == 48 and builder.buffers.cache_format == "fp8_tensor_576", "not the config's cache"
