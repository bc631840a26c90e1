"""What is written shares no memory with anything else, numbers are aligned, and autograd is told or refused."""

import contextlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_backend
import mla_backend.flash_mla as flash_mla
import right_calls as right
from mla_backend import Launch, Plan
from problems import random_problem

TOKENS, HEADS, TOPK = 3, 4, 10
INT = torch.int32
LAUNCH = Launch("cpu", 1, 0, 1, 0, 2)


def attention(**changes):
    problem = random_problem("bf16", TOKENS, HEADS, TOPK)
    return mla_backend.sparse_attention(**{**vars(problem), **changes})


def attention_into(make):
    """Attention with arguments that `make` cuts out of one buffer of bytes."""
    return attention(**make(torch.zeros(1 << 20, dtype=torch.uint8)))


def piece(buffer, dtype, sizes, strides, offset=0):
    return buffer.view(dtype).as_strided(sizes, strides, offset)


def write_into(cache, rows=2):
    return mla_backend.cache_write(torch.randn(rows, 512), torch.randn(rows, 64), cache, torch.arange(rows))


def drop_in(kv_heads=1, **views):
    """Two requests of three queries, sparse with one KV head and dense with more."""
    lists = {"indices": torch.zeros(2, 3, TOPK, dtype=INT)} if kv_heads == 1 else {}
    paged = (None, None) if lists else (torch.zeros(2, 1, dtype=INT), torch.full((2,), 5, dtype=INT))
    cache, metadata = torch.randn(2, 16, kv_heads, 576).bfloat16(), flash_mla.get_mla_metadata()[0]
    arguments = {"q": torch.randn(2, 3, HEADS, 576).bfloat16(), "k_cache": cache, **lists, **views}
    return flash_mla.flash_mla_with_kvcache(
        block_table=paged[0], cache_seqlens=paged[1], head_dim_v=512, tile_scheduler_metadata=metadata, **arguments
    )


def drop_in_into(make, **more):
    return drop_in(**make(torch.zeros(1 << 20, dtype=torch.uint8)), **more)


OUT, LSE = (TOKENS, HEADS, 512), (TOKENS, HEADS)
BF16, F32 = torch.bfloat16, torch.float32

