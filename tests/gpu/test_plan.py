"""plan and combine_partials on a GPU."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import Plan, library, reference
from mla_backend.plan import choose_launch, most_ctas
from plans import by_load, gpu_plan
from problems import CUDA_KERNEL, assert_accurate, partials_to_combine

pytestmark = pytest.mark.gpu
TILE_SLOTS = 64


def on_gpu(tokens, topk, launch, **more):
    """A GPU's table, which has to be what a CPU computes for a GPU."""
    there = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in more.items()}
    table = mla_backend.plan(tokens, topk, launch=launch, device="cuda", **there).table.cpu()
    assert torch.equal(table, gpu_plan(tokens, topk, launch, **more))
    return table


@given(st.data())
def test_any_plan_is_as_on_the_cpu(data):
    topk, extra_topk = data.draw(st.integers(0, 3000)), data.draw(st.integers(0, 500))
    tokens = data.draw(st.one_of(st.integers(0, 40), st.integers(1000, 5000)))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    lengths = torch.randint(-5, topk + 5, (tokens,), dtype=torch.int32)
    extra = torch.randint(0, extra_topk + 1, (tokens,), dtype=torch.int32)
    if data.draw(st.booleans()):
        lengths[torch.rand(tokens) < 0.9] = 0
    ctas = data.draw(st.sampled_from([1, 2, 33, 132, 264, 1023, 1024, 1025, 3000]))
    launch = by_load(ctas, data.draw(st.integers(1, 16)), data.draw(st.integers(0, 20)))
    more = {"topk_length": lengths, "extra_topk": extra_topk, "extra_topk_length": extra}
    on_gpu(tokens, topk, launch, **more, batch_invariant=data.draw(st.booleans()))


@given(
    ctas=st.sampled_from([1, 2, 33, 66, 132, 264, 1023, 1024, 1025, 3000]),
    rounds=st.integers(1, 5),
    idle=st.floats(0, 1),
    topk=st.integers(0, 3000),
    shorter=st.booleans(),
    splits=st.sampled_from([0, 1]),
)
def test_equal_lists_are_planned_as_on_the_cpu(ctas, rounds, idle, topk, shorter, splits):
    tokens, launch = max(rounds * ctas - int(idle * ctas), 1), by_load(ctas, splits=splits)
    lengths = torch.full((tokens,), topk, dtype=torch.int32)
    lengths[tokens // 2] -= TILE_SLOTS * shorter
    table = on_gpu(tokens, topk, launch, topk_length=lengths)
    if not shorter:
        assert torch.equal(table, on_gpu(tokens, topk, launch))


@pytest.mark.parametrize("longest", [100, 2048, 4096, 20_000, 131072])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8])
def test_plans_for_wide_tables_are_as_on_the_cpu(tokens, longest):
    lengths = torch.randint(0, longest + 1, (tokens,), dtype=torch.int32)
    lengths[0] = longest
    on_gpu(tokens, 131072, choose_launch("cuda", 16, tokens, 131072), topk_length=lengths)
    on_gpu(tokens, 131072, by_load(120, 8), topk_length=lengths)


@pytest.mark.parametrize(
    ("tokens", "topk", "launch"),
    [
        *((200_000, 2048, by_load(132)), (200, 2**31 - 1, by_load(264))),
        *((tokens, 512, by_load(2 * tokens, 2, 2)) for tokens in (512, 1024, 1025, 4096, 5000)),
    ],
)
def test_many_tokens_and_enormous_lists_are_planned_as_on_the_cpu(tokens, topk, launch):
    lengths = torch.randint(0, topk, (tokens,), dtype=torch.int32)
    lengths[1::7] = topk
    on_gpu(tokens, topk, launch, topk_length=lengths)


@pytest.mark.parametrize("ctas", [5, 1500])
def test_a_table_may_lie_anywhere(ctas):
    lengths = torch.randint(0, 2049, (77,), dtype=torch.int32, device="cuda")
    memory = torch.full((ctas * 8 + 9,), 7, dtype=torch.int32, device="cuda")
    table, launch = memory[1:-8].view(ctas, 8), by_load(ctas)
    mla_backend.plan(77, 2048, topk_length=lengths, out=Plan(table, launch))
    assert torch.equal(table, mla_backend.plan(77, 2048, topk_length=lengths, launch=launch, device="cuda").table)
    assert memory[0] == 7 and torch.all(memory[-8:] == 7)


def test_the_gpu_is_asked_what_launches_depend_on():
    gpu, properties = library.describe_gpu(0), torch.cuda.get_device_properties(0)
    assert gpu["multiprocessors"] == properties.multi_processor_count
    has_hopper_kernels = properties.major == 9 and "90a" in library.about()["cuda_archs"].split()
    assert gpu["hopper"] == (has_hopper_kernels and CUDA_KERNEL != "portable")
    counts = gpu["clusters"][2:]
    assert all(ctas * count <= gpu["multiprocessors"] for ctas, count in enumerate(counts, 2))
    assert counts == sorted(counts, reverse=True) and bool(counts[0]) == has_hopper_kernels
    assert 0.5 < gpu["clock_ghz"] < 5 and 0.1 < gpu["memory_tbs"] < 20
    for tokens, heads in itertools.product((1, 8, 33, 66, 200), (8, 64, 128)):
        plan, most = mla_backend.plan(tokens, 2048, num_heads=heads, device="cuda"), Plan.bounds(heads, "cuda")
        assert len(plan.table) == plan.launch.ctas <= most.ctas == most_ctas(gpu, heads)


@given(partials_to_combine())
def test_combined_results_agree_with_the_oracle(partials):
    got = mla_backend.combine_partials(*(x.cuda() for x in partials))
    assert_accurate(got, reference.combine_partials(*partials))
