"""Masks of blocks: flex_mla and its lists against eager attention in float64."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import mla_backend
from flex_problems import BLOCKS, MASKS, flex_problems, mask_mod, random_flex
from mla_backend import flex_mla, mask, reference
from problems import BASIC, assert_accurate, random_cache

OPS = torch.ops.mla_backend


@given(problem=flex_problems())
def test_any_mask_agrees_with_eager_attention_in_float64(problem):
    problem.check(cancels=True)


@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("kind", MASKS)
def test_every_kind_of_mask(device, kind, heads):
    """Few heads take full blocks through dense attention, 64 and more do not."""
    random_flex(kind, 1, heads, 50, 90, 16, device=device).poisoned().check()
    random_flex(kind, 2, heads, 32, 64, 16, device=device, mask_batch=2).poisoned().check()


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_size(device, block):
    """Of lengths that are no multiple of it, and of one that is."""
    for queries, positions in ((70, 131), (64, 320)):
        random_flex("prefix", 2, 3, queries, positions, block, device=device).poisoned().check()


@pytest.mark.parametrize("heads", [4, 100])
def test_a_query_that_sees_nothing_gives_0_and_minus_infinity_and_no_gradient(device, heads):
    problem = random_flex(lambda b, h, i, j: (i % 5 != 0) & (i < 40) & (j <= i), 1, heads, device=device).poisoned()
    out, lse = problem.solve()
    empty = ~problem.seen[0, 0].any(-1)
    assert (out[:, :, empty] == 0).all() and (lse[:, :, empty] == -torch.inf).all()
    d_q, d_kv = problem.gradients()
    assert (d_q[:, :, empty] == 0).all() and not d_kv.isnan().any()


@pytest.mark.parametrize("heads", [4, 100])
def test_a_row_with_nan_reaches_the_queries_that_see_it_and_no_others(device, heads):
    problem = random_flex("causal", 1, heads, 70, 70, 16, device=device)
    problem.kv[0, 0, 37] = torch.nan
    out, lse = problem.solve()
    assert out[:, :, 37:].isnan().all() and lse[:, :, 37:].isnan().all()
    assert not out[:, :, :37].isnan().any() and not lse[:, :, :37].isnan().any()


@pytest.mark.parametrize("heads", [129, 256])
def test_more_heads_without_gradients(device, heads):
    random_flex("causal", 1, heads, 20, 40, device=device).check(backward=False)


@pytest.mark.parametrize(("batch", "queries", "positions"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (1, 0, 0)])
@pytest.mark.parametrize("heads", [4, 64])
def test_nothing_to_do_gives_zeros(device, batch, heads, queries, positions):
    problem = random_flex("nothing", batch, heads, queries, positions, device=device)
    out, lse = problem.solve()
    assert out.shape == (batch, heads, queries, 512) and (out == 0).all() and (lse == -torch.inf).all()
    d_q, d_kv = problem.gradients()
    assert d_q.shape == problem.q.shape and (d_q == 0).all()
    assert d_kv.shape == problem.kv.shape and (d_kv == 0).all()


def test_a_mask_is_read_once(device):
    calls = []

    def causal(b, h, i, j):
        calls.append(1)
        return j <= i

    problem = random_flex(causal, device=device)
    first = problem.solve()
    calls.clear()
    again = problem.solve()
    assert not calls and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    prepared = mla_backend.flex_mask(problem.block_mask)
    assert mla_backend.flex_mask(problem.block_mask) is prepared and not calls
    assert torch.equal(problem.but(block_mask=prepared).solve()[0], first[0])


def test_a_mask_that_was_read_in_inference_serves_training(device):
    with torch.inference_mode():
        problem = random_flex("prefix", device=device)
        problem.solve()
    problem = random_flex("prefix", device=device).but(block_mask=problem.block_mask, seen=problem.seen.clone())
    problem.check()


def test_another_mask_mod_is_read_anew(device):
    """As torch wants it after a mask was cut."""
    problem = random_flex("causal", 1, 4, 64, 64, device=device)
    whole = problem.block_mask
    problem.solve()
    whole.mask_mod = lambda b, h, i, j: i > j
    problem.seen = problem.seen & create_mask(whole.mask_mod, 1, 1, 64, 64, device)
    full = torch.arange(64, device=device) // 16
    problem.seen = problem.seen | (full.unsqueeze(1) > full)
    problem.check()


def test_blocks_without_a_mask_mod_in_any_order_and_with_garbage(device):
    """A block that is listed twice counts once; numbers past the end, and those beyond a row's count, are skipped."""
    counts = torch.tensor([[[3, 0, 4]]], dtype=torch.int32, device=device)
    listed = torch.tensor([[[[3, 0, 99, 1], [9, -5, 0, 1], [2, 2, -1, 0]]]], dtype=torch.int32, device=device)
    block_mask = BlockMask.from_kv_blocks(
        counts, listed.clamp(0, 3), BLOCK_SIZE=16, seq_lengths=(40, 60), compute_q_blocks=False
    )
    block_mask.kv_indices = listed
    problem = random_flex("everything", 1, 4, 40, 60, device=device)
    seen = torch.zeros(3, 4, dtype=torch.bool, device=device)
    seen[0, [0, 3]] = seen[2, [0, 2]] = True
    seen = seen.repeat_interleave(16, 0)[:40].repeat_interleave(16, 1)[:, :60]
    problem.but(block_mask=block_mask, seen=seen.expand(1, 1, -1, -1)).check()
    block_mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), listed, counts, listed, 16, seq_lengths=(40, 60), compute_q_blocks=False
    )
    problem.but(block_mask=block_mask, seen=seen.expand(1, 1, -1, -1)).check()


