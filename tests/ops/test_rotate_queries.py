"""Rotation of queries, and the indexer's in FP8: the reference's bits. tests/gpu runs these again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mla_backend
from mla_backend import reference

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = st.sampled_from([FP32, BF16])
FAR = [-(2**63), -1, 49, 50, 2**31, 2**63 - 1]
"""Positions at the ends of a table and beyond."""


def random_queries(
    tokens: int = 3,
    heads: int = 4,
    index_heads: int = 5,
    *,
    interleaved: bool = False,
    weights: torch.dtype = FP32,
    cos_sin: torch.dtype = FP32,
    index_cos_sin: torch.dtype = FP32,
    gap: int = 0,
    device: str = "cpu",
) -> dict:
    """Arguments; before each row are `gap` numbers that belong to nobody, as in vLLM before queries' rope."""

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape[:-1], gap + shape[-1], device=device)

    def angles(size: float, dtype: torch.dtype) -> Tensor:
        table = rows(50, 64)
        turns = torch.arange(50, device=device).outer(torch.rand(32, device=device))
        table[:, gap:] = size * torch.cat([turns.cos(), turns.sin()], -1)
        return table.to(dtype)[:, gap:]

    positions = torch.randint(0, 50, (tokens,), device=device)
    positions[: len(FAR)] = torch.tensor(FAR, device=device)[:tokens]
    sizes = torch.randn(tokens, index_heads, 1, device=device).exp()
    return {
        "queries": rows(tokens, heads, 64).to(BF16)[..., gap:],
        "index_queries": (rows(tokens, index_heads, 128) * sizes).to(BF16)[..., gap:],
        "weights": rows(tokens, index_heads).to(weights)[..., gap:],
        "positions": positions,
        "cos_sin": angles(1.0, cos_sin),
        "index_cos_sin": angles(1.5, index_cos_sin),
        "weight_scale": 0.3,
        "interleaved": interleaved,
    }


def bits(tensor: Tensor) -> Tensor:
    """Of all but NaN, of which there are several."""
    integers = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return integers.masked_fill(tensor.float().isnan(), 1)


def assert_exact(arguments: dict, **outputs: Tensor) -> None:
    found = mla_backend.rotate_queries(**arguments, **outputs)
    want = reference.rotate_queries(**arguments)
    for name, a, b in zip(("queries", "index queries", "weights"), found, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(bits(a), bits(b)), name
        assert torch.equal(a.float().isnan(), b.float().isnan()), name


@given(
    tokens=st.integers(0, 9),
    heads=st.sampled_from([0, 1, 3, 16, 128]),
    index_heads=st.sampled_from([0, 1, 5, 64]),
    interleaved=st.booleans(),
    dtypes=st.fixed_dictionaries(dict.fromkeys(("weights", "cos_sin", "index_cos_sin"), DTYPES)),
    gap=st.sampled_from([0, 1, 2, 8, 128]),
)
def test_bits_are_the_references(device, tokens, heads, index_heads, interleaved, dtypes, gap):
    assert_exact(random_queries(tokens, heads, index_heads, interleaved=interleaved, gap=gap, device=device, **dtypes))


@pytest.mark.parametrize("gap", [0, 4])
def test_outputs_may_have_strides(device, gap):
    arguments = random_queries(7, 3, 4, device=device)
    kinds = (3, 64, BF16), (4, 128, torch.float8_e4m3fn)
    out, index_out = (
        torch.full((7, heads + 1, width + gap), 3.0, device=device).to(dtype)[:, 1:, gap:]
        for heads, width, dtype in kinds
    )
    weights_out = torch.full((7, 4 + gap), 3.0, device=device)[:, gap:]
    assert_exact(arguments, out=out, index_out=index_out, weights_out=weights_out)
    assert (out._base[:, 0] == 3).all() and (index_out._base.float()[:, 0] == 3).all()


def test_zeros_and_what_is_no_number_stay_in_their_heads(device):
    arguments = random_queries(1, 3, 7, device=device)
    queries, index_queries, weights = (arguments[name] for name in ("queries", "index_queries", "weights"))
    queries[0, 0, 5], queries[0, 1, 6] = torch.nan, torch.inf
    index_queries[0, 0], index_queries[0, 1, 70] = 0, torch.inf
    index_queries[0, 2, 3], index_queries[0, 3] = torch.nan, 1e-38
    weights[0, 5], weights[0, 6] = torch.nan, -torch.inf
    assert_exact(arguments)
    rotated, rounded, weights = mla_backend.rotate_queries(**arguments)
    assert rotated[0, 2].isfinite().all() and weights[0, :5].isfinite().all()
    assert not rounded[0, 0].float().any() and rounded[0, 1, 70].float() == 448
    assert rounded[0, 4].float().abs().max() > 200


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_querys_size_is_in_its_weight(device, interleaved):
    arguments = random_queries(6, 2, 8, interleaved=interleaved, device=device)
    _, rounded, weights = mla_backend.rotate_queries(**arguments)
    small = arguments | {"index_queries": arguments["index_queries"] * 2.0**-100}
    _, same, smaller = mla_backend.rotate_queries(**small)
    assert torch.equal(bits(rounded), bits(same)) and torch.equal(weights, smaller * 2.0**100)
    found = (rounded.float() * (weights / (arguments["weights"] * 0.3)).unsqueeze(-1))[..., 64:]
    queries = arguments["index_queries"].float()
    want, size = queries[..., 64:], queries.norm(dim=-1, keepdim=True)
    assert ((found - want).abs() <= 2**-4 * want.abs() + 2**-12 * size).all()
