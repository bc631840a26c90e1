"""The indexer's ops: scores of paged keys, and the positions of the largest of them. tests/gpu runs some again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from index_problems import DTYPES, KINDS, ORDERS, TOPKS, index_problems, orders, random_index
from mla_backend import reference


@given(problem=index_problems())
def test_scores_are_those_of_the_oracle(cpu_kernel, problem):
    problem.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_may_have_strides(device, cpu_kernel, kind, dtype):
    problem = random_index(kind, 9, 24, 200, gap=16, dtype=dtype, device=device)
    for gap in 1, 2, 4:  # 1 and 2 leave no row where 16 bytes could be read at once
        queries = torch.randn(9, 25, 128 + gap, device=device).to(dtype)[:, 1:, gap:]
        weights = torch.randn(9, 30, device=device)[:, 3:27]
        table = torch.cat([problem.block_table, problem.block_table], dim=1)[:, : problem.block_table.shape[1]]
        problem.but(queries=queries, weights=weights, block_table=table).check()


@pytest.mark.parametrize("kind", KINDS)
def test_positions_without_a_key_have_minus_infinity(kind):
    problem = random_index(kind, tokens=4, requests=2, positions=50, block_size=16, blocks=8)
    problem.block_table = torch.tensor([[2, -1, 8], [-(2**31), 2**31 - 1, 5]], dtype=torch.int32)
    problem.requests = torch.tensor([0, 1, 2, -1], dtype=torch.int32)
    problem.lengths = torch.full((4,), 2**31 - 1, dtype=torch.int32)
    scores = problem.solve()
    found = torch.zeros(4, 50, dtype=torch.bool)
    found[0, :16] = found[1, 32:48] = True
    assert torch.equal(scores.isfinite(), found) and (scores[~found] == -torch.inf).all()


def test_no_blocks_no_requests_no_tokens_and_no_positions_are_ordinary(device):
    problem = random_index(device=device)
    nothing = problem.but(cache=problem.cache[:0])
    assert (nothing.solve()[nothing.seen()] == -torch.inf).all()
    for table in (problem.block_table[:0], problem.block_table[:, :0]):
        empty = problem.but(block_table=table)
        assert (empty.solve()[empty.seen()] == -torch.inf).all()
    no_scores = problem.but(positions=0).solve()
    assert no_scores.shape == (8, 0) and (mla_backend.select_top(no_scores, problem.lengths, 4) == -1).all()
    nobody = problem.only(slice(0)).solve()
    assert nobody.shape == (0, 300) and mla_backend.select_top(nobody, problem.lengths[:0], 4).shape == (0, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_not_a_number_spoils_its_own_score_alone(cpu_kernel, kind):
    problem = random_index(kind, tokens=1, requests=1, positions=64, heads=20, block_size=16)
    problem.block_table[:], problem.requests[:], problem.lengths[:] = torch.arange(4), 0, 64
    # all bits set is no number: of a value, with which a block begins, and of one of MXFP4's scales behind them
    at = {"bf16": 3 * 256, "fp8": 3 * 128, "mxfp4_68": 16 * 64 + 3 * 4}[kind]
    problem.cache.view(torch.uint8).view(len(problem.cache), -1)[1, at:][:2] = 0xFF
    scores = problem.solve()[0]
    assert scores[16 + 3].isnan() and scores.isnan().sum() == 1


def test_infinite_keys_give_infinite_scores_for_any_number_of_heads(cpu_kernel):
    for heads in (1, 15, 16, 17, 33):
        problem = random_index("bf16", tokens=1, requests=1, positions=16, heads=heads, block_size=16)
        problem.queries, problem.weights = torch.ones(1, heads, 128), torch.ones(1, heads)
        problem.block_table[:], problem.requests[:], problem.lengths[:] = 2, 0, 16
        problem.cache[2, 5] = torch.inf
        assert problem.solve()[0, 5] == torch.inf


@pytest.mark.parametrize(
    ("heads", "dtype"), [(16, torch.float32), (32, torch.bfloat16), (64, torch.float32), (128, torch.bfloat16)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_token_depend_on_nothing_else_in_the_batch(device, cpu_kernel, kind, heads, dtype):
    problem = random_index(kind, 150, heads, 900, dtype=dtype, device=device).of_prompts([100, 50])
    together, seen = problem.solve(), problem.seen()
    assert torch.equal(problem.solve(), together), "not the same bits twice"
    shuffled = torch.randperm(150, device=device)  # few neighbours share their keys any more
    assert torch.equal(problem.only(shuffled).solve(), together[shuffled])
    for token in 0, 99, 100, 149:
        alone = problem.only(torch.tensor([token], device=device))
        longer = alone.but(positions=problem.positions + 300)  # as in a batch with a longer context
        for scores in (alone.solve(), longer.solve()[:, : problem.positions]):
            assert torch.equal(scores[0][seen[token]], together[token][seen[token]])


@given(data=st.data())
def test_selections_are_those_of_the_oracle(device, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    names = data.draw(st.lists(st.sampled_from(ORDERS), min_size=1, max_size=6))
    topk = data.draw(st.just(0) | TOPKS)
    positions = data.draw(st.sampled_from([1, 2, 100, 400] + [4096, 4097, 16385, 131072] * (device == "cuda")))
    scores = torch.stack([orders(positions)[name] for name in names]).to(device)
    lengths = torch.randint(-2, positions + 3, (len(names),), dtype=torch.int32, device=device)
    want = reference.select_top(scores, lengths, topk)
    assert torch.equal(mla_backend.select_top(scores, lengths, topk), want)
    gap = data.draw(st.sampled_from([0, 1, 4]))  # strides, and a place to write into
    wide = torch.cat([scores, scores.new_full((len(names), gap), torch.nan)], 1)[:, :positions]
    wide[torch.arange(positions, device=device) >= lengths.unsqueeze(1)] = torch.nan  # seen by nobody
    chosen = torch.full((len(names), topk + 4), 77, dtype=torch.int32, device=device)
    mla_backend.select_top(wide, lengths, chosen=chosen[:, 1:-3])
    assert torch.equal(chosen[:, 1:-3], want) and (chosen[:, -3:] == 77).all() and (chosen[:, 0] == 77).all()


def test_long_contexts_select_what_torch_does():
    scores = torch.randn(3, 131072)
    lengths = torch.tensor([131072, 100000, 2049], dtype=torch.int32)
    for row, own, length in zip(mla_backend.select_top(scores, lengths, 2048), scores, lengths.tolist(), strict=True):
        assert torch.equal(row.long(), own[:length].topk(2048).indices.sort().values)
