"""Every wrong input is refused with an error that names the argument."""

import copy
import dataclasses
import math

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import mla_backend
import right_calls as right
from dense_problems import random_dense
from mla_backend import Launch, Plan, flash_mla, library


def _dense_into_its_queries():
    problem = random_dense("bf16", (40, 20), 3, 5)
    problem.solve(out=problem.q[..., :512])


def second(cache):
    return {"extra_k_cache": cache, "extra_indices_in_kvcache": right.zeros(2, 1, 6)}


def mask_elsewhere(mask):
    return dataclasses.replace(mla_backend.flex_mask(mask), blocks=right.zeros(1, 1, 1, 1).to("meta"))


def order_of(queries, rows):
    return mla_backend.backward_order(right.zeros(queries, 10), rows)


INT = torch.int32
MEMORY = torch.zeros(20 * 576).bfloat16()

WRONG = {
    torch.Tensor: {
        "no tensor": (lambda x: 5, TypeError),
        "another dtype": (lambda x: x.long() if x.dtype == INT else x.double(), ValueError),
        "a dimension more": (lambda x: x[None], ValueError),
        "a dimension less": (lambda x: x[0] if x.dim() > 1 else x[None], ValueError),
        "another width": (lambda x: torch.cat([x, x], -1) if x.dim() > 1 else x[None], ValueError),
        "another device": (lambda x: x.to("meta"), ValueError),
        "another length": (lambda x: torch.cat([x, x]), ValueError),
    },
    bool: {"text": (lambda x: "no", TypeError), "None": (lambda x: None, TypeError)},
    int: {"text": (lambda x: "x", TypeError), "no int": (lambda x: 1.5, TypeError)},
    float: {"text": (lambda x: "x", TypeError), "NaN": (lambda x: math.nan, ValueError)},
}
FREE = {
    "another length": ("cache", "extra_cache", "k_cache", "kv", "block_table", "cos_sin", "index_cos_sin", "workspace"),
    "another width": ("block_table", "indices", "extra_indices", "scores", "chosen"),
}
"""Arguments that may be of any."""
SHARED = ("another device", "another length")
"""What two tensors may disagree in: then either may be called wrong."""
STAGED = (mla_backend.stage_rows, "out", "another length")
HAVE_GRADIENTS = ("sparse_mla", "flex_mla", "flash_attn_varlen")


@pytest.mark.parametrize("call", list(right.complete_calls()), ids=lambda call: call.func.__name__)
def test_each_argument_is_held_to_its_type_and_named(call):
    call()
    known = {name: value for name, value in call.keywords.items() if type(value) in WRONG and name != "head_dim_v"}
    for name, value in known.items():
        for what, (change, kind) in WRONG[type(value)].items():
            if name in FREE.get(what, ()) or (call.func, name, what) == STAGED:
                continue
            names = "|".join(call.keywords) if name in ("positions", "out", "outs") or what in SHARED else name
            with pytest.raises(kind, match=rf"^({names})\b.* must .*(got|on (cpu|meta)|known format|shapes change)"):
                call(**{name: change(value)})
        has_gradient = call.func.__name__.startswith(HAVE_GRADIENTS)
        if type(value) is torch.Tensor and value.is_floating_point() and not has_gradient:
            leaf = value.detach().clone().requires_grad_()
            with pytest.raises(ValueError, match=f"^{name} must be without requires_grad"):
                call(**{name: leaf})
            with torch.no_grad():
                call(**{name: leaf})


def wrong_values(value):
    """Of other types, dtypes, shapes, layouts and devices."""
    yield from (None, "x", 5, -1, 1.5, torch.nan, True, [], object(), 2**63)
    yield from map(torch.zeros, ((), 3, 0))
    if isinstance(value, torch.Tensor):
        others = torch.float32, torch.float16, torch.int64, torch.int16, torch.bool, torch.complex64, torch.uint16
        yield from map(value.to, (*others, "meta"))
        yield from (value[:0], value[:1], value[0], torch.cat([value, value]), value.flatten(), value[..., :0])
        yield from (value.unsqueeze(0), value.unsqueeze(-1), value.transpose(0, -1))
        yield value.flatten()[:1].expand(value.shape)
        yield torch.quantize_per_tensor(value.float(), 0.1, 0, torch.qint8)
        yield torch.nested.nested_tensor([value.float()])
        if value.dtype != torch.float8_e4m3fn:
            yield value.to_sparse()


@pytest.mark.parametrize("call", [*right.complete_calls(), *right.drop_in_calls()], ids=lambda call: call.func.__name__)
def test_what_is_wrong_raises_a_value_or_type_error_that_says_what_must_be(call):
    copy.deepcopy(call)()
    for name, value in call.keywords.items():
        for wrong in wrong_values(value):
            try:
                copy.deepcopy(call)(**{name: wrong})
            except (ValueError, TypeError) as error:
                assert " must " in str(error), f"{name}: {error}"


