"""Caches of more than 64 GiB, such as pools that all layers share: Hopper's kernels read rows at their far end."""

import pytest
import torch

import mla_backend
from mla_backend.plan import PRODUCTS
from problems import random_cache, scale_of

pytestmark = pytest.mark.gpu
GIB, BLOCK_SIZE, NEAR, TOKENS, TOPK = 2**30, 64, 8, 24, 320
FORMATS = ["bf16", "fp8_ds_mla", "fp8_tensor_576", "bf16_512"]


@pytest.fixture(scope="module")
def memory():
    """72 GiB that nobody has written to."""
    if torch.cuda.mem_get_info()[0] < 100 * GIB:
        pytest.skip("needs 100 GiB of free memory on the GPU")
    yield torch.empty(72 * GIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()


def caches(fmt: str, memory: torch.Tensor, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of 16 blocks, and one of all the memory that has these as its first and its last ones. Its blocks lie as
    far apart as where so many layers share it."""
    near = random_cache(fmt, 2 * NEAR, BLOCK_SIZE).cuda()
    page = near[0].nbytes
    count = len(memory) // (layers * page)
    far = memory[: count * layers * page].view(near.dtype).view(count, layers, *near.shape[1:])[:, layers - 1]
    far[:NEAR], far[-NEAR:] = near[:NEAR], near[NEAR:]
    return near, far


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_rows_at_the_far_end_give_the_bits_that_near_ones_give(memory, fmt, heads, layers):
    near, far = caches(fmt, memory, layers)
    assert far.data_ptr() + far.stride(0) * far.element_size() * len(far) > memory.data_ptr() + 64 * GIB
    head_dim = mla_backend.format_of(near).head_dim
    q = (torch.randn(TOKENS, heads, head_dim, device="cuda") * 3).bfloat16()
    blocks = torch.cat([torch.arange(NEAR), torch.arange(len(far) - NEAR, len(far))]).int().cuda()
    slots = torch.randint(0, 2 * NEAR * BLOCK_SIZE, (TOKENS, TOPK), dtype=torch.int32, device="cuda")
    slots[:, ::7] = -1
    far_slots = torch.where(slots < 0, -1, blocks[slots.clamp(min=0) // BLOCK_SIZE] * BLOCK_SIZE + slots % BLOCK_SIZE)
    given = dict(scale=0.04, cache_scale=scale_of(fmt))
    for products in PRODUCTS if fmt == "fp8_ds_mla" and heads > 32 else ("exact",):
        for of_near, of_far in zip(
            mla_backend.sparse_attention(q, near, slots, **given, products=products),
            mla_backend.sparse_attention(q, far, far_slots, **given, products=products),
            strict=True,
        ):
            assert torch.equal(of_near, of_far), "the portable kernel, which reads any cache, gives others"
    lengths = torch.tensor([2 * NEAR * BLOCK_SIZE - 5, 900, 1], dtype=torch.int32, device="cuda")
    order = torch.randperm(2 * NEAR).cuda()
    tables = (order.int().expand(3, -1).contiguous(), blocks[order].expand(3, -1).contiguous())
    queries = q[:3].unsqueeze(1)
    (of_near, _), (of_far, _) = (
        mla_backend.dense_attention(queries, cache, table, lengths, **given)
        for cache, table in zip((near, far), tables, strict=True)
    )
    assert torch.equal(of_near, of_far)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_are_written_and_gathered_at_the_far_end(memory, fmt):
    near, far = caches(fmt, memory, 1)
    first = (len(far) - NEAR) * BLOCK_SIZE
    slots = torch.arange(NEAR * BLOCK_SIZE, dtype=torch.int32, device="cuda")
    rope = None if mla_backend.format_of(near).head_dim == 512 else torch.randn(len(slots), 64, device="cuda")
    mla_backend.cache_write(torch.randn(len(slots), 512, device="cuda"), rope, far, slots + first, scale=scale_of(fmt))
    copied = far[-NEAR:].clone()
    got, want = mla_backend.cache_gather(far, slots + first), mla_backend.cache_gather(copied, slots)
    assert torch.equal(got, want) and got.any()
