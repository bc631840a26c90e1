"""The backend in SGLang's own fixtures: its metadata, cache and batches. The reference says what attention gives."""

import contextlib
import functools
import unittest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
import mla_backend.sglang_plugin as plugin
import sglang_installed
from mla_backend import reference
from problems import assert_accurate

plugin.register()
from sglang.srt.layers.attention import dsa_backend  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.speculative.draft_utils import DraftBackendFactory  # noqa: E402
from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as fixtures  # noqa: E402

from mla_backend.sglang_plugin.backend import SparseMLABackend, SparseMLADraftBackend  # noqa: E402

HookRegistry.apply_hooks()
DEVICE = sglang_installed.DEVICE
DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
VERIFY, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2
CACHES = pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])


@pytest.fixture(autouse=True)
def lengths_on_a_cpu(monkeypatch):
    """SGLang's kernel for these lengths refuses tensors on a CPU, so a CPU gets the same in PyTorch."""

    def expand(extend_lens: torch.Tensor, lengths: torch.Tensor, total: int, most: int) -> torch.Tensor:
        each = zip(extend_lens.tolist(), lengths.tolist(), strict=True)
        expanded = [torch.arange(length - extend + 1, length + 1) for extend, length in each]
        return torch.cat(expanded).int()

    if DEVICE == "cpu":
        monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expand)


def batch_of(mode: ForwardMode, prefixes: tuple[int, ...], new: int | tuple[int, ...] = 1, heads=4, **options):
    """SGLang's fixture: a runner with its pools and the backend, a batch, and what its layer projects."""
    new = (new,) * len(prefixes) if isinstance(new, int) else new
    sizes = dict(prefix_lens=prefixes, extend_lens=None if mode is DECODE else new, page_size=64)
    kind = dict(name=mode.name, backend=plugin.NAME, forward_mode=mode, num_heads=heads, num_kv_heads=1)
    case = fixtures.DSAAttentionCase(**kind, **sizes)
    with torch.no_grad():
        return fixtures.build_dsa_sparse_attention_fixture(unittest.TestCase(), case, device=DEVICE, **options)


def full_cache(fixture) -> torch.Tensor:
    """The layer's cache, with random values in every slot."""
    cache = fixture.runner.token_to_kv_pool.get_key_buffer(0)
    slots = torch.arange(len(cache), device=DEVICE)
    latent, rope = (torch.randn(len(cache), dims, device=DEVICE).bfloat16() for dims in (512, 64))
    mla_backend.cache_write(latent, rope, cache, slots)
    return cache


@contextlib.contextmanager
def watched(backend: SparseMLABackend):
    """Compares each call with the reference."""
    calls = []
    attend = backend._forward_fa3

    def compared(**arguments):
        out = attend(**arguments)
        on_host = {name: x.cpu() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        q, lists = torch.cat([on_host["q_nope"], on_host["q_rope"]], dim=-1), on_host["page_table"]
        how = dict(scale=arguments["sm_scale"], topk_length=on_host["cache_seqlens"][: len(lists)])
        exact = reference.sparse_attention(q, on_host["kv_cache"], lists, **how)
        assert_accurate((out,), exact, magnitude=1)
        calls.append(out)
        return out

    backend._forward_fa3 = compared
    try:
        yield calls
    finally:
        del backend._forward_fa3


def run(fixture) -> torch.Tensor:
    """The layer's output, which SGLang's own reference has to agree with as well."""
    with watched(fixture.backend) as calls:
        got = fixtures.run_dsa_sparse_fixture_eager(fixture, unittest.TestCase())
    assert len(calls) == 1
    torch.testing.assert_close(got, fixtures.expected_dsa_sparse_fixture_output(fixture), atol=0.2, rtol=0.2)
    return got


@CACHES
@pytest.mark.parametrize(
    ("mode", "prefixes", "new"),
    [(DECODE, (64, 128, 192), 1), (EXTEND, (20, 140), (5, 3)), (VERIFY, (60, 200), 3), (DRAFT, (60, 200), 3)],
    ids=["decode", "prefill", "verification", "draft"],
)
def test_attention_is_right_in_every_kind_of_batch(mode, prefixes, new, fp8, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
    run(batch_of(mode, prefixes, new, fp8_kv_cache=fp8))


class Elsewhere:
    """Stands for HiSparse, whose coordinator brings rows and says where they are: here in the opposite order."""

    def __init__(self, fixture):
        self.pool, self.table = fixture.runner.token_to_kv_pool, fixture.runner.req_to_token_pool.req_to_token

    def swap_in_selected_pages(self, requests, lengths, picked, layer_id):
        wanted = picked.flatten(1).clamp(min=0).long()
        slots = self.table[requests.long()].gather(1, wanted).view_as(picked)
        return torch.where(picked < 0, -1, self.move(slots))

    def move(self, slots):
        cache = self.pool.get_key_buffer(0)
        raw = cache.view(torch.uint8)
        raw.copy_(raw.flip(0))
        return torch.where(slots < 0, -1, len(cache) - 1 - slots).int()


@CACHES
@pytest.mark.parametrize(
    ("mode", "new"), [(DECODE, 1), (EXTEND, (5, 3)), (VERIFY, 3)], ids=["decode", "prefill", "verification"]
)
def test_rows_that_hisparse_keeps_elsewhere_are_attended_to_there(mode, new, fp8, monkeypatch):
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "0")
    fixture = batch_of(mode, (60, 200), new, fp8_kv_cache=fp8)
    elsewhere = fixture.backend.hisparse_coordinator = Elsewhere(fixture)
    elsewhere.pool.translate_loc_to_hisparse_device = elsewhere.move
    run(fixture)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
    st.sampled_from([1, 8, 16]),
    st.sampled_from(["trailing", "head_tail"]),
)
def test_decode_is_right_at_any_lengths(lengths, heads, pattern):
    run(batch_of(DECODE, tuple(lengths), heads=heads, index_pattern=pattern))


