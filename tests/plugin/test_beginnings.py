"""Which tokens of a step's prefill see everything before them."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from mla_backend.vllm_plugin.beginnings import Beginnings, beginnings, between, dense_tokens


def test_new_prompts_begin_densely():
    # decodes, a new prompt, one that goes on, two short ones side by side, a long one
    query_lens, seq_lens = [1, 1, 3000, 500, 200, 300, 4096], [9000, 80, 3000, 700, 200, 300, 4096]
    starts = [0, *accumulate(query_lens)]
    dense = dense_tokens(query_lens, seq_lens, 2, 2048)
    assert dense == [0, 0, 2048, 0, 200, 300, 2048]
    found = beginnings(starts, dense)
    assert found == [Beginnings(slice(2, 2050), (2048,)), Beginnings(slice(3502, 6050), (200, 300, 2048))]
    assert between(found, 2, starts[-1]) == [slice(2050, 3502), slice(6050, 8098)]
    assert beginnings([0, 5], [0]) == [] and between([], 0, 5) == [slice(0, 5)]


@given(data=st.data())
def test_tokens_attend_densely_if_their_list_would_be_all_before_them(data):
    topk = data.draw(st.integers(1, 40))
    query_lens = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=9))
    seq_lens = [query + data.draw(st.sampled_from([0, 0, 1, 50])) for query in query_lens]
    first, starts = data.draw(st.integers(0, len(query_lens))), [0, *accumulate(query_lens)]
    found = beginnings(starts, dense_tokens(query_lens, seq_lens, first, topk))
    expected = [
        start + i
        for start, query, seq in zip(starts[first:-1], query_lens[first:], seq_lens[first:], strict=True)
        for i in range(query)
        if query == seq and i < topk
    ]
    assert [token for one in found for token in range(one.tokens.start, one.tokens.stop)] == expected
    assert all(sum(one.lengths) == one.tokens.stop - one.tokens.start for one in found)
    assert all(a.tokens.stop < b.tokens.start for a, b in zip(found, found[1:], strict=False))
    rest = [token for part in between(found, starts[first], starts[-1]) for token in range(part.start, part.stop)]
    assert sorted(rest + expected) == list(range(starts[first], starts[-1]))
