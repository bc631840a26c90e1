"""The contract of sparse_attention, as properties, against the oracle. tests/gpu runs those with a `device` again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mla_backend
from mla_backend import reference
from mla_backend.plan import PRODUCTS
from plans import planned
from problems import (
    BASIC,
    BASIC_WAYS,
    FORMATS,
    FP8,
    PARTNERS,
    PARTS,
    WAYS,
    WITH_ROPE,
    apart,
    assert_accurate,
    copy_with_gaps,
    problems,
    random_cache,
    random_problem,
    score_error,
    with_row_gaps,
    write_part,
)
from staged_problems import FINITE, cache_with_scales


@given(problem=problems())
def test_any_problem_agrees_with_the_oracle(cpu_kernel, problem):
    problem.check()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("heads", [1, 2, 3, 8, 15, 16, 17, 31, 33, 48, 64, 65, 100, 127, 128, 129, 200, 256])
def test_every_head_count(fmt, heads):
    random_problem(fmt, tokens=1, heads=heads, topk=150).check()


@pytest.mark.parametrize("fmt", BASIC)
@pytest.mark.parametrize("topk", [0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 2048, 2176, 5000])
def test_every_list_length(cpu_kernel, fmt, topk):
    random_problem(fmt, tokens=1, heads=4, topk=topk, blocks=40).check()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("block_size", "topk"), [(1, 20), (2, 20), (61, 200), (64, 2176), (69, 20), (256, 20), (576, 20)]
)
def test_every_block_size(fmt, block_size, topk):
    random_problem(fmt, tokens=1, heads=4, topk=topk, blocks=3, block_size=block_size, gap=8).poisoned().check()


@pytest.mark.parametrize(("fmt", "extra_fmt"), [(fmt, extra) for fmt in FORMATS for extra in PARTNERS[fmt]])
def test_two_caches_of_any_formats_that_go_together(cpu_kernel, fmt, extra_fmt):
    problem = random_problem(fmt, tokens=2, heads=20, topk=150, blocks=4, block_size=64)
    extra = random_problem(extra_fmt, tokens=2, topk=160, blocks=30, block_size=2)
    lengths = torch.tensor([160, 77], dtype=torch.int32)
    problem.but(extra_cache=extra.cache, extra_indices=extra.indices, extra_topk_length=lengths).check()


@pytest.mark.parametrize("fmt", WITH_ROPE)
@pytest.mark.parametrize("latent", [0.0, 1e-38, 1e-30])
def test_queries_that_are_rope_alone(cpu_kernel, fmt, latent):
    problem = random_problem(fmt, tokens=3, heads=16, topk=70)
    problem.q[..., :512] *= latent
    problem.q[..., 512:] += 8
    problem.check()


@pytest.mark.parametrize("fmt", BASIC)
def test_the_largest_queries_that_the_contract_names(cpu_kernel, fmt):
    """All of one sign, on rows whose every fp8 number is the largest."""
    largest = 2.0**112
    problem = random_problem(fmt, tokens=1, heads=16, topk=64, scale=1 / (10 * largest))
    values = torch.full((128, 576), 0.1)
    mla_backend.cache_write(values[:, :512], values[:, 512:], problem.cache, torch.arange(128))
    problem.but(q=torch.full_like(problem.q, largest)).check()


@pytest.mark.parametrize(("fmt", "products"), WAYS)
def test_rows_that_no_index_names_may_hold_nan(device, cpu_kernel, fmt, products, shape):
    tokens, heads = shape
    problem = random_problem(fmt, tokens=tokens, heads=heads, topk=60, blocks=300, products=products)
    problem.topk_length = torch.randint(0, 61, (tokens,), dtype=torch.int32)
    problem.poisoned().check(device=device)


@pytest.mark.parametrize(("fmt", "part"), PARTS)
def test_named_nan_reaches_only_the_tokens_that_name_it(cpu_kernel, fmt, part):
    problem = random_problem(fmt, tokens=2, heads=3, topk=10)
    problem.indices[:] = torch.arange(20, dtype=torch.int32).view(2, 10)
    # one number, or the scale of some: 0xff is NaN in e4m3 and ue8m0, as 0xffff is in bf16 and fp16
    write_part(problem.cache, fmt, 3, part, torch.full((4 if fmt == "fp8_ds_mla" and part == "scales" else 2,), 0xFF))
    out, lse, largest = problem.solve()
    assert out[0].isnan().all() and lse[0].isnan().all() and largest[0].isnan().all()
    assert not out[1].isnan().any() and not lse[1].isnan().any() and not largest[1].isnan().any()


@pytest.mark.parametrize("fmt", FP8)
@pytest.mark.parametrize("products", PRODUCTS)
def test_every_e4m3_code_is_decoded_as_torch_decodes_it(device, cpu_kernel, fmt, shape, products):
    # One slot a token: the weight is 1, so out shows the row itself, and bf16 holds every e4m3 number.
    (tokens, heads), form = shape, mla_backend.FORMATS[fmt]
    every_byte = torch.arange(256, dtype=torch.uint8)
    numbers = every_byte.view(torch.float8_e4m3fn).float()
    cache = form.new_cache(2, 1)
    for slot in range(2):
        if form.scale == "ue8m0":
            write_part(cache, fmt, slot, "scales", torch.full((form.latent // form.group,), 127))
        elif form.scale == "fp32":
            write_part(cache, fmt, slot, "scales", torch.ones(4).view(torch.uint8))
    write_part(cache, fmt, 0, "latent", torch.where(numbers.isnan(), 0, every_byte).repeat(2)[: form.latent])
    write_part(cache, fmt, 1, "latent", torch.tensor([0x7F]))

    q = torch.zeros(tokens, heads, form.head_dim).bfloat16()
    indices = torch.arange(tokens, dtype=torch.int32).unsqueeze(1) % 2
    there = q.to(device), copy_with_gaps(cache, device), indices.to(device)
    out, _ = mla_backend.sparse_attention(*there, scale=1.0, products=products)
    got, want = out[::2, :, : form.latent].float().cpu(), numbers.nan_to_num(0.0).repeat(2)[: form.latent]
    assert torch.equal(got, want.expand_as(got))
    assert out[1::2].isnan().any(-1).all(), "0x7f is NaN"


@pytest.mark.parametrize("fmt", ["fp8_model1", "fp8_528"])
@pytest.mark.parametrize("heads", [1, 16, 17, 64])
@pytest.mark.parametrize("products", PRODUCTS)
def test_every_scale_byte_is_a_power_of_two(device, cpu_kernel, fmt, heads, products):
    form = mla_backend.FORMATS[fmt]
    groups = form.latent // form.group
    cache = form.new_cache(256, 1)
    for byte in range(256):
        write_part(cache, fmt, byte, "latent", torch.full((form.latent,), 0xB8))  # -1
        write_part(cache, fmt, byte, "scales", (torch.arange(groups) + byte).clamp(max=254).to(torch.uint8))
    q, indices = torch.zeros(256, heads, 512).bfloat16(), torch.arange(256, dtype=torch.int32).view(256, 1)
    there = q.to(device), copy_with_gaps(cache, device), indices.to(device)
    got, _ = mla_backend.sparse_attention(*there, scale=1.0, products=products)
    out = got[..., : form.latent].double().cpu()
    bytes_ = (torch.arange(256).unsqueeze(1) + torch.arange(groups)).clamp(max=254)
    want = -torch.exp2(bytes_.double() - 127).repeat_interleave(form.group, 1).unsqueeze(1).expand_as(out)
    small = want > -(2.0**-126)  # subnormal numbers may count as zeros, as where a CPU multiplies bf16
    assert torch.equal(out[~small], want[~small]) and (out[small] <= 0).all() and (out[small] >= want[small]).all()


@pytest.mark.parametrize(
    ("fmt", "magnitude"),
    [
        *((fmt, magnitude) for fmt in BASIC for magnitude in (1e-8, 1e-3, 0.1, 20.0, 3e4)),
        *((fmt, magnitude) for fmt in FORMATS if fmt not in (*BASIC, "fp16") for magnitude in (1e-8, 3e4)),
        *(("fp16", magnitude) for magnitude in (1e-3, 20.0)),
    ],
)
def test_cached_values_of_any_size(cpu_kernel, fmt, magnitude):
    random_problem(fmt, tokens=2, heads=20, topk=150, magnitude=magnitude).check(magnitude)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_unlike_size_in_one_tile(cpu_kernel, fmt):
    problem = random_problem(fmt, tokens=2, heads=20, topk=200)
    for i in range(0, 8, 2):
        problem.cache[i : i + 1] = random_cache(fmt, 1, 16, 0.1 / 16.0 ** (i + 1))
    problem.check()


def check_spread(problem, device, larger_scores=4.0):
    """With scores up to 4, whatever the sizes of queries and rows."""
    slots = torch.arange(problem.cache.shape[0] * problem.cache.shape[1])
    rows = reference.cache_rows(problem.cache, slots, scale=problem.cache_scale)[0].double()
    problem.scale = 4 / float((problem.q.double() @ rows.T).abs().max())
    problem.check(float(rows[:, :512].abs().max()) / 4, device, larger_scores=larger_scores)


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("scales", FINITE)
def test_scales_of_any_size(device, cpu_kernel, scales, products, shape):
    problem = random_problem("fp8_ds_mla", *shape, topk=90, products=products)
    check_spread(problem.but(cache=cache_with_scales(scales, 8, 16)), device)


@pytest.mark.parametrize(("fmt", "products"), WAYS)
def test_one_huge_value_in_rows_and_in_queries(device, cpu_kernel, fmt, products, shape):
    problem, rows = random_problem(fmt, *shape, topk=90, products=products), reference.FORMATS[fmt]
    kv_c, k_pe = torch.randn(60, rows.latent), torch.randn(60, rows.rope)
    kv_c[:, 7], problem.q[..., 300] = 2000, problem.q[..., 300] * 2**10
    reference.cache_write(kv_c / 10, k_pe / 10, problem.cache, torch.arange(60), scale=problem.cache_scale)
    check_spread(problem, device, larger_scores=8.0)  # a small query that meets the huge value may be off by 2^-8


@pytest.mark.parametrize("fmt", FP8)
def test_the_model_of_fp8_products_errs_only_where_e4m3_rounds(fmt):
    problem, rows = random_problem(fmt, tokens=3, heads=40, topk=100, products="fp8"), reference.FORMATS[fmt]
    values = torch.randn(128, rows.latent), torch.randn(128, rows.rope), problem.cache, torch.arange(128)
    reference.cache_write(*values, power_of_two=True, scale=problem.cache_scale)

    def change(**more):
        model = problem.but(**more)
        results = zip(model.oracle(), model.but(products="exact").oracle(), strict=True)
        return [(a - b).norm() / b.norm() for a, b in results]

    out, lse, largest = change(scale=0.1 * problem.scale)
    assert 0.02 < out < 0.06 and 0 < lse < 0.01 and 0 < largest < 0.06
    assert max(change(q=problem.q.sign())[1:]) == 0, "queries that e4m3 holds"
    assert change(scale=0.0)[0] < 1e-12, "weights that e4m3 holds"


@pytest.mark.parametrize("bad", [-1, -(2**31), 8 * 16, 2**31 - 1])
def test_slots_outside_the_cache_are_skipped(device, cpu_kernel, bad):
    problem = random_problem(tokens=2, heads=3, topk=40)
    problem.indices = torch.randint(0, 8 * 16, (2, 40), dtype=torch.int32)
    mixed = torch.full((2, 80), bad, dtype=torch.int32)
    mixed[:, ::2] = problem.indices
    got = problem.but(indices=mixed).to(device).solve()
    assert_accurate(got, problem.oracle(), score_error=score_error(problem.cache, device))


EMPTY = {
    "topk 0": lambda p: p.but(indices=p.indices[:, :0]),
    "all invalid": lambda p: p.but(indices=torch.full_like(p.indices, -1)),
    "no blocks": lambda p: p.but(cache=p.cache[:0]),
    **{f"length {n}": lambda p, n=n: p.but(topk_length=torch.full((3,), n, dtype=torch.int32)) for n in (0, -7)},
}


@pytest.mark.parametrize("empty", EMPTY)
def test_nothing_to_attend_to_gives_zero_and_minus_infinity(cpu_kernel, empty):
    problem = random_problem(tokens=3, heads=4, topk=20)
    problem.sink = torch.tensor([0.0, torch.inf, -torch.inf, 1.0])
    out, lse, largest = EMPTY[empty](problem).solve()
    assert (out == 0).all() and (lse == -torch.inf).all() and (largest == -torch.inf).all()


@pytest.mark.parametrize(("fmt", "products"), BASIC_WAYS)
def test_lists_of_very_unequal_length(device, cpu_kernel, fmt, products):
    heads = 3 if products == "exact" else 40
    problem = random_problem(fmt, tokens=40, heads=heads, topk=900, blocks=100, products=products)
    problem.topk_length = torch.zeros(40, dtype=torch.int32)
    problem.topk_length[[3, 17, 18, 39]] = torch.tensor([900, 1, 899, 500], dtype=torch.int32)
    problem.check(device=device)


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("gap", [32, 33])
def test_strided_inputs_and_outputs(device, cpu_kernel, fmt, products, gap):
    heads = 5 if products == "exact" else 40
    problem = random_problem(fmt, tokens=3, heads=heads, topk=33, products=products).to(device)
    form = mla_backend.FORMATS[fmt]
    q = apart(problem.q.transpose(0, 1).contiguous().transpose(0, 1), fmt, gap)  # head-major, as vLLM has them
    cache = with_row_gaps(problem.cache, fmt, gap)
    indices = torch.full((3, 50), 10**6, dtype=torch.int32, device=device)
    indices[:, :33] = problem.indices
    whole = torch.full((heads, 3, 568 + gap), torch.nan, device=device).to(form.number).transpose(0, 1)
    lse = torch.full((heads, 3), torch.nan, device=device).t()
    strided = problem.but(q=q, cache=cache, indices=indices[:, :33])
    got = strided.solve(out=whole[..., gap : gap + 512], lse=lse)
    problem.to("cpu").hold(got)
    assert whole[..., :gap].isnan().all() and whole[..., gap + 512 :].isnan().all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cache_at_an_odd_address(device, cpu_kernel, fmt):
    problem = random_problem(fmt, tokens=2, heads=20, topk=150)
    shifted = torch.empty(problem.cache.numel() + 1, dtype=problem.cache.dtype)[1:].view(problem.cache.shape)
    problem.but(cache=shifted.copy_(problem.cache)).check(device=device)


def test_a_dimension_of_one_for_the_kv_head_is_accepted():
    problem = random_problem()
    a, b = problem.solve(), problem.but(cache=problem.cache.unsqueeze(2)).solve()
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("fmt", FP8)
def test_an_fp8_cache_may_come_as_any_byte(fmt, dtype):
    problem = random_problem(fmt)
    assert torch.equal(problem.solve()[0], problem.but(cache=problem.cache.view(dtype)).solve()[0])


@pytest.mark.parametrize(("fmt", "products"), WAYS)
def test_a_sink_scales_the_output_and_leaves_lse(device, cpu_kernel, fmt, products, shape):
    tokens, heads = shape
    problem = random_problem(fmt, tokens=tokens, heads=heads, topk=150, products=products)
    without = problem.to(device).solve()
    problem.sink = torch.randn(heads) * 3
    problem.sink[:4] = torch.tensor([torch.inf, -torch.inf, 0.0, 5.0])
    problem.check(device=device)
    out, lse, _ = problem.to(device).solve()
    assert (out[:, 0] == 0).all() and torch.equal(out[:, 1], without[0][:, 1]) and torch.equal(lse, without[1])


@pytest.mark.parametrize("fmt", BASIC)
@pytest.mark.parametrize("scale", [0.0, -0.05, 3.0])
def test_any_scale(cpu_kernel, fmt, scale):
    random_problem(fmt, heads=3, topk=500, scale=scale).check()


@given(problem=problems(max_tokens=3, max_topk=600), threads=st.sampled_from([1, 2, 3]))
def test_split_and_unsplit_agree(device, cpu_kernel, problem, threads):
    if device == "cpu":
        torch.set_num_threads(threads)
    here, problem = problem, problem.to(device)
    (tokens, topk), heads = problem.indices.shape, problem.q.shape[1]
    extra = 0 if problem.extra_indices is None else problem.extra_indices.shape[1]
    more = {"topk_length": problem.topk_length, "extra_topk_length": problem.extra_topk_length}
    more |= {"extra_topk": extra, "products": problem.products}
    for ctas in (1, 2, 7, 64, 264):
        here.hold(problem.solve(plan=planned(tokens, topk, ctas=ctas, num_heads=heads, device=device, **more)))


@pytest.mark.parametrize("fmt", BASIC)
def test_the_same_inputs_give_the_same_bits(cpu_kernel, fmt):
    problem = random_problem(fmt, tokens=3, heads=40, topk=700, blocks=60)
    first = problem.solve()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(first, problem.solve(), strict=True))


@pytest.mark.parametrize(("fmt", "products"), WAYS)
@pytest.mark.parametrize("heads", [3, 16, 24, 128])
def test_batch_invariant_mode_gives_a_token_the_same_bits_in_any_batch(device, cpu_kernel, fmt, products, heads):
    problem = random_problem(fmt, tokens=9, heads=heads, topk=400, blocks=40, products=products).to(device)
    problem.topk_length = torch.tensor([400, 1, 399, 0, 130, 400, 64, 300, 5], dtype=torch.int32, device=device)
    together = problem.solve(batch_invariant=True)
    for begin, end in ((0, 1), (1, 3), (3, 9), (4, 5)):
        alone = problem.but(
            q=problem.q[begin:end], indices=problem.indices[begin:end], topk_length=problem.topk_length[begin:end]
        ).solve(batch_invariant=True)
        assert all(torch.equal(a[begin:end], b) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("fmt", BASIC)
def test_a_plan_that_fits_is_followed(cpu_kernel, fmt):
    # Split elsewhere, sums are rounded elsewhere: of 128 numbers some differ in their last bit.
    problem = random_problem(fmt, tokens=2, heads=64, topk=3000, blocks=100)
    whole, split = (problem.solve(plan=planned(2, 3000, ctas=ctas)) for ctas in (1, 9))
    assert torch.equal(whole[1], problem.solve(batch_invariant=True)[1])
    assert not torch.equal(whole[1], split[1])


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_cache_of_more_than_2_to_the_31_elements(fmt):
    width = mla_backend.FORMATS[fmt].width
    row_gap = 2**22  # a slot every 4 M elements, most of which are never touched
    rows = 2**31 // row_gap + 40
    backing = torch.empty(rows * row_gap, dtype=mla_backend.FORMATS[fmt].dtype)
    cache = backing.as_strided((rows, 1, width), (row_gap, row_gap, 1))
    picked = torch.tensor([0, 1, rows // 2, rows - 30, rows - 2, rows - 1])
    small = random_cache(fmt, len(picked), 1)
    cache[picked] = small
    problem = random_problem(fmt, tokens=1, heads=2, topk=6)
    want = problem.but(cache=small, indices=torch.arange(6, dtype=torch.int32).view(1, 6)).solve()
    got = problem.but(cache=cache, indices=picked.int().view(1, 6)).solve()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
