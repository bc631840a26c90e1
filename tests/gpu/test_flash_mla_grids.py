"""The shapes that FlashMLA's own tests go through, through our stand-in for it."""

import pytest
import torch

import mla_backend
import mla_backend.flash_mla as flash_mla
from mla_backend import reference
from problems import assert_accurate, score_error

pytestmark = pytest.mark.gpu
HEADS = [8, 16, 64, 128]
TOKENS_AT_ONCE = 32  # of the oracle, which gathers every row in float64


def oracle(q, cache, indices, scale, length, sink):
    parts = []
    for begin in range(0, q.shape[0], TOKENS_AT_ONCE):
        part = slice(begin, begin + TOKENS_AT_ONCE)
        more = {"scale": scale, "sink": sink, "topk_length": length[part]}
        parts.append(reference.sparse_attention(q[part], cache, indices[part], **more))
    return tuple(torch.cat(p) for p in zip(*parts, strict=True))


def fp8_cache(blocks, block_size):
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(blocks, block_size, device="cuda")
    tokens = blocks * block_size
    latent, rope = ((torch.randn(tokens, width, device="cuda") * 0.1).bfloat16() for width in (512, 64))
    mla_backend.cache_write(latent, rope, cache, torch.arange(tokens, device="cuda"))
    return cache


def check_decode(b, s_q, h, context, topk, block_size):
    blocks = -(-context // block_size) * min(b, 8)
    cache = fp8_cache(blocks, block_size)
    slots = blocks * block_size
    q = (torch.randn(b, s_q, h, 576, device="cuda") * 10).bfloat16()
    indices = torch.randint(0, slots, (b, s_q, topk), dtype=torch.int32, device="cuda")
    indices[torch.rand(indices.shape, device="cuda") < 0.1] = -1
    indices[torch.rand(indices.shape, device="cuda") < 0.02] = slots + 5
    indices[b // 2, 0] = -1
    length = torch.randint(0, topk + 1, (b,), dtype=torch.int32, device="cuda")
    length[0] = 0
    sink = torch.randn(h, device="cuda")
    sink[0], sink[1] = torch.inf, -torch.inf
    meta, _ = flash_mla.get_mla_metadata()
    more = {"is_fp8_kvcache": True, "indices": indices, "attn_sink": sink, "topk_length": length}
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache.unsqueeze(2), None, None, 512, meta, None, **more)
    want = oracle(q.flatten(0, 1), cache, indices.flatten(0, 1), 576**-0.5, length.repeat_interleave(s_q), sink)
    lse = torch.where(lse == torch.inf, -torch.inf, lse).transpose(1, 2).reshape(b * s_q, h)
    assert_accurate((out.flatten(0, 1), lse), want[:2], score_error=score_error(cache))


@pytest.mark.parametrize("h", HEADS)
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize("b", [4, 74, 321])
@pytest.mark.parametrize(
    ("context", "topk", "block_size"),
    [
        *((512, 64, block_size) for block_size in (2, 64, 69)),
        *((1024, 576, block_size) for block_size in (2, 61)),
        *((2046, 2048, block_size) for block_size in (2, 64, 576)),
    ],
)
def test_sparse_decode(context, topk, block_size, b, s_q, h):
    check_decode(b, s_q, h, context, topk, block_size)


@pytest.mark.parametrize("h", [16, 128])
@pytest.mark.parametrize("topk", [128, 2048])
@pytest.mark.parametrize("s_k", [20, 140, 4096])
@pytest.mark.parametrize("s_q", [1, 2, 4])
@pytest.mark.parametrize("b", [1, 2, 6, 64])
def test_sparse_decode_of_2025(b, s_q, s_k, topk, h):
    check_decode(b, s_q, h, s_k, topk, 64)


@pytest.mark.parametrize("h", HEADS)
@pytest.mark.parametrize(
    ("s_kv", "topk", "s_q"),
    [
        *((s_kv, 128, s_q) for s_kv in (95, 128, 592) for s_q in (1, 62)),
        *((s_kv, 256, s_q) for s_kv in (153, 256, 1840) for s_q in (1, 62)),
        *((s_kv, 384, s_q) for s_kv in (114, 1592) for s_q in (1, 62)),
        *((s_kv, 512, s_q) for s_kv in (512, 1521) for s_q in (1, 62)),
        *((s_kv, topk, s_q) for s_kv, topk in [(32, 2048), (64, 8192)] for s_q in (1, 1024)),
    ],
)
def test_sparse_prefill(s_kv, topk, s_q, h):
    q = (torch.randn(s_q, h, 576, device="cuda") * 10).bfloat16()
    kv = (torch.randn(s_kv, 1, 576, device="cuda") * 0.1).bfloat16()
    indices = torch.randint(-s_kv // 10, s_kv + s_kv // 10 + 1, (s_q, 1, topk), dtype=torch.int32, device="cuda")
    indices[0] = -1
    length = torch.randint(0, topk + 1, (s_q,), dtype=torch.int32, device="cuda")
    sink = torch.randn(h, device="cuda")
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 576**-0.5, 512, sink, length)
    want = oracle(q, kv, indices.squeeze(1), 576**-0.5, length, sink)
    assert_accurate((out, torch.where(lse == torch.inf, -torch.inf, lse), largest), want)
