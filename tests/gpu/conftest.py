"""What tests that run on a GPU share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> Iterator[str]:
    """Products of fp32 are in fp32 there: an environment may have asked for TF32, which keeps 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield "cuda"
    torch.set_float32_matmul_precision(before)
