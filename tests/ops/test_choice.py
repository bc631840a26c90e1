"""Which kernel a GPU computes attention with, and that its plan and its launch agree."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import library
from mla_backend.formats import format_number
from plans import cuts_of, gpu, gpu_choice

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"
HEADS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256)


@pytest.mark.parametrize(
    ("tokens", "heads", "fp8", "kernel", "heads_per_block"),
    [
        *((1, 8, True, "few_heads", 8), (1, 16, True, "few_heads", 8), (128, 16, True, "few_heads", 16)),
        *((128, 8, False, "few_heads", 8), (1, 64, True, "few_heads", 8), (4, 128, False, "few_heads", 16)),
        (8, 128, False, "many_heads", 64),
        *((128, 17, True, "few_heads_wide", 32), (128, 32, True, "few_heads_wide", 32)),
        *((128, 17, False, "many_heads", 64), (128, 33, True, "many_heads", 64), (51, 64, True, "few_heads_wide", 32)),
        *((17, 128, False, "many_heads", 64), (51, 32, False, "few_heads", 16), (0, 64, True, "few_heads", 8)),
    ],
)
def test_hopper_has_a_kernel_for_each_shape(tokens, heads, fp8, kernel, heads_per_block):
    fmt = "fp8_ds_mla" if fp8 else "bf16"
    workers = library.cuda_workers(gpu(), heads, tokens, 2048, format_number(fmt, "fmt"))
    choice = gpu_choice(gpu(), tokens, heads, fmt=fmt, workers=workers)
    assert (choice.kernel, choice.heads_per_block) == (kernel, heads_per_block)


@pytest.mark.skipif(not PAGE.is_file(), reason="needs the source tree")
def test_the_docs_have_what_is_chosen():
    table = PAGE.read_text().partition("| slots | heads | ")[2].partition("\n\n")[0]
    tokens, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
    assert len(rows) > 9
    for slots, heads, *cells in rows:
        assert cells == [cuts_of(gpu(), int(t), int(heads), int(slots)) for t in tokens], (slots, heads)


@pytest.mark.parametrize("heads", HEADS)
def test_other_gpus_and_rows_that_do_not_suit_get_the_portable_kernel(heads):
    for tokens in (1, 66, 1000):
        other = gpu_choice(gpu(hopper_kernels=False), tokens, heads)
        unsuited = gpu_choice(gpu(), tokens, heads, suits_hopper=False)
        assert other == unsuited and (other.kernel, other.cluster, other.parts) == ("portable", 1, 0)


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "bf16", "fp8_model1", "fp8_tensor_576"])
@pytest.mark.parametrize("heads", HEADS)
def test_the_default_plan_is_for_the_clusters_that_its_launch_has(heads, fmt):
    for processors in (78, 132):
        device = gpu(processors)
        for tokens in range(1, 200):
            for tiles in (7, 8, 32, 128, 512):
                workers = library.cuda_workers(device, heads, tokens, 64 * tiles, format_number(fmt, "fmt"))
                launch = gpu_choice(device, tokens, heads, fmt=fmt, workers=workers, token_tiles=tiles)
                default = gpu_choice(device, tokens, heads, fmt=fmt, token_tiles=tiles)
                # rows of a plan for long lists may happen to be 16 for each token
                assert (launch._replace(parts=default.parts) if tiles == 512 else launch) == default
                if launch.parts:
                    blocks = -(-heads // launch.heads_per_block)
                    assert launch.cluster == launch.parts
                    assert tokens * blocks <= device.clusters[launch.parts], "all run at once"


@pytest.mark.parametrize("processors", [78, 114, 132])
@given(st.integers(1, 600), st.integers(1, 256), st.integers(1, 2048), st.sampled_from(sorted(mla_backend.FORMATS)))
def test_all_blocks_of_a_default_plan_run_at_once(processors, tokens, heads, tiles, fmt):
    """With what clusters that are not full add to them."""
    device = gpu(processors)
    workers = library.cuda_workers(device, heads, tokens, 64 * tiles, format_number(fmt, "fmt"))
    choice = gpu_choice(device, tokens, heads, fmt=fmt, workers=workers, token_tiles=tiles)
    blocks = -(-heads // choice.heads_per_block)
    assert -(-choice.workers // choice.cluster) * choice.cluster * blocks <= max(processors, blocks)


@pytest.mark.parametrize("heads", HEADS)
def test_with_whole_tokens_their_number_does_not_choose_the_kernel(heads):
    workers = library.cuda_workers(gpu(), heads)
    choices = {gpu_choice(gpu(), t, heads, whole_tokens=True, workers=workers)[:3] for t in (1, 8, 66, 67, 5000)}
    assert len(choices) == 1 and choices.pop()[2] == 0


def test_a_plan_of_more_rows_than_clusters_have_room_for_gets_smaller_ones():
    assert gpu_choice(gpu(), 128, 16, workers=132).cluster == 2
    assert gpu_choice(gpu(), 3, 16, workers=100).cluster == 8
    assert gpu_choice(gpu(), 1, 16, workers=132, token_tiles=2).cluster == 8, "few workers have work"


@pytest.mark.parametrize(("tokens", "slots"), [(1, 16384), (2, 16384), (4, 16384), (8, 32768), (1, 131072)])
def test_long_lists_of_few_tokens_are_cut_by_load(tokens, slots):
    choice = gpu_choice(gpu(), tokens, 16, fmt="bf16", token_tiles=slots // 64)
    assert (choice.kernel, choice.heads_per_block, choice.parts, choice.workers) == ("few_heads", 16, 0, 120)


@pytest.mark.parametrize("fmt", ["fp8_ds_mla", "bf16", "fp8_model1"])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (1, 112), (2, 32), (2, 48), (3, 32), (7, 16)])
def test_lists_of_few_tokens_and_all_their_heads_meet_in_clusters(fmt, tokens, heads):
    longest = 4096 if (fmt, tokens, heads) == ("fp8_model1", 2, 32) else 8192  # the next test has that with 8192
    for slots in (4096, longest):
        choice = gpu_choice(gpu(), tokens, heads, fmt=fmt, token_tiles=slots // 64)
        assert choice == ("few_heads", 16, 16, 16 * tokens, 16)


@pytest.mark.parametrize(
    ("fmt", "tokens", "heads", "slots", "workers"),
    [("fp8_ds_mla", 1, 32, 32768, 56), ("fp8_model1", 2, 32, 8192, 56), ("bf16", 1, 64, 32768, 24)],
)
def test_longer_lists_are_cut_for_clusters_that_leave_few_parts_to_the_workspace(fmt, tokens, heads, slots, workers):
    assert gpu_choice(gpu(), tokens, heads, fmt=fmt, token_tiles=slots // 64) == ("few_heads", 16, 0, workers, 8)


def test_a_launch_spreads_tokens_as_their_plan_does():
    for_other_rows = library.cuda_workers(gpu(), 16, 5, 2048)
    assert gpu_choice(gpu(), 5, 16, fmt="fp8_model1", workers=for_other_rows) == ("few_heads", 8, 8, 40, 8)
    for_longer_lists = gpu_choice(gpu(), 5, 16, token_tiles=64).workers
    assert gpu_choice(gpu(), 5, 16, workers=for_longer_lists) == ("few_heads", 16, 16, 80, 16)
    for_any_number = library.cuda_workers(gpu(), 64)
    assert gpu_choice(gpu(), 1, 64, workers=for_any_number, token_tiles=128).kernel == "many_heads"


@pytest.mark.parametrize(
    ("fmt", "heads", "most"), [("fp8_ds_mla", 16, 66), ("fp8_ds_mla", 64, 11), ("bf16", 64, 16), ("fp8_model1", 24, 44)]
)
def test_short_whole_lists_have_8_heads_a_block_while_there_is_room(fmt, heads, most):
    """All blocks run at once. Where more than two read rows that are not converted, they fill two thirds of the GPU."""
    for tokens, heads_per_block in (1, 8), (most, 8), (most + 1, 16):
        choice = gpu_choice(gpu(), tokens, heads, fmt=fmt, token_tiles=1)
        assert choice[:3] == ("few_heads", heads_per_block, 0)
    assert gpu_choice(gpu(), 1, heads, fmt=fmt, token_tiles=1, whole_tokens=True).heads_per_block > 8


@pytest.mark.parametrize(("heads", "tiles", "parts"), [(8, 2, 0), (16, 2, 0), (16, 4, 8), (8, 8, 8)])
def test_short_lists_of_few_tokens_are_spread_where_it_saves_more_than_their_merge_takes(heads, tiles, parts):
    assert gpu_choice(gpu(), 5, heads, token_tiles=tiles)[:3] == ("few_heads", 8, parts)


@pytest.mark.parametrize("heads", [1, 8, 9, 16])
def test_to_few_heads_no_sparse_list_is_long(heads):
    for tokens in range(1, 67):
        short, full = (gpu_choice(gpu(), tokens, heads, token_tiles=n) for n in (17, 34))
        assert short == full or (short.parts, full.parts) == (4, 6)
