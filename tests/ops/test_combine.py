"""Combining partial results by their lse."""

import pytest
import torch
from hypothesis import given

import mla_backend
from mla_backend import reference
from problems import assert_accurate, partials_to_combine, random_problem


@given(partials_to_combine())
def test_combined_results_agree_with_the_oracle(partials):
    got = mla_backend.combine_partials(*partials)
    assert got[0].dtype == partials[0].dtype
    assert_accurate(got, reference.combine_partials(*partials))


def test_two_halves_of_a_list_combine_to_the_whole():
    problem = random_problem(tokens=3, heads=7, topk=200)
    left, right = (problem.but(indices=half).solve()[:2] for half in problem.indices.split(77, dim=1)[:2])
    rest = problem.but(indices=problem.indices[:, 154:]).solve()[:2]
    outs, lses = zip(left, right, rest, strict=True)
    assert_accurate(mla_backend.combine_partials(outs, lses), problem.oracle()[:2])


def test_lses_that_would_overflow_are_combined():
    lses = torch.tensor([[[1000.0]], [[1001.0]], [[-1000.0]]])
    got = mla_backend.combine_partials(torch.randn(3, 1, 1, 8), lses)
    assert got[1].item() == pytest.approx(1001.3132617)


def test_strided_results():
    outs, lses = torch.randn(4, 3, 5, 100)[:, :, ::2, 10:74], torch.randn(4, 3, 9)[..., 2:5]
    got = mla_backend.combine_partials(outs, lses)
    assert_accurate(got, reference.combine_partials(outs, lses))
    head_major = lses.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(mla_backend.combine_partials(outs, head_major)[0], got[0])