def call_of(fixture, tokens: int, lengths: list[int]) -> dict[str, torch.Tensor | float]:
    """What SGLang hands a layer: random slots for as many tokens as the fixture's batch has, and none for others."""
    cache = full_cache(fixture)
    lists = torch.full((tokens, 128), -1, dtype=torch.int32, device=DEVICE)
    lists[: fixture.case.num_input_tokens] = torch.randint(0, len(cache), (128,), device=DEVICE)
    parts = {"q_nope": 512, "q_rope": 64}
    queries = {name: torch.randn(tokens, 4, dims, device=DEVICE).bfloat16() for name, dims in parts.items()}
    more = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32, device=DEVICE), "sm_scale": 0.1, "page_size": 1}
    return {**queries, "kv_cache": cache, "page_table": lists, **more}


def test_the_layers_of_a_pass_share_a_plan_and_each_pass_makes_its_own(monkeypatch):
    fixture = batch_of(DECODE, (64, 128))
    call, made, make = call_of(fixture, 2, [65, 128]), [], mla_backend.plan
    monkeypatch.setattr(mla_backend, "plan", lambda *args, **kwargs: made.append(args) or make(*args, **kwargs))
    for passes in (1, 2):
        fixture.backend.init_forward_metadata(fixture.forward_batch)
        for _ in range(3):
            fixture.backend._forward_fa3(**call)
        assert len(made) == passes


def test_fp8_rows_have_the_products_of_the_environment(monkeypatch):
    monkeypatch.setenv(plugin.PRODUCTS_VARIABLE, "fp8")
    with pytest.raises(ValueError, match="MLA_PRODUCTS=fp8 is for FP8 rows. Use --kv-cache-dtype fp8_e4m3"):
        batch_of(DECODE, (64,))
    noted = []
    for op in ("plan", "sparse_attention"):
        own = getattr(mla_backend, op)
        monkeypatch.setattr(
            mla_backend, op, lambda *a, own=own, **more: noted.append(more["products"]) or own(*a, **more)
        )
    run(batch_of(DECODE, (64, 128), fp8_kv_cache=True))
    assert noted == ["fp8"] * 2


@pytest.mark.parametrize("lengths", [[65, 128, 0, 0, 0], [65, 128]], ids=["padded further", "not padded"])
def test_queries_that_sglang_padded_attend_to_nothing(lengths):
    """With data parallelism it pads queries and lists; lengths may be longer or shorter than those."""
    fixture = batch_of(DECODE, (64, 128))
    out = fixture.backend._forward_fa3(**call_of(fixture, 4, lengths))
    assert out.shape == (4, 4, 512) and not out[2:].any() and out[:2].any()


