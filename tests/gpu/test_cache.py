"""The cache ops on a GPU have the bits of the CPU's, which the tests beside these hold against the oracle."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import cli, library
from problems import FORMATS

pytestmark = pytest.mark.gpu


def bits(x):
    return x.cpu().contiguous().view(torch.uint8)


def random_tokens(n, dtype, special=None):
    latent = torch.randn(n, 512) * torch.exp(torch.randn(n, 4) * 10).repeat_interleave(128, 1)
    rope = torch.randn(n, 64)
    if special is not None and n:
        latent[torch.rand(n, 512) < 0.02] = special
        rope[torch.rand(n, 64) < 0.02] = special
    return latent.to(dtype), rope.to(dtype)


@pytest.mark.parametrize("fmt", FORMATS)
@given(st.data())
def test_writing_has_the_bits_of_the_cpu(fmt, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    n = data.draw(st.sampled_from([0, 1, 7, 8, 9, 1000]))
    special = data.draw(st.sampled_from([None, 0.0, torch.inf, -torch.inf, torch.nan]))
    latent, rope = random_tokens(n, data.draw(st.sampled_from([torch.bfloat16, torch.float32])), special)
    blocks, block_size = data.draw(st.sampled_from([(0, 1), (70, 16), (400, 3)]))
    slots = torch.randperm(blocks * block_size + 200)[:n] - 100
    latent, rope = latent[: len(slots)], rope[: len(slots)]
    slots = slots.to(data.draw(st.sampled_from([torch.int32, torch.int64])))
    power_of_two = data.draw(st.booleans())
    gap = data.draw(st.sampled_from([0, 1, 16]))  # 1 makes rows that no 16-byte access may touch
    width = mla_backend.FORMATS[fmt].width
    padded = torch.randint(
        0, 255, (blocks, block_size, (width + gap) * mla_backend.FORMATS[fmt].dtype.itemsize), dtype=torch.uint8
    )
    padded = padded.view(mla_backend.FORMATS[fmt].dtype)
    on_gpu = padded.cuda()
    mla_backend.cache_write(latent, rope, padded[..., :width], slots, power_of_two=power_of_two)
    mla_backend.cache_write(latent.cuda(), rope.cuda(), on_gpu[..., :width], slots.cuda(), power_of_two=power_of_two)
    assert torch.equal(bits(on_gpu), bits(padded))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_groups_of_every_magnitude_have_the_bits_of_the_cpu(dtype, power_of_two):
    exponents = torch.arange(-149, 119).view(268, 1, 1)
    steps = torch.randint(-896, 897, (268, 4, 128)) / 2  # with 448 in the group, many lie in the middle of two codes
    steps[..., 0] = 448
    steps[:, 1::2] *= torch.rand(268, 2, 1)
    steps[torch.rand(steps.shape) < 0.1] = -0.0
    steps[torch.rand(steps.shape) < 0.1] *= 1e-3
    latent = torch.ldexp(steps.double(), exponents).view(268, 512).to(dtype)
    rope = torch.randn(268, 64).to(dtype)
    slots = torch.randperm(268)
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(5, 64)
    on_gpu = cache.cuda()
    mla_backend.cache_write(latent, rope, cache, slots, power_of_two=power_of_two)
    mla_backend.cache_write(latent.cuda(), rope.cuda(), on_gpu, slots.cuda(), power_of_two=power_of_two)
    assert torch.equal(bits(on_gpu), bits(cache))


@pytest.mark.parametrize("fmt", FORMATS)
@given(st.data())
def test_gathering_has_the_bits_of_the_cpu(fmt, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    width = mla_backend.FORMATS[fmt].width
    gap = data.draw(st.sampled_from([0, 1, 16]))
    cache = torch.zeros(50, 7, width + gap, dtype=mla_backend.FORMATS[fmt].dtype)[..., :width]
    mla_backend.cache_write(*random_tokens(350, torch.float32), cache, torch.arange(350))
    if fmt != "bf16":
        cache[0, 0, :256] = torch.arange(256, dtype=torch.uint8)  # every code, NaN included
    slots = torch.randint(-30, 380, (data.draw(st.sampled_from([0, 1, 300])),), dtype=torch.int32)
    out_gap = data.draw(st.sampled_from([0, 3]))
    on_gpu = torch.empty(50, 7, width + gap, dtype=cache.dtype, device="cuda")[..., :width].copy_(cache)
    out = torch.full((len(slots), 576 + out_gap), torch.nan, dtype=torch.bfloat16, device="cuda")[:, :576]
    mla_backend.cache_gather(on_gpu, slots.cuda(), out=out)
    want = mla_backend.cache_gather(cache, slots)
    # NaN times a scale is a NaN of either sign
    nan = want.isnan()
    assert torch.equal(out.cpu().isnan(), nan)
    assert torch.equal(bits(out.cpu().masked_fill(nan, 0)), bits(want.masked_fill(nan, 0)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cache_of_more_than_2_to_the_31_elements(fmt):
    width = mla_backend.FORMATS[fmt].width
    blocks = 2**31 // (64 * width) + 100
    cache = torch.zeros(blocks, 64, width, dtype=mla_backend.FORMATS[fmt].dtype, device="cuda")
    slots = torch.tensor([0, 63, blocks * 32, blocks * 64 - 1, blocks * 64], device="cuda")
    latent, rope = random_tokens(5, torch.bfloat16)
    mla_backend.cache_write(latent.cuda(), rope.cuda(), cache, slots)
    small = mla_backend.FORMATS[fmt].new_cache(5, 1)
    mla_backend.cache_write(latent, rope, small, torch.tensor([0, 1, 2, 3, -1]))
    assert torch.equal(bits(cache.view(-1, width)[slots[:4]]), bits(small[:4, 0]))
    assert torch.equal(
        bits(mla_backend.cache_gather(cache, slots)),
        bits(mla_backend.cache_gather(small, torch.tensor([0, 1, 2, 3, 99]))),
    )


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_captured_graph_follows_new_slots_and_values(fmt):
    latent, rope = (t.cuda() for t in random_tokens(20, torch.bfloat16))
    slots = torch.arange(20, device="cuda")
    cache = mla_backend.FORMATS[fmt].new_cache(4, 16, device="cuda")
    rows = torch.empty(20, 576, dtype=torch.bfloat16, device="cuda")
    mla_backend.cache_write(latent, rope, cache, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla_backend.cache_write(latent, rope, cache, slots)
        mla_backend.cache_gather(cache, slots, out=rows)
    for _ in range(3):
        fresh = random_tokens(20, torch.bfloat16)
        latent.copy_(fresh[0])
        rope.copy_(fresh[1])
        slots.copy_(torch.randperm(64)[:20])
        graph.replay()
        want = mla_backend.FORMATS[fmt].new_cache(4, 16)
        mla_backend.cache_write(*fresh, want, slots.cpu())
        assert torch.equal(bits(rows), bits(mla_backend.cache_gather(want, slots.cpu())))


def test_it_runs_on_the_current_stream():
    latent, rope = (t.cuda() for t in random_tokens(4000, torch.bfloat16))
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(64, 64, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        mla_backend.cache_write(latent, rope, cache, torch.arange(4000, device="cuda"))
        busy = not stream.query()
    assert busy, "the op returned before its stream reached it"
    stream.synchronize()
    assert torch.count_nonzero(cache[:60]) > 0


def test_arguments_on_two_devices_are_refused():
    latent, rope = random_tokens(3, torch.bfloat16)
    cache = mla_backend.FORMATS["bf16"].new_cache(2, 2, device="cuda")
    with pytest.raises(ValueError, match="cache must be on cpu like the first argument; got a tensor on cuda:0"):
        mla_backend.cache_write(latent, rope, cache, torch.arange(3))


def test_the_doctor_reads_every_kernel(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpus"]["devices"] and report["gpus"]["kernels"] == library.cuda_kernels()
    for kernel in report["gpus"]["kernels"]:
        assert "error" not in kernel and kernel["registers"] > 0 and kernel["blocks_per_sm"] > 0
        # a few words that are read once a token; the rest would be spilled numbers
        assert kernel["local_bytes"] <= 64
    assert {"what": "every op on a GPU", "runs": True, "why": None} in report["can_run"]