def test_large_blocks_are_read_in_strips(device, monkeypatch):
    monkeypatch.setattr(mask, "MASK_VALUES", 500)
    random_flex("random", 1, 4, 70, 90, (50, 60), device=device).check(backward=False)
    random_flex("random", 1, 4, 20, 900, (10, 600), device=device).check(backward=False)


# ---- Parts -----------------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=700),
    entries=st.sampled_from([1, 64 * 100, 64 * 1000, 2**23]),
)
def test_parts_cover_all_queries_in_order_and_are_bounded(lengths, entries):
    lengths = torch.tensor(lengths, dtype=torch.int32)
    whole = mask.LIST_ENTRIES
    mask.LIST_ENTRIES = entries
    try:
        parts = torch.tensor(mask._parts(lengths)).view(-1, 3).tolist()
    finally:
        mask.LIST_ENTRIES = whole
    end = 0
    for first, count, topk in parts:
        assert first == end and count > 0 and topk == lengths[first : first + count].max()
        assert count * topk <= entries or count <= mask.LIST_QUERIES
        end = first + count
    assert end == len(lengths)


def backward_through(problem, parts):
    """The gradients if lists are cut into these parts, of one forward pass."""
    prepared = mla_backend.flex_mask(problem.block_mask)
    out, lse = problem.solve()
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (problem.q, out, lse, problem.d_out, problem.d_lse)]
    given = tokens[0], problem.kv.flatten(0, 2), *tokens[1:], prepared.blocks, prepared.bits, prepared.sizes
    return tokens, OPS.flex_mla_backward(*given, parts, problem.scale, problem.q.shape[0], True)


@pytest.mark.parametrize("heads", [5, 128])
def test_gradients_have_the_same_bits_in_any_parts_and_are_those_of_lists(device, heads):
    problem = random_flex("prefix", 2, heads, 90, 140, 32, device=device, mask_batch=2).poisoned()
    prepared = mla_backend.flex_mask(problem.block_mask)
    tokens, whole = backward_through(problem, (0, 180, 140))
    assert torch.equal(problem.gradients()[0].transpose(1, 2).flatten(0, 1), whole[0])
    for parts in ((0, 100, 140, 100, 80, 140), (0, 1, 140, 1, 64, 140, 65, 115, 140)):
        again = backward_through(problem, parts)[1]
        assert all(torch.equal(a, b) for a, b in zip(again, whole, strict=True))
    slots, lengths = prepared.lists(0, 180, 140)
    q, out, lse, d_out, d_lse = tokens
    arguments = q, problem.kv.flatten(0, 2), slots, out, lse, d_out
    d_q, d_kv, _ = mla_backend.sparse_mla_backward(
        *arguments, scale=problem.scale, d_lse=d_lse, topk_length=lengths, deterministic=True
    )
    assert torch.equal(d_q, whole[0]) and torch.equal(d_kv, whole[1])


