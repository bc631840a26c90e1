"""The cache ops on a GPU: the CPU's tests with the `device` of this folder, and what has the bits of the CPU's ops."""

import json

import pytest
import torch

import mla_backend
from gpu_checks import captured, on_either_device
from mla_backend import cli, library, reference
from problems import FORMATS, all_bytes, copy_with_gaps, random_cache
from tests.ops.test_cache import tokens_for

pytestmark = pytest.mark.gpu
globals().update(on_either_device("cache"))


def bits(x):
    return x.cpu().contiguous().view(torch.uint8)


def on_gpu(x):
    return None if x is None else x.cuda()


@pytest.mark.parametrize(
    ("fmt", "power_of_two"),
    [("fp8_ds_mla", True), *((fmt, False) for fmt in ("fp8_ds_mla", "fp8_model1", "fp8_528", "nvfp4_352"))],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_groups_of_every_magnitude_have_the_bits_of_the_cpu(fmt, power_of_two, dtype):
    rows = reference.FORMATS[fmt]
    groups = rows.latent // rows.group
    exponents = torch.arange(-149, 119).view(268, 1, 1)
    steps = torch.randint(-896, 897, (268, groups, rows.group)) / 2  # many lie in the middle of two codes,
    steps[..., 0] = 448  # as this is in the group
    steps[:, 1::2] *= torch.rand(268, groups // 2, 1)
    steps[torch.rand(steps.shape) < 0.1] = -0.0
    steps[torch.rand(steps.shape) < 0.1] *= 1e-3
    latent = torch.ldexp(steps.double(), exponents).view(268, rows.latent).to(dtype)
    rope = torch.randn(268, 64).to(dtype) if rows.rope else None
    slots = torch.randperm(268)
    cache = random_cache(fmt, 5, 64)
    there = copy_with_gaps(cache, "cuda")
    mla_backend.cache_write(latent, rope, cache, slots, power_of_two=power_of_two)
    mla_backend.cache_write(latent.cuda(), on_gpu(rope), there, slots.cuda(), power_of_two=power_of_two)
    assert torch.equal(all_bytes(there).cpu(), all_bytes(cache))


@pytest.mark.parametrize("fmt", ["fp16", "fp8_tensor_576"])
def test_every_bf16_or_fp16_number_has_the_bits_of_the_cpu(fmt):
    """As fp32, halfway cases of rounding included: to fp16, and to e4m3 at the cache's own scale."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = torch.cat([numbers.view(torch.bfloat16).float(), numbers.view(torch.float16).float()])
    steps = torch.cat([numbers, numbers * (1 + 2.0**-11), numbers * (1 + 2.0**-4)])
    latent = steps.view(-1, 512)
    rope = latent[:, :64].contiguous()
    cache = random_cache(fmt, 12, 64)
    there = copy_with_gaps(cache, "cuda")
    slots, scale = torch.arange(len(latent)), {"scale": 0.3} if fmt == "fp8_tensor_576" else {}
    mla_backend.cache_write(latent, rope, cache, slots, **scale)
    mla_backend.cache_write(latent.cuda(), rope.cuda(), there, slots.cuda(), **scale)
    assert torch.equal(all_bytes(there).cpu(), all_bytes(cache))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cache_of_more_than_2_to_the_31_elements(fmt):
    form = mla_backend.FORMATS[fmt]
    blocks = 2**31 // (64 * form.width) + 100
    cache = form.new_cache(blocks, 64, device="cuda")
    slots = torch.tensor([0, 63, blocks * 32, blocks * 64 - 1, blocks * 64], device="cuda")
    values = tokens_for(fmt, 5, form.number)
    mla_backend.cache_write(*map(on_gpu, values), cache, slots)
    # the same in the first and the last page of a small one, which has the bytes of those pages
    small = form.new_cache(3, 64)
    here = torch.tensor([0, 63, 64 + blocks * 32 % 64, 3 * 64 - 1, 3 * 64])
    mla_backend.cache_write(*values, small, here)
    for page, same in ((0, 0), (blocks // 2, 1), (blocks - 1, 2)):
        assert torch.equal(bits(cache[page]), bits(small[same]))
    assert torch.equal(bits(mla_backend.cache_gather(cache, slots)), bits(mla_backend.cache_gather(small, here)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_captured_graph_follows_new_slots_and_values(fmt):
    form = mla_backend.FORMATS[fmt]
    values = [on_gpu(v) for v in tokens_for(fmt, 20, form.number)]
    slots = torch.arange(20, device="cuda")
    cache = form.new_cache(4, 16, device="cuda")
    rows = torch.empty(20, form.head_dim, dtype=form.number, device="cuda")

    def step():
        mla_backend.cache_write(*values, cache, slots)
        mla_backend.cache_gather(cache, slots, out=rows)

    step()
    graph, _ = captured(step)
    for _ in range(3):
        fresh = tokens_for(fmt, 20, form.number)
        for value, new in zip(values, fresh, strict=True):
            if new is not None:
                value.copy_(new)
        slots.copy_(torch.randperm(64)[:20])
        graph.replay()
        want = form.new_cache(4, 16)
        mla_backend.cache_write(*fresh, want, slots.cpu())
        assert torch.equal(bits(rows), bits(mla_backend.cache_gather(want, slots.cpu())))


def test_it_runs_on_the_current_stream():
    latent, rope = (t.cuda() for t in tokens_for("fp8_ds_mla", 4000, torch.bfloat16))
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
    latent, rope = tokens_for("bf16", 3, torch.bfloat16)
    cache = mla_backend.FORMATS["bf16"].new_cache(2, 2, device="cuda")
    with pytest.raises(ValueError, match="must be on"):
        mla_backend.cache_write(latent, rope, cache, torch.arange(3))


def test_the_doctor_reads_every_kernel(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["gpus"]["devices"] and report["gpus"]["kernels"] == library.cuda_kernels()
    for kernel in report["gpus"]["kernels"]:
        assert "error" not in kernel and kernel["registers"] > 0 and kernel["ctas_per_sm"] > 0
        # a few words that are read once a token; the rest would be spilled numbers
        assert kernel["local_bytes"] <= 80
    assert {"what": "every op on a GPU", "runs": True, "why": None} in report["can_run"]
