"""What the tests of the ops share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def shape() -> tuple[int, int]:
    """Tokens and heads of tests that on a GPU have one for each of its kernels."""
    return 2, 20


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """The kernels run on several threads, and plans for a CPU have several entries, however many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
