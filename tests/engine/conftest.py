"""What the tests of the engine share."""

from collections.abc import Iterator

import pytest

import engine_models


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with engine_models.one_thread():
        yield
