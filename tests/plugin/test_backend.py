"""The backend's classes against the reference, without a server around them: what vLLM's contract asks of a backend."""

import functools
import inspect
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mla_backend
import vllm_installed  # noqa: F401
from mla_backend import reference
from mla_backend.vllm_plugin.staging import StagedRequests
from mla_backend.vllm_plugin.step import SparseStep, StepBatch, StepBuffers
from problems import assert_accurate, random_cache, scale_of
from vllm_models import common_metadata, config_with

HEADS, TOPK, BLOCK_SIZE, BLOCKS = 5, 24, 16, 24
SCALE = 0.04


class Ops(TorchDispatchMode):
    """Counts ops that compute something, as on a GPU each of them is a launch or more, and tensors they allocate."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.allocated = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = op(*args, **(kwargs or {}))
        if not op.is_view:
            self.names.append(str(op))
            made = [x for x in tree_leaves(found) if isinstance(x, Tensor) and x.numel()]
            self.allocated += sum(x.untyped_storage().data_ptr() not in known for x in made)
        return found


class SparseBatch:
    """Requests that decode, extend and prefill, then tokens that are padding; and what an indexer picked for them."""

    def __init__(self, query_lens: list[int], seq_lens: list[int], padding: int = 0):
        self.query_lens, self.tokens = query_lens, sum(query_lens) + padding
        ends = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.query_start_loc, self.seq_lens = ends, torch.tensor(seq_lens, dtype=torch.int32)
        order = torch.randperm(BLOCKS).int()
        blocks = [-(-length // BLOCK_SIZE) for length in seq_lens]
        self.block_table = torch.full((len(seq_lens), max(blocks)), -1, dtype=torch.int32)
        for row, count in enumerate(blocks):
            self.block_table[row, :count], order = order[:count], order[count:]
        pairs = zip(query_lens, seq_lens, strict=True)
        self.positions = [seq - query + i for query, seq in pairs for i in range(query)]
        self.request_ids = [row for row, query in enumerate(query_lens) for _ in range(query)]
        self.picked = torch.full((self.tokens + 3, TOPK), 7, dtype=torch.int32)  # what stood there before, all valid
        for token, position in enumerate(self.positions):
            chosen = torch.randperm(position + 1)[:TOPK].int()
            self.picked[token] = -1
            self.picked[token, : len(chosen)] = chosen

    def slots(self) -> Tensor:
        """The same as slots, a token at a time; none for padding."""
        slots = torch.full((self.tokens, TOPK), -1, dtype=torch.int32)
        for token, row in enumerate(self.request_ids):
            for i, position in enumerate(self.picked[token].tolist()):
                if position >= 0:
                    block = self.block_table[row, position // BLOCK_SIZE]
                    slots[token, i] = block * BLOCK_SIZE + position % BLOCK_SIZE
        return slots


def assert_attends(out: Tensor, q: Tensor, cache: Tensor, slots: Tensor, **more) -> None:
    assert_accurate((out,), reference.sparse_attention(q, cache, slots, scale=SCALE, **more)[:1])


def buffers(captured_tokens: int = 0, **more) -> StepBuffers:
    given = dict(max_tokens=64, topk=TOPK, heads=HEADS, device=torch.device("cpu"), batch_invariant=False)
    return StepBuffers(captured_tokens=captured_tokens, **{**given, **more})


def layer_of(backend, picked: Tensor, indexer: object = None, sinks: Tensor | None = None, selection: int = 0):
    """A layer without the model around it."""

    class Layer(backend.SparseMLALayer):
        topk_indices_buffer = picked

    layer = object.__new__(Layer)
    layer.scale, layer.sinks, layer.dcp_world_size, layer.dcp_rank = SCALE, sinks, 1, 0
    layer.selects, layer.selection = indexer is not None, selection
    return layer


def made_layer(backend, monkeypatch, kv_cache_dtype="auto", **given):
    """A layer as vLLM makes it, on one device."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    module = inspect.getmodule(backend.LayerBase)
    monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1, raising=False)
    sizes = dict(q_lora_rank=24, kv_lora_rank=512, qk_nope_head_dim=16, qk_rope_head_dim=64, qk_head_dim=80)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
        first = HEADS, 576, SCALE, 1, None, None, kv_cache_dtype, None, "decoder", None
        return backend.SparseMLALayer(*first, **sizes, v_head_dim=16, kv_b_proj=None, **given)