@pytest.mark.parametrize("heads", [4, 64])
def test_many_parts_and_a_mask_that_all_batch_elements_share(device, heads, monkeypatch):
    monkeypatch.setattr(mask, "LIST_ENTRIES", 64 * 50)
    problem = random_flex("prefix", 2, heads, 130, 70, 16, device=device).poisoned()
    assert len(mla_backend.flex_mask(problem.block_mask).parts) > 3
    problem.check()
    first, again = problem.gradients(), problem.gradients()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ---- Lists -----------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(MASKS),
    sizes=st.tuples(st.integers(1, 80), st.integers(1, 150)),
    block=st.sampled_from(BLOCKS),
    page_size=st.sampled_from([0, 1, 16, 24]),
    cut=st.floats(0, 1),
)
def test_lists_name_what_is_seen_in_ascending_order(device, seed, kind, sizes, block, page_size, cut):
    torch.manual_seed(seed)
    batch, heads, (queries, positions) = 2, 3, sizes
    mod = mask_mod(kind, queries, positions, device)
    shape = batch, heads, queries, positions
    prepared = mla_backend.flex_mask(create_block_mask(mod, *shape, device=device, BLOCK_SIZE=block))
    table = None
    if page_size:
        table = torch.randint(-1, 100, (batch, max(1, positions // page_size)), dtype=torch.int32, device=device)
    first = int(cut * batch * heads * queries)
    count = batch * heads * queries - first
    topk = max(1, int(cut * positions))
    slots, lengths = prepared.lists(first, count, topk, True, table, max(page_size, 1))
    seen = create_mask(mod, *shape, device=device).flatten(0, 2)[first:].cpu()
    assert torch.equal(lengths.cpu(), seen.sum(1, dtype=torch.int32))
    for i, row in enumerate(slots.cpu()):
        found, element = seen[i].nonzero().squeeze(1), (first + i) // (heads * queries)
        want = element * positions + found
        if page_size:
            pages = torch.nn.functional.pad(table[element].cpu(), (0, 2 + positions // page_size), value=-1)
            own = pages[found // page_size]
            want = torch.where(own < 0, -1, own * page_size + found % page_size)
        assert torch.equal(row[: lengths[i]], want[:topk].int())
    partial = prepared.lists(first, count, 0, False)[1].cpu()
    if group := prepared.sizes[4]:
        full = prepared.full_lengths.flatten(0, 1).cpu().repeat_interleave(group, 1)[:, :queries].flatten()
        assert torch.equal(partial + full[first:], lengths.cpu())


def test_a_table_of_blocks_that_names_bits_which_are_not_there_is_harmless(device):
    prepared = mla_backend.flex_mask(random_flex("random", device=device).block_mask)
    blocks = torch.tensor([2**31 - 1, -(2**31), -3, len(prepared.bits)], dtype=torch.int32, device=device)
    wrong = dataclasses.replace(prepared, blocks=blocks[torch.randint(0, 4, prepared.blocks.shape)].contiguous())
    assert (wrong.lists(0, 50, 70)[1] == 0).all()


# ---- Paged caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", BASIC)
@pytest.mark.parametrize("kv_block", [16, 32, 128, 24])
@pytest.mark.parametrize("heads", [16, 70])
def test_a_tree_of_drafted_tokens_over_a_paged_cache(device, fmt, kv_block, heads):
    """Each sequence ends in the tree, of which a token sees itself and its ancestors. One page is not in the cache."""
    batch, drafted, page, blocks = 3, 6, 16, 8
    lengths = torch.tensor([100, 37, 8], device=device)
    parents, sees = [-1, 0, 0, 1, 1, 2], torch.eye(drafted, dtype=torch.bool, device=device)
    for i, parent in enumerate(parents[1:], 1):
        sees[i] |= sees[parent]

    def tree(b, h, i, j):
        drafts = j - (lengths[b] - drafted)
        return (j < lengths[b]) & ((drafts < 0) | sees[i, drafts.clamp(0, drafted - 1)])

    shape = batch, 1, drafted, blocks * page
    block_mask = create_block_mask(tree, *shape, device=device, BLOCK_SIZE=(128, kv_block))
    cache = random_cache(fmt, 40, page).to(device)
    table = torch.randperm(40, device=device)[: batch * blocks].view(batch, blocks).int()
    table[0, 2] = 40
    form = mla_backend.FORMATS[fmt]
    q = (torch.randn(batch, drafted, heads, form.head_dim, device=device) * 10).to(form.number).transpose(1, 2)
    got = flex_mla(q, cache, block_mask, scale=1 / 24, block_table=table, return_lse=True)
    slots = (table.long().unsqueeze(-1) * page + torch.arange(page, device=device)).flatten(1)
    rows, valid = reference.cache_rows(cache, slots)
    seen = create_mask(tree, *shape, device=device) & valid.view(batch, 1, 1, -1)
    want = reference.flex_mla(q.double(), rows.double().unsqueeze(1), seen, scale=1 / 24)
    score_error = 2.0**-9 if device == "cuda" and fmt == "fp8_ds_mla" else 0.0
    assert_accurate(got, want, score_error=score_error)


# ---- torch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [4, 70])
def test_it_compiles_without_a_graph_break(device, heads):
    """With a mask that was made before, whichever it is."""

    def loss(q, kv, block_mask):
        out, lse = flex_mla(q * 1, kv, block_mask, scale=1 / 24, return_lse=True, deterministic=True)
        return out.float().square().sum() + lse.clamp(min=-100).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for kind in ("causal", "window", "causal"):
        problem = random_flex(kind, 2, heads, device=device)
        gradients = []
        for function in (loss, compiled):
            leaves = [x.clone().requires_grad_() for x in (problem.q, problem.kv)]
            function(*leaves, mla_backend.flex_mask(problem.block_mask)).backward()
            gradients.append([leaf.grad for leaf in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_opcheck_of_the_autograd_ops():
    problem = random_flex("prefix", 2, 3, 20, 30)
    prepared = mla_backend.flex_mask(problem.block_mask)
    fields = [getattr(prepared, field.name) for field in dataclasses.fields(prepared)]
    tokens = problem.q.transpose(1, 2).flatten(0, 1)
    arguments = tokens.requires_grad_(), problem.kv.flatten(0, 2).requires_grad_(), *fields, 0.04, 2, None
    torch.library.opcheck(OPS.flex_mla.default, arguments)
    out, lse = (x.detach() for x in OPS.flex_mla(*arguments))
    d_out, more = torch.randn_like(out), (prepared.blocks, prepared.bits, prepared.sizes, prepared.parts)
    arguments = tokens.detach(), problem.kv.flatten(0, 2).detach(), out, lse, d_out, None, *more, 0.04, 2, True
    torch.library.opcheck(OPS.flex_mla_backward.default, arguments)


def test_only_gradients_that_are_asked_for(device):
    problem = random_flex("causal", device=device)
    want = problem.but(d_lse=torch.zeros_like(problem.d_lse)).gradients()
    kv = problem.kv.clone().requires_grad_()
    out = flex_mla(problem.q, kv, problem.block_mask, scale=problem.scale, deterministic=True)
    out.backward(problem.d_out)
    assert torch.equal(kv.grad, want[1])
    with torch.no_grad():
        assert not flex_mla(problem.q, kv, problem.block_mask, scale=0.1).requires_grad


def test_a_second_derivative_is_refused(device):
    problem = random_flex("causal", 1, 2, device=device)
    q = problem.q.clone().requires_grad_()
    (d_q,) = torch.autograd.grad(problem.but(q=q).solve()[0].float().square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        d_q.float().sum().backward()


def test_it_computes_what_torchs_flex_attention_does():
    """Eager, in float64, of rows that see something, with and without a score_mod."""
    problem = random_flex("prefix", 2, 4, 40, 60, mask_batch=2)
    q, kv = problem.q.double(), problem.kv.double()
    for score_mod in (None, lambda score, b, h, i, j: score * 0.5 + (j - i) / (h + 10)):
        got = problem.solve(score_mod=score_mod)
        want = flex_attention(
            q, kv, kv[..., :512], score_mod, problem.block_mask, problem.scale, enable_gqa=True, return_lse=True
        )
        assert_accurate(got, want, magnitude=1.0)


# ---- score_mod -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "rows and columns"])
def test_any_score_mod_on_a_cpu(kind):
    """Soft-capping and a bias that is learnt; both are also written down here without torch's indices."""
    problem = random_flex(kind, 2, 3, 30, 40, mask_batch=2, mask_heads=3)
    bias = torch.randn(3, requires_grad=True)

    def score_mod(score, b, h, i, j):
        return 5 * torch.tanh(score / 5) + bias[h] * (j - i)

    q, kv = problem.q.clone().requires_grad_(), problem.kv.clone().requires_grad_()
    out, lse = problem.but(q=q, kv=kv).solve(score_mod=score_mod)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    got = torch.autograd.grad(out, (q, kv, bias), problem.d_out)

    q, kv, own_bias = (x.detach().double().requires_grad_() for x in (q, kv, bias))
    scores = torch.einsum("bhsd,btd->bhst", q, kv.squeeze(1)) * problem.scale
    distance = torch.arange(40) - torch.arange(30).unsqueeze(1)
    scores = 5 * torch.tanh(scores / 5) + own_bias.view(3, 1, 1) * distance
    empty = ~problem.seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~problem.seen & ~empty, -torch.inf).softmax(-1).masked_fill(empty, 0.0)
    want = torch.einsum("bhst,btd->bhsd", weights, kv.squeeze(1)[..., :512])
    torch.testing.assert_close(out.double(), want, rtol=0.01, atol=0.01)
    assert torch.equal(lse.isinf().unsqueeze(-1), empty.expand_as(lse.unsqueeze(-1)))
    for ours, exact in zip(got, torch.autograd.grad(want, (q, kv, own_bias), problem.d_out.double()), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=0.01, atol=0.01)
