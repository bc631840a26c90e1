"""The contract of sparse_attention on a GPU, against the oracle: the CPU's tests with the `device` of this folder, and
what only a GPU has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from gpu_checks import check, chosen_kernel
from mla_backend import flash_mla, library, reference
from mla_backend.plan import PRODUCTS, workspace_floats
from plans import FEW_AND_MANY, SPLIT_FOR_CLUSTERS, WHOLE_TOKENS, planned
from problems import (
    BASIC,
    BASIC_WAYS,
    CUDA_KERNEL,
    FORMATS,
    FP8,
    MAGNITUDE,
    PARTNERS,
    PARTS,
    WAYS,
    WITH_ROPE,
    all_bytes,
    assert_accurate,
    copy_with_gaps,
    problems,
    random_cache,
    random_problem,
    scale_of,
    score_error,
    write_part,
)
from tests.ops.test_attention import (
    test_a_cache_at_an_odd_address,
    test_a_sink_scales_the_output_and_leaves_lse,
    test_batch_invariant_mode_gives_a_token_the_same_bits_in_any_batch,
    test_every_e4m3_code_is_decoded_as_torch_decodes_it,
    test_every_scale_byte_is_a_power_of_two,
    test_lists_of_very_unequal_length,
    test_one_huge_value_in_rows_and_in_queries,
    test_rows_that_no_index_names_may_hold_nan,
    test_scales_of_any_size,
    test_slots_outside_the_cache_are_skipped,
    test_split_and_unsplit_agree,
    test_strided_inputs_and_outputs,
)
from tests.ops.test_flash_mla import test_metadata_of_september_2025
from tests.ops.test_torch_integration import test_a_layer_compiles_without_a_graph_break

pytestmark = pytest.mark.gpu
HEADS = [*range(1, 20), 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 256]
PAIRS = [(fmt, extra, products) for fmt, products in WAYS for extra in PARTNERS[fmt]]
PAIRS = [pair for pair in PAIRS if pair[2] == "exact" or pair[1] in FP8]


def formats_with(values, fewer):
    """A format and a value for each test: BASIC with all values, other formats with fewer."""
    return [(fmt, value) for fmt in FORMATS for value in (values if fmt in BASIC else fewer)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_portable_kernel_serves_hopper_too(fmt):
    for heads in (1, 16, 40):
        problem = random_problem(fmt, tokens=5, heads=heads, topk=300, blocks=30)
        with chosen_kernel("portable"):
            assert_accurate(problem.to("cuda").solve(), problem.oracle())


def workspace_of_split_tokens(fmt, tokens, heads):
    """What is left in it of a problem that is right."""
    problem = random_problem(fmt, tokens=tokens, heads=heads, topk=1100, blocks=100)
    plan = mla_backend.plan(tokens, 1100, num_heads=heads, device="cuda")
    workspace = torch.zeros(workspace_floats(plan.launch.ctas, heads), device="cuda")
    check(problem, plan=plan, workspace=workspace)
    return workspace


@pytest.mark.parametrize(("fmt", "shape"), formats_with(SPLIT_FOR_CLUSTERS, [(1, 16), (33, 8), (8, 64)]))
def test_splits_meet_in_their_cluster(fmt, shape):
    workspace = workspace_of_split_tokens(fmt, *shape)
    if torch.cuda.get_device_capability()[0] == 9 and CUDA_KERNEL == "auto":
        assert not workspace.any(), "this GPU runs fewer clusters at once than the plan supposes: right, but slow"


@pytest.mark.parametrize(("fmt", "shape"), formats_with(SPLIT_FOR_CLUSTERS, [(1, 16), (33, 8), (8, 64)]))
def test_split_tokens_are_combined_without_clusters_too(fmt, shape):
    with chosen_kernel("unclustered"):
        workspace = workspace_of_split_tokens(fmt, *shape)
    assert workspace.any()  # splits went by way of it


@pytest.mark.parametrize(("fmt", "splits"), formats_with(range(2, 18), (2, 7, 16)))
def test_a_token_has_any_number_of_splits(fmt, splits):
    problem = random_problem(fmt, tokens=3, heads=16, topk=1100, blocks=100)
    for cluster in {1, min(splits, 16)}:
        plan = planned(3, 1100, ctas=3 * splits, splits=splits, cluster=cluster, device="cuda")
        check(problem, plan=plan)


def test_kernels_are_chosen_by_name():
    with pytest.raises(ValueError, match="name must be auto, portable or unclustered; got 'fastest'"):
        library.select_cuda_kernel("fastest")


@pytest.mark.parametrize("fmt", FORMATS)
@given(data=st.data())
def test_any_problem_agrees_with_the_oracle(fmt, data):
    check(data.draw(problems(formats=(fmt,))))


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_count(fmt, products, heads):
    for tokens in (2, 20, WHOLE_TOKENS) if fmt in BASIC else (2, WHOLE_TOKENS):
        topk = 150 if fmt in BASIC else 40
        check(random_problem(fmt, tokens=tokens, heads=heads, topk=topk, products=products))


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("topk", [0, 1, 2, 63, 64, 65, 127, 128, 129, 2048, 2176, 5000, 40000])
def test_every_list_length(fmt, products, topk):
    heads = 4 if products == "exact" else 64
    check(random_problem(fmt, tokens=1, heads=heads, topk=topk, blocks=400, products=products))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("block_size", [1, 2, 61, 576])
def test_every_block_size(fmt, block_size):
    check(random_problem(fmt, tokens=2, heads=4, topk=2176, blocks=5, block_size=block_size, gap=8).poisoned())


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("gap", [16, 8, 1])
@pytest.mark.parametrize(("tokens", "heads"), FEW_AND_MANY)
def test_pages_at_any_distance(fmt, products, gap, tokens, heads):
    """A gap of 8 bytes or of 1 leaves rows that no 16-byte access may touch."""
    problem = random_problem(fmt, tokens, heads, topk=80, blocks=50, block_size=3, gap=gap, products=products)
    check(problem.poisoned())


@pytest.mark.parametrize(("fmt", "extra_fmt", "products"), PAIRS)
@pytest.mark.parametrize(("tokens", "heads"), FEW_AND_MANY)
def test_two_caches_of_any_formats_that_go_together(fmt, extra_fmt, products, tokens, heads):
    problem = random_problem(fmt, tokens=tokens, heads=heads, topk=70, blocks=4, block_size=64, products=products)
    extra = random_problem(extra_fmt, tokens=tokens, topk=80, blocks=30, block_size=3)
    lengths = torch.randint(-1, 82, (tokens,), dtype=torch.int32)
    problem = problem.but(extra_cache=extra.cache, extra_indices=extra.indices, extra_topk_length=lengths)
    check(problem.poisoned())


@pytest.mark.parametrize(("fmt", "products"), [way for way in WAYS if way[0].startswith("fp8_tensor")])
@pytest.mark.parametrize("cache_scale", [-0.0007, 30.0])
@pytest.mark.parametrize(("tokens", "heads"), FEW_AND_MANY)
def test_the_scale_of_a_whole_cache(fmt, cache_scale, tokens, heads, products):
    problem = random_problem(fmt, tokens=tokens, heads=heads, topk=150, products=products)
    grown = abs(cache_scale) / problem.cache_scale
    problem.q = (problem.q / grown).bfloat16()
    check(problem.but(cache_scale=cache_scale), 0.1 * grown)


@pytest.mark.parametrize("fmt", ["fp8_model1", "fp8_528"])
@pytest.mark.parametrize("heads", [1, 16, 17, 64])
@pytest.mark.parametrize("products", PRODUCTS)
def test_every_e4m3_number_times_any_scale(fmt, heads, products):
    form = mla_backend.FORMATS[fmt]
    scales = [10, 11, 100, 126, 127, 128, 134, 135, 200, 245, 246]  # products of all are bf16 numbers
    every_byte = torch.arange(256, dtype=torch.uint8)
    every_byte[[0x7F, 0xFF]] = 0  # NaN
    cache = form.new_cache(2, 16)
    for slot, byte in enumerate(scales):
        write_part(cache, fmt, slot, "latent", every_byte.repeat(2)[: form.latent])
        write_part(cache, fmt, slot, "scales", torch.full((form.latent // form.group,), byte))
    tokens = 44  # each four times
    q, indices = torch.zeros(tokens, heads, 512).bfloat16(), torch.arange(tokens, dtype=torch.int32).view(-1, 1) % 11
    there = q.cuda(), copy_with_gaps(cache, "cuda"), indices.cuda()
    got, _ = mla_backend.sparse_attention(*there, scale=1.0, products=products)
    numbers = every_byte.view(torch.float8_e4m3fn).double().repeat(2)[: form.latent]
    want = numbers * torch.exp2(torch.tensor(scales).double() - 127).unsqueeze(1)
    assert torch.equal(got[..., : form.latent].double().cpu(), want.repeat(4, 1).unsqueeze(1).expand(-1, heads, -1))


@pytest.mark.parametrize(
    ("way", "latent", "heads"),
    [
        *((way, latent, heads) for way in BASIC_WAYS for latent in (0.0, 1e-38, 1e-30) for heads in (3, 16, 32, 64)),
        *((way, 0.0, heads) for way in WAYS if way[0] in WITH_ROPE and way not in BASIC_WAYS for heads in (3, 64)),
    ],
)
@pytest.mark.parametrize("tokens", [2, WHOLE_TOKENS])
def test_queries_that_are_rope_alone(way, heads, tokens, latent):
    problem = random_problem(way[0], tokens=tokens, heads=heads, topk=70, products=way[1])
    problem.q[..., :512] *= latent
    problem.q[..., 512:] += 8
    check(problem)


@pytest.mark.parametrize(
    ("way", "magnitude", "heads"),
    [
        *((w, x, h) for w in BASIC_WAYS for x in (1e-8, 1e-3, 0.0078, 0.1, 20.0, 64.0, 3e4) for h in (3, 32, 64, 100)),
        *((w, x, h) for w in WAYS if w[0] not in (*BASIC, "fp16") for x in (1e-8, 3e4) for h in (3, 64)),
        *((("fp16", "exact"), x, h) for x in (1e-3, 20.0) for h in (3, 64)),
    ],
)
@pytest.mark.parametrize("holes", [False, True])
def test_cached_values_of_any_size(way, heads, magnitude, holes):
    problem = random_problem(way[0], WHOLE_TOKENS, heads, topk=200, magnitude=magnitude, products=way[1])
    if not holes:
        problem.indices = torch.randint(0, 8 * 16, (WHOLE_TOKENS, 200), dtype=torch.int32)
    check(problem, magnitude)


@pytest.mark.parametrize(
    ("fmt", "products", "heads"),
    [(*way, h) for way in WAYS for h in ((3, 32, 64, 100) if way[0] in BASIC else (3, 64))],
)
def test_rows_of_unlike_size_in_one_tile(fmt, products, heads):
    problem = random_problem(fmt, tokens=WHOLE_TOKENS, heads=heads, topk=200, products=products)
    problem.indices = torch.randint(0, 8 * 16, (WHOLE_TOKENS, 200), dtype=torch.int32)
    for i in range(0, 8, 2):
        problem.cache[i : i + 1] = random_cache(fmt, 1, 16, 0.1 / 16.0 ** (i + 1))
    check(problem)


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("heads", [16, 32, 64, 100])
@pytest.mark.parametrize("magnitude", [1e-3, 1e-7])
def test_rope_beside_latents_of_unlike_size_in_one_tile(fmt, products, heads, magnitude):
    problem = held_problem(fmt, heads, topk=200, products=products)
    for i in range(0, 30, 2):
        small = random_cache(fmt, 1, 16, magnitude)
        small.view(torch.uint8)[..., -128:] = problem.cache[i : i + 1].view(torch.uint8)[..., -128:]
        problem.cache[i : i + 1] = small
    check(problem)


def held_problem(fmt, heads, topk=700, tokens=WHOLE_TOKENS, **more):
    """One whose lists have no holes, by default with so many tokens that no kernel for few of them serves it."""
    problem = random_problem(fmt, tokens=tokens, heads=heads, topk=topk, blocks=30, **more)
    problem.indices = torch.randint(0, 30 * 16, (tokens, topk), dtype=torch.int32)
    return problem


@pytest.mark.parametrize(
    ("fmt", "products", "ctas", "heads"),
    [
        *((*way, ctas, heads) for way in BASIC_WAYS for ctas in (1, 7, None) for heads in (8, 32, 64, 100)),
        *((*way, 7, heads) for way in WAYS if way not in BASIC_WAYS for heads in (8, 64)),
    ],
)
def test_lists_without_holes(fmt, products, heads, ctas):
    problem = held_problem(fmt, heads, products=products)
    rows = {"cache_format": fmt, "products": products, "device": "cuda"}
    plan = planned(WHOLE_TOKENS, 700, ctas=ctas, num_heads=heads, **rows) if ctas else None
    check(problem, plan=plan)
    problem.indices[:, 200] = -1  # a tile with a hole between two without
    check(problem, plan=plan)


@pytest.mark.parametrize(("fmt", "heads"), [("fp8_tensor_576", 40), ("fp8_tensor_576", 100), ("fp8_tensor_512", 8)])
def test_rows_with_one_scale_lose_nothing_where_they_are_converted(fmt, heads):
    problem = held_problem(fmt, heads)
    assert_accurate(problem.to("cuda").solve(batch_invariant=True), problem.oracle())


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("heads", [8, 32, 64, 100])
@pytest.mark.parametrize("largest", [False, True])
def test_scores_that_grow_along_the_list(fmt, products, heads, largest):
    tokens = 40  # the bound is for about so many
    problem = held_problem(fmt, heads, tokens=tokens, products=products)
    problem.indices = problem.indices.sort(dim=1).values
    for block in range(30):  # 8 times as large in the end, 2^30 as much weight
        problem.cache[block : block + 1] = random_cache(fmt, 1, 16, 0.1 * 8 ** (block / 29))
    rows = {"cache_format": fmt, "products": products, "device": "cuda"}
    plan = planned(tokens, 700, ctas=tokens, splits=1, num_heads=heads, **rows)
    problem.hold(problem.to("cuda").solve(plan=plan, return_max_logits=largest), 0.8, larger_scores=8)


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("heads", [8, 32, 64, 100])
@pytest.mark.parametrize("begin", [64, 96, 128, 160, 224])
def test_scores_that_leap_within_a_tile(fmt, products, heads, begin):
    """For all heads at once, from a slot in either half of a tile on."""
    problem = held_problem(fmt, heads, topk=300, products=products)
    problem.q = problem.q.abs() / 8
    rows = random_cache(fmt, 30, 16, 0.1)
    small, large = rows[:15], rows[15:]
    latents = torch.randn(15 * 16, 512).abs().mul_(0.8).bfloat16()
    mla_backend.cache_write(latents, torch.zeros(15 * 16, 64).bfloat16(), large, torch.arange(15 * 16))
    problem.cache = torch.cat([small, large])
    problem.indices = torch.randint(0, 15 * 16, problem.indices.shape, dtype=torch.int32)
    problem.indices[:, begin:] += 15 * 16
    problem.hold(problem.to("cuda").solve(), 0.8, larger_scores=8)


def assert_nan_reaches_its_token_alone(problem, fmt, part, place, **options):
    """NaN in a row that token 5 names at this place."""
    problem.indices[problem.indices == 77] = 78
    problem.indices[5, place] = 77
    # one number, or the scale of some: 0xff is NaN in e4m3 and ue8m0, as 0xffff is in bf16 and fp16
    write_part(problem.cache, fmt, 77, part, torch.full((4 if fmt == "fp8_ds_mla" and part == "scales" else 2,), 0xFF))
    got, others = problem.to("cuda").solve(**options), torch.arange(len(problem.q)) != 5
    assert got[0][5].isnan().all() and got[1][5].isnan().all()
    problem.but(q=problem.q[others], indices=problem.indices[others]).hold([a[others.to(a.device)] for a in got])
    return got


@pytest.mark.parametrize(
    ("fmt", "products", "part"),
    [(*way, part) for way in WAYS for fmt, part in PARTS if fmt == way[0]],
)
@pytest.mark.parametrize("heads", [8, 32, 64, 100])
def test_nan_in_a_named_row_reaches_its_tokens_alone(fmt, products, part, heads):
    problem = held_problem(fmt, heads, topk=140, products=products)
    got = assert_nan_reaches_its_token_alone(problem, fmt, part, 100)
    assert got[2][5].isnan().all()


SPLIT = (*BASIC_WAYS, ("bf16_512", "exact"), ("fp8_528", "fp8"))


def split_problem(fmt, products, magnitude=MAGNITUDE):
    """One of many heads, and a plan that splits each token between three or four CTAs."""
    problem = held_problem(fmt, heads=100, tokens=20, magnitude=magnitude, products=products)
    return problem, planned(20, 700, ctas=66, num_heads=100, products=products, device="cuda")


@pytest.mark.parametrize(
    ("way", "magnitude"),
    [(way, size) for way in SPLIT for size in (1e-8, 3e4)] + [(("bf16", "exact"), 1e-30)],
)
def test_split_tokens_with_values_of_any_size(way, magnitude):
    problem, plan = split_problem(*way, magnitude)
    check(problem, magnitude, plan=plan)


@pytest.mark.parametrize(("fmt", "products"), SPLIT)
def test_nan_reaches_a_split_token_alone(fmt, products):
    problem, plan = split_problem(fmt, products)
    assert_nan_reaches_its_token_alone(problem, fmt, "latent", 600, plan=plan)


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
@pytest.mark.parametrize("heads", [8, 32, 64, 100])
@pytest.mark.parametrize("scale", [-(576**-0.5), 0.0, 1e-30])
def test_any_scale(fmt, products, heads, scale):
    check(held_problem(fmt, heads, topk=150, products=products).but(scale=scale))


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("heads", [16, 64])
def test_batch_invariant_mode_of_lists_without_holes(fmt, products, heads):
    problem = held_problem(fmt, heads, products=products).to("cuda")
    together = problem.solve(batch_invariant=True)
    alone = problem.but(q=problem.q[7:9], indices=problem.indices[7:9]).solve(batch_invariant=True)
    assert all(torch.equal(a[7:9], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cache_of_more_than_2_to_the_31_elements(fmt):
    form, rows = mla_backend.FORMATS[fmt], reference.FORMATS[fmt]
    blocks = 2**31 // (64 * form.width) + 100
    cache = form.new_cache(blocks, 64, device="cuda")
    all_bytes(cache).fill_(0xFF)
    picked = torch.tensor([0, 63, blocks * 32, blocks * 64 - 2, blocks * 64 - 1])
    small = random_cache(fmt, 5, 1)
    tokens = small[reference.token_address(rows, small, torch.arange(5))]
    cache[reference.token_address(rows, cache, picked.cuda())] = tokens.cuda()
    for heads, products in ((2, "exact"), (64, "exact"), *((64, "fp8") for _ in range(form.fp8))):
        problem = random_problem(fmt, tokens=1, heads=heads, topk=5, products=products)
        got = problem.to("cuda").but(cache=cache, indices=picked.int().view(1, 5).cuda()).solve()
        problem.but(cache=small, indices=torch.arange(5, dtype=torch.int32).view(1, 5)).hold(got)


SMALL = [
    *((1, 16, 200), (8, 16, 200), (17, 16, 200), (3, 20, 130), (17, 20, 70)),
    *((5, 8, 70), (31, 33, 70), (16, 64, 200), (34, 20, 130), (17, 64, 200)),
]


@pytest.mark.parametrize(("fmt", "shape"), formats_with(SMALL, [(8, 16, 200), (34, 20, 130), (17, 64, 200)]))
def test_small_case_of_everything(fmt, shape):
    """Every op once, small enough for compute-sanitizer (tests/support/run_compute_sanitizer.py)."""
    tokens, heads, topk = shape
    form = mla_backend.FORMATS[fmt]
    lengths, sink = torch.randint(0, topk + 1, (tokens,), dtype=torch.int32), torch.randn(heads)
    problem = random_problem(fmt, tokens=tokens, heads=heads, topk=topk, topk_length=lengths, sink=sink)
    problem.extra_cache = random_cache(PARTNERS[fmt][0], 3, 5)
    problem.extra_indices = torch.randint(-2, 16, (tokens, 9), dtype=torch.int32)
    want, on_gpu = problem.oracle(), problem.to("cuda")
    check(problem)
    if form.fp8:
        check(problem.but(extra_cache=None, extra_indices=None, products="fp8"))
    held = problem.but(
        indices=problem.indices.clamp(0, 8 * 16 - 1), topk_length=None, extra_cache=None, extra_indices=None
    )
    check(held)
    plan = planned(tokens, topk, topk_length=on_gpu.topk_length, extra_topk=9, ctas=7, num_heads=on_gpu.q.shape[1])
    assert_accurate(on_gpu.solve(plan=plan), want, score_error=score_error(problem.cache))
    halves = [
        on_gpu.but(indices=half, topk_length=None, extra_cache=None, extra_indices=None, sink=None).solve()
        for half in on_gpu.indices.split(topk // 2 + 3, dim=1)
    ]
    outs = [h[0].float() if fmt == "fp16" else h[0] for h in halves]
    combined = mla_backend.combine_partials(outs, [h[1] for h in halves])
    plain = problem.but(topk_length=None, extra_cache=None, extra_indices=None, sink=None)
    assert_accurate(combined, plain.oracle()[:2], score_error=score_error(problem.cache))
    slots = torch.arange(5, device="cuda")
    rope = torch.randn(5, form.rope, device="cuda") if form.rope else None
    mla_backend.cache_write(torch.randn(5, form.latent, device="cuda"), rope, on_gpu.cache, slots)
    want_rows = mla_backend.cache_gather(copy_with_gaps(on_gpu.cache, "cpu"), slots.cpu())
    assert torch.equal(mla_backend.cache_gather(on_gpu.cache, slots).cpu(), want_rows)
    positions = torch.randint(-3, 40, (tokens, topk), dtype=torch.int32, device="cuda")
    table = torch.arange(6, dtype=torch.int32, device="cuda").view(2, 3)
    requests = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    got = mla_backend.convert_indices(positions, table, requests, 16, compact=True)
    want = mla_backend.convert_indices(positions.cpu(), table.cpu(), requests.cpu(), 16, compact=True)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
