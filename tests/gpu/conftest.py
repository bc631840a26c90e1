"""What tests that run on a GPU share."""

from collections.abc import Iterator

import pytest
import torch

from plans import FEW_AND_MANY


@pytest.fixture(params=FEW_AND_MANY)
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def cpu_kernel() -> None:
    """For the CPU's tests, which run once for each of its kernels; here they run once."""


@pytest.fixture(scope="session")
def device() -> Iterator[str]:
    """Products of fp32 are in fp32 there: an environment may have asked for TF32, which keeps 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield "cuda"
    torch.set_float32_matmul_precision(before)
