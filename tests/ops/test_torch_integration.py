"""The ops as torch sees them: opcheck, torch.compile without graph breaks, threads of the caller."""

import threading

import pytest
import torch

import mla_backend
from dense_problems import random_dense
from mla_backend import Launch
from mla_backend.plan import plan_arguments
from problems import FORMATS, random_cache, random_problem
from training_problems import random_training_problem

OPS = torch.ops.mla_backend


def samples():
    """One call of every op, with and without its optional tensors."""
    p = random_problem(tokens=2, heads=3, topk=20)
    yield OPS.own_memory.default, (p.q, [p.cache, p.indices], "q,cache,indices")
    out, lse, largest = torch.zeros(2, 3, 512).bfloat16(), torch.zeros(2, 3), torch.zeros(2, 3)
    lengths = torch.tensor([5, 20], dtype=torch.int32)
    yield (
        OPS.sparse_attention.default,
        (p.q, None, p.cache, p.indices, 0.1, *[None] * 5, -1, -1, 1.0, None, [], None, False, out, lse, None),
    )
    yield (
        OPS.sparse_attention.default,
        (
            p.q[..., :512],
            p.q[..., 512:],
            p.cache,
            p.indices,
            0.1,
            lengths,
            torch.randn(3),
            p.cache,
            p.indices,
            lengths,
            2,
            2,
            1.0,
            *plan_arguments(mla_backend.plan(2, 20, extra_topk=20)),
            torch.zeros(10),
            True,
            out,
            lse,
            largest,
        ),
    )
    d = random_dense("bf16", (20, 5), 2, 3)
    out, lse = torch.zeros(2, 2, 3, 512).bfloat16(), torch.zeros(2, 3, 2)
    more = (*plan_arguments(mla_backend.plan(2, 32, topk_length=lengths)), torch.zeros(10), True, out, lse)
    dense = OPS.dense_attention.default
    yield dense, (d.q, None, d.cache, d.block_table, lengths, 0.1, True, -1, 1.0, None, [], None, False, out, lse)
    yield dense, (d.q[..., :512], d.q[..., 512:], d.cache, d.block_table, lengths, 0.1, False, 0, 1.0, *more)
    launch = Launch("cpu", 3, 0, 1, 0, 4).numbers()
    yield OPS.plan.default, (lengths, None, 2, 20, 0, False, launch, torch.zeros(4, 8, dtype=torch.int32))
    combined = torch.zeros(3, 4, 8), torch.zeros(3, 4)
    yield OPS.combine_partials.default, (torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4), *combined)
    for fmt in FORMATS:
        form, slots = mla_backend.FORMATS[fmt], torch.arange(3)
        values = torch.randn(3, form.latent), torch.randn(3, 64) if form.rope else None
        yield OPS.cache_write.default, (*values, random_cache(fmt, 2, 4), slots, False, -1, 1.0)
        out = torch.zeros(3, form.head_dim).to(form.number)
        yield OPS.cache_gather.default, (random_cache(fmt, 2, 4), slots, -1, 1.0, out)
    positions, table, requests = (torch.zeros(shape, dtype=torch.int32) for shape in ((2, 5), (1, 4), (2,)))
    outputs = positions.clone(), requests.clone()
    yield OPS.convert_indices.default, (positions, table, requests, 16, True, 2, 1, 1, *outputs)
    table, staged = torch.zeros(1, 2, dtype=torch.int32), mla_backend.STAGED.new_cache(2, 16)
    for more in (None, table):
        yield OPS.stage_rows.default, (random_cache("fp8_ds_mla", 2, 16), table, lengths[:1], more, -1, staged)
    queries, index_queries = torch.randn(2, 3, 64).bfloat16(), torch.randn(2, 4, 128).bfloat16()
    table, outputs = torch.randn(9, 64), (queries.clone(), index_queries.byte(), torch.zeros(2, 4))
    inputs = queries, index_queries, torch.randn(2, 4), torch.arange(2), table, table.bfloat16()
    yield OPS.rotate_queries.default, (*inputs, 0.1, True, *outputs)
    for cache in (torch.zeros(2, 16, 132, dtype=torch.uint8), torch.zeros(2, 16, 128).bfloat16()):
        table, requests = torch.arange(2, dtype=torch.int32).view(1, 2), torch.zeros(2, dtype=torch.int32)
        inputs = torch.randn(2, 32, 128), torch.randn(2, 32), cache, table, requests, lengths
        yield OPS.index_scores.default, (*inputs, torch.zeros(2, 20))
        outputs = torch.zeros(0, dtype=torch.uint8), torch.zeros(2, 7, dtype=torch.int32), torch.zeros(2, 7)
        yield OPS.select_tokens.default, (*inputs, table, 16, *outputs)
        yield OPS.select_tokens.default, (*inputs, None, 1, None, outputs[1], None)
    yield OPS.select_top.default, (torch.randn(2, 20), lengths, torch.zeros(2, 7, dtype=torch.int32))
    blocks, bits = torch.tensor([[[[-2, 0, -1]]]], dtype=torch.int32), torch.ones(1, 2, 1, dtype=torch.int32)
    slots, table = torch.zeros(2, 30, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    yield OPS.mask_lists.default, (blocks, bits, 128, 16, 2, 40, 0, True, table, 16, slots, lengths)
    yield from samples_of_the_backward()


def samples_of_the_backward():
    p = random_training_problem(2, 3, 10, 5, sink=True, d_lse=True)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    out, lse, delta, lse2, d_sink = torch.randn(2, 3, 512).bfloat16(), *torch.randn(4, 2, 3)
    yield OPS.sparse_delta.default, (out, p.d_out, lse, p.d_lse, p.sink, delta, lse2, d_sink)
    begin, pairs = mla_backend.backward_order(p.indices, 10)
    yield OPS.backward_order.default, (p.indices, lengths, 10, None, begin, pairs)
    contributions = torch.zeros(1, 5, 576).bfloat16()
    main = p.q, p.kv, p.indices, None, 0.04, p.d_out, lse2, delta, 1, 1, torch.zeros_like(p.q), contributions
    yield OPS.sparse_backward.default, (*main, None, None)
    following, accumulator = torch.zeros(10, dtype=torch.int32), torch.zeros(10, 576)
    d_kv = torch.zeros(10, 576).bfloat16()
    yield OPS.backward_sum.default, (begin, pairs, contributions, 5, 5, False, following, accumulator, d_kv)


@pytest.fixture(scope="module")
def made() -> list:
    return list(samples())


@pytest.mark.parametrize("index", range(37))
def test_opcheck(made, index):
    torch.library.opcheck(*made[index])


def test_every_op_has_a_sample(made):
    assert len(made) == 37 and {str(op).split(".")[1] for op, _ in made} == set(mla_backend.fake.OPS)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("fmt", FORMATS)
def test_attention_compiles_without_a_graph_break(fmt):
    p = random_problem(fmt, tokens=3, heads=5, topk=40, topk_length=torch.tensor([0, 7, 40], dtype=torch.int32))

    def step(q, cache, indices, lengths):
        plan = mla_backend.plan(q.shape[0], indices.shape[1], topk_length=lengths)
        out, lse, largest = mla_backend.sparse_attention(
            q * 1, cache, indices, scale=0.05, topk_length=lengths, plan=plan, return_max_logits=True
        )
        return out + 1, lse, largest

    arguments = p.q, p.cache, p.indices, p.topk_length
    for got, want in zip(compiled(step)(*arguments), step(*arguments), strict=True):
        assert torch.equal(got, want)


def test_a_layer_compiles_without_a_graph_break():
    cache = mla_backend.FORMATS["fp8_ds_mla"].new_cache(4, 16)
    table, requests = torch.arange(4, dtype=torch.int32).view(1, 4), torch.zeros(2, dtype=torch.int32)

    def layer(kv_c, k_pe, q, positions):
        mla_backend.cache_write(kv_c, k_pe, cache, torch.arange(64))
        slots, counts = mla_backend.convert_indices(positions, table, requests, 16, compact=True)
        halves = [mla_backend.sparse_attention(q, cache, s, scale=0.05) for s in slots.split(10, 1)]
        out, lse = mla_backend.combine_partials([h[0] for h in halves], [h[1] for h in halves])
        return out, lse, counts, mla_backend.cache_gather(cache, slots[0])

    positions = torch.randint(-5, 64, (2, 20), dtype=torch.int32)
    arguments = torch.randn(64, 512), torch.randn(64, 64), torch.randn(2, 3, 576).bfloat16(), positions
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
        slots = mla_backend.select_tokens(*arguments, 10, slots_of=(table, 16))
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
    wrong = []

    def work(i):
        for _ in range(20):
            if not all(torch.equal(a, b) for a, b in zip(problems[i].solve(), want[i], strict=True)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
