"""The drop-in for the flash_mla package: its conventions, against the oracle."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
import mla_backend.flash_mla as flash_mla
from dense_problems import random_dense
from mla_backend import reference
from problems import (
    FORMATS,
    MAGNITUDE,
    PARTNERS,
    SCALE,
    assert_accurate,
    copy_with_gaps,
    random_cache,
    scale_of,
    score_error,
)


def is_fp8(fmt):
    return mla_backend.FORMATS[fmt].fp8


def goes_with(fmt):
    """Formats that a second cache may have: the package says of both at once whether they are FP8."""
    return [name for name in PARTNERS[fmt] if is_fp8(name) == is_fp8(fmt)]


def request_tensors(fmt, b, s_q, h_q, topk, blocks=12, block_size=16):
    """The drop-in takes 1 for the scale of a cache, so that values of one with a scale are larger."""
    rows = mla_backend.FORMATS[fmt]
    q = (torch.randn(b, s_q, h_q, rows.head_dim) * 10 * scale_of(fmt)).to(rows.number)
    cache = random_cache(fmt, blocks, block_size).unsqueeze(2)
    slots = blocks * block_size
    return q, cache, torch.randint(-9, slots + 9, (b, s_q, topk), dtype=torch.int32)


def oracle(q, cache, indices, **more):
    return reference.sparse_attention(q.flatten(0, 1), cache.squeeze(2), indices.flatten(0, 1), scale=SCALE, **more)


def decode(q, cache, indices, meta=None, **more):
    meta = flash_mla.get_mla_metadata()[0] if meta is None else meta
    return flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, meta, indices=indices, **more)


def assert_decode(got, want, b, s_q, **tolerance):
    """(out, lse) of flash_mla_with_kvcache against the oracle's."""
    out, lse = got
    h_q = out.shape[2]
    assert out.shape == (b, s_q, h_q, 512) and lse.shape == (b, h_q, s_q)
    assert not (lse == -torch.inf).any()
    lse = torch.where(lse == torch.inf, -torch.inf, lse).transpose(1, 2).reshape(b * s_q, h_q)
    assert_accurate((out.flatten(0, 1), lse), want[:2], **tolerance)


@given(st.data())
def test_sparse_decode(data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    fmt = data.draw(st.sampled_from(FORMATS))
    b, s_q, h_q = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 8, 16, 64]))
    block_size = data.draw(st.sampled_from([1, 2, 16, 61, 64, 69]))
    q, cache, indices = request_tensors(fmt, b, s_q, h_q, data.draw(st.integers(0, 100)), 12, block_size)
    as_given = cache.view(torch.float8_e4m3fn) if is_fp8(fmt) and data.draw(st.booleans()) else cache
    indices[0, 0] = -1
    topk = indices.shape[2]
    more = {}
    if data.draw(st.booleans()):
        more["topk_length"] = torch.randint(0, topk + 1, (b,), dtype=torch.int32)
    if data.draw(st.booleans()):
        more["attn_sink"] = torch.randn(h_q)
        more["attn_sink"][0] = data.draw(st.sampled_from([torch.inf, -torch.inf, 0.0]))
    if data.draw(st.booleans()):
        other = data.draw(st.sampled_from(goes_with(fmt)))
        _, more["extra_k_cache"], more["extra_indices_in_kvcache"] = request_tensors(other, b, s_q, h_q, 20, 3, 5)
        if data.draw(st.booleans()):
            more["extra_topk_length"] = torch.randint(0, 21, (b,), dtype=torch.int32)
    per_token = lambda name: None if more.get(name) is None else more[name].repeat_interleave(s_q)  # noqa: E731
    second = {}
    if "extra_k_cache" in more:
        second = {"extra_cache": more["extra_k_cache"].squeeze(2), "extra_topk_length": per_token("extra_topk_length")}
        second["extra_indices"] = more["extra_indices_in_kvcache"].flatten(0, 1)
    lengths, sink = per_token("topk_length"), more.get("attn_sink")
    want = oracle(q, cache, indices, topk_length=lengths, sink=sink, **second)
    meta, _ = flash_mla.get_mla_metadata()
    for _ in range(2):  # the second call reuses the plan
        got = decode(q, as_given, indices, meta, softmax_scale=SCALE, is_fp8_kvcache=is_fp8(fmt), **more)
        assert_decode(got, want, b, s_q, magnitude=MAGNITUDE / scale_of(fmt))


