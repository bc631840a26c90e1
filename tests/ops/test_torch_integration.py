"""The ops as torch sees them: opcheck, torch.compile without graph breaks, threads of the caller."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mla_backend
import right_calls as right
from mla_backend import arguments
from problems import FORMATS, random_problem

OPS = torch.ops.mla_backend


def calls():
    """Of every function, with and without its optional tensors."""
    yield from right.complete_calls()
    less = (right.attention, right.dense, right.write, right.gather, right.convert, right.stage, right.rotate)
    less += (right.combine, right.keys, right.mxfp4_keys, right.kvcache, right.prefill, right.forward, right.backward)
    yield from (call() for call in less)
    yield from (call(fmt) for call in (right.write, right.gather) for fmt in FORMATS)
    yield right.attention(q=lambda q: (q[..., :512], q[..., 512:]), plan=mla_backend.plan(2, 10))
    yield right.dense(causal=False, plan=mla_backend.plan(2, 64, num_heads=15))
    for more in ({}, {"cache": torch.zeros(2, 4, 128).bfloat16(), "slots_of": (right.zeros(1, 2), 16)}):
        yield from (right.tokens(**more), right.index(cache=more.get("cache", lambda x: x)))


@pytest.fixture(scope="module")
def made() -> dict[str, dict[tuple, tuple]]:
    """What each op is given in these calls, once for each kind of arguments."""
    found, result_of = {name: {} for name in mla_backend.fake.OPS}, arguments.result_of

    def noted(op, *given):
        kinds = tuple(getattr(x, "dtype", type(x)) for x in given)
        e4m3 = (kind == torch.float8_e4m3fn for kind in kinds)  # opcheck can't compare it; an op takes bytes for it
        checked = tuple(x.view(torch.uint8) if own else x for x, own in zip(given, e4m3, strict=True))
        found[op._schema.name.split("::")[1]][kinds] = checked
        return result_of(op, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "result_of", noted)
        for call in calls():
            call()
    return found


@pytest.mark.parametrize("op", mla_backend.fake.OPS)
def test_opcheck(made, op):
    assert made[op], "no call has it"
    for given in made[op].values():
        torch.library.opcheck(getattr(OPS, op).default, given)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("fmt", FORMATS)
def test_attention_compiles_without_a_graph_break(fmt):
    p = random_problem(fmt, tokens=3, heads=5, topk=40, topk_length=torch.tensor([0, 7, 40], dtype=torch.int32))

    more = {"cache_format": fmt, "products": "fp8" if mla_backend.FORMATS[fmt].fp8 else "exact"}

    def step(q, cache, indices, lengths):
        plan = mla_backend.plan(q.shape[0], indices.shape[1], topk_length=lengths, **more)
        out, lse, largest = mla_backend.sparse_attention(
            q * 1, cache, indices, scale=0.05, topk_length=lengths, plan=plan, return_max_logits=True, **more
        )
        return out + 1, lse, largest

    arguments = p.q, p.cache, p.indices, p.topk_length
    for got, want in zip(compiled(step)(*arguments), step(*arguments), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_layer_compiles_without_a_graph_break(device, fmt):
    form = mla_backend.FORMATS[fmt]
    cache = form.new_cache(4, 16, device=device)
    table, requests = right.zeros(1, 4).to(device), right.zeros(2).to(device)
    table += torch.arange(4, device=device)

    def layer(kv_c, k_pe, q, positions):
        mla_backend.cache_write(kv_c, k_pe, cache, torch.arange(64, device=device))
        slots, counts = mla_backend.convert_indices(positions, table, requests, 16, compact=True)
        out, lse = mla_backend.sparse_attention(q * 1, cache, slots, scale=0.05, topk_length=counts)
        halves = [mla_backend.sparse_attention(q, cache, s, scale=0.05) for s in slots.split(10, 1)]
        combined = mla_backend.combine_partials([h[0].float() for h in halves], [h[1] for h in halves])
        return out + 1, lse, counts, *combined, mla_backend.cache_gather(cache, slots[0])

    values = torch.randn(64, form.latent, device=device), torch.randn(64, 64, device=device) if form.rope else None
    q = torch.randn(2, 3, form.head_dim, device=device).to(form.number)
    arguments = *values, q, torch.randint(-5, 64, (2, 20), dtype=torch.int32, device=device)
    got = compiled(layer)(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, layer(*arguments), strict=True))


def test_an_indexer_compiles_without_a_graph_break():
    cache = torch.randn(8, 16, 128).bfloat16()
    table = torch.arange(8, dtype=torch.int32).view(2, 4)

    rotations = torch.randn(99, 64)

    def select(queries, weights, requests, lengths):
        _, rotated, weights = mla_backend.rotate_queries(
            queries[..., :64].bfloat16(), queries.bfloat16(), weights, lengths.long(), rotations
        )
        scores = mla_backend.index_scores(rotated.float() * 1, weights, cache, table, requests, lengths, 64)
        chosen = mla_backend.select_top(scores, lengths, 10)
        arguments = rotated, weights, cache, table, requests, lengths
        again, _ = mla_backend.select_tokens(*arguments, 10, return_scores=True)
        slots = mla_backend.select_tokens(*arguments, 10, slots_of=(table, 16), candidates=(scores[:, :3].int(), 8))
        one = mla_backend.select_tokens(*arguments[:2], cache.view(-1, 128), None, requests * 0, lengths, 10)
        return torch.cat([chosen, again, slots, one]) + 1

    step = compiled(select)
    for tokens in (1, 2, 5):
        numbers = torch.arange(tokens, dtype=torch.int32)
        arguments = torch.randn(tokens, 32, 128), torch.randn(tokens, 32), numbers % 2, numbers * 12 + 5
        assert torch.equal(step(*arguments), select(*arguments))


def test_new_list_lengths_do_not_break_a_compiled_graph():
    step = compiled(lambda lists: mla_backend.plan(3, lists.shape[1], extra_topk=lists.shape[1]))
    for topk in (64, 128, 192):
        lists = torch.zeros(3, topk, dtype=torch.int32)
        assert torch.equal(step(lists).table, mla_backend.plan(3, topk, extra_topk=topk).table)


def test_new_token_counts_do_not_break_a_compiled_graph():
    step = compiled(lambda q, cache, indices: mla_backend.sparse_attention(q, cache, indices, scale=0.05))
    for tokens in (1, 2, 3, 7):
        p = random_problem(tokens=tokens, heads=2, topk=8)
        assert torch.equal(step(p.q, p.cache, p.indices)[0], p.but(scale=0.05).solve()[0])


def test_several_threads_may_call_at_once():
    problems = [random_problem(tokens=3, heads=17, topk=500) for _ in range(4)]
    want = [p.solve() for p in problems]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda p: [p.solve() for _ in range(20)], problems))
    for again, first in zip(found, want, strict=True):
        assert all(torch.equal(a, b) for one in again for a, b in zip(one, first, strict=True))
