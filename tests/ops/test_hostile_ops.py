"""Some seeds of the attacks on the ops: wild plans, and arguments that are wrong or unusual. tests/gpu runs them again:
nothing faults, and nothing but outputs is written."""

import pytest

import hostile


@pytest.mark.parametrize("attack", ["plans", "ops"])
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_what_is_wrong_is_refused_or_harmless(device, attack, first):
    hostile.run(attack, range(first, first + 50), device)


def test_a_list_of_one_slot_has_the_tolerance_of_the_contract():
    hostile.run("plans", [779179])
