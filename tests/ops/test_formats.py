"""The one description of the cache formats."""

import pytest
import torch

import mla_backend
from mla_backend import reference


def test_the_description_agrees_with_the_oracle():
    fp8, bf16 = mla_backend.FORMATS["fp8_ds_mla"], mla_backend.FORMATS["bf16"]
    assert fp8.token_bytes == reference.FP8_ROW_BYTES and fp8.group == reference.GROUP
    assert bf16.token_bytes == 2 * (reference.LATENT + reference.ROPE)
    assert fp8.head_dim == bf16.head_dim == 576 and fp8.value_dim == bf16.value_dim == 512
    assert fp8.scale_offset == 512 and fp8.rope_offset == 528


@pytest.mark.parametrize("name", mla_backend.FORMATS)
def test_a_new_cache_is_of_its_format(name):
    cache = mla_backend.FORMATS[name].new_cache(3, 5)
    assert cache.shape[:2] == (3, 5) and cache.nbytes == 15 * mla_backend.FORMATS[name].token_bytes
    assert mla_backend.format_of(cache) is mla_backend.FORMATS[name]
    assert mla_backend.format_of(cache.unsqueeze(2)) is mla_backend.FORMATS[name]
    assert torch.count_nonzero(cache) == 0