# fmt: off
REFUSED = {
    "out of stride 0": (lambda: attention(out=torch.zeros(512).bfloat16().expand(OUT)), "out"),
    "lse of stride 0": (lambda: attention(lse=torch.zeros(1, HEADS).expand(LSE)), "lse"),
    "lse inside of out": (lambda: attention_into(lambda b: {"out": piece(b, BF16, OUT, (2048, 512, 1)), "lse": piece(b, F32, LSE, (4, 1), 100)}), "out"),
    "out that is q": (lambda: attention_into(lambda b: {"q": piece(b, BF16, (TOKENS, HEADS, 576), (4 * 576, 576, 1)), "out": piece(b, BF16, OUT, (4 * 576, 576, 1))}), "out"),
    "out in the cache": (lambda: attention_into(lambda b: {"cache": piece(b, BF16, (2, 16, 576), (16 * 576, 576, 1)), "out": piece(b, BF16, OUT, (2048, 512, 1), 8 * 576)}), "out"),
    "lse in the indices": (lambda: attention_into(lambda b: {"indices": piece(b, INT, (TOKENS, TOPK), (TOPK, 1)), "lse": piece(b, F32, LSE, (HEADS, 1), TOPK)}), "lse"),
    "out in half of q, shifted by one element": (lambda: attention_into(lambda b: {"q": piece(b, BF16, (TOKENS, HEADS, 576), (8192, 2048, 1)), "out": piece(b, BF16, OUT, (8192, 2048, 1), 575)}), "out"),
    "workspace in out": (lambda: attention_into(lambda b: {"out": piece(b, BF16, OUT, (2048, 512, 1)), "workspace": piece(b, F32, (10,), (1,))}), "workspace"),
    "a cache of stride 0": (lambda: write_into(torch.zeros(1, 4, 656, dtype=torch.uint8).expand(3, 4, 656)), "cache"),
    "a cache whose rows overlap": (lambda: write_into(torch.zeros(9999, dtype=torch.uint8).as_strided((2, 4, 656), (4 * 656, 640, 1))), "cache"),
    "a cache whose blocks overlap": (lambda: write_into(torch.zeros(9999, dtype=torch.uint8).as_strided((2, 4, 656), (3 * 656, 656, 1))), "cache"),
    "keys written over themselves": (lambda: (lambda b: mla_backend.cache_write(b[0, :2, :512], b[0, :2, 512:], b, torch.arange(2)))(torch.zeros(1, 4, 576).bfloat16()), "cache"),
    "rows gathered into the cache": (lambda: (lambda b: mla_backend.cache_gather(b, torch.arange(4), out=b[0]))(torch.zeros(1, 4, 576).bfloat16()), "out"),
    "combined into a partial result": (lambda: (lambda b: mla_backend.combine_partials(b, torch.zeros(2, 3, 4), out=b[0]))(torch.zeros(2, 3, 4, 8)), "out"),
    "slots over positions": (lambda: (lambda p: mla_backend.convert_indices(p, torch.zeros(1, 4, dtype=INT), torch.zeros(2, dtype=INT), 16, slots=p))(torch.zeros(2, 5, dtype=INT)), "slots"),
    "counts in the slots": (lambda: (lambda s: mla_backend.convert_indices(torch.zeros(2, 5, dtype=INT), torch.zeros(1, 4, dtype=INT), torch.zeros(2, dtype=INT), 16, slots=s, counts=s[:, 0]))(torch.zeros(2, 5, dtype=INT)), "slots"),
    "staged blocks that overlap": (lambda: (lambda m: mla_backend.stage_rows(torch.zeros(2, 16, 656, dtype=torch.uint8), torch.zeros(1, 2, dtype=INT), torch.zeros(1, dtype=INT), out=m.as_strided((2, 16, 1153), (16, 1153, 1))))(torch.zeros(99999, dtype=torch.uint8)), "out"),
    "a plan over its lengths": (lambda: (lambda t: mla_backend.plan(8, 5, topk_length=t[0], out=Plan(t, LAUNCH)))(torch.zeros(2, 8, dtype=INT)), "out"),
    "queries rotated in place": (lambda: (lambda q: mla_backend.rotate_queries(q, torch.zeros(2, 4, 128).bfloat16(), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64), torch.zeros(9, 64), out=q))(torch.zeros(2, 3, 64).bfloat16()), "out"),
    "the drop-in's out in q, of another order": (lambda: drop_in_into(lambda b: {"q": piece(b, BF16, (2, 3, HEADS, 576), (6912, 2304, 576, 1), 5), "out": piece(b, BF16, (2, 3, HEADS, 512), (2048, 4096, 512, 1))}), "out"),
    "the drop-in's out in its indices": (lambda: drop_in_into(lambda b: {"indices": piece(b, INT, (2, 3, TOPK), (TOPK, 2 * TOPK, 1), 99), "out": piece(b, BF16, (2, 3, HEADS, 512), (2048, 4096, 512, 1))}), "out"),
    "the drop-in's out whose requests overlap": (lambda: drop_in_into(lambda b: {"out": piece(b, BF16, (2, 3, HEADS, 512), (512, 512, 512, 1))}), "out"),
    "the drop-in's out in another KV head's q": (lambda: drop_in_into(lambda b: {"q": piece(b, BF16, (2, 3, HEADS, 576), (6912, 2304, 576, 1)), "out": piece(b, BF16, (2, 3, HEADS, 512), (6912, 2304, 576, 1), 2 * 576)}, kv_heads=2), "out"),
    "the indexer's keys written over themselves": (lambda: (lambda b: mla_backend.write_keys(b[0, :2], b, torch.tensor([5, 6])))(torch.zeros(1, 16, 128).bfloat16()), "cache"),
    "tokens selected into their lengths": (lambda: (lambda m: right.tokens(lengths=m[:, 0], topk=None, out=m)())(torch.zeros(2, 4, dtype=INT)), "out"),
    "scores of the selected in their positions": (lambda: (lambda m: right.tokens(topk=None, out=m, scores=m.view(F32))())(torch.zeros(2, 4, dtype=INT)), "out"),
    "a selection of one row": (lambda: right.tokens(topk=None, out=torch.zeros(1, 4, dtype=INT).expand(2, 4))(), "out"),
    "a selection's workspace in its keys": (lambda: (lambda m: right.tokens(cache=m, workspace=m.view(-1))())(torch.zeros(2, 4, 132, dtype=torch.uint8)), "workspace"),
    "positions chosen into scores": (lambda: (lambda s: mla_backend.select_top(s, torch.full((2,), 9, dtype=INT), chosen=s.view(INT)[:, :3]))(torch.zeros(2, 9)), "chosen"),
}