@CACHES
def test_a_captured_pass_attends_at_the_lengths_of_its_replay(fp8):
    """Decode as SGLang's runner captures it: metadata before the graph, the plan and attention in it."""
    fixture = batch_of(DECODE, (64, 128), fp8_kv_cache=fp8, disable_cuda_graph=False)
    backend, batch = fixture.backend, fixture.forward_batch
    cache = full_cache(fixture)
    lists = torch.randint(0, len(cache), (2, 128), dtype=torch.int32, device=DEVICE)
    q = torch.randn(2, 4, 576, device=DEVICE).bfloat16()
    out = torch.empty(2, 4, 512, dtype=torch.bfloat16, device=DEVICE)
    backend.init_cuda_graph_state(max_bs=2, max_num_tokens=2)

    def attend() -> None:
        backend.init_forward_metadata_in_graph(batch)
        lengths = backend.forward_metadata.dsa_cache_seqlens_int32
        arguments = {"kv_cache": cache, "page_table": lists, "cache_seqlens": lengths, "sm_scale": 0.1}
        for _ in range(2):  # layers
            out.copy_(backend._forward_fa3(q_nope=q[..., :512], q_rope=q[..., 512:], **arguments))

    prepare(fixture, torch.tensor([1, 1]), in_capture=True)
    replay = captured(attend)
    for lengths in ([1, 128], [100, 3], [128, 128]):
        prepare(fixture, torch.tensor(lengths), in_capture=False)
        replay()
        on_host, counts = (x.cpu() for x in (q, cache, lists)), torch.tensor(lengths, dtype=torch.int32)
        exact = reference.sparse_attention(*on_host, scale=0.1, topk_length=counts)
        assert_accurate((out,), exact, magnitude=1)


def prepare(fixture, lengths: torch.Tensor, in_capture: bool) -> None:
    """What SGLang does before it captures or replays a pass for requests of these lengths."""
    batch = fixture.forward_batch
    batch.seq_lens.copy_(lengths)
    batch.seq_lens_cpu = batch.seq_lens.cpu()
    fixture.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)


def captured(function):
    """The function as a CUDA graph; on a CPU the function."""
    if DEVICE == "cpu":
        return function
    for _ in range(2):
        function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def test_drafts_get_this_backend_too():
    runner = batch_of(DECODE, (64,)).runner
    factory = DraftBackendFactory(runner, topk=1, speculative_num_steps=3)
    steps, after = factory.create_decode_backend(), factory.create_draft_extend_backend()
    assert isinstance(steps, SparseMLADraftBackend) and len(steps.attn_backends) == 2
    for step, backend in enumerate(steps.attn_backends):
        assert isinstance(backend, SparseMLABackend) and backend.speculative_step_id == step
    for backend in (*steps.attn_backends, after):
        assert backend.prefill_attention_backend_str == backend.decode_attention_backend_str == plugin.NAME
    assert isinstance(after, SparseMLABackend)


@pytest.mark.parametrize(
    ("where", "value", "word"),
    [
        ("dtype", torch.float16, "--dtype"),
        ("model_config.kv_lora_rank", 256, "256"),
        ("model_config.hf_config.architectures", ["LlamaForCausalLM"], "sparse MLA"),
        ("model_config.hf_config.learnable_sink", True, "learnable sinks"),
        ("token_to_kv_pool.kv_cache_dim", 528, "--kv-cache-dtype bfloat16"),
        ("token_to_kv_pool.dtype", torch.float8_e4m3fn, "--dsa-decode-backend"),
        ("model_config.hf_config.index_kpool", 4, "MLA_SELECTION=1 does not take pooled"),
        ("model_config.hf_config.index_local_tokens", 1, "last tokens"),
        ("model_config.hf_config.index_n_heads", 129, "up to 128 index_n_heads"),
        ("model_config.hf_config.index_topk", 8192, "up to 4096; got 128, 1 and 8192"),
        ("token_to_kv_pool.index_key_cache.buffer", [torch.zeros(4, 4352)], "FP8 alone"),
    ],
)
def test_what_it_cannot_do_is_said_before_it_serves(where, value, word, monkeypatch):
    monkeypatch.setenv("MLA_SELECTION", "1")
    runner = batch_of(DECODE, (64,)).runner
    *owners, name = where.split(".")
    setattr(functools.reduce(getattr, owners, runner), name, value)
    with pytest.raises(ValueError, match="^sparse_mla: ") as refused:
        SparseMLABackend(runner)
    assert word in str(refused.value)


@pytest.mark.parametrize(
    ("context", "word"),
    [
        (lambda: get_context().override_server_args(prefill_attention_backend="dsa"), "--attention-backend"),
        (lambda: get_context().override_server_args(decode_attention_backend="dsa"), "--attention-backend"),
        (lambda: get_parallel().override(attn_dcp_size=2), "--dcp-size"),
    ],
)
def test_half_of_a_model_and_context_parallelism_are_refused(context, word):
    runner = batch_of(DECODE, (64,)).runner
    with context(), pytest.raises(ValueError, match=word):
        SparseMLABackend(runner)
