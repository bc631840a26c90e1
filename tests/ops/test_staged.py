"""Staged rows: fp8_ds_mla rows that are converted once, for a kernel that would convert them at each visit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import reference
from problems import all_bytes, copy_with_gaps, random_problem
from staged_problems import SCALES, cache_with_scales, new_staged


def numbers(staged):
    """What staged rows hold, NaN as one number."""
    parts = reference.STAGED.split(staged)
    kinds = {"latent": torch.float16, "rope": torch.bfloat16, "power": torch.int8}
    dense = {name: part.clone(memory_format=torch.contiguous_format) for name, part in parts.items()}
    return [dense[name].view(kind).double().nan_to_num(12345) for name, kind in kinds.items()]


def test_the_description_agrees_with_the_oracle():
    ours, rows = mla_backend.STAGED, reference.STAGED
    assert (ours.latent, ours.rope, ours.dtype, ours.number, ours.width) == (512, 64, torch.uint8, rows.number, 1153)
    assert ours.row_bytes == 1152 and ours.rope_offset == rows.parts["latent"] and ours.name == "staged"
    assert ours.new_cache(3, 61).stride(0) % 128 == 0
    assert "staged" not in mla_backend.FORMATS


@pytest.mark.parametrize("scales", SCALES)
@given(data=st.data())
def test_rows_are_staged_as_the_oracle_says(scales, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    blocks, block_size, requests = (data.draw(st.integers(1, most)) for most in (9, 17, 3))
    cache = cache_with_scales(scales, blocks, block_size, data.draw(st.sampled_from([0, 16, 1])))
    table = torch.randint(-2, blocks + 2, (requests, data.draw(st.integers(0, 4))), dtype=torch.int32)
    lengths = torch.randint(-3, 4 * block_size + 4, (requests,), dtype=torch.int32)
    staged_table, room = None, table.numel() + data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):
        staged_table = (torch.randperm(room)[: table.numel()] - 1).int().view(table.shape)
    got = new_staged(room, block_size, data.draw(st.sampled_from([0, 128])))
    want = copy_with_gaps(got)
    assert mla_backend.stage_rows(cache, table, lengths, staged_table=staged_table, out=got) is got
    reference.stage_rows(cache, table, lengths, staged_table=staged_table, out=want)
    if scales == "not finite":
        slots = torch.arange(room * block_size)
        got, want = (numbers(x[reference.token_address(reference.STAGED, x, slots)]) for x in (got, want))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    else:
        assert torch.equal(all_bytes(got), all_bytes(want)), "other rows and gaps keep what they held"


@pytest.mark.parametrize("scales", ["usual", "small rows"])
@pytest.mark.parametrize(("heads", "topk"), [(1, 0), (3, 7), (40, 200)])
def test_attention_reads_staged_rows(cpu_kernel, scales, heads, topk):
    problem = random_problem("fp8_ds_mla", tokens=2, heads=heads, topk=topk)
    blocks, block_size = problem.cache.shape[:2]
    table = torch.arange(blocks, dtype=torch.int32).view(1, -1)
    lengths = torch.tensor([blocks * block_size], dtype=torch.int32)
    staged = mla_backend.stage_rows(cache_with_scales(scales, blocks, block_size), table, lengths)
    problem.but(cache=staged).check()