def made_builder(
    backend, monkeypatch, topk=2048, kv_cache_dtype="fp8_ds_mla", products="exact", hisparse=None, **parallel
):
    """A builder as vLLM makes it for a model with 64 heads and two drafted tokens, on a Hopper GPU."""

    def init(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.vllm_config, self._prefill_backend = kv_cache_spec, vllm_config, None

    monkeypatch.setattr(backend.BuilderBase, "__init__", init)
    monkeypatch.setattr(backend, "_on_cpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    impl = SimpleNamespace(topk_indices_buffer=torch.empty(64, topk), kv_cache_dtype=kv_cache_dtype, num_heads=64)
    layers, model = {"layers.0": SimpleNamespace(impl=impl)}, SimpleNamespace(num_hidden_layers=1)
    config = config_with(
        parallel={"decode_context_parallel_size": 1, **parallel},
        scheduler=dict(max_num_batched_tokens=64),
        speculative=dict(num_speculative_tokens=2, parallel_drafting=False),
        attention=dict(hisparse_config=hisparse),
        cache=dict(cache_dtype="fp8_ds_mla"),
        compilation=dict(static_forward_context=layers, cudagraph_capture_sizes=[1]),
        model=dict(hf_text_config=model),
    )
    config.use_v2_model_runner, config.additional_config = True, {"mla_products": products}
    return backend.SparseMLAMetadataBuilder(None, ["layers.0"], config, torch.device("cpu"))


def metadata_of(batch: SparseBatch, room: StepBuffers, leaders=None, staged=None, spans=None) -> SimpleNamespace:
    of_step, ids = StepBatch(batch.query_start_loc, batch.seq_lens, batch.tokens), room.request_ids[: batch.tokens]
    more = dict(req_id_per_token=ids, block_table=batch.block_table, cp_kv_cache_interleave_size=1)
    return SimpleNamespace(
        step=SparseStep(room, of_step, batch.tokens, leaders, staged, spans), **more, dense=(), masked=()
    )


BATCHES = {
    "decode": SparseBatch([1, 1, 1], [40, 3, 77]),
    "prefill": SparseBatch([9, 30], [9, 30]),
    "mixed": SparseBatch([1, 3, 20, 5], [40, 3, 50, 80]),
    "padded": SparseBatch([1, 1], [40, 61], padding=6),
    "speculative": SparseBatch([3, 3, 3], [40, 30, 70], padding=3),
}


@pytest.mark.parametrize("name", BATCHES)
def test_tokens_know_their_request_and_how_much_they_may_attend_to(name):
    batch, room = BATCHES[name], buffers()
    ids = room.locate(StepBatch(batch.query_start_loc, batch.seq_lens, batch.tokens))
    real = sum(batch.query_lens)
    assert ids.tolist() == batch.request_ids + [len(batch.query_lens)] * (batch.tokens - real)
    lengths = [min(position + 1, TOPK) for position in batch.positions] + [0] * (batch.tokens - real)
    assert room.lengths[: batch.tokens].tolist() == lengths
    again = buffers()  # what the host knows of the batch changes nothing
    known = again.locate(StepBatch(batch.query_start_loc, batch.seq_lens, batch.tokens, max(batch.query_lens)))
    assert torch.equal(known, ids) and again.lengths[: batch.tokens].tolist() == lengths


@pytest.mark.parametrize("fmt", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("captured_tokens", [0, 64])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_attends_to_what_the_indexer_picked(backend, name, captured_tokens, fmt):
    batch = BATCHES[name]
    wide = random_cache(fmt, BLOCKS, 2 * BLOCK_SIZE)
    cache = wide[:, :BLOCK_SIZE]  # blocks lie apart, as where layers share them
    first, rest = torch.randn(HEADS, batch.tokens, 512) * 10, torch.randn(batch.tokens, HEADS, 64) * 10
    q = first.bfloat16().transpose(0, 1), rest.bfloat16()
    room = buffers(captured_tokens)
    room.own.out.fill_(torch.nan)
    sinks = torch.linspace(-2, 4, HEADS) if name == "decode" else None
    out, lse = layer_of(backend, batch.picked, sinks=sinks).forward_mqa(q, cache, metadata_of(batch, room), None)
    assert lse is None, "it is wanted with context parallelism alone"
    assert_attends(out, torch.cat(q, dim=-1), cache, batch.slots(), sink=sinks)
    assert not out[sum(batch.query_lens) :].any(), "padding attends to nothing"
    assert (out.data_ptr() == room.own.out.data_ptr()) == bool(captured_tokens)


@pytest.mark.parametrize("captured_tokens", [0, 64])
@pytest.mark.parametrize("staged", [StagedRequests(0, 0, 80), StagedRequests(2, 4, 80), StagedRequests(3, 24, 80)])
def test_staged_requests_attend_to_what_the_indexer_picked(backend, captured_tokens, staged):
    batch = SparseBatch([1, 3, 20, 5], [40, 3, 50, 80], padding=2)
    cache = random_cache("fp8_ds_mla", BLOCKS, 2 * BLOCK_SIZE)[:, :BLOCK_SIZE]
    q = (torch.randn(batch.tokens, HEADS, 576) * 10).bfloat16()
    room = buffers(captured_tokens, staged_rows=BLOCKS * BLOCK_SIZE)
    metadata = metadata_of(batch, room, staged=staged)
    want = reference.sparse_attention(q, cache, batch.slots(), scale=SCALE)
    for layer in (layer_of(backend, batch.picked, indexer=object()), layer_of(backend, batch.picked)):
        with Ops() as ops:
            out, _ = layer.forward_mqa(q, cache, metadata, None)
        assert_accurate((out,), (want[0],))
        assert not out[sum(batch.query_lens) :].any(), "padding attends to nothing"
        launches = [sum(op in name for name in ops.names) for op in ("stage_rows", "sparse_attention")]
        assert launches == [1, 1 + (staged.token > 0)], "each layer stages its own rows"


@pytest.mark.parametrize("staged", [None, StagedRequests(2, 4, 40), StagedRequests(3, 34, 40)])
def test_prompts_attend_to_what_the_indexer_picked_after_their_beginnings(backend, staged, monkeypatch):
    """One token decodes, a prompt goes on and two begin. What is dense is vLLM's affair, here a number."""
    batch, dims = SparseBatch([1, 3, 30, 40], [40, 90, 30, 40]), dict(qk_nope_head_dim=16, qk_rope_head_dim=64)
    dense = [slice(4, 4 + TOPK), slice(34, 34 + TOPK)]
    sparse = [slice(1, 4), slice(4 + TOPK, 34), slice(34 + TOPK, 74)]
    cache, q = random_cache("fp8_ds_mla", BLOCKS, BLOCK_SIZE), (torch.randn(74, HEADS, 80) * 4).bfloat16()
    up, down = torch.randn(HEADS, 16, 512).bfloat16(), torch.eye(512)[:, ::64].expand(HEADS, -1, -1).bfloat16()

    def own_dense(self, q, latent, rope, cache, metadata, scale, output):
        assert len(q) == len(latent) == len(rope) == len(output) == TOPK
        output.fill_(metadata)

    monkeypatch.setattr(backend.LayerBase, "forward_mha", own_dense)
    around = SimpleNamespace(W_UK_T=up, layer_name="first")
    own = (lambda out: out.view(-1, HEADS, 8).transpose(0, 1)), buffers(max_tokens=80, staged_rows=BLOCKS * BLOCK_SIZE)
    around._v_up_proj = lambda x, out: torch.bmm(x.transpose(0, 1), down, out=own[0](out))
    metadata = metadata_of(batch, own[1], None, staged, [slice(0, 1), *sparse])
    vars(metadata).update(dense=list(zip(dense, (7.0, 8.0), strict=True)), num_decode_tokens=1)
    absorbed = torch.einsum("thp,hpl->thl", q[..., :16].float(), up.float()).bfloat16()
    queries = torch.cat([absorbed, q[..., 16:]], dim=-1)
    want = reference.sparse_attention(queries, cache, batch.slots(), scale=SCALE)[0]
    for layer in (layer_of(backend, batch.picked, indexer=object()), layer_of(backend, batch.picked)):
        vars(layer).update(num_heads=HEADS, _vllm_layer=around, **dims)
        output = torch.full((73, HEADS * 8), torch.nan, dtype=torch.bfloat16)
        with Ops() as ops:
            layer.forward_mha(q[1:], torch.empty(73, 512), torch.empty(73, 1, 64), cache, metadata, None, output)
        assert [float(output[part.start - 1 : part.stop - 1].unique()) for part in dense] == [7.0, 8.0]
        for part in sparse:
            assert_accurate((output[part.start - 1 : part.stop - 1],), (want[part][..., ::64].flatten(1),))
        out, _ = layer.forward_mqa(queries[:1], cache, metadata, around)
        assert_accurate((out,), (want[:1],))
        assert sum("stage_rows" in name for name in ops.names) == (staged is not None), "a layer stages its rows once"


def test_a_builder_looks_at_lengths_that_the_host_has(backend):
    builder, nothing = object.__new__(backend.SparseMLAMetadataBuilder), SimpleNamespace(prefill=None)
    builder.buffers, builder.kv_cache_spec = buffers(staged_rows=1 << 16, topk=2048), SimpleNamespace(block_size=64)
    builder.splits_prompts = True
    starts, lengths = torch.tensor([0, 1, 4097]), torch.tensor([900, 32768])
    common = SimpleNamespace(query_start_loc_cpu=starts, seq_lens_cpu_upper_bound=lengths, max_query_len=4096)
    assert builder._parts_of(nothing, common) == (StagedRequests(1, 1, 32768), None)
    assert builder._parts_of(nothing, SimpleNamespace(**{**vars(common), "max_query_len": 1})) == (None, None)
    common.seq_lens_cpu_upper_bound = None
    assert builder._parts_of(nothing, common) == (None, None)


PREFILL = dict(
    query_start_loc=None, query_lens_cpu=None, max_query_len=0, chunked_context="of all", prefill_backend=None
)
PrefillMetadata = make_dataclass("PrefillMetadata", [(name, object, given) for name, given in PREFILL.items()])
STEP = ("query_start_loc", "num_decodes", "num_decode_tokens", "num_actual_tokens", "prefill", "prefill_max_seq_len")
MORE = [("topk_tokens", int, 2048), ("dense", tuple, ()), ("masked", tuple, ())]
StepMetadata = make_dataclass("StepMetadata", [*STEP, *MORE])


class DensePrefill:
    """What vLLM has for dense prefill: it keeps the metadata of what it attends to next."""

    def clone(self) -> "DensePrefill":
        return DensePrefill()

    def prepare_metadata(self, metadata: PrefillMetadata) -> None:
        self.prepared = metadata


def test_a_builder_tells_which_tokens_attend_densely(backend):
    """The first request counts as decode, though staging its rows would be worth it."""
    from vllm.config import DeviceConfig, VllmConfig

    builder = object.__new__(backend.SparseMLAMetadataBuilder)
    builder.buffers, builder.kv_cache_spec = buffers(staged_rows=1 << 16, topk=2048), SimpleNamespace(block_size=64)
    builder.vllm_config, builder._prefill_backend = VllmConfig(device_config=DeviceConfig("cpu")), DensePrefill()
    builder.splits_prompts, builder.dense_backends, builder.longest_masked = True, [], 0
    starts = torch.tensor([0, 100, 400, 5400, 9400], dtype=torch.int32)
    lengths = torch.tensor([3000, 300, 5000, 9000])
    common = SimpleNamespace(query_start_loc_cpu=starts, seq_lens_cpu_upper_bound=lengths, max_query_len=5000)
    metadata = StepMetadata(starts, 1, 100, 9401, PrefillMetadata(), 9000)
    staged, spans = builder._parts_of(metadata, common)
    assert staged == StagedRequests(2, 400, 9000)
    assert spans == [slice(0, 100), slice(2448, 9401)]
    ((tokens, own),) = metadata.dense
    assert tokens == slice(100, 2448) and own.prefill.query_start_loc.tolist() == [0, 300, 2348]
    assert own.prefill_max_seq_len == own.prefill.max_query_len == 2048 and own.prefill.chunked_context is None
    assert own.prefill.prefill_backend.prepared is own.prefill and metadata.prefill.prefill_backend is None
    builder.longest_masked = 4096
    assert builder._parts_of(metadata, common)[1] == [slice(0, 100), slice(4496, 9401)]
    (masked,) = metadata.masked
    assert masked.tokens == slice(2448, 4496) and list(masked.blocks) == [2048, 3072]
    common.seq_lens_cpu_upper_bound[1:3] = 7000  # they began in an earlier step
    metadata.dense = metadata.masked = ()
    assert builder._parts_of(metadata, common)[1] is None and not metadata.dense and not metadata.masked


@pytest.mark.parametrize("fmt", ["bf16_512", "fp8_ds_mla", "fp8_tensor_512"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_model_without_rope_attends_to_what_the_indexer_picked(backend, fmt, parts):
    batch = BATCHES["mixed"]
    cache = random_cache(fmt, BLOCKS, BLOCK_SIZE)
    if fmt == "fp8_ds_mla":  # its rows have rope all the same
        cache[..., mla_backend.FORMATS[fmt].rope_offset :] = 0
    q = (torch.randn(batch.tokens, HEADS, 512) * 10).bfloat16()
    given = q if parts == 1 else (q, q[..., :0])  # one with decode context parallelism
    around = SimpleNamespace(_k_scale_float=scale_of(fmt))
    out, _ = layer_of(backend, batch.picked).forward_mqa(given, cache, metadata_of(batch, buffers()), around)
    head_dim = mla_backend.format_of(cache).head_dim
    wide = torch.nn.functional.pad(q, (0, head_dim - 512), value=3.0)  # rope of the cache is zero, so this adds nothing
    assert_attends(out, wide, cache, batch.slots(), cache_scale=scale_of(fmt))


def test_a_builder_goes_by_its_layers_lists_and_cache(backend, monkeypatch):
    """GLM-5.3-Flash picks up to 2176 slots, not index_topk. Layers that are kept in bf16 have no rows to stage."""
    assert made_builder(backend, monkeypatch, topk=2176).buffers.topk == 2176
    formats = {"fp8_ds_mla": "fp8_ds_mla", "nvfp4_ds_mla": "nvfp4_352", "auto": "bf16", "fp8": "fp8_tensor_512"}
    for dtype, fmt in formats.items():
        room = made_builder(backend, monkeypatch, kv_cache_dtype=dtype).buffers
        assert room.cache_format == fmt and (room.staged_rows > 0) == (dtype == "fp8_ds_mla")


def test_layers_of_fp8_rows_have_the_products_asked_for(backend, monkeypatch):
    for dtype, products in (("fp8_ds_mla", "fp8"), ("auto", "exact")):
        room = made_builder(backend, monkeypatch, kv_cache_dtype=dtype, products="fp8").buffers
        assert room.products == products and room.staged_rows == 0
    batch, q, bf16 = BATCHES["mixed"], torch.zeros(29, HEADS, 576).bfloat16(), random_cache("bf16", BLOCKS, BLOCK_SIZE)
    with pytest.raises(ValueError, match="^products must be 'exact' with bf16 rows"):  # the op's word for it
        layer_of(backend, batch.picked).forward_mqa(q, bf16, metadata_of(batch, buffers(products="fp8")), None)


@pytest.mark.parametrize("interleave", [1, 64])
def test_tokens_under_verification_are_decode_with_context_parallelism(backend, monkeypatch, interleave):
    """As prefill they would attend in vLLM's dense kernel, which a captured graph can't give longer contexts."""
    parallel = dict(decode_context_parallel_size=2, cp_kv_cache_interleave_size=interleave)
    assert made_builder(backend, monkeypatch, **parallel).reorder_batch_threshold >= 3


LAYERS = SimpleNamespace(layer_name="first"), SimpleNamespace(layer_name="second"), SimpleNamespace(layer_name="draft")


def test_the_leading_layers_prepare_a_step_anew_in_every_pass(backend):
    """As a captured graph does that was made with the metadata of another step: lengths change under it in place."""
    batch, room = SparseBatch([1, 1, 1], [40, 3, 77]), buffers(captured_tokens=64)
    cache, q = random_cache("bf16", BLOCKS, BLOCK_SIZE), torch.randn(3, HEADS, 576).bfloat16()
    layer, metadata = layer_of(backend, batch.picked), metadata_of(batch, room, leaders=("first", "draft"))
    room.lengths.fill_(-7)
    layer.forward_mqa(q, cache, metadata, LAYERS[0])
    assert room.lengths[:3].tolist() == [TOPK, 3, TOPK]
    batch.seq_lens[2] = 5
    layer.forward_mqa(q, cache, metadata, LAYERS[1])
    assert room.lengths[:3].tolist() == [TOPK, 3, TOPK], "a layer that follows takes the step as it is"
    for leader in (LAYERS[0], LAYERS[2]):
        room.lengths.fill_(-7)
        layer.forward_mqa(q, cache, metadata, leader)
        assert room.lengths[:3].tolist() == [TOPK, 3, 5]
    late = metadata_of(batch, room, leaders=("first",))
    room.lengths.fill_(-7)
    layer.forward_mqa(q, cache, late, LAYERS[1])
    assert room.lengths[:3].tolist() == [TOPK, 3, 5], "without a leading layer the first one prepares it"


def test_layers_that_lead_are_the_first_one_and_those_that_draft(backend):
    names = [f"model.layers.{i}.self_attn.attn" for i in (4, 3, 5, 6, 7)]
    assert backend.leading_layers(names, layers=6) == {names[1], names[3], names[4]}
    assert backend.leading_layers(names[3:], layers=6) == set(names[3:])
    assert backend.leading_layers(["decoder.3.attn", *names], layers=6) == {"decoder.3.attn", *names}


@pytest.mark.parametrize("name", BATCHES)
def test_preparing_a_step_and_attending_allocate_nothing(backend, name):
    """What is captured as a CUDA graph."""
    batch, room = BATCHES[name], buffers(captured_tokens=64)
    cache, q = random_cache("fp8_ds_mla", BLOCKS, BLOCK_SIZE), torch.randn(batch.tokens, HEADS, 576).bfloat16()
    layer = layer_of(backend, batch.picked, indexer=object())
    metadata = metadata_of(batch, room, leaders=("first",))
    with Ops() as first:
        layer.forward_mqa(q, cache, metadata, LAYERS[0])
    with Ops() as second:
        layer.forward_mqa(q, cache, metadata, LAYERS[1])
    layer.dcp_world_size, layer.dcp_rank = 8, 5
    with Ops() as of_rank:
        layer.forward_mqa(q, cache, metadata, LAYERS[1])
    assert first.allocated == second.allocated == of_rank.allocated == 0, first.names
    assert len(second.names) == 2, "slots are looked up and attended to"
    assert len(of_rank.names) == 3, "with context parallelism a layer also makes its plan"
    assert len(first.names) - len(second.names) <= 7, first.names


@pytest.mark.parametrize("leaders", [("draft",), None])
def test_a_captured_loop_of_drafts_follows_what_changes_in_place(backend, leaders):
    """vLLM makes the metadata once, and in each pass new lengths and a new selection in the same memory."""
    builder = object.__new__(backend.SparseMLAMetadataBuilder)
    assert builder.supports_draft_decode_metadata_update
    batch, room = SparseBatch([1, 1], [40, 2]), buffers(captured_tokens=64)
    metadata = metadata_of(batch, room, leaders=leaders)
    layer = layer_of(backend, batch.picked, indexer=object())
    cache = random_cache("bf16", BLOCKS, BLOCK_SIZE)
    for _ in range(3):
        batch.seq_lens += 1
        for token, length in enumerate(batch.seq_lens.tolist()):
            chosen = torch.randperm(length)[:TOPK].int()
            batch.picked[token] = -1
            batch.picked[token, : len(chosen)] = chosen
        q = torch.randn(2, HEADS, 576).bfloat16()
        with Ops() as ops:
            builder.update_draft_decode_metadata(metadata)
            out, _ = layer.forward_mqa(q, cache, metadata, LAYERS[2])
        assert ops.allocated == 0
        assert_attends(out, q, cache, batch.slots())
        assert room.lengths[:2].tolist() == batch.seq_lens.clamp(max=TOPK).tolist()


def test_building_the_metadata_of_a_decode_step_launches_nothing(backend):
    room, builder = buffers(captured_tokens=64), object.__new__(backend.SparseMLAMetadataBuilder)
    config, spec = config_with(parallel=dict(cp_kv_cache_interleave_size=1)), SimpleNamespace(block_size=BLOCK_SIZE)
    vars(builder).update(buffers=room, leaders=frozenset(["first"]), first_batch=None, reorder_batch_threshold=1)
    vars(builder).update(kv_cache_spec=spec, vllm_config=config, cp_kv_cache_interleave_size=1, topk_tokens=TOPK)
    vars(builder).update(use_pcp=False, _prefill_backend=None)
    starts, seq_lens = torch.arange(4, dtype=torch.int32), torch.tensor([40, 3, 77], dtype=torch.int32)

    def build(starts: Tensor) -> tuple[object, Ops]:
        common = common_metadata(starts, starts.clone(), seq_lens, torch.zeros(3, 5, dtype=torch.int32))
        with Ops() as ops:
            metadata = builder.build(0, common)
        return metadata, ops

    room.lengths.fill_(-7)
    for _ in range(2):
        metadata, ops = build(starts)
        assert ops.names == [] and (room.lengths == -7).all(), "the layers prepare it"
        assert metadata.req_id_per_token.data_ptr() == room.request_ids.data_ptr()
    _, ops = build(starts.clone())
    assert ops.names and room.lengths[:3].tolist() == [TOPK, 3, TOPK], "in other memory: no graph would find it there"


@pytest.mark.parametrize("captured_tokens", [64, 0])
def test_layers_without_an_indexer_use_the_selection_of_the_last_one_with(backend, captured_tokens):
    batch = BATCHES["decode"]
    cache, q = random_cache("bf16", BLOCKS, BLOCK_SIZE), torch.randn(3, HEADS, 576).bfloat16()
    metadata = metadata_of(batch, buffers(captured_tokens))
    selecting, sharing = layer_of(backend, batch.picked, indexer=object()), layer_of(backend, batch.picked)
    first = selecting.forward_mqa(q, cache, metadata, None)[0].clone()
    with Ops() as ops:
        second, _ = sharing.forward_mqa(q, cache, metadata, None)
    assert torch.equal(first, second)
    looked_up = sum("convert_indices" in name for name in ops.names)
    assert looked_up == (not captured_tokens), "again where other layers have used the memory"
    other = layer_of(backend, batch.picked * 0 - 1, indexer=object())
    assert not other.forward_mqa(q, cache, metadata, None)[0].any(), "one with an indexer has its own"


def test_they_do_where_vllm_gives_them_a_step_of_their_own(backend):
    """From 0.32 on it makes a metadata builder for layers with an indexer and one for those without."""
    batch = BATCHES["decode"]
    cache, q = random_cache("bf16", BLOCKS, BLOCK_SIZE), torch.randn(3, HEADS, 576).bfloat16()
    of_selecting, of_sharing = (metadata_of(batch, buffers(captured_tokens=64)) for _ in range(2))
    picked = batch.picked.clone()
    for number in (1, 2):
        picked[:3, 3 - number :] = -1
        selecting = layer_of(backend, picked, indexer=object(), selection=number)
        want = selecting.forward_mqa(q, cache, of_selecting, None)[0].clone()
        for looked_up in (1, 0):
            with Ops() as ops:
                out, _ = layer_of(backend, picked, selection=number).forward_mqa(q, cache, of_sharing, None)
            assert torch.equal(out, want)
            assert sum("convert_indices" in name for name in ops.names) == looked_up


def test_layers_know_whose_selection_they_use(backend, monkeypatch):
    picked = torch.empty(7, TOPK, dtype=torch.int32)
    indexer, nothing = SimpleNamespace(topk_indices_buffer=picked), None
    indexers, given = (indexer, nothing, nothing, indexer, nothing), dict(topk_indices_buffer=picked)
    layers = [made_layer(backend, monkeypatch, **given, indexer=one) for one in indexers]
    numbers = [layer.selection - layers[0].selection for layer in layers]
    assert numbers == [0, 0, 0, 1, 1] and [layer.selects for layer in layers] == [True, False, False, True, False]


def test_longer_steps_than_graphs_have_write_into_memory_that_vllm_counts(backend, monkeypatch):
    """Its scratch memory, of which a layer asks for as much as any step can need when it is made."""
    from vllm.v1.worker import workspace

    class Scratch:
        asked: list[list] = []

        def get_simultaneous(self, *specs):
            self.asked.append([(tuple(shape), dtype) for shape, dtype in specs])
            return [torch.full(shape, -3, dtype=dtype) for shape, dtype in specs]

    monkeypatch.setattr(workspace, "_manager", Scratch())
    monkeypatch.setattr(backend, "room_for_rows", lambda *_: BLOCKS * BLOCK_SIZE)
    batch = BATCHES["mixed"]
    layer = made_layer(backend, monkeypatch, topk_indices_buffer=batch.picked)
    cache, q = random_cache("fp8_ds_mla", BLOCKS, BLOCK_SIZE), torch.randn(batch.tokens, HEADS, 576).bfloat16()
    metadata = metadata_of(batch, buffers(staged_rows=BLOCKS * BLOCK_SIZE), staged=StagedRequests(2, 4, 80))
    out, _ = layer.forward_mqa(q, cache, metadata, None)
    assert_attends(out, q, cache, batch.slots())
    reserved, used = Scratch.asked
    for (most, dtype), (shape, used_dtype) in zip(reserved, used, strict=True):
        assert dtype == used_dtype and most[0] >= shape[0] > 0 and most[1:] == shape[1:]
    assert [most[0] for most, _ in reserved[:-1]] == [len(batch.picked)] * 4


def test_a_layer_makes_vllm_allocate_no_slots_for_it(backend, monkeypatch):
    """vLLM's own groups of layers that share a selection would, for each layer with an indexer."""
    picked = torch.empty(7, TOPK, dtype=torch.int32)
    for indexer in (None, SimpleNamespace(topk_indices_buffer=picked)):
        layer = made_layer(backend, monkeypatch, topk_indices_buffer=picked, indexer=indexer)
        assert getattr(layer, "index_group", None) is None
        layer.record_logical_topk_ready()


def test_on_a_gpu_vllm_compiles_its_indexers_kernels_before_the_first_request(backend, monkeypatch):
    from vllm.v1.attention.backends.mla import indexer

    names, registered = ("_PREPARE_UNIFORM_DECODE_KERNEL", "_BUILD_PREFILL_CHUNK_METADATA_KERNEL"), []
    if not any(hasattr(indexer, name) for name in names):
        pytest.skip("this vLLM has no list of kernels to compile at start")
    for name in names:
        kernel = SimpleNamespace(register_warmup=functools.partial(registered.append, name))
        monkeypatch.setattr(indexer, name, kernel)
    for on_cpu in (True, False):
        monkeypatch.setattr(backend, "_on_cpu", lambda on_cpu=on_cpu: on_cpu)
        made_layer(backend, monkeypatch, topk_indices_buffer=torch.empty(7, TOPK, dtype=torch.int32))
        assert registered == [] if on_cpu else list(names)


def made_on_a_gpu(backend, monkeypatch, **given):
    """A layer that believes so."""
    monkeypatch.setattr(backend, "_on_cpu", lambda: False)
    monkeypatch.setattr(backend, "room_for_rows", lambda *_: 0)
    return made_layer(backend, monkeypatch, topk_indices_buffer=torch.empty(7, TOPK, dtype=torch.int32), **given)


def test_sinks_are_loaded_later_and_leave_no_prompt_to_the_dense_kernel(backend, monkeypatch):
    sinks = torch.nn.Parameter(torch.empty(HEADS), requires_grad=False)
    layer = made_on_a_gpu(backend, monkeypatch, sinks=sinks)
    assert layer.sinks is sinks and not (layer.supports_dense_mha_prefill or layer.splits_prompts)
    for wrong in (sinks.bfloat16(), sinks[1:]):
        with pytest.raises(ValueError, match=r"sinks must be float32 \[5\]; got"):
            made_on_a_gpu(backend, monkeypatch, sinks=wrong)


def test_batch_invariance_leaves_no_prompt_to_the_dense_kernel(backend, monkeypatch):
    """vLLM runs that where all prefills of a step are short, so it depends on a prompt's neighbours."""
    for invariant in (False, True):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
        assert made_on_a_gpu(backend, monkeypatch).supports_dense_mha_prefill is not invariant


@pytest.mark.parametrize("interleave", [1, 4])
def test_ranks_of_decode_context_parallelism_combine_to_the_whole(backend, interleave, monkeypatch):
    """Each rank keeps every n-th run of tokens and attends to those; the splits combine by their natural-log lse."""
    ranks, batch, walked, attend = 3, BATCHES["mixed"], [], mla_backend.sparse_attention

    def count(*args, topk_length, **kwargs):
        walked.append(topk_length.clone())
        return attend(*args, topk_length=topk_length, **kwargs)

    monkeypatch.setattr(mla_backend, "sparse_attention", count)
    keys = random_cache("bf16", len(batch.seq_lens), 96)  # row r holds the tokens of request r, in order
    q = (torch.randn(batch.tokens, HEADS, 576) * 3).bfloat16()
    parts = []
    for rank in range(ranks):
        mine = [i for i in range(96) if i // interleave % ranks == rank]
        cache = keys[:, mine].reshape(-1, BLOCK_SIZE, 576)  # 32 tokens, two blocks, a request
        layer = layer_of(backend, batch.picked)
        layer.dcp_world_size, layer.dcp_rank = ranks, rank
        metadata = metadata_of(batch, buffers())
        metadata.block_table = torch.arange(2 * len(batch.seq_lens), dtype=torch.int32).view(-1, 2)
        metadata.cp_kv_cache_interleave_size = interleave
        parts.append(layer.forward_mqa(q, cache, metadata, None))
    lengths = (batch.picked[: batch.tokens] >= 0).sum(1)
    assert torch.equal(sum(walked), lengths), "a rank walks over what it keeps, and over nothing else"
    out, lse = mla_backend.combine_partials([p[0].float() for p in parts], [p[1] for p in parts])
    picked = batch.picked[: batch.tokens]
    slots = torch.where(picked < 0, -1, picked + 96 * torch.tensor(batch.request_ids)[:, None])
    want = reference.sparse_attention(q, keys, slots.int(), scale=SCALE)
    assert_accurate((out.bfloat16(), lse), want[:2])


def test_batch_invariance_gives_a_token_the_same_bits_alone_and_in_a_batch(backend):
    batch, cache = BATCHES["mixed"], random_cache("fp8_ds_mla", BLOCKS, BLOCK_SIZE)
    q = torch.randn(batch.tokens, HEADS, 576).bfloat16()
    room = buffers(batch_invariant=True)
    together, _ = layer_of(backend, batch.picked).forward_mqa(q, cache, metadata_of(batch, room), None)
    first = SparseBatch([1], [40])
    first.block_table = batch.block_table[:1]
    alone, _ = layer_of(backend, batch.picked[:4]).forward_mqa(q[:1], cache, metadata_of(first, room), None)
    assert torch.equal(alone[0], together[0])


def test_no_step_waits_for_the_device(backend, no_values_are_read):
    batch, room = BATCHES["mixed"], buffers(captured_tokens=64)
    cache, q = random_cache("bf16", BLOCKS, BLOCK_SIZE), torch.randn(batch.tokens, HEADS, 576).bfloat16()
    layer, metadata = layer_of(backend, batch.picked), metadata_of(batch, room, leaders=("first",))
    no_values_are_read()
    layer.forward_mqa(q, cache, metadata, LAYERS[0])
