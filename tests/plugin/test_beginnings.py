"""Which tokens of a step's prefill see everything before them."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_backend.vllm_plugin.beginnings import MASKED, attend_to_picked, beginnings, between, dense_tokens, masked


@given(data=st.data())
def test_tokens_attend_densely_if_their_list_would_be_all_before_them(data):
    topk = data.draw(st.integers(1, 40))
    query_lens = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=9))
    seq_lens = [query + data.draw(st.sampled_from([0, 0, 1, 50])) for query in query_lens]
    first, starts = data.draw(st.integers(0, len(query_lens))), [0, *accumulate(query_lens)]
    found = beginnings(starts, dense_tokens(query_lens, seq_lens, first, topk))
    requests = list(zip(starts[:-1], query_lens, seq_lens, strict=True))[first:]
    expected = [start + i for start, query, seq in requests if query == seq for i in range(min(query, topk))]
    assert [token for one in found for token in range(one.tokens.start, one.tokens.stop)] == expected
    own = [min(query, topk) for start, query, seq in requests if query == seq and query]
    assert [length for one in found for length in one.lengths] == own
    assert all(a.tokens.stop < b.tokens.start for a, b in zip(found, found[1:], strict=False))
    parts = between([one.tokens for one in found], starts[first], starts[-1])
    rest = [token for part in parts for token in range(part.start, part.stop)]
    assert sorted(rest + expected) == list(range(starts[first], starts[-1]))


@given(data=st.data())
def test_tokens_with_masks_follow_beginnings_in_whole_blocks_of_short_contexts(data):
    topk, longest = data.draw(st.integers(1, 3 * MASKED)), data.draw(st.integers(0, 9 * MASKED))
    query_lens = data.draw(st.lists(st.integers(0, 9 * MASKED), min_size=1, max_size=5))
    seq_lens = [query + data.draw(st.sampled_from([0, 0, 1])) for query in query_lens]
    starts = [0, *accumulate(query_lens)]
    dense = dense_tokens(query_lens, seq_lens, 0, topk)
    found = masked(starts, query_lens, dense, topk, longest)
    of_prompt = {one.prompt: len(one.blocks) * MASKED for one in found}
    counts = [of_prompt.get(start, 0) if query else 0 for start, query in zip(starts, query_lens, strict=False)]
    for query, seq, begins, count in zip(query_lens, seq_lens, dense, counts, strict=True):
        room = min(query, longest) - topk if query == seq else 0
        assert count % MASKED == 0 and 0 <= count <= max(room, 0) < count + MASKED
        assert count == 0 or begins == topk
    wanted = [(start + topk, count // MASKED) for start, count in zip(starts, counts, strict=False) if count]
    assert [(one.tokens.start, len(one.blocks)) for one in found] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_leaves_what_was_picked(dtype):
    q, k, v = (torch.randn(*shape, dtype=dtype) for shape in ((40, 3, 24), (100, 3, 24), (100, 3, 8)))
    picked = torch.stack([torch.randperm(100)[:12] for _ in range(40)]).int()
    picked[:, 7:] = torch.where(torch.rand(40, 5) < 0.5, -1, picked[:, 7:])
    out = attend_to_picked(q, k, v, picked, 0.3)
    for token in range(40):
        rows = picked[token][picked[token] >= 0].long()
        scores = torch.einsum("hd,chd->hc", q[token].float(), k[rows].float()) * 0.3
        want = torch.einsum("hc,chv->hv", scores.softmax(-1), v[rows].float())
        torch.testing.assert_close(out[token].float(), want, atol=1e-5 if dtype == torch.float32 else 0.02, rtol=0.01)