@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize("fmt", FORMATS)
def test_metadata_of_september_2025(device, fmt, s_q):
    b, h_q, topk = 3, 16, 900
    q, cache, indices = request_tensors(fmt, b, s_q, h_q, topk)
    want, there = oracle(q, cache, indices), (q.to(device), copy_with_gaps(cache, device))
    seqlens = torch.full((b,), 192, dtype=torch.int32, device=device)
    table, num_splits = flash_mla.get_mla_metadata(seqlens, s_q * h_q, 1, h_q, is_fp8(fmt), topk)
    assert table.dtype == num_splits.dtype == torch.int32
    assert table.shape[1] == 8 and num_splits.shape == (b + 1,)
    begins_inside = int(((table[:, 2] > 0) & (table[:, 1] > table[:, 0])).sum())
    assert num_splits[0] == 0 and num_splits[-1] == b * s_q + begins_inside
    more = {"is_fp8_kvcache": is_fp8(fmt), "indices": indices.to(device)}
    got = flash_mla.flash_mla_with_kvcache(*there, None, seqlens, 512, table, num_splits, SCALE, **more)
    tolerance = {"magnitude": MAGNITUDE / scale_of(fmt), "score_error": score_error(cache, device)}
    assert_decode(got, want, b, s_q, **tolerance)


SEQLENS = torch.full((3,), 64, dtype=torch.int32)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((None,), {"is_fp8_kvcache": True}),
        ((16, SEQLENS), {}),
        ((SEQLENS,), {}),
        ((SEQLENS, 16, 1), {"topk": 40}),
        ((SEQLENS, 16, 1, 16, True, 40, "more"), {}),
        ((), {"num_heads_q": 16, "topk": 40, "an_argument_of_another_version": 1}),
    ],
)
def test_metadata_of_the_newest_version_ignores_its_arguments(args, kwargs):
    q, cache, indices = request_tensors("fp8_ds_mla", 3, 1, 16, 40)
    meta, num_splits = flash_mla.get_mla_metadata(*args, **kwargs)
    assert isinstance(meta, flash_mla.FlashMLASchedMeta) and num_splits is None
    got = flash_mla.flash_mla_with_kvcache(
        q, cache, None, SEQLENS, 512, meta, num_splits, is_fp8_kvcache=True, indices=indices
    )
    want = oracle(q, cache, indices)
    assert_decode(got, want, 3, 1)


