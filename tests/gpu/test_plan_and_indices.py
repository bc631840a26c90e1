"""plan, merge_partials and convert_indices on a GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import library, reference
from plans import TOKEN_UNITS, gpu_plan, tiles_of, walk
from problems import CUDA_KERNEL, assert_accurate, parts_to_merge

pytestmark = pytest.mark.gpu
TILE_SLOTS = 64


def this_gpu():
    return library.describe_device(torch.cuda.current_device())


@given(st.data())
def test_every_tile_is_covered_exactly_once(data):
    topk, extra_topk = data.draw(st.integers(0, 3000)), data.draw(st.integers(0, 500))
    tokens = data.draw(st.one_of(st.integers(0, 40), st.integers(1000, 5000)))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    lengths = torch.randint(-5, topk + 5, (tokens,), dtype=torch.int32)
    extra = torch.randint(0, extra_topk + 1, (tokens,), dtype=torch.int32)
    if data.draw(st.booleans()):
        lengths[torch.rand(tokens) < 0.9] = 0
    workers = data.draw(st.sampled_from([1, 2, 33, 132, 264, 1023, 1024, 1025, 3000]))
    whole = data.draw(st.booleans())
    table = mla_backend.plan(
        tokens,
        topk,
        topk_length=lengths.cuda(),
        extra_topk=extra_topk,
        extra_topk_length=extra.cuda(),
        workers=workers,
        batch_invariant=whole,
    )
    tiles = [
        a + b
        for a, b in zip(
            tiles_of(lengths.clamp(max=topk).tolist(), TILE_SLOTS), tiles_of(extra.tolist(), TILE_SLOTS), strict=True
        )
    ]
    parts = walk(table.cpu(), tiles, TILE_SLOTS)
    assert all(n >= 1 for n in parts)
    if whole:
        assert all(n == 1 for n in parts)
    wanted = gpu_plan(
        tokens,
        topk,
        workers,
        topk_length=lengths,
        extra_topk=extra_topk,
        extra_topk_length=extra,
        batch_invariant=whole,
        device=this_gpu(),
    )
    assert torch.equal(table.cpu(), wanted), "the GPU computes what the CPU does"


@given(
    workers=st.sampled_from([1, 2, 33, 66, 132, 264, 1023, 1024, 1025, 3000]),
    rounds=st.integers(1, 5),
    idle=st.floats(0, 1),
    topk=st.integers(0, 3000),
    shorter=st.booleans(),
)
def test_equal_lists_are_planned_as_on_the_cpu(workers, rounds, idle, topk, shorter):
    tokens = max(rounds * workers - int(idle * workers), 1)
    lengths = torch.full((tokens,), topk, dtype=torch.int32)
    lengths[tokens // 2] -= TILE_SLOTS * shorter
    table = mla_backend.plan(tokens, topk, topk_length=lengths.cuda(), workers=workers)
    assert torch.equal(table.cpu(), gpu_plan(tokens, topk, workers, topk_length=lengths, device=this_gpu()))
    if not shorter:
        assert torch.equal(table, mla_backend.plan(tokens, topk, workers=workers, device="cuda"))


@pytest.mark.parametrize("longest", [100, 2048, 4096, 20_000, 131072])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8])
def test_plans_for_wide_tables_are_as_on_the_cpu(tokens, longest):
    device = this_gpu()
    workers = library.cuda_workers(device, 16, tokens, 131072)
    lengths = torch.randint(0, longest + 1, (tokens,), dtype=torch.int32)
    lengths[0] = longest
    table = mla_backend.plan(tokens, 131072, topk_length=lengths.cuda(), workers=workers)
    assert torch.equal(table.cpu(), gpu_plan(tokens, 131072, workers, topk_length=lengths, device=device))


@pytest.mark.parametrize("tokens", [512, 1024, 1025, 4096, 5000])
def test_two_workers_a_token_are_planned_as_on_the_cpu(tokens):
    lengths = torch.randint(0, 513, (tokens,), dtype=torch.int32)
    table = mla_backend.plan(tokens, 512, topk_length=lengths.cuda(), workers=2 * tokens)
    assert torch.equal(table.cpu(), gpu_plan(tokens, 512, 2 * tokens, topk_length=lengths, device=this_gpu()))


@pytest.mark.parametrize(
    ("tokens", "parts"), [(100, 1), (127, 1), (128, 1), (132, 1), (66, 2), (64, 2), (32, 4), (16, 8), (8, 16)]
)
def test_equal_lists_are_cut_into_equal_parts_or_not_at_all(tokens, parts):
    table = mla_backend.plan(tokens, 2048, workers=132, device="cuda").cpu()
    busy = table[table[:, 0] < table[:, 1]]
    assert len(busy) == tokens * parts
    assert (busy[:, 3] - busy[:, 2] == 32 // parts).all()


def test_many_tokens_are_planned_too():
    tokens = 200_000
    lengths = torch.randint(0, 2049, (tokens,), dtype=torch.int32)
    table = mla_backend.plan(tokens, 2048, topk_length=lengths.cuda(), workers=132)
    walk(table.cpu(), tiles_of(lengths.tolist(), TILE_SLOTS), TILE_SLOTS)
    tiles = torch.tensor(tiles_of(lengths.tolist(), TILE_SLOTS))
    rows = table.cpu().tolist()
    loads = [
        int(tiles[b:e].sum()) + TOKEN_UNITS * (e - b) - tb - (int(tiles[e - 1]) - te if e > b else 0)
        for b, e, tb, te, *_ in rows
    ]
    assert max(loads) - min(loads) <= 0.001 * max(loads)


def test_lists_of_more_than_2_to_the_32_tiles_together_are_planned_too():
    topk = 2**31 - 1
    lengths = torch.full((200,), topk, dtype=torch.int32)
    lengths[::7] = 5
    table = mla_backend.plan(200, topk, topk_length=lengths.cuda(), workers=264)
    walk(table.cpu(), tiles_of(lengths.tolist(), TILE_SLOTS), TILE_SLOTS)


@pytest.mark.parametrize("workers", [5, 1500])
def test_a_table_may_lie_anywhere(workers):
    lengths = torch.randint(0, 2049, (77,), dtype=torch.int32, device="cuda")
    memory = torch.full((workers * 8 + 9,), 7, dtype=torch.int32, device="cuda")
    table = memory[1:-8].view(workers, 8)
    mla_backend.plan(77, 2048, topk_length=lengths, out=table)
    assert torch.equal(table, mla_backend.plan(77, 2048, topk_length=lengths, workers=workers, device="cuda"))
    assert memory[0] == 7 and torch.all(memory[-8:] == 7)


def test_the_gpu_is_asked_what_plans_for_it_depend_on():
    device, properties = library.describe_device(0), torch.cuda.get_device_properties(0)
    assert device.processors == properties.multi_processor_count
    has_hopper_kernels = properties.major == 9 and "90a" in library.about()["cuda_archs"].split()
    assert bool(device.hopper_kernels) == (has_hopper_kernels and CUDA_KERNEL != "portable")
    counts = device.clusters[2:]
    assert all(blocks * count <= device.processors for blocks, count in enumerate(counts, 2))
    assert counts == sorted(counts, reverse=True) and bool(counts[0]) == has_hopper_kernels
    for tokens in (1, 8, 33, 66, 200):
        rows = mla_backend.plan(tokens, 2048, num_heads=16, device="cuda").shape[0]
        assert rows == library.cuda_workers(device, 16, tokens, 2048)


@given(parts_to_merge())
def test_merging_agrees_with_the_oracle(parts):
    got = mla_backend.merge_partials(*(part.cuda() for part in parts))
    assert_accurate(got, reference.merge_partials(*parts))


@given(st.data())
def test_positions_become_slots(data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    requests, max_blocks = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 60))
    tokens, topk = data.draw(st.integers(0, 6)), data.draw(st.sampled_from([0, 1, 100, 1024, 2500, 2501]))
    block_size = data.draw(st.sampled_from([1, 3, 64, 1000, 2**25 + 1]))
    table = torch.randint(-1, 2**25 if block_size < 1000 else 2 * 60, (requests, max_blocks), dtype=torch.int32)
    positions = torch.randint(-3, max_blocks * block_size + 5, (tokens, topk), dtype=torch.int32)
    request_ids = torch.randint(-1, requests + 1, (tokens,), dtype=torch.int32)
    how = dict(compact=data.draw(st.booleans()), ranks=data.draw(st.sampled_from([1, 2, 8])))
    how |= dict(rank=data.draw(st.integers(0, how["ranks"] - 1)), interleave=data.draw(st.sampled_from([1, 64, 1000])))
    got = mla_backend.convert_indices(positions.cuda(), table.cuda(), request_ids.cuda(), block_size, **how)
    want = mla_backend.convert_indices(positions, table, request_ids, block_size, **how)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
