"""Right calls of every function: what tests of wrong arguments change, and what the ops are given."""

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask

import mla_backend
from dense_problems import random_dense
from flex_problems import random_flex
from mha_problems import random_mha
from mla_backend import flash_mla
from mla_backend.index import select_workspace
from problems import random_problem, scale_of
from training_problems import random_training_problem

INT = torch.int32


def changed(function, arguments, changes):
    """A call whose arguments are right but for the changes: other values, or functions of the right ones."""
    for name, change in changes.items():
        arguments[name] = change(arguments.get(name)) if callable(change) else change
    return functools.partial(function, **arguments)


def attention(fmt="fp8_ds_mla", with_extra=False, sizes=(2, 3, 10), **changes):
    problem = random_problem(fmt, *sizes)
    extra = {"extra_cache": problem.cache, "extra_indices": problem.indices} if with_extra else {}
    return changed(mla_backend.sparse_attention, {**vars(problem), **extra}, changes)


def dense(fmt="bf16", lengths=(40, 20), queries=3, heads=5, block_size=16, **changes):
    problem = random_dense(fmt, lengths, queries, heads, block_size)
    return changed(mla_backend.dense_attention, vars(problem), changes)


def split_q(nope=lambda x: x, rope=lambda x: x):
    q = random_problem(tokens=2, heads=3, topk=10).q
    return attention(q=(nope(q[..., :512]), rope(q[..., 512:])))


def write(fmt="fp8_ds_mla", **changes):
    form = mla_backend.FORMATS[fmt]
    values = {"kv_c": torch.randn(3, form.latent), "k_pe": torch.randn(3, 64) if form.rope else None}
    return changed(mla_backend.cache_write, values | {"cache": form.new_cache(2, 4), "slots": torch.arange(3)}, changes)


def gather(fmt="fp8_ds_mla", **changes):
    arguments = {"cache": mla_backend.FORMATS[fmt].new_cache(2, 4), "slots": torch.arange(3)}
    return changed(mla_backend.cache_gather, arguments, changes)


def convert(t=2, k=5, **changes):
    arguments = {"positions": zeros(t, k), "block_table": zeros(1, 4), "request_ids": zeros(t), "block_size": 16}
    return changed(mla_backend.convert_indices, arguments, changes)


def zeros(*shape, dtype=INT):
    return torch.zeros(shape, dtype=dtype)


def stage(fmt="fp8_ds_mla", **changes):
    cache = mla_backend.FORMATS[fmt].new_cache(4, 16)
    return changed(mla_backend.stage_rows, {"cache": cache, "block_table": zeros(2, 3), "lengths": zeros(2)}, changes)


def rotate(t=2, h=3, **changes):
    arguments = {"queries": torch.zeros(t, h, 64).bfloat16(), "index_queries": torch.zeros(t, 4, 128).bfloat16()}
    arguments |= {"weights": torch.zeros(t, 4), "positions": zeros(t).long(), "cos_sin": torch.zeros(9, 64)}
    return changed(mla_backend.rotate_queries, arguments, changes)


def _indexed(t, h):
    arguments = {"queries": torch.randn(t, h, 128), "weights": torch.randn(t, h), "block_table": zeros(1, 2)}
    return arguments | {"cache": zeros(2, 4, 132, dtype=torch.uint8), "requests": zeros(t), "lengths": zeros(t)}


def index(t=2, h=3, **changes):
    return changed(mla_backend.index_scores, _indexed(t, h) | {"positions": 8}, changes)


def select(t=2, **changes):
    arguments = {"scores": torch.randn(t, 9), "lengths": zeros(t), "topk": 4}
    return changed(mla_backend.select_top, arguments, changes)


def tokens(t=2, h=3, **changes):
    given = _indexed(t, h)
    return changed(mla_backend.select_tokens, given | {"queries": given["queries"].bfloat16(), "topk": 4}, changes)


def combine(outs=None, lses=None, **more):
    outs = torch.zeros(2, 3, 4, 8) if outs is None else outs
    return changed(
        mla_backend.combine_partials, {"outs": outs, "lses": torch.zeros(2, 3, 4) if lses is None else lses}, more
    )


def mxfp4_keys(**changes):
    return keys(zeros(1, 2, 68, dtype=torch.uint8), **changes)


def keys(cache=None, **changes):
    cache = zeros(1, 2, 132, dtype=torch.uint8) if cache is None else cache
    arguments = {"keys": torch.zeros(2, 128), "cache": cache, "slots": torch.arange(2)}
    return changed(mla_backend.write_keys, arguments, changes)