def test_metadata_of_september_2025_takes_its_arguments_by_name_in_any_order():
    by_name = flash_mla.get_mla_metadata(
        topk=900, num_heads_k=1, is_fp8_kvcache=True, num_heads_q=16, cache_seqlens=SEQLENS, num_q_tokens_per_head_k=32
    )
    in_order = flash_mla.get_mla_metadata(SEQLENS, 32, 1, 16, True, 900)
    for one, other in zip(by_name, in_order, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("asked", ["of the call", "of new metadata", "of old metadata"])
def test_batch_invariance_gives_a_request_the_same_bits_alone_and_in_a_batch(asked):
    q, cache, indices = request_tensors("bf16", 3, 1, 4, 900)

    def run(requests):
        if asked == "of old metadata":
            seqlens = torch.full((requests,), 192, dtype=torch.int32)
            meta, _ = flash_mla.get_mla_metadata(seqlens, 4, 1, 4, False, 900, enable_batch_invariant=True)
        else:
            meta, _ = flash_mla.get_mla_metadata(enable_batch_invariant=asked == "of new metadata")
        more = {"enable_batch_invariant": True} if asked == "of the call" else {}
        out, lse = decode(q[:requests], cache, indices[:requests], meta, **more)
        table = meta if asked == "of old metadata" else meta.tile_scheduler_metadata.table
        assert not table[:, 2].any(), "no CTA begins inside a token"
        return out[0], lse[0]

    for alone, among in zip(run(1), run(3), strict=True):
        assert torch.equal(alone, among)


def test_a_batch_invariant_prefill_gives_a_token_the_same_bits_alone_and_in_a_batch():
    q, kv = torch.randn(3, 4, 576).bfloat16(), (torch.randn(950, 1, 576) * 0.1).bfloat16()
    indices = torch.randint(0, 950, (3, 1, 900), dtype=torch.int32)
    alone, among = (
        flash_mla.flash_mla_sparse_fwd(q[:n], kv, indices[:n], SCALE, enable_batch_invariant=True) for n in (1, 3)
    )
    for one, other in zip(alone, among, strict=True):
        assert torch.equal(one[0], other[0])


def whole_sequences(fmt="bf16", s_q=1, heads=(4, 1), seqlens=(64, 5, 0, 33), block_size=16, device="cpu", **more):
    """A problem for each KV head, and the drop-in's arguments for all of them. What belongs to no sequence is NaN."""
    h_q, h_kv = heads
    problems = [random_dense(fmt, seqlens, s_q, h_q // h_kv, block_size, **more) for _ in range(h_kv)]
    problems = [p.but(block_table=problems[0].block_table).poisoned().to(device) for p in problems]
    q = torch.cat([p.q for p in problems], 2)
    cache = torch.stack([p.cache for p in problems], 2)
    return problems, (q, cache, problems[0].block_table, problems[0].lengths, 512)


def assert_dense(got, problems):
    """(out, lse) of the drop-in against the oracle's, the query heads of one KV head after the other's."""
    out, lse = got
    want = [p.oracle() for p in problems]
    assert not (lse == -torch.inf).any()
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    want = torch.cat([w[0] for w in want], 2), torch.cat([w[1] for w in want], 1)
    assert_accurate((out, lse), want, score_error=score_error(problems[0].cache, out.device.type))


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (9, 3), (63, 1), (64, 2), (8, 8), (128, 1)])
@pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp8_ds_mla"])
def test_attention_over_whole_sequences(device, fmt, heads, s_q, causal, old):
    problems, arguments = whole_sequences(fmt, s_q, heads, device=device, causal=causal)
    h_q, h_kv = heads
    meta = flash_mla.get_mla_metadata(arguments[3], s_q * h_q // h_kv, h_kv) if old else flash_mla.get_mla_metadata()
    for _ in range(2):  # the second call reuses the plan
        got = flash_mla.flash_mla_with_kvcache(*arguments, *meta, causal=causal, is_fp8_kvcache=is_fp8(fmt))
        assert got[0].dtype == arguments[0].dtype and got[1].shape == (4, h_q, s_q) and got[1].is_contiguous()
        assert_dense(got, problems)


def test_whole_sequences_into_a_given_output():
    problems, arguments = whole_sequences(s_q=2, heads=(6, 2), causal=False)
    out = torch.full((6, 4, 2, 600), torch.nan).bfloat16().permute(1, 2, 0, 3)[..., :512]
    got = flash_mla.flash_mla_with_kvcache(*arguments, *flash_mla.get_mla_metadata(), out=out)
    assert got[0] is out
    assert_dense(got, problems)


def test_metadata_of_whole_sequences_counts_their_parts():
    seqlens = torch.tensor([4096, 0, 64], dtype=torch.int32)
    table, num_splits = flash_mla.get_mla_metadata(seqlens, 32, 2)
    assert num_splits.shape == (4,) and num_splits[0] == 0
    begins_inside = int(((table[:, 2] > 0) & (table[:, 1] > table[:, 0])).sum())
    assert begins_inside > 0 and num_splits[-1] == 3 + begins_inside


@pytest.mark.parametrize("s_q", [1, 2])
@pytest.mark.parametrize(("descale_q", "descale_k"), [(None, None), (0.5, 0.25), (0.013, 0.0021), (None, 0.003)])
def test_vllms_fp8_functions(descale_q, descale_k, s_q):
    """Scales that are no powers of two round a query and a result once more."""
    problems, (_, cache, table, seqlens, d_v) = whole_sequences("fp8_tensor_576", s_q, (16, 1), causal=True)
    scale_q, scale_k = descale_q or 1.0, descale_k or 1.0
    q = (torch.randn(4, s_q, 16, 576) / (scale_q * scale_k) / 20).to(torch.float8_e4m3fn)
    meta = flash_mla.get_mla_metadata_dense_fp8(seqlens, s_q * 16, 1)
    given = {"descale_q": descale_q, "descale_k": descale_k}
    given = {name: None if x is None else torch.tensor([x]) for name, x in given.items()}
    arguments = q, cache.view(torch.float8_e4m3fn), table, seqlens, d_v, *meta
    out, lse = flash_mla.flash_mla_with_kvcache_fp8(*arguments, causal=True, **given)
    assert out.dtype == torch.bfloat16 and (lse[2] == torch.inf).all() and (out[2] == 0).all()
    want = problems[0].but(q=q.double() * scale_q, cache_scale=scale_k).oracle()
    size = want[0].abs().max()
    torch.testing.assert_close(out.double(), want[0], rtol=2.01 / 64, atol=float(size) * 0.02)
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-3, atol=2e-2)


@pytest.mark.parametrize("head_dim", [576, 512])
@pytest.mark.parametrize("s_kv", [0, 1, 95])
def test_sparse_prefill(s_kv, head_dim):
    q, kv = (torch.randn(7, 9, head_dim) * 10).bfloat16(), (torch.randn(s_kv, 1, head_dim) * 0.1).bfloat16()
    indices = torch.randint(-5, s_kv + 5, (7, 1, 40), dtype=torch.int32)
    lengths = torch.randint(0, 41, (7,), dtype=torch.int32)
    sink = torch.randn(9)
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, 512, sink, lengths)
    out, lse, largest = reference.sparse_attention(
        q, kv, indices.squeeze(1), scale=SCALE, topk_length=lengths, sink=sink
    )
    assert_accurate((got[0], torch.where(got[2] == torch.inf, -torch.inf, got[2]), got[1]), (out, lse, largest))
    base2 = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, 512, sink, lengths, base2_lse=True)
    finite = got[2].isfinite()
    assert torch.allclose(base2[2][finite].exp2(), got[2][finite].exp(), rtol=1e-4)
    assert torch.allclose(base2[1][finite].exp2(), got[1][finite].exp(), rtol=1e-4)


