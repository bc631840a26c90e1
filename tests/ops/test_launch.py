"""How a GPU computes attention: decided once, from shapes alone."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

import mla_backend
from mla_backend import Launch, doctor, library
from mla_backend.plan import PRODUCTS, choose_launch, most_ctas
from plans import SPLIT_FOR_CLUSTERS, WHOLE_TOKENS, gpu, gpu_launch
from problems import FP8, WAYS, WITH_ROPE

ROOT = Path(__file__).parents[2]
HEADS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256)
any_rows = st.sampled_from([{"fmt": fmt, "products": products} for fmt, products in WAYS])


@pytest.mark.parametrize(
    ("tokens", "heads", "fmt", "kernel", "heads_per_cta"),
    [
        *((1, 8, "fp8_ds_mla", "swap_ab", 8), (1, 16, "fp8_ds_mla", "swap_ab", 8), (64, 16, "bf16", "swap_ab", 16)),
        *((128, 16, "fp8_ds_mla", "swap_ab", 16), (128, 32, "fp8_ds_mla", "swap_ab", 32)),
        *((512, 64, "fp8_ds_mla", "m64", 64), (512, 128, "bf16", "m64", 64), (0, 64, "bf16", "swap_ab", 16)),
    ],
)
def test_hopper_has_a_kernel_for_each_shape(tokens, heads, fmt, kernel, heads_per_cta):
    assert gpu_launch(gpu(), tokens, heads, fmt=fmt)[:2] == (kernel, heads_per_cta)


@given(st.integers(1, 600), st.integers(1, 256), st.integers(0, 200_000), any_rows, st.sampled_from([78, 114, 132]))
def test_all_ctas_and_clusters_run_at_once(tokens, heads, slots, rows, multiprocessors):
    device = gpu(multiprocessors)
    launch = gpu_launch(device, tokens, heads, slots, **rows)
    head_groups = -(-heads // launch.heads_per_cta)
    assert launch.ctas * head_groups <= max(multiprocessors, head_groups)
    if launch.cluster > 1:
        assert -(-launch.ctas // launch.cluster) * head_groups <= device.clusters[launch.cluster]


@given(st.integers(1, 600), st.integers(1, 256), st.integers(0, 200_000), any_rows)
def test_a_launch_says_how_tokens_are_split(tokens, heads, slots, rows):
    launch = gpu_launch(gpu(), tokens, heads, slots, **rows)
    if launch.splits == 1:
        assert launch.rounds == -(-tokens // launch.ctas)
    else:
        assert launch.rounds == 0 and (not launch.splits or launch.ctas == tokens * launch.splits)


@given(st.integers(1, 9000), st.integers(1, 256), st.integers(0, 3000), st.sampled_from(FP8), st.booleans())
@example(4347, 24, 128, "fp8_tensor_576", False)  # which m64 serves
def test_fp8_products_round_short_lists_of_many_heads_alone(tokens, heads, slots, fmt, batch_invariant):
    how = {"fmt": fmt, "batch_invariant": batch_invariant}
    exact, fp8 = (gpu_launch(gpu(), tokens, heads, slots, **how, products=products) for products in PRODUCTS)
    suits = heads > 32 and fmt in WITH_ROPE and (slots <= 2048 or batch_invariant)
    assert exact.kernel != "m64_fp8" and (fp8.kernel in ("swap_ab", "m64_fp8") if suits else fp8 == exact)


@given(st.integers(0, 5000), st.integers(1, 256), st.integers(0, 200_000), st.booleans())
def test_gpus_without_hopper_kernels_get_the_portable_one(tokens, heads, slots, batch_invariant):
    launch = gpu_launch(gpu(hopper=False), tokens, heads, slots, batch_invariant=batch_invariant)
    assert launch == Launch("portable", 16, int(batch_invariant), 1, 0, max(264 // -(-heads // 16), 1))


@given(st.integers(1, 256), any_rows, st.integers(1, 5000), st.integers(0, 200_000))
def test_a_batch_invariant_launch_depends_on_neither_tokens_nor_slots(heads, rows, tokens, slots):
    launch = gpu_launch(gpu(), tokens, heads, slots, **rows, batch_invariant=True)
    assert launch == gpu_launch(gpu(), None, heads, None, **rows, batch_invariant=True) and launch.splits == 1


@given(st.integers(1, 256), any_rows)
def test_a_launch_for_any_number_of_tokens_keeps_the_gpu_busy(heads, rows):
    launch = gpu_launch(gpu(), None, heads, None, **rows)
    assert launch.splits == 0 and launch.ctas == max(132 // -(-heads // launch.heads_per_cta), 1)


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_a_gpu_that_holds_no_clusters_gets_none(heads):
    for tokens in (1, 8, 66):
        assert gpu_launch(gpu(clusters=False), tokens, heads).cluster == 1


@pytest.mark.parametrize(("tokens", "slots"), [(2, 32768), (8, 131072), (1, 131072)])
def test_long_lists_of_few_tokens_occupy_the_whole_gpu(tokens, slots):
    launch = gpu_launch(gpu(), tokens, 16, slots, fmt="bf16")
    assert launch.ctas >= 120


def test_gpu_tests_have_the_shapes_that_they_are_about():
    splits = {gpu_launch(gpu(), tokens, heads)[2:4] for tokens, heads in SPLIT_FOR_CLUSTERS}
    assert {cluster for _, cluster in splits} >= {16, 8, 4, 3, 2} and all(s == c > 1 for s, c in splits)
    for heads, slots in itertools.product(range(17, 257), (192, 256)):
        assert gpu_launch(gpu(), WHOLE_TOKENS, heads, slots).kernel == ("swap_ab" if heads <= 32 else "m64")


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/launches.csv")), ids=lambda path: path.parent.name)
def test_the_model_chooses_nearly_the_best_of_what_was_timed(path):
    """The constants are fitted to these files."""
    tune = pytest.importorskip("serving_benchmarks.ops.tune")
    regrets = list(tune.Timings(path).regrets(None).values())
    assert len(regrets) > 500 and sum(regrets) / len(regrets) < 0.01


def test_a_cpu_has_one_kernel_whose_items_its_threads_take_in_turn():
    assert choose_launch("cpu", 40, 3, 100) == Launch("cpu", 40, 0, 1, 0, 2 * torch.get_num_threads())


def test_print_the_doctor_and_errors_describe_a_launch_alike(capsys):
    shape = doctor.DECODE
    plan = mla_backend.plan(shape["num_tokens"], shape["slots"], num_heads=shape["num_heads"])
    assert "kernel='cpu'" in str(plan.launch)
    report = doctor.examine()
    assert report["decode"]["cpu"] == str(plan.launch)
    doctor.render(report, Console(width=200))
    assert str(plan.launch) in capsys.readouterr().out
    with pytest.raises(ValueError, match=re.escape(f"for a table of 3 CTAs; got {plan.launch}")):
        mla_backend.plan(1, 5, out=plan._replace(table=plan.table[:3]))


@given(st.integers(1, 600), st.integers(1, 256), st.integers(0, 200_000), any_rows, st.booleans(), st.booleans())
def test_no_plan_has_more_ctas_than_its_bound(tokens, heads, slots, rows, hopper, batch_invariant):
    launch = gpu_launch(gpu(hopper=hopper), tokens, heads, slots, **rows, batch_invariant=batch_invariant)
    assert launch.ctas <= most_ctas({"hopper": hopper, "multiprocessors": 132}, heads)


def test_bounds_hold_on_a_cpu():
    plan = mla_backend.plan(1000, 2048, num_heads=16)
    assert mla_backend.Plan.bounds(16, "cpu") == (plan.launch.ctas, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to ask")
def test_asking_a_gpu_that_is_not_there_says_why():
    with pytest.raises(RuntimeError, match="^mla_backend: .*(device|driver|without CUDA)"):
        library.describe_gpu(0)