ACCEPTED = {
    "lse behind out in each head's row": lambda b: {"out": piece(b, BF16, OUT, (2056, 514, 1)), "lse": piece(b, F32, LSE, (1028, 257), 256)},
    "q and out in each head's row": lambda b: {"q": piece(b, BF16, (TOKENS, HEADS, 576), (4 * 1088, 1088, 1)), "out": piece(b, BF16, OUT, (4 * 1088, 1088, 1), 576)},
    "q of every second token, out of the others": lambda b: {"q": piece(b, BF16, (TOKENS, HEADS, 576), (8 * 576, 576, 1)), "out": piece(b, BF16, OUT, (8 * 576, 576, 1), 4 * 576)},
    "rows of two strides that meet nowhere": lambda b: {"q": piece(b, BF16, (TOKENS, HEADS, 576), (8192, 2048, 1)), "out": piece(b, BF16, OUT, (12288, 2048, 1), 576)},
    "one cache twice": lambda b: {"cache": piece(b, BF16, (2, 16, 576), (16 * 576, 576, 1)), "extra_cache": piece(b, BF16, (2, 16, 576), (16 * 576, 576, 1)), "extra_indices": torch.zeros(TOKENS, 2, dtype=INT)},
    "overlapping inputs": lambda b: {"q": piece(b, BF16, (TOKENS, HEADS, 576), (0, 16, 1)), "cache": piece(b, BF16, (2, 16, 576), (0, 576, 1))},
}
# fmt: on


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_written_shares_no_memory(name):
    call, argument = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{argument} must be (without elements that share|in memory that no other)"):
        call()


def elements(view):
    """The address of each element."""
    indices = itertools.product(*map(range, view.shape))
    offsets = (sum(i * stride for i, stride in zip(index, view.stride(), strict=True)) for index in indices)
    return [view.storage_offset() + offset for offset in offsets]


@settings(max_examples=400)
@given(st.randoms(use_true_random=False))
def test_exactly_what_overlaps_is_refused(random):
    buffer, (parts, tokens, heads, dims) = torch.zeros(512), [random.randint(1, 4) for _ in range(4)]

    def view(*sizes, strides=()):
        own = [random.choice([0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24]) for _ in sizes[: len(sizes) - len(strides)]]
        return buffer.as_strided(sizes, (*own, *strides), random.randint(0, 100))

    lses, out, lse = view(parts, tokens, heads), view(tokens, heads, dims, strides=(1,)), view(tokens, heads)
    written = elements(out) + elements(lse)
    overlap = len(set(written)) < len(written) or not set(written).isdisjoint(elements(lses))
    outs = torch.zeros(parts, tokens, heads, dims)
    with pytest.raises(ValueError, match="memory") if overlap else contextlib.nullcontext():
        mla_backend.combine_partials(outs, lses, out=out, lse=lse)


@pytest.mark.parametrize("name", ACCEPTED)
def test_views_of_one_buffer_that_do_not_overlap_are_right(name):
    views = ACCEPTED[name](torch.zeros(1 << 20, dtype=torch.uint8))
    problem = random_problem("bf16", TOKENS, HEADS, TOPK)
    for argument in ("q", "cache", "extra_cache", "extra_indices"):
        if argument in views:
            view = views.pop(argument)
            if view.dtype == BF16 and 0 not in view.stride() and argument != "extra_cache":
                view.copy_(torch.randn(view.shape) * 0.1)
            problem = problem.but(**{argument: view})
    problem.check(**views)


def test_a_cache_between_other_layers_of_one_buffer_is_written():
    """As vLLM lays hybrid models out: a block has a page of each layer."""
    buffer = torch.zeros(4, 3, 16 * 656, dtype=torch.uint8)
    caches = [buffer[:, layer].unflatten(1, (16, 656)) for layer in range(3)]
    write_into(caches[1], rows=64)
    assert buffer[:, 1].any() and not buffer[:, 0].any() and not buffer[:, 2].any()


