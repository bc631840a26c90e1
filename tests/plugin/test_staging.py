"""Which requests of a step attend to staged rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import vllm_installed  # noqa: F401
from mla_backend.vllm_plugin import config, staging
from mla_backend.vllm_plugin.staging import TOKENS, VISITS, StagedRequests, requests_to_stage
from vllm_models import config_with

ROOM = 1 << 16


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "rows", "found"),
    [
        ([4096], [32768], ROOM, StagedRequests(0, 0, 32768)),
        ([1, 1, 2048, 1024], [5000, 70, 2048, 9000], ROOM, StagedRequests(2, 2, 9000)),
        ([1, 2048, 1024], [5000, 9000, 60000], ROOM, StagedRequests(2, 2049, 60000)),  # no room for the other
        ([1] * 300, [5000] * 300, ROOM, None),
        ([4] * 100, [5000] * 100, ROOM, None),
        ([255], [4000], ROOM, None),
        ([256], [4000], ROOM, StagedRequests(0, 0, 4000)),
        ([256], [40000], ROOM, None),  # a row is visited 13 times
        ([4096], [65537], ROOM, None),
        ([4096], [32768], 0, None),
        ([], [], ROOM, None),
    ],
)
def test_requests_are_staged_whose_tokens_read_their_rows_often(query_lens, seq_lens, rows, found):
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    assert requests_to_stage(starts, seq_lens, query_lens, 2048, rows, 64) == found


@given(data=st.data())
def test_what_is_staged_has_room_and_is_worth_it(data):
    query_lens = data.draw(st.lists(st.integers(1, 3000), max_size=9))
    seq_lens = [query + data.draw(st.integers(0, 50000)) for query in query_lens]
    rows, block_size = data.draw(st.integers(0, 1 << 18)), data.draw(st.sampled_from([64, 128]))
    starts = torch.tensor([0, *query_lens]).cumsum(0).tolist()
    reading = [data.draw(st.integers(0, query)) for query in query_lens]
    found = requests_to_stage(starts, seq_lens, reading, 2048, rows, block_size)
    if found is None:
        return
    staged = list(zip(reading, seq_lens, strict=True))[found.request :]
    assert found.token == starts[found.request] and found.rows == max(length for _, length in staged)
    assert sum(-(-length // block_size) for _, length in staged) * block_size <= rows
    assert all(tokens * min(2048, length) >= VISITS * length for tokens, length in staged)
    assert sum(tokens for tokens, _ in staged) >= TOKENS
    table = found.table(torch.tensor(seq_lens, dtype=torch.int32), block_size)
    assert (table[: found.request] == -1).all()
    owned = [row[: -(-length // block_size)] for row, (_, length) in zip(table[found.request :], staged, strict=True)]
    assert torch.equal(torch.cat(owned), torch.arange(sum(map(len, owned)), dtype=torch.int32))


def settings(heads=64, cache_dtype="fp8_ds_mla", ranks=1, **options):
    """The arguments of room_for_rows."""
    parallel, scheduler = dict(decode_context_parallel_size=ranks), dict(max_num_batched_tokens=8192)
    config = config_with(parallel=parallel, scheduler=scheduler)
    config.additional_config = options
    return config, heads, 2048, cache_dtype


def test_there_is_room_only_where_it_is_of_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert staging.room_for_rows(*settings(heads=128), False) == staging.ROWS
    assert staging.room_for_rows(*settings(heads=64), False) == staging.ONE_CTA_ROWS
    assert staging.room_for_rows(*settings(mla_staged_rows=5000), False) == 5000
    assert staging.room_for_rows(*settings(mla_staged_rows=0), False) == 0
    without_options, *rest = settings(heads=128)
    without_options.additional_config = None
    assert staging.room_for_rows(without_options, *rest, False) == staging.ROWS
    assert staging.room_for_rows(*settings(), True) == 0
    for useless in (settings(heads=32), settings(cache_dtype="auto"), settings(ranks=2), settings(mla_products="fp8")):
        assert staging.room_for_rows(*useless, False) == 0
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert staging.room_for_rows(*settings(), False) == 0


@pytest.mark.parametrize("rows", [-1, 1.5, "all", None, True])
def test_a_number_of_rows_that_is_none_is_refused(rows):
    assert staging.OPTION in config._staging(settings(mla_staged_rows=rows)[0])
