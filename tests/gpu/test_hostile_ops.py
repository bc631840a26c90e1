"""The attacks on the ops, on a GPU: nothing faults, and nothing but outputs is written."""

import pytest

import hostile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("attack", ["plans", "ops"])
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_what_is_wrong_is_refused_or_harmless(attack, first):
    hostile.run(attack, range(first, first + 100), device="cuda")