def kvcache(**changes):
    arguments = {"q": torch.randn(2, 1, 4, 576).bfloat16(), "k_cache": torch.randn(3, 8, 1, 576).bfloat16()}
    arguments |= {"block_table": None, "cache_seqlens": None, "head_dim_v": 512, "indices": zeros(2, 1, 6)}
    arguments["tile_scheduler_metadata"] = flash_mla.get_mla_metadata()[0]
    return changed(flash_mla.flash_mla_with_kvcache, arguments, changes)


def fp8(**changes):
    q, cache = (torch.zeros(shape).to(torch.float8_e4m3fn) for shape in ((2, 1, 4, 576), (3, 8, 1, 576)))
    arguments = {"q": q, "k_cache": cache, "block_table": zeros(2, 1), "cache_seqlens": zeros(2) + 1, "head_dim_v": 512}
    arguments["tile_scheduler_metadata"] = flash_mla.get_mla_metadata()[0]
    return changed(flash_mla.flash_mla_with_kvcache_fp8, arguments, changes)


def prefill(**changes):
    arguments = {"q": torch.randn(2, 4, 576).bfloat16(), "kv": torch.randn(9, 1, 576).bfloat16()}
    return changed(flash_mla.flash_mla_sparse_fwd, arguments | {"indices": zeros(2, 1, 6), "sm_scale": 0.1}, changes)


def mha(**changes):
    """Sequences of 2 and 3 tokens, 4 heads of q and 2 of k and v."""
    return changed(flash_mla.flash_attn_varlen_func, random_mha((2, 3), heads=4, kv_heads=2).arguments(), changes)


def packed(which, width=512, **changes):
    cu, q = torch.tensor([0, 2, 5], dtype=INT), torch.zeros(5, 2, 192).bfloat16()
    arguments = {"cu_seqlens": cu, "max_seqlen": 3}
    if which == "kv":
        arguments = {"q": q, "cu_seqlens_qo": cu, "cu_seqlens_kv": cu, "max_seqlen_qo": 3, "max_seqlen_kv": 3}
    arguments |= {which: torch.zeros(5, 2, width).bfloat16(), "head_dim_qk": 192}
    return changed(getattr(flash_mla, f"flash_attn_varlen_{which}packed_func"), arguments, changes)


def forward(**changes):
    problem = random_training_problem(2, 3, 20, 10, sink=True)
    arguments = {"q": problem.q, "kv": problem.kv, "indices": problem.indices, "scale": 0.04, "sink": problem.sink}
    return changed(mla_backend.sparse_mla, arguments, changes)


def backward(t=2, h=3, k=10, **changes):
    problem = random_training_problem(t, h, 20, k)
    arguments = {"q": problem.q, "kv": problem.kv, "indices": problem.indices, "scale": 0.04}
    out, lse = mla_backend.sparse_mla(**arguments)
    arguments |= {"out": out, "lse": lse, "d_out": problem.d_out}
    return changed(mla_backend.sparse_mla_backward, arguments, changes)


def flex(**changes):
    problem = random_flex("causal", 2, 4, 20, 30)
    arguments = {"q": problem.q, "kv": problem.kv, "block_mask": problem.block_mask, "scale": 0.04}
    return changed(mla_backend.flex_mla, arguments, changes)


def block_mask(batch=1, heads=1, queries=20, positions=30):
    return create_block_mask(lambda b, h, i, j: j <= i + 128, batch, heads, queries, positions, device="cpu")


PAGED = {"kv": torch.zeros(4, 16, 576).bfloat16(), "block_table": zeros(2, 2), "block_mask": block_mask(2)}


OPS = "attention dense write gather convert stage rotate index select tokens combine backward".split()