@pytest.mark.parametrize("head_dim", [576, 512])
def test_a_prefill_without_query_tokens_is_an_ordinary_input(head_dim):
    q, kv = torch.randn(0, 64, head_dim).bfloat16(), torch.randn(50, 1, head_dim).bfloat16()
    out, *rows = flash_mla.flash_mla_sparse_fwd(q, kv, torch.zeros(0, 1, 30, dtype=torch.int32), SCALE, indexer_topk=10)
    assert out.shape == (0, 64, 512) and [row.shape for row in rows] == [(0, 64)] * 3


def test_the_indexers_part_of_the_lse():
    q, kv = torch.randn(3, 4, 576).bfloat16(), (torch.randn(50, 1, 576) * 0.1).bfloat16()
    indices = torch.randint(0, 50, (3, 1, 30), dtype=torch.int32)
    *_, part = flash_mla.flash_mla_sparse_fwd(q, kv, indices, SCALE, indexer_topk=10)
    assert torch.equal(part, flash_mla.flash_mla_sparse_fwd(q, kv, indices[..., :10].contiguous(), SCALE)[2])


@pytest.mark.parametrize(
    ("requests", "changes", "said"),
    [
        (1, {}, "b was 2, is 1"),
        (2, {"topk_length": torch.tensor([3, 8], dtype=torch.int32)}, "has_topk_length was False, is True"),
        (2, {"enable_batch_invariant": True}, "enable_batch_invariant was False, is True"),
    ],
)
def test_metadata_of_another_problem_is_refused(requests, changes, said):
    q, cache, indices = request_tensors("bf16", 2, 1, 3, 8)
    meta, _ = flash_mla.get_mla_metadata()
    decode(q, cache, indices, meta)
    with pytest.raises(ValueError, match=said):
        decode(q[:requests], cache, indices[:requests], meta, **changes)


@pytest.mark.parametrize("made_for", [900, 512, 2048])
def test_metadata_for_another_topk_is_not_followed(made_for):
    q, cache, indices = request_tensors("bf16", 2, 2, 16, 900)
    seqlens = torch.full((2,), 192, dtype=torch.int32)
    meta = flash_mla.get_mla_metadata(seqlens, 32, 1, 16, False, made_for)
    got = flash_mla.flash_mla_with_kvcache(q, cache, None, seqlens, 512, *meta, indices=indices)
    assert_decode(got, oracle(q, cache, indices), 2, 2)


def test_a_refused_call_leaves_the_metadata_new():
    q, cache, indices = request_tensors("bf16", 2, 1, 3, 8)
    meta, _ = flash_mla.get_mla_metadata()
    with pytest.raises(ValueError, match="attn_sink"):
        decode(q, cache, indices, meta, attn_sink=torch.zeros(9))
    decode(q[:1], cache, indices[:1], meta)


@pytest.mark.parametrize(("b", "s_q"), [(0, 1), (0, 2), (3, 1), (3, 2)])
def test_a_given_output_may_be_strided_or_empty(b, s_q):
    q, cache, indices = request_tensors("bf16", b, s_q, 4, 8)
    want = decode(q, cache, indices)[0]
    memory = torch.full((b, s_q + 1, 4, 512), torch.nan).bfloat16()
    out = memory[:, :s_q]
    got, _ = decode(q, cache, indices, out=out)
    assert got is out and torch.equal(out, want) and memory[:, s_q:].isnan().all()
