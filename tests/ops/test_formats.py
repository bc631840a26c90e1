"""The one description of the cache formats."""

import pytest
import torch

import mla_backend
from mla_backend import reference


def test_the_oracle_knows_the_same_formats():
    assert list(mla_backend.FORMATS) == list(reference.FORMATS)


def test_an_unknown_format_is_an_error_that_suggests_others():
    with pytest.raises(KeyError, match="fp8_ds_mla"):
        mla_backend.FORMATS["fp8"]
    assert "fp8" not in mla_backend.FORMATS and mla_backend.FORMATS.get("fp8") is None


@pytest.mark.parametrize("name", mla_backend.FORMATS)
def test_the_description_agrees_with_the_oracle(name):
    ours, rows = mla_backend.FORMATS[name], reference.FORMATS[name]
    assert (ours.latent, ours.rope, ours.group) == (rows.latent, rows.rope, rows.group)
    assert (ours.dtype, ours.number, ours.width) == (rows.dtype, rows.number, rows.width)
    assert ours.token_bytes == sum(rows.parts.values()) and ours.row_bytes == ours.token_bytes - rows.trailer
    assert ours.head_dim == rows.latent + rows.rope and ours.value_dim == 512
    order, sizes = list(rows.parts), list(rows.parts.values())
    if rows.rope:
        assert ours.rope_offset == sum(sizes[: order.index("rope")])
    if ours.scales_at == "in_row":
        assert ours.scale_offset == sum(sizes[: order.index("scales")])
    assert ours.scale_bytes == rows.parts.get("scales", 0) + rows.parts.get("padding", 0)
    assert (ours.scales_at == "end_of_page") == (rows.trailer > 0)


@pytest.mark.parametrize("block_size", [1, 5, 64, 576])
@pytest.mark.parametrize("name", mla_backend.FORMATS)
def test_a_new_cache_is_of_its_format(name, block_size):
    form = mla_backend.FORMATS[name]
    cache = form.new_cache(3, block_size)
    assert cache.shape == (3, block_size, form.width) and cache.dtype == form.dtype
    assert mla_backend.format_of(cache) is form and mla_backend.format_of(cache, name) is form
    assert mla_backend.format_of(cache.unsqueeze(2)) is form
    assert torch.count_nonzero(cache) == 0
    page, bytes_ = cache.stride(0) * cache.element_size(), block_size * form.token_bytes
    assert page == form.page_bytes(block_size)
    if name == "fp8_model1":  # FlashMLA's pages
        assert page % 576 == 0 and bytes_ <= page < bytes_ + 576
    else:
        assert page == bytes_