def complete(op, t=2, h=3, k=10, fmt="bf16", device="cpu"):
    """A call for t tokens, h heads and lists of k, with all arguments of a kind that tests of wrong ones change."""
    form, lengths = mla_backend.FORMATS[fmt], torch.full((t,), k, dtype=INT)
    paged = {"cache": zeros(4, 16, 132, dtype=torch.uint8), "block_table": zeros(2, 4), "lengths": lengths}
    match op:
        case "attention":
            more = {"extra_topk_length": lengths, "topk_length": lengths, "sink": torch.zeros(h)}
            more |= {"out": torch.zeros(t, h, 512, dtype=form.number), "lse": torch.zeros(t, h)}
            return attention(fmt, True, (t, h, k), **more, return_max_logits=False, batch_invariant=False)
        case "dense":
            outputs = {"out": torch.zeros(t, 5, h, 512, dtype=form.number), "lse": torch.zeros(t, h, 5)}
            return dense(fmt, range(k, k + t), 5, h, 7, **outputs, batch_invariant=False)
        case "write":
            return write(fmt, scale=scale_of(fmt), power_of_two=False)
        case "gather":
            return gather(fmt, scale=scale_of(fmt), out=torch.zeros(3, form.head_dim, dtype=form.number))
        case "convert":
            return convert(t, k, compact=True, ranks=2, rank=1, interleave=1, slots=zeros(t, k), counts=zeros(t))
        case "stage":
            more = {"lengths": zeros(2) + 40, "out": mla_backend.STAGED.new_cache(6, 16)}
            return stage(staged_table=zeros(2, 3), **more)
        case "rotate":
            outputs = {"out": torch.zeros(t, h, 64).bfloat16(), "index_out": zeros(t, 4, 128, dtype=torch.uint8)}
            outputs |= {"weights_out": torch.zeros(t, 4), "index_cos_sin": torch.zeros(9, 64)}
            return rotate(t, h, weight_scale=1.0, interleaved=False, **outputs)
        case "index":
            return index(t, h, **paged, positions=None, scores=torch.zeros(t, 64))
        case "select":
            return select(t, scores=torch.randn(t, 90), lengths=lengths, topk=None, chosen=zeros(t, 30))
        case "tokens":
            size = max(9, select_workspace(t, h, 64, 30, device))
            outputs = {"out": zeros(t, 30), "scores": torch.zeros(t, 30), "workspace": zeros(size, dtype=torch.uint8)}
            return tokens(t, h, **paged, topk=None, **outputs)
        case "combine":
            outputs = {"out": torch.zeros(t, h, 8), "lse": torch.zeros(t, h)}
            return combine(torch.zeros(2, t, h, 8), torch.zeros(2, t, h), **outputs)
        case "backward":
            more = {"sink": torch.zeros(h), "d_lse": torch.zeros(t, h), "topk_length": lengths}
            more |= {"d_q": torch.zeros(t, h, 576).bfloat16(), "d_kv": torch.zeros(20, 576).bfloat16()}
            return backward(t, h, k, **more, workspace=zeros(99999, dtype=torch.uint8))


def complete_calls():
    """Calls of every function with all arguments of a kind that the next test changes."""
    yield from map(complete, OPS)
    yield from (index(), select(), tokens(return_scores=True))
    yield keys()
    yield kvcache(topk_length=zeros(2), attn_sink=torch.zeros(4), softmax_scale=1.0, causal=False)
    yield kvcache(indices=None, block_table=zeros(2, 1), cache_seqlens=zeros(2), enable_batch_invariant=False)
    yield fp8()
    yield prefill(topk_length=zeros(2), attn_sink=torch.zeros(4))
    yield from (mha(deterministic=False), packed("qkv"))
    yield forward(topk_length=zeros(2), workspace_bytes=2**20)
    yield functools.partial(mla_backend.backward_order, zeros(2, 10), rows=20, topk_length=zeros(2))
    yield from (flex(), flex(**PAGED))


def drop_in_calls():
    """The same of the drop-in's functions, with arguments too that these take from others or don't need."""
    outputs, lists = {"out": torch.zeros(2, 1, 4, 512).bfloat16()}, {"extra_indices_in_kvcache": zeros(2, 1, 6)}
    lists |= {"extra_k_cache": torch.zeros(3, 8, 1, 576).bfloat16(), "extra_topk_length": zeros(2)}
    flags = {"is_fp8_kvcache": False, "base2_lse": False, "num_splits": None}
    yield kvcache(**lists, **outputs, **flags)
    yield kvcache(indices=None, block_table=zeros(2, 1), cache_seqlens=zeros(2), **outputs, **flags)
    yield fp8(descale_q=torch.ones(1), descale_k=torch.ones(1), softmax_scale=1.0, causal=False, num_splits=None)
    out, lse = torch.zeros(2, 4, 512).bfloat16(), torch.zeros(2, 4)
    right = prefill(indexer_topk=3, out=out, base2_lse=False, enable_batch_invariant=False, d_v=512)
    yield right
    shared = {name: right.keywords[name] for name in ("q", "kv", "indices", "sm_scale", "d_v", "base2_lse")}
    more = {"o": out, "dO": out, "lse": lse, "topk_length": zeros(2), "q_start_index_s": 2}
    yield functools.partial(flash_mla.flash_mla_sparse_bwd, **shared, **more)
    yield mha(dropout_p=0.0, is_varlen=True)
    old = {"cache_seqlens": zeros(2) + 40, "num_q_tokens_per_head_k": 8, "num_heads_k": 1}
    yield functools.partial(flash_mla.get_mla_metadata_dense_fp8, **old)
    yield functools.partial(flash_mla.get_mla_metadata, **old, num_heads_q=4, is_fp8_kvcache=False, topk=10)