@pytest.mark.parametrize("argument", ["q", "indices", "sink", "out", "lse"])
def test_numbers_at_odd_addresses_are_refused(argument):
    """As a file or another library may bring them. Bytes may begin anywhere."""
    whole = {"sink": torch.zeros(HEADS), "out": torch.zeros(OUT, dtype=BF16), "lse": torch.zeros(LSE)}
    problem = random_problem(tokens=TOKENS, heads=HEADS, topk=TOPK)
    tensor = {**vars(problem), **whole}[argument]
    data = bytearray(tensor.nbytes + 2)
    odd = 1 - torch.frombuffer(data, dtype=torch.uint8).data_ptr() % 2
    view = torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel(), offset=odd).view(tensor.shape)
    with pytest.raises(ValueError, match=f"^{argument} must be aligned to its elements"):
        mla_backend.sparse_attention(**{**vars(problem), argument: view})


@pytest.mark.parametrize(("shape", "write"), [((2, 16, 576), write_into), (OUT, lambda out: attention(out=out))])
def test_what_was_saved_for_backward_may_not_be_overwritten(shape, write):
    saved = torch.zeros(shape, dtype=BF16)
    product = (torch.ones(shape, dtype=BF16, requires_grad=True) * saved).sum()
    write(saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


FORWARD_MODE = {"q": (right.attention(), right.forward()), "kv": (right.flex(),), "keys": (right.keys(),)}
FORWARD_MODE["scale"] = (right.forward(scale=torch.tensor(0.1)),)


@pytest.mark.parametrize("argument", FORWARD_MODE)
def test_a_forward_mode_gradient_that_would_be_lost_is_refused(argument):
    for call in FORWARD_MODE[argument]:
        primal = torch.ones_like(call.keywords[argument])
        with pytest.raises(ValueError, match=f"^{argument} must be without a forward-mode gradient"):
            torch.func.jvp(lambda x, call=call: call(**{argument: x}), (primal,), (primal,))
        call(**{argument: primal})


@pytest.mark.parametrize("call", [right.attention, right.forward])
def test_a_scale_whose_gradient_would_be_lost_is_refused(call):
    scale = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(ValueError, match="^scale must be without requires_grad"):
        call(scale=scale)()
    with torch.no_grad():
        call(scale=scale)()


HUGE = 2**62


def test_a_dimension_of_one_or_an_empty_tensor_may_have_any_stride():
    """UBSan stops where one is multiplied."""
    problem = random_problem("bf16", TOKENS, HEADS, TOPK, 1, 16)
    problem.but(cache=problem.cache.as_strided((1, 16, 576), (HUGE, 576, 1))).check()
    rows = (torch.randn(9, 1, 576) * 0.1).bfloat16()
    problem.but(cache=rows.as_strided((9, 1, 576), (576, HUGE, 1))).check()
    problem.but(cache=rows.as_strided((0, 16, 576), (HUGE, HUGE, 1))).check()
    keys = torch.zeros(16, 128).bfloat16().as_strided((1, 16, 128), (HUGE, 128, 1))
    scores = mla_backend.index_scores(
        *(torch.ones(2, 8, 128), torch.ones(2, 8), keys, torch.zeros(1, 1, dtype=INT), torch.zeros(2, dtype=INT)),
        torch.full((2,), 3, dtype=INT),
        positions=5,
    )
    assert (scores[:, :3] == 0).all()
    assert right.tokens(cache=keys, lengths=torch.full((2,), 6, dtype=INT))().tolist() == [[0, 1, 2, 3]] * 2
    tables = (torch.zeros(0, dtype=INT).as_strided((3, 0), (HUGE, 1)) for _ in range(2))
    assert (right.tokens(block_table=next(tables), slots_of=(next(tables), 16))() == -1).all()
    positions, table = (torch.zeros(0, dtype=INT).as_strided((3, 0), (HUGE, 1)) for _ in range(2))
    slots = torch.zeros(0, dtype=INT).as_strided((3, 0), (HUGE, 1))
    mla_backend.convert_indices(positions, table, torch.zeros(3, dtype=INT), 16, slots=slots)
    chosen = mla_backend.select_top(torch.zeros(0).as_strided((3, 0), (HUGE, 1)), torch.ones(3, dtype=INT), 4)
    assert (chosen == -1).all()
    empty = torch.zeros(0, dtype=BF16).as_strided((1, 2, 0, 8), (HUGE, HUGE, HUGE, 1))
    mla_backend.combine_partials(empty, torch.zeros(1, 2, 0))