LAUNCH = Launch("cpu", 1, 0, 1, 0, 2)
# fmt: off
CASES = {
    "q is no tensor": (right.attention(q=[[1.0]]), ValueError, r"q must be a tensor .* pair .*got 1 tensors"),
    "q is a pair of lists": (right.attention(q=([1], [2])), TypeError, r"q_nope must be a torch.Tensor; got list"),
    "q is not dense": (right.attention(q=lambda q: q.repeat_interleave(2, -1)[..., ::2]), ValueError, r"q must be dense in its last dimension"),
    "q has no heads": (right.attention(q=lambda q: q[:, :0]), ValueError, r"q must be of 1 to 256 heads"),
    "q has 257 heads": (right.attention(q=torch.zeros(2, 257, 576).bfloat16()), ValueError, r"q must be of 1 to 256 heads"),
    "q is sparse": (right.attention(q=torch.eye(3).to_sparse()), TypeError, r"^q must be a dense tensor; got one of torch.sparse_coo"),
    "q_nope is 576 wide": (right.split_q(nope=lambda x: torch.zeros(2, 3, 576).bfloat16()), ValueError, r"q_nope must be .*\[T, H, 512\]"),
    "q_rope is 32 wide": (right.split_q(rope=lambda x: x[..., :32]), ValueError, r"q_rope must be .*\[T=2, H=3, 64\]; got bfloat16 \[2, 3, 32\]"),
    "q_rope has other heads": (right.split_q(rope=lambda x: x[:, :2]), ValueError, r"q_rope must be .*H=3"),
    "cache has 2 KV heads": (right.attention(cache=lambda c: torch.stack([c, c], 2)), ValueError, r"cache must be .*\[8, 16, 2, 656\]"),
    "cache has blocks of 0": (right.attention(cache=lambda c: c[:, :0]), ValueError, r"cache must be of a block size of 1 or more"),
    "q of 512 for rows of 576": (right.attention("bf16", q=lambda q: q[..., :512]), ValueError, r"^q must be bfloat16 \[T, H, 576\]; got bfloat16 \[2, 3, 512\]"),
    "q of 576 for rows of 512": (right.attention("fp8_model1", q=torch.zeros(2, 3, 576).bfloat16()), ValueError, r"^q must be bfloat16 \[T, H, 512\]; got bfloat16 \[2, 3, 576\]"),
    "q is fp16 for bf16 rows": (right.attention("bf16", q=lambda q: q.half()), ValueError, r"^q must be bfloat16 \[T, H, 576\]; got float16"),
    "q is a pair for rows without rope": (right.attention("bf16_512", q=(torch.zeros(2, 3, 448).bfloat16(), torch.zeros(2, 3, 64).bfloat16())), ValueError, r"^q must be one tensor with bf16_512 rows; got a pair"),
    "out is bf16 for fp16 rows": (right.attention("fp16", out=torch.zeros(2, 3, 512).bfloat16()), ValueError, r"^out must be float16 .*got bfloat16"),
    "cache_format is unknown": (right.attention(cache_format="fp8"), ValueError, r"^cache_format must be None or one of bf16, fp16, fp8_ds_mla, bf16_512, fp8_model1, fp8_528, fp8_tensor_576, fp8_tensor_512, nvfp4_352; got 'fp8'"),
    "extra_cache_format is unknown": (right.attention(with_extra=True, extra_cache_format="fp8"), ValueError, r"^extra_cache_format must be None or one of .*got 'fp8'"),
    "cache_format does not fit": (right.attention(cache_format="fp8_model1"), ValueError, r"^cache must be \[blocks, block_size, width\].* of fp8_model1 \(584 bytes\), where bytes are uint8, int8 or float8_e4m3fn; got uint8 \[8, 16, 656\]"),
    "extra_cache_format does not fit": (right.attention(with_extra=True, extra_cache_format="bf16"), ValueError, r"^extra_cache must be \[blocks, block_size, width\].* of bf16 \(576 bfloat16\).*got uint8"),
    "cache_scale without a tensor's scale": (right.attention(cache_scale=0.5), ValueError, r"^cache_scale must be 1 with fp8_ds_mla rows; got 0.5"),
    "cache_scale is NaN": (right.attention("fp8_tensor_576", cache_scale=float("nan")), ValueError, r"^cache_scale must be a finite number; got nan"),
    "cache_scale is 0": (right.attention("fp8_tensor_576", cache_scale=0.0), ValueError, r"^cache_scale must be other than 0; got 0"),
    "scales too large together": (right.attention("fp8_tensor_576", scale=1e30, cache_scale=1e30), ValueError, r"^scale \* cache_scale must be a finite number; got 1e\+60"),
    "products are none there are": (right.attention(products="fast"), ValueError, r"^products must be one of exact, fp8; got 'fast'"),
    "products are no text": (right.attention(products=True), TypeError, r"^products must be a str; got bool"),
    "products of bf16 rows": (right.attention("bf16", products="fp8"), ValueError, r"^products must be 'exact' with bf16 rows, whose latent values are not e4m3; got 'fp8'"),
    "products of staged rows": (right.attention(cache=mla_backend.STAGED.new_cache(2, 4), products="fp8"), ValueError, r"^products must be 'exact' with staged rows"),
    "products with a second cache of bf16": (right.attention("fp8_model1", with_extra=True, extra_cache=torch.zeros(2, 4, 512).bfloat16(), products="fp8"), ValueError, r"^products must be 'exact' with bf16_512 rows"),
    "products of dense bf16 rows": (right.dense(products="fp8"), ValueError, r"^products must be 'exact' with bf16 rows"),
    "plan for products of bf16 rows": (lambda: mla_backend.plan(1, 5, cache_format="bf16", products="fp8"), ValueError, r"^products must be 'exact' with bf16 rows"),
    "cache rows are apart where pages must be whole": (right.attention("fp8_model1", cache=torch.zeros(2, 4, 600, dtype=torch.uint8)[..., :584]), ValueError, r"^cache must be in pages without gaps \(stride 584 in dimension 1\); got stride 600"),
    "cache rows overlap": (right.attention("bf16_512", cache=torch.zeros(9999).bfloat16().as_strided((2, 4, 512), (2048, 500, 1))), ValueError, r"^cache must be of rows that do not overlap \(stride 512 or more in dimension 1\); got stride 500"),
    "extra_cache of 512 with rows of 576": (right.attention("bf16", with_extra=True, extra_cache=torch.zeros(2, 4, 512).bfloat16()), ValueError, r"^extra_cache must be of a format that goes with bf16; got bf16_512"),
    "extra_cache of fp16 with bf16": (right.attention("bf16", with_extra=True, extra_cache=torch.zeros(2, 4, 576).half()), ValueError, r"^extra_cache must be of a format that goes with bf16; got fp16"),
    "extra_cache with a tensor's scale": (right.attention("bf16", with_extra=True, extra_cache=torch.zeros(2, 4, 576, dtype=torch.uint8)), ValueError, r"^extra_cache must be of a format that goes with bf16; got fp8_tensor_576"),
    "indices are not dense": (right.attention(indices=lambda i: i[:, ::2]), ValueError, r"indices must be dense in its last dimension"),
    "scale is missing": (lambda: mla_backend.sparse_attention(None, None, None), TypeError, r"scale"),
    "scale is infinite": (right.attention(scale=float("inf")), ValueError, r"^scale must be a finite number; got inf$"),
    "scale is no fp32 number": (right.attention(scale=1e39), ValueError, r"^scale must be a finite number; got 1e\+39$"),
    "extra_cache without indices": (right.attention(extra_cache=lambda _: torch.zeros(1, 1, 576).bfloat16()), ValueError, r"extra_indices must be given"),
    "extra_indices without cache": (right.attention(extra_indices=torch.zeros(2, 1, dtype=INT)), ValueError, r"extra_cache must be given"),
    "extra_topk_length without cache": (right.attention(extra_topk_length=torch.zeros(2, dtype=INT)), ValueError, r"extra_topk_length must be None"),
    "extra_cache_format without cache": (right.attention(extra_cache_format="bf16"), ValueError, r"^extra_cache_format must be None without extra_cache"),
    "plan is of 7 columns": (right.attention(plan=Plan(torch.zeros(2, 7, dtype=INT), LAUNCH)), ValueError, r"plan must be int32 \[ctas, 8\]"),
    "plan has no entries": (right.attention(plan=Plan(torch.zeros(0, 8, dtype=INT), LAUNCH)), ValueError, r"plan must be a contiguous table of one entry or more"),
    "plan is a tuple": (right.attention(plan=(1, 2)), TypeError, r"plan must be what mla_backend.plan returned; got tuple"),
    "plan for -1 tokens": (lambda: mla_backend.plan(-1, 5), ValueError, r"num_tokens must be 0 or more; got -1"),
    "plan for 1.5 tokens": (lambda: mla_backend.plan(1.5, 5), TypeError, r"num_tokens must be an int; got float"),
    "plan for no CTAs": (lambda: mla_backend.plan(1, 5, launch=LAUNCH._replace(ctas=0)), ValueError, r"launch.ctas must be 1 or more; got 0"),
    "plan of a launch of other CTAs": (right.attention(plan=Plan(torch.zeros(3, 8, dtype=INT), LAUNCH)), ValueError, r"plan.launch must be a Launch for a table of 3 CTAs"),
    "plan of an unknown kernel": (lambda: mla_backend.plan(1, 5, launch=LAUNCH._replace(kernel="fast")), ValueError, r"launch.kernel must be one of"),
    "plan of a launch that is a number": (lambda: mla_backend.plan(1, 5, launch=4), TypeError, r"launch must be a Launch; got int"),
    "plan for more tokens than are counted": (lambda: mla_backend.plan(2**63, 5), ValueError, r"^num_tokens must be 9223372036854775807 or less"),
    "scale is larger than any float": (right.attention(scale=10**400), ValueError, r"^scale must be a number that fits into 64 bits"),
    "plan on a GPU that is not there": (lambda: mla_backend.plan(1, 5, device="cuda:99"), ValueError, r"^device must be an available device; got 'cuda:99'"),
    "plan on a number": (lambda: mla_backend.plan(1, 5, device=1.5), TypeError, r"^device must be an available device; got 1.5"),
    "a cache on a device of no kind": (lambda: mla_backend.FORMATS["bf16"].new_cache(1, 1, "gpu"), ValueError, r"^device must be an available device; got 'gpu'"),
    "plan for rows that are none": (lambda: mla_backend.plan(1, 5, cache_format="fp4"), ValueError, r"cache_format must be None or one of .*; got 'fp4'"),
    "plan with other lengths": (lambda: mla_backend.plan(3, 5, topk_length=torch.zeros(2, dtype=INT)), ValueError, r"topk_length must be int32 \[T=3\]"),
    "plan into fp32": (lambda: mla_backend.plan(3, 5, out=Plan(torch.zeros(2, 8), LAUNCH)), ValueError, r"out must be int32 \[ctas, 8\]"),
    "plan into a tensor": (lambda: mla_backend.plan(3, 5, out=torch.zeros(2, 8, dtype=INT)), TypeError, r"out must be what mla_backend.plan returned; got Tensor"),
    "kv_c is fp16 for bf16 rows": (right.write("bf16", kv_c=torch.zeros(3, 512).half()), ValueError, r"kv_c must be bfloat16 or float32 \[N, 512\]; got float16"),
    "kv_c is bf16 for fp16 rows": (right.write("fp16", kv_c=torch.zeros(3, 512).bfloat16()), ValueError, r"kv_c must be float16 or float32 \[N, 512\]; got bfloat16"),
    "kv_c is 512 wide for fp8_model1": (right.write("fp8_model1", kv_c=torch.zeros(3, 512)), ValueError, r"kv_c must be bfloat16 or float32 \[N, 448\]; got float32 \[3, 512\]"),
    "k_pe is missing": (right.write(k_pe=None), ValueError, r"^k_pe must be given with fp8_ds_mla rows; got nothing"),
    "k_pe without rope": (right.write("fp8_528", k_pe=torch.zeros(3, 64)), ValueError, r"^k_pe must be None with fp8_528 rows; got float32 \[3, 64\]"),
    "write: format is unknown": (right.write(format="fp8"), ValueError, r"^format must be None or one of bf16, .*got 'fp8'"),
    "write: format does not fit": (right.write(format="fp8_528"), ValueError, r"^cache must be .* of fp8_528 .*got uint8 \[2, 4, 656\]"),
    "write: scale of no tensor's": (right.write(scale=2.0), ValueError, r"^scale must be 1 with fp8_ds_mla rows; got 2"),
    "write: scale is 0": (right.write("fp8_tensor_576", scale=0.0), ValueError, r"^scale must be other than 0; got 0"),
    "write: scale is infinite": (right.write("fp8_tensor_576", scale=float("-inf")), ValueError, r"^scale must be a finite number; got -inf"),
    "gather: format does not fit": (right.gather(format="bf16"), ValueError, r"^cache must be .*bf16"),
    "gather: scale of no tensor's": (right.gather("bf16", scale=2.0), ValueError, r"^scale must be 1 with bf16 rows; got 2"),
    "k_pe is of another dtype": (right.write(k_pe=torch.zeros(3, 64).bfloat16()), ValueError, r"k_pe must be float32 \[N=3, 64\]"),
    "block_size is 0": (right.convert(block_size=0), ValueError, r"block_size must be 1 or more; got 0"),
    "no ranks": (right.convert(ranks=0), ValueError, r"ranks must be 1 or more; got 0"),
    "rank is another's": (right.convert(ranks=2, rank=2), ValueError, r"rank must be 0 to 1; got 2"),
    "interleave is 0": (right.convert(interleave=0), ValueError, r"interleave must be 1 or more; got 0"),
    "other rows are staged": (right.stage("bf16"), ValueError, r"cache must be one of fp8_ds_mla rows; got bf16"),
    "staged rows are staged": (right.stage(cache=mla_backend.STAGED.new_cache(4, 16)), ValueError, r"cache must be of a known format"),
    "a cache of no dims is staged": (right.stage(cache=torch.zeros(656, dtype=torch.uint8)), ValueError, r"cache must be \[blocks, block_size, width\].* of bf16 "),
    "staged_table of other blocks": (right.stage(staged_table=torch.zeros(2, 4, dtype=INT), out=mla_backend.STAGED.new_cache(6, 16)), ValueError, r"staged_table must be int32 \[R=2, max_blocks=3\]"),
    "staged_table without out": (right.stage(staged_table=torch.zeros(2, 3, dtype=INT)), ValueError, r"out must be given with staged_table; got None"),
    "out with other blocks": (right.stage(out=mla_backend.STAGED.new_cache(6, 8)), ValueError, r"out must be of the cache's block size, 16; got"),
    "out with too few blocks": (right.stage(out=mla_backend.STAGED.new_cache(5, 16)), ValueError, r"out must be of R \* max_blocks = 6 blocks or more; got"),
    "out of other rows": (right.stage(out=mla_backend.FORMATS["bf16"].new_cache(6, 16)), ValueError, r"out must be .* of staged \(1153 bytes\), where bytes are uint8, .*; got bfloat16"),
    "out with blocks that begin anywhere": (right.stage(out=torch.zeros(6, 16 * 1153 + 1, dtype=torch.uint8)[:, :-1].unflatten(1, (16, 1153))), ValueError, r"out must be of blocks that begin at multiples of 16 bytes"),
    "staged rows are written": (right.write(cache=mla_backend.STAGED.new_cache(2, 4)), ValueError, r"cache must be \[blocks, block_size, width\].* of bf16 .*; got uint8"),
    "staged rows are gathered": (right.gather(cache=mla_backend.STAGED.new_cache(2, 4)), ValueError, r"cache must be"),
    "staged and other rows in one call": (right.attention(extra_cache=mla_backend.STAGED.new_cache(2, 4), extra_indices=lambda _: torch.zeros(2, 5, dtype=INT)), ValueError, r"extra_cache must be of a format that goes with fp8_ds_mla; got staged"),
    "staged rows in dense attention": (right.dense(cache=mla_backend.STAGED.new_cache(4, 16)), ValueError, r"cache must be \[blocks, block_size, width\].* of bf16 .*; got uint8"),
    "queries to rotate of 257 heads": (right.rotate(queries=torch.zeros(2, 257, 64).bfloat16()), ValueError, r"^queries must be of up to 256 heads"),
    "index_queries of 129 heads": (right.rotate(index_queries=torch.zeros(2, 129, 128).bfloat16()), ValueError, r"^index_queries must be of up to 128 heads"),
    "positions to rotate to are int32": (right.rotate(positions=torch.zeros(2, dtype=INT)), ValueError, r"^positions must be int64 \[T=2\]; got int32"),
    "a table of no positions": (right.rotate(cos_sin=torch.zeros(0, 64)), ValueError, r"^cos_sin must be of 1 position or more; got float32 \[0, 64\]"),
    "queries are not dense": (right.index(queries=torch.zeros(2, 3, 256)[..., ::2]), ValueError, r"queries must be dense in its last dimension"),
    "queries have no heads": (right.index(queries=torch.zeros(2, 0, 128), weights=torch.zeros(2, 0)), ValueError, r"queries must be of 1 to 128 heads"),
    "queries have 129 heads": (right.index(queries=torch.zeros(2, 129, 128), weights=torch.zeros(2, 129)), ValueError, r"queries must be of 1 to 128 heads"),
    "keys have blocks of 0": (right.index(cache=torch.zeros(2, 0, 132, dtype=torch.uint8)), ValueError, r"cache must be of a block size of 1 or more"),
    "keys of a block lie apart": (right.index(cache=torch.zeros(2, 8, 132, dtype=torch.uint8)[:, ::2]), ValueError, r"cache must be of blocks that lie in one piece .*; got stride 264"),
    "positions are negative": (right.index(positions=-1), ValueError, r"positions must be 0 or more; got -1"),
    "positions are missing": (right.index(positions=None), ValueError, r"positions must be given where scores is not"),
    "positions and scores": (right.index(scores=torch.zeros(2, 8)), ValueError, r"positions must be given where scores is not, and only there; got 8"),
    "scores share memory": (right.index(positions=None, scores=torch.zeros(1, 8).expand(2, 8)), ValueError, r"scores must be without elements that share memory"),
    "topk is negative": (right.select(topk=-1), ValueError, r"topk must be 0 or more; got -1"),
    "topk is missing": (right.select(topk=None), ValueError, r"topk must be given where chosen is not"),
    "chosen is not dense": (right.select(topk=None, chosen=torch.zeros(2, 8, dtype=INT)[:, ::2]), ValueError, r"chosen must be dense in its last dimension"),
    "129 heads to select with": (right.tokens(queries=torch.zeros(2, 129, 128), weights=torch.zeros(2, 129)), ValueError, r"^queries must be of 1 to 128 heads"),
    "keys of a cache without a table": (right.tokens(block_table=None), ValueError, r"^cache must be bfloat16 \[N, 128\] without a block_table; got uint8 \[2, 4, 132\]"),
    "contiguous keys are fp32": (right.tokens(block_table=None, cache=torch.zeros(9, 128)), ValueError, r"^cache must be bfloat16 \[N, 128\] without a block_table; got float32"),
    "contiguous keys are 64 wide": (right.tokens(block_table=None, cache=torch.zeros(9, 64).bfloat16()), ValueError, r"^cache must be .*; got bfloat16 \[1, 9, 64\]"),
    "contiguous keys lie apart": (right.tokens(block_table=None, cache=torch.zeros(9, 256).bfloat16()[:, :128]), ValueError, r"^cache must be of blocks that lie in one piece"),
    "contiguous keys with a table": (right.tokens(cache=torch.zeros(9, 128).bfloat16()), ValueError, r"^cache must be uint8 \[blocks, block_size, 132 or 68\]"),
    "a table of more than 2^24 positions": (right.tokens(block_table=torch.zeros(1, 2**22 + 1, dtype=INT)), ValueError, r"^block_table must be of up to 16777216 positions a request; got 4194305 blocks of 4"),
    "topk of 0": (right.tokens(topk=0), ValueError, r"^topk must be 1 or more; got 0"),
    "topk of 4097": (right.tokens(topk=4097), ValueError, r"^topk must be 1 to 4096; got 4097"),
    "topk and out": (right.tokens(out=right.zeros(2, 4)), ValueError, r"^topk must be given where out is not, and only there; got 4"),
    "neither topk nor out": (right.tokens(topk=None), ValueError, r"^topk must be given where out is not"),
    "scores of another topk": (right.tokens(scores=torch.zeros(2, 5)), ValueError, r"^scores must be float32 \[T=2, topk=4\]; got float32 \[2, 5\]"),
    "slots of a table alone": (right.tokens(slots_of=right.zeros(1, 2)), TypeError, r"^slots_of must be a pair of blocks and their block size; got Tensor"),
    "slots of an int64 table": (right.tokens(slots_of=(torch.zeros(1, 2).long(), 16)), ValueError, r"^slots_of must be int32 \[R, max_blocks\]; got int64"),
    "slots of a list": (right.tokens(slots_of=([[0]], 16)), TypeError, r"^slots_of must be a torch.Tensor; got list"),
    "slots of blocks of a number": (right.tokens(slots_of=(right.zeros(1, 2), 16.0)), TypeError, r"^slots_of must have an int as its block size; got float"),
    "slots of blocks of 0": (right.tokens(slots_of=(right.zeros(1, 2), 0)), ValueError, r"^slots_of must have a block size of 1 to 2147483647; got 0"),
    "slots of blocks of 2^31": (right.tokens(slots_of=(right.zeros(1, 2), 2**31)), ValueError, r"^slots_of must have a block size of 1 to 2147483647; got 2147483648"),
    "candidates of int64": (right.tokens(candidates=(torch.zeros(2, 3).long(), 8)), ValueError, r"^candidates must be int32 \[T=2, blocks\]; got int64"),
    "candidates of another T": (right.tokens(candidates=(right.zeros(3, 3), 8)), ValueError, r"^candidates must be int32 \[T=2, blocks\]; got int32 \[3, 3\]"),
    "candidates of blocks of 0": (right.tokens(candidates=(right.zeros(2, 3), 0)), ValueError, r"^candidates must have a block size of 1 to 16777216; got 0"),
    "candidates of more than 2^24 positions": (right.tokens(candidates=(right.zeros(2, 3), 2**23)), ValueError, r"^candidates must be of up to 16777216 positions a token; got 3 blocks of 8388608"),
    "outs have no partial results": (right.combine(torch.zeros(0, 3, 4, 8), torch.zeros(0, 3, 4)), ValueError, r"outs must be of one partial result or more"),
    "outs are 1025 wide": (right.combine(torch.zeros(2, 3, 4, 1025)), ValueError, r"outs must be of at most 1024 values a head"),
    "outs hold a number": (right.combine([torch.zeros(1), 5]), TypeError, r"outs\[1\] must be a torch.Tensor; got int"),
    "combined from two devices": (lambda: mla_backend.combine_partials([torch.zeros(3, 4, 8), torch.zeros(3, 4, 8, device="meta")], torch.zeros(2, 3, 4)), ValueError, r"^outs\[1\] must be on cpu like outs\[0\]; got meta"),
    "partial results of unequal shape": (right.combine([torch.zeros(3, 4, 8), torch.zeros(3, 4, 9)]), ValueError, r"outs\[1\] must be .*\[3, 4, 8\] like outs\[0\]"),
    "no partial results": (right.combine([], []), TypeError, r"outs must be a torch.Tensor or a sequence of one or more"),
    "plan of a list of lengths": (lambda: mla_backend.plan(2, 5, topk_length=[1, 2]), TypeError, r"topk_length must be a torch.Tensor; got list"),
    "plan into a table of another launch": (lambda: mla_backend.plan(2, 5, launch=LAUNCH, out=Plan(torch.zeros(2, 8, dtype=INT), LAUNCH)), ValueError, r"out must be given alone"),
    "plan for 2**31 tokens": (lambda: mla_backend.plan(2**31, 5), ValueError, r"num_tokens must be 0 to 2147483647; got 2147483648"),
    "format of a list": (lambda: mla_backend.format_of([1]), TypeError, r"cache must be a torch.Tensor; got list"),
    "format of fp32": (lambda: mla_backend.format_of(torch.zeros(1, 1, 576)), ValueError, r"cache must be of a known format"),
    "format that does not fit": (lambda: mla_backend.format_of(torch.zeros(1, 1, 576).half(), "bf16"), ValueError, r"cache must be of a known format, by last dimension and dtype: bf16 \(576 bfloat16\); got float16"),
    "format of another name": (lambda: mla_backend.format_of(torch.zeros(1, 1, 576).half(), "f16"), ValueError, r"name must be None or one of bf16, fp16.*got 'f16'"),
    "unknown CPU kernel": (lambda: library.select_cpu_kernel("sse9"), ValueError, r"name must be auto or a kernel .*got 'sse9'"),
    "unknown CUDA kernel": (lambda: library.select_cuda_kernel("fast"), ValueError, r"name must be auto, portable or unclustered; got 'fast'"),
    "dense: q has 257 heads": (right.dense(q=torch.zeros(2, 3, 257, 576).bfloat16()), ValueError, r"^q must be of 1 to 256 heads; got .*257"),
    "dense: q has 65 queries": (right.dense(q=torch.zeros(2, 65, 5, 576).bfloat16()), ValueError, r"^q must be of 64 queries a request or fewer; got .*65"),
    "dense: q is three parts": (right.dense(q=lambda q: (q, q, q)), ValueError, r"^q must be a tensor or a pair \(q_nope, q_rope\); got 3 tensors"),
    "dense: q_rope has other heads": (right.dense(q=lambda q: (q[..., :512], q[:, :, :4, 512:])), ValueError, r"^q_rope must be bfloat16 \[B=2, S=3, H=5, 64\]; got bfloat16 \[2, 3, 4, 64\]"),
    "dense: q_rope is no tensor": (right.dense(q=lambda q: (q[..., :512], 1)), TypeError, r"^q_rope must be a torch.Tensor; got int"),
    "dense: block_table is not dense": (right.dense(block_table=lambda t: t[:, ::2]), ValueError, r"^block_table must be dense in its last dimension"),
    "dense: cache_format is unknown": (right.dense(cache_format="fp8"), ValueError, r"^cache_format must be None or one of bf16, "),
    "dense: cache_scale with bf16": (right.dense(cache_scale=0.5), ValueError, r"^cache_scale must be 1 with bf16 rows; got 0.5"),
    "dense: out is q": (lambda: _dense_into_its_queries(), ValueError, r"^out must be .*memory"),
    "flash_mla: q of part heads": (right.kvcache(indices=None, k_cache=torch.zeros(3, 8, 3, 576).bfloat16()), ValueError, r"^q must be of a multiple of k_cache's 3 heads; got 4"),
    "flash_mla: no KV heads": (right.kvcache(indices=None, k_cache=torch.zeros(3, 8, 0, 576).bfloat16()), ValueError, r"^k_cache must be \[blocks, block_size, h_k, width\]"),
    "flash_mla: descale_q is a number": (right.fp8(descale_q=1.0), TypeError, r"^descale_q must be a torch.Tensor; got float"),
    "flash_mla: descale_k is on another device": (right.fp8(descale_k=torch.ones(1, device="meta")), ValueError, r"^descale_k must be float32 of one number on cpu; got .* on meta"),
    "flash_mla: descale_k is of 2 numbers": (right.fp8(descale_k=torch.ones(2)), ValueError, r"^descale_k must be float32 of one number on cpu; got torch.float32 \[2\]"),
    "flash_mla: q is 576 wide": (right.kvcache(k_cache=torch.zeros(3, 8, 1, 512).bfloat16()), ValueError, r"q must be bfloat16 \[b, s_q, h_q, 512\] with bf16_512 rows"),
    "flash_mla: extra_k_cache of no format": (right.kvcache(**second(torch.zeros(3, 8, 1, 100).bfloat16())), ValueError, r"^extra_k_cache must be of a known format, by last dimension and dtype: "),
    "flash_mla: extra_k_cache is 512 wide": (right.kvcache(**second(torch.zeros(3, 8, 1, 512).bfloat16())), ValueError, r"^extra_k_cache must be of a format that goes with bf16"),
    "flash_mla: extra_k_cache alone": (right.kvcache(extra_k_cache=torch.zeros(3, 8, 1, 576).bfloat16()), ValueError, r"^extra_indices_in_kvcache must be given with extra_k_cache"),
    "flash_mla: out of another shape": (right.kvcache(out=torch.zeros(2, 4, 512).bfloat16()), ValueError, r"out must be bfloat16 \[b=2, s_q=1, h_q=4, 512\]"),
    "flash_mla: extra lists alone": (right.kvcache(extra_indices_in_kvcache=torch.zeros(2, 1, 6, dtype=INT)), ValueError, r"extra_k_cache must be given with extra_indices_in_kvcache"),
    "flash_mla: no heads": (right.kvcache(q=torch.zeros(2, 1, 0, 576).bfloat16()), ValueError, r"^q must be of a multiple of k_cache's 1 heads; got 0"),
    "flash_mla: lengths of int64": (lambda: flash_mla.get_mla_metadata(torch.zeros(2, dtype=torch.long), 16, 1), ValueError, r"cache_seqlens must be int32"),
    "flash_mla: the whole pair": (right.kvcache(tile_scheduler_metadata=flash_mla.get_mla_metadata()), TypeError, r"must be the first of what get_mla_metadata returned; got tuple"),
    "flash_mla: 2 KV heads": (right.kvcache(k_cache=torch.zeros(3, 8, 2, 576).bfloat16()), ValueError, r"k_cache.shape\[2\] must be 1"),
    "flash_mla: value dim": (right.kvcache(head_dim_v=128), ValueError, r"head_dim_v must be 512; got 128"),
    "flash_mla: fp8 of bf16": (right.kvcache(is_fp8_kvcache=True), ValueError, r"is_fp8_kvcache must agree with k_cache"),
    "flash_mla: causal and sparse": (right.kvcache(causal=True), ValueError, r"causal must be False with indices"),
    "flash_mla: lengths of no second cache": (right.kvcache(extra_topk_length=torch.zeros(2, dtype=INT)), ValueError, r"^extra_topk_length must be None without extra_k_cache;"),
    "flash_mla: a backward of a number": (lambda: flash_mla.flash_mla_sparse_bwd(torch.tensor(1.0), torch.zeros(9, 1, 576).bfloat16(), *[torch.zeros(1)] * 2, torch.zeros(2, 1, 6, dtype=INT), torch.zeros(1)), ValueError, r"^q must be bfloat16"),
    "flash_mla: no block table": (right.kvcache(indices=None), TypeError, r"block_table must be a torch.Tensor; got NoneType"),
    "flash_mla: sink without indices": (right.kvcache(indices=None, attn_sink=torch.zeros(4)), ValueError, r"attn_sink must be None without indices"),
    "flash_mla: foreign metadata": (right.kvcache(tile_scheduler_metadata="auto"), TypeError, r"tile_scheduler_metadata must be the first of what get_mla_metadata"),
    "flash_mla: metadata of 2 heads": (lambda: flash_mla.get_mla_metadata(torch.zeros(2, dtype=INT), 4, 2, 4, topk=9), ValueError, r"num_heads_k must be 1"),
    "flash_mla: metadata of part tokens": (lambda: flash_mla.get_mla_metadata(torch.zeros(2, dtype=INT), 5, 1, 4, topk=9), ValueError, r"num_q_tokens_per_head_k must be a multiple"),
    "flash_mla: kv is 512 wide": (right.prefill(kv=torch.zeros(9, 1, 512).bfloat16()), ValueError, r"^q must be bfloat16 \[T, H, 512\]; got bfloat16 \[2, 4, 576\]"),
    "flash_mla: prefill value dim": (right.prefill(d_v=64), ValueError, r"d_v must be 512; got 64"),
    "mha: k is fp16": (right.mha(k=torch.zeros(5, 2, 192).half()), ValueError, r"^k must be bfloat16 \[T_k, h_k, 192\]; got float16"),
    "mha: k is narrower": (right.mha(k=torch.zeros(5, 2, 128).bfloat16()), ValueError, r"^k must be bfloat16 \[T_k, h_k, 192\]; got bfloat16 \[5, 2, 128\]"),
    "mha: k of 3 heads": (right.mha(k=torch.zeros(5, 3, 192).bfloat16(), v=torch.zeros(5, 3, 128).bfloat16()), ValueError, r"^k must have heads that divide q's 4; got 3"),
    "mha: v is as wide as k": (right.mha(v=torch.zeros(5, 2, 192).bfloat16()), ValueError, r"^v must be bfloat16 \[T_k=5, h_k=2, 128\]; got bfloat16 \[5, 2, 192\]"),
    "mha: cu_seqlens_kv is empty": (right.mha(cu_seqlens_kv=torch.zeros(0, dtype=INT)), ValueError, r"^cu_seqlens_kv must be int32 \[b \+ 1\]"),
    "mha: fewer sequences of keys": (right.mha(cu_seqlens_kv=torch.tensor([0, 5], dtype=INT), max_seqlen_kv=5), ValueError, r"^cu_seqlens_kv must have as many numbers as cu_seqlens_qo \(3\); got 2"),
    "mha: cu_seqlens_qo falls": (right.mha(cu_seqlens_qo=torch.tensor([0, 6, 5], dtype=INT), max_seqlen_qo=6), ValueError, r"^cu_seqlens_qo must rise from 0 to q.shape\[0\] = 5; got \[0, 6, 5\]"),
    "mha: cu_seqlens_kv ends early": (right.mha(cu_seqlens_kv=torch.tensor([0, 2, 4], dtype=INT)), ValueError, r"^cu_seqlens_kv must rise from 0 to k.shape\[0\] = 5; got \[0, 2, 4\]"),
    "mha: max_seqlen_qo is too small for the tokens": (right.mha(max_seqlen_qo=2), ValueError, r"^max_seqlen_qo must be at least the longest sequence's: q has 5 tokens in 2; got 2"),
    "mha: max_seqlen_kv is too small for a sequence": (right.mha(cu_seqlens_kv=torch.tensor([0, 1, 5], dtype=INT)), ValueError, r"^max_seqlen_kv must be at least the longest sequence's 4; got 3"),
    "mha: dropout": (right.mha(dropout_p=0.1), ValueError, r"^dropout_p must be 0, as in FlashMLA; got 0.1"),
    "mha: scale is larger than any float": (right.mha(softmax_scale=10**400), ValueError, r"^softmax_scale must be a finite number; got a larger one"),
    "mha: sequences differ": (right.mha(is_varlen=False), ValueError, r"^is_varlen must be True where sequences differ: q has 5 tokens in 2; got False"),
    "mha: a window": (right.mha(window_size=(3, 0)), TypeError, r"window_size"),
    "mha: an unknown provider": (right.mha(provider="triton"), ValueError, r"^provider must be auto, flash_attn_4, sdpa; got 'triton'"),
    "mha: a provider for GPUs": (right.mha(provider="flash_attn_4"), ValueError, r"^provider must be one that can do this; got 'flash_attn_4'. flash_attn_4: runs on GPUs only"),
    "mha: max_seqlen is too small": (right.packed("qkv", max_seqlen=2), ValueError, r"^max_seqlen must be at least"),
    "mha: head_dim_qk is a float": (right.packed("kv", 320, head_dim_qk=192.0), TypeError, r"^head_dim_qk must be an int; got float"),
    "mha: head_dim_qk is 64": (right.packed("kv", 320, head_dim_qk=64), ValueError, r"^head_dim_qk must be 192 or 128; got 64"),
    "mha: kv of another width": (right.packed("kv", 512), ValueError, r"^kv must be bfloat16 \[tokens, heads, 320\]; got bfloat16 \[5, 2, 512\]"),
    "mha: kv is fp16": (right.packed("kv", kv=torch.zeros(5, 2, 320).half()), ValueError, r"^kv must be bfloat16 \[tokens, heads, 320\]; got float16"),
    "q_rope requires a gradient": (right.split_q(rope=lambda x: x.clone().requires_grad_()), ValueError, r"^q_rope must be without requires_grad"),
    "keys: blocks of 0": (right.keys(right.zeros(1, 0, 132, dtype=torch.uint8)), ValueError, r"^cache must be of a block size of 1"),
    "keys: rows with gaps": (right.keys(right.zeros(4, 64, 256, dtype=torch.uint8)[..., :132]), ValueError, r"^cache must be of blocks that lie in one piece"),
    "keys: tokens before blocks": (right.keys(torch.zeros(64, 4, 128).bfloat16().transpose(0, 1)), ValueError, r"^cache must be of blocks that lie in one piece, of strides 128 and 1"),
    "keys: blocks that overlap": (right.keys(torch.zeros(1, 4, 128).bfloat16().expand(3, 4, 128)), ValueError, r"^cache must be of blocks that share no memory"),
    "keys: blocks at odd places": (right.keys(right.zeros(2, 529, dtype=torch.uint8)[:, 1:].view(2, 4, 132)), ValueError, r"^cache must be of blocks that begin at multiples of 4"),
    "training: kv of another width": (right.forward(kv=lambda kv: kv[:, :512]), ValueError, r"^q must be bfloat16"),
    "training: kv with two heads": (right.forward(kv=torch.zeros(20, 2, 576).bfloat16()), ValueError, r"^kv must be bfloat16"),
    "training: 129 heads": (right.forward(q=torch.zeros(2, 129, 576).bfloat16(), sink=None), ValueError, r"^q must be of 1 to 128 heads"),
    "training: too small a workspace": (right.forward(q=lambda q: q.requires_grad_(), workspace_bytes=11519), ValueError, r"^workspace_bytes must be 11520 or more, for one query; got 11519"),
    "training: an order that is a tensor": (right.forward(order=torch.zeros(2)), TypeError, r"^order must be what backward_order returned"),
    "training: deterministic by name": (right.forward(deterministic="yes"), TypeError, r"^deterministic must be a bool or None; got str"),
    "training: no workspace": (right.forward(workspace_bytes=0), ValueError, r"^workspace_bytes must be 1 or more; got 0"),
    "training: an order of other rows": (right.forward(order=order_of(2, 19)), ValueError, r"^order must be of these lists"),
    "backward: no workspace for empty lists": (right.backward(indices=lambda x: x[:, :0], workspace_bytes=0), ValueError, r"^workspace_bytes must be 1 or more; got 0"),
    "backward: an order of pairs in int64": (right.backward(order=mla_backend.BackwardOrder(right.zeros(21), right.zeros(20).long())), ValueError, r"^order must be of these lists, with pairs int32"),
    "backward: a workspace in floats": (right.backward(workspace_bytes=1e9), TypeError, r"^workspace_bytes must be an int"),
    "backward: d_kv whose rows overlap": (right.backward(d_kv=torch.zeros(2, 576).bfloat16().expand(20, 2, 576)[:, 0]), ValueError, r"^d_kv must be"),
    "backward: d_kv in d_q": (right.backward(d_q=MEMORY[:3456].view(2, 3, 576), d_kv=MEMORY.view(20, 576)), ValueError, r"^d_q must"),
    "backward: d_kv that is kv": (right.backward(kv=MEMORY.view(20, 576), d_kv=MEMORY.view(20, 576)), ValueError, r"^d_kv must"),
    "backward: an order of other lists": (right.backward(order=order_of(3, 20)), ValueError, r"^order must be of these lists"),
    "backward: an order of nothing": (right.backward(order=mla_backend.BackwardOrder(None, None)), TypeError, r"^order.begin must be a torch.Tensor"),
    "backward: too small a workspace": (right.backward(workspace=right.zeros(11519, dtype=torch.uint8)), ValueError, r"^workspace must be 11520 or more, for one query; got 11519"),
    "backward: a workspace at an odd address": (right.backward(workspace=right.zeros(99999, dtype=torch.uint8)[1:]), ValueError, r"^workspace must be aligned to 16 bytes"),
    "backward: another d_v": (lambda: flash_mla.flash_mla_sparse_bwd(*[torch.zeros(1)] * 6, d_v=256), ValueError, r"^d_v must be 512"),
    "flex: q of 192": (right.flex(q=torch.zeros(2, 4, 20, 192).bfloat16()), ValueError, r"^q must be bfloat16 .*flash_attn_varlen_func"),
    "flex: 257 heads": (right.flex(q=torch.zeros(2, 257, 20, 576).bfloat16()), ValueError, r"^q must be of 1 to 256 heads"),
    "flex: 129 heads with a gradient": (right.flex(q=torch.zeros(2, 129, 20, 576).bfloat16().requires_grad_()), ValueError, r"^q must be of 1 to 128 heads"),
    "flex: 129 heads and a gradient of kv": (right.flex(q=torch.zeros(2, 129, 20, 576).bfloat16(), kv=lambda kv: kv.requires_grad_()), ValueError, r"^q must be of 1 to 128 heads"),
    "flex: several KV heads": (right.flex(kv=lambda kv: kv.expand(2, 4, 30, 576)), ValueError, r"^kv must be bfloat16 .* each of several"),
    "flex: a mask that is a tensor": (right.flex(block_mask=torch.ones(20, 30)), TypeError, r"^block_mask must be a torch.nn.attention.flex_attention.BlockMask"),
    "flex: a mask of other queries": (right.flex(block_mask=right.block_mask(queries=21)), ValueError, r"^block_mask must be of 20 queries and 30"),
    "flex: a mask of other positions": (right.flex(block_mask=right.block_mask(positions=32)), ValueError, r"^block_mask must be of 20 queries and 30"),
    "flex: a mask of another batch": (right.flex(block_mask=right.block_mask(batch=3)), ValueError, r"^block_mask must be of B = 1 or 2"),
    "flex: a mask of other heads": (right.flex(block_mask=right.block_mask(heads=2)), ValueError, r"^block_mask must be of B = 1 or 2 and H = 1 or 4"),
    "flex: a mask elsewhere": (right.flex(block_mask=mask_elsewhere), ValueError, r"^block_mask must be on cpu like q"),
    "flex: deterministic by name": (right.flex(deterministic="yes"), TypeError, r"^deterministic must be a bool or None"),
    "flex: a scale of NaN with a score_mod": (right.flex(scale=math.nan, score_mod=lambda _: lambda s, b, h, i, j: s), ValueError, r"^scale must be a finite number"),
    "flex: a score_mod that is a number": (right.flex(score_mod=3), TypeError, r"^score_mod must be a function or None"),
    "flex: a score_mod with a cache": (right.flex(**right.PAGED, score_mod=lambda _: lambda s, b, h, i, j: s), ValueError, r"^score_mod must be None"),
    "flex: a format without a cache": (right.flex(cache_format="bf16"), ValueError, r"^cache_format must be None without a block_table"),
    "flex: a cache's scale without a cache": (right.flex(cache_scale=2.0), ValueError, r"^cache_scale must be 1 without a block_table"),
    "flex: a cache that requires a gradient": (right.flex(**right.PAGED | {"kv": right.PAGED["kv"].clone().requires_grad_()}), ValueError, r"^kv must be without requires_grad"),
    "flex: a gradient for q of a cache": (right.flex(**right.PAGED, q=lambda q: q.requires_grad_()), ValueError, r"^q must be without requires_grad"),
    "flex: pages of no tokens": (right.flex(**right.PAGED | {"kv": torch.zeros(4, 0, 576).bfloat16(), "block_mask": right.block_mask(2, 1, 20, 640)}), ValueError, r"^kv must be"),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    call, error, text = CASES[name]
    with pytest.raises(error, match=text):
        call()


FORGED = {
    "counts of another shape": ("kv_num_blocks", lambda x: x[..., :0]),
    "counts in floats": ("kv_num_blocks", lambda x: x.float()),
    "no counts": ("kv_num_blocks", lambda x: None),
    "numbers of three dims": ("kv_indices", lambda x: x[0]),
    "numbers in bools": ("kv_indices", lambda x: x.bool()),
    "numbers elsewhere": ("kv_indices", lambda x: x.to("meta")),
    "full numbers of another batch": ("full_kv_indices", lambda x: torch.cat([x, x, x])),
    "full blocks without counts": ("full_kv_num_blocks", lambda x: None),
    "sparse full numbers": ("full_kv_indices", lambda x: x.to_sparse()),
    "one length": ("seq_lengths", lambda x: 20),
    "a length in words": ("seq_lengths", lambda x: (20, "30")),
    "a negative length": ("seq_lengths", lambda x: (20, -1)),
    "a length of 2^40": ("seq_lengths", lambda x: (20, 2**40)),
    "blocks of nothing": ("BLOCK_SIZE", lambda x: (0, 128)),
    "no mask_mod": ("mask_mod", lambda x: 5),
    "a mask_mod of floats": ("mask_mod", lambda x: lambda b, h, i, j: i * 0.5),
    "a mask_mod of one int": ("mask_mod", lambda x: lambda b, h, i, j: 5),
    "a mask_mod of nothing": ("mask_mod", lambda x: lambda b, h, i, j: None),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_mask_whose_fields_do_not_fit_is_refused(case):
    name, change = FORGED[case]
    mask = create_block_mask(lambda b, h, i, j: j <= i, 2, 1, 20, 30, device="cpu")
    setattr(mask, name, change(getattr(mask, name)))
    with pytest.raises((ValueError, TypeError), match=r"^block_mask\S* must be"):
        right.flex(block_mask=mask)()
