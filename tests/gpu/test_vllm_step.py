"""What a step of the vLLM backend does on a GPU, without vLLM: nothing waits, nothing is allocated under capture, and a
captured graph follows new lengths."""

import pytest
import torch
from torch import Tensor

import mla_backend
from gpu_checks import captured, nothing_waits
from mla_backend import reference
from mla_backend.vllm_plugin.beginnings import MASKED, MASKED_CONTEXT, MASKED_WIDTHS, attend_to_picked, longest_masked
from mla_backend.vllm_plugin.dense_step import DenseBuffers, DenseStep, groups_of
from mla_backend.vllm_plugin.staging import StagedRequests
from mla_backend.vllm_plugin.step import SparseStep, StepBatch, StepBuffers
from problems import assert_accurate, random_cache, scale_of, score_error

pytestmark = pytest.mark.gpu
TOKENS, TOPK, BLOCK_SIZE, BLOCKS, SCALE = 8, 256, 64, 16, 0.04


def attend(
    step: SparseStep, q: Tensor, cache: Tensor, picked: Tensor, table: Tensor, ranks: int = 1, rank: int = 0
) -> Tensor:
    """As the first layer does it."""
    room = step.buffers
    step.begin("first")
    slots, counts, out, lse, memory = step.room_for(len(q), room.heads)
    for part, staged in step.parts(len(q)):
        requests, blocks = room.request_ids[part], step.table(table, BLOCK_SIZE) if staged else table
        more = dict(compact=True, ranks=ranks, rank=rank, slots=slots[part], counts=counts[part])
        mla_backend.convert_indices(picked[part], blocks, requests, BLOCK_SIZE, **more)
        if ranks > 1:
            step.use_lengths(counts)
        lengths, plan = step.work_for(part)
        more = dict(topk_length=lengths, plan=plan, workspace=room.workspace, out=out[part], lse=lse[part])
        rows = step.stage(cache, table, memory) if staged else cache
        mla_backend.sparse_attention(q[part], rows, slots[part], scale=SCALE, **more)
    return out


@pytest.mark.parametrize("fmt", ["bf16", "fp8_ds_mla"])
@pytest.mark.parametrize("heads", [16, 64, 128, 256])
def test_a_step_waits_for_nothing_allocates_nothing_and_its_graph_follows_new_lengths(heads, fmt):
    cache = random_cache(fmt, BLOCKS, BLOCK_SIZE).cuda()
    q = (torch.randn(TOKENS, heads, 576) * 10).bfloat16().cuda()
    picked = torch.full((TOKENS, TOPK), -1, dtype=torch.int32, device="cuda")
    table = torch.randperm(BLOCKS, dtype=torch.int32).view(4, 4).cuda()
    room = StepBuffers(
        max_tokens=64, captured_tokens=TOKENS, topk=TOPK, heads=heads, device=q.device, batch_invariant=False
    )
    batches = [([1, 1, 1, 1], [256, 40, 3, 130]), ([2, 2, 2, 0], [200, 64, 2, 0]), ([1, 4, 1, 2], [7, 256, 90, 33])]
    starts, seq_lens = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (5, 4))
    graph, out = None, None
    for queries, lengths in batches:
        ends = torch.tensor([0, *queries]).cumsum(0).int()
        slots = torch.full((TOKENS, TOPK), -1, dtype=torch.int32)
        chosen = torch.full((TOKENS, TOPK), -1, dtype=torch.int32)
        for row in range(4):
            for i in range(queries[row]):
                token, length = int(ends[row]) + i, lengths[row] - queries[row] + i + 1
                positions = torch.randperm(length).int()[:TOPK]
                chosen[token, : len(positions)] = positions
                blocks = table[row].cpu()[positions.long() // BLOCK_SIZE]
                slots[token, : len(positions)] = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        picked.copy_(chosen)
        starts.copy_(ends)
        seq_lens.copy_(torch.tensor(lengths))
        with nothing_waits():
            step = SparseStep(room, StepBatch(starts, seq_lens, TOKENS), TOKENS, leaders=("first",))
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            eager = attend(step, q, cache, picked, table)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
            eager = eager.clone()
        want = reference.sparse_attention(q.cpu(), cache.cpu(), slots, scale=SCALE)
        assert_accurate((eager,), (want[0],), score_error=score_error(cache))
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
                out = attend(step, q, cache, picked, table)
                assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        # all that a replay has of the batch is what now stands where the first one's stood
        out.fill_(torch.nan)
        room.lengths.fill_(-1)
        room.request_ids.fill_(-1)
        room.plan_table.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, eager)


@pytest.mark.parametrize("heads", [48, 128])
@pytest.mark.parametrize(("first", "spans"), [(0, None), (2, None), (2, [slice(0, 2), slice(20, 62), slice(99, 152)])])
def test_requests_attend_to_staged_rows_and_nothing_waits(heads, first, spans):
    """Those of the spans, if others attend densely."""
    cache, lengths, queries = random_cache("fp8_ds_mla", BLOCKS, BLOCK_SIZE).cuda(), [256, 70, 200, 130], [1, 1, 60, 90]
    tokens, ends = sum(queries), torch.tensor([0, *queries]).cumsum(0).int()
    table = torch.randperm(BLOCKS, dtype=torch.int32).view(4, 4)
    picked = torch.full((tokens, TOPK), -1, dtype=torch.int32)
    requests = torch.arange(4, dtype=torch.int32).repeat_interleave(torch.tensor(queries))
    for token, request in enumerate(requests.tolist()):
        chosen = torch.randperm(lengths[request] - int(ends[request + 1]) + token + 1).int()
        picked[token, : len(chosen)] = chosen
    q = (torch.randn(tokens, heads, 576) * 10).bfloat16().cuda()
    sizes = dict(max_tokens=tokens, captured_tokens=TOKENS, topk=TOPK, heads=heads, batch_invariant=False)
    room = StepBuffers(**sizes, device=q.device, staged_rows=BLOCKS * BLOCK_SIZE)
    given = [x.cuda() for x in (picked, table, ends, torch.tensor(lengths, dtype=torch.int32))]
    with nothing_waits():
        staged = StagedRequests(first, sum(queries[:first]), max(lengths[first:]))
        leaders = ("first",) if spans is None else None
        step = SparseStep(
            room, StepBatch(given[2], given[3], tokens), tokens, leaders=leaders, staged=staged, spans=spans
        )
        out = attend(step, q, cache, *given[:2])
    slots, _ = reference.convert_indices(picked, table, requests, BLOCK_SIZE)
    want = reference.sparse_attention(q.cpu(), cache.cpu(), slots, scale=SCALE)
    for part in spans or [slice(None)]:
        assert_accurate((out[part],), (want[0][part],))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_ranks_graph_follows_what_is_picked_and_walks_over_what_it_keeps(heads, rank):
    """Of two ranks of decode context parallelism."""
    cache, ranks = random_cache("fp8_ds_mla", BLOCKS, BLOCK_SIZE).cuda(), dict(ranks=2, rank=rank)
    q = (torch.randn(TOKENS, heads, 576) * 10).bfloat16().cuda()
    table = torch.randperm(BLOCKS, dtype=torch.int32).view(4, 4).cuda()
    starts = torch.arange(0, TOKENS + 1, 2, dtype=torch.int32, device="cuda")
    seq_lens = torch.full((4,), 2 * 4 * BLOCK_SIZE, dtype=torch.int32, device="cuda")
    sizes = dict(max_tokens=TOKENS, captured_tokens=TOKENS, topk=TOPK, heads=heads, batch_invariant=False)
    step = SparseStep(
        StepBuffers(**sizes, device=q.device), StepBatch(starts, seq_lens, TOKENS), TOKENS, leaders=("first",)
    )
    picked = torch.zeros(TOKENS, TOPK, dtype=torch.int32, device="cuda")
    attend(step, q, cache, picked, table, **ranks)
    graph, out = captured(lambda: attend(step, q, cache, picked, table, **ranks))
    for _ in range(3):
        chosen = torch.stack([torch.randperm(2 * 4 * BLOCK_SIZE)[:TOPK] for _ in range(TOKENS)]).int()
        picked.copy_(chosen)
        graph.replay()
        requests = torch.arange(4, dtype=torch.int32).repeat_interleave(2)
        slots, counts = reference.convert_indices(chosen, table.cpu(), requests, BLOCK_SIZE, True, **ranks)
        assert step.lengths.tolist() == counts.tolist() and counts.max() < TOPK
        want = reference.sparse_attention(q.cpu(), cache.cpu(), slots, scale=SCALE)
        assert_accurate((out,), (want[0],), score_error=score_error(cache))


@pytest.mark.parametrize("fmt", ["bf16", "fp8_tensor_576"])
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (16, 3), (128, 1), (128, 2)])
def test_a_graph_of_dense_attention_follows_new_lengths_and_a_step_waits_for_nothing(heads, queries, fmt):
    """All requests have so many tokens, as under verification. One of them is padding."""
    requests, room_for = 4, 4
    cache = random_cache(fmt, BLOCKS, BLOCK_SIZE).cuda()
    table = torch.randperm(BLOCKS, dtype=torch.int32).view(requests, room_for).cuda()
    lengths = torch.zeros(requests, dtype=torch.int32, device="cuda")
    tokens = requests * queries
    q_nope = (torch.randn(heads, tokens, 512) * 10).bfloat16().cuda().transpose(0, 1)
    q = q_nope, (torch.randn(tokens, heads, 64) * 10).bfloat16().cuda()
    buffers = DenseBuffers(
        most_queries=8,
        slots=room_for * BLOCK_SIZE,
        heads=heads,
        device=q[0].device,
        batch_invariant=False,
    )
    starts = [0, queries, 2 * queries, 3 * queries, 3 * queries]
    step = DenseStep(buffers, groups_of(starts, tokens), leaders=("first",))
    how = dict(scale=SCALE, cache_scale=scale_of(fmt))
    graph = None
    for now in ([256, 40, 8, 0], [64, 256, 130, 0], [9, 100, 255, 0]):
        lengths.copy_(torch.tensor(now))
        with nothing_waits():
            eager = [step.attend(layer, q, cache, table, lengths, **how) for layer in ("first", "second")]
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = [step.attend(layer, q, cache, table, lengths, **how) for layer in ("first", "second")]
        graph.replay()
        joined = torch.cat(q, dim=-1).cpu().view(requests, queries, heads, 576)
        out, lse = reference.dense_attention(joined, cache.cpu(), table.cpu(), lengths.cpu(), cache_format=fmt, **how)
        want = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        for found in (*eager, *captured):
            assert_accurate([x.cpu() for x in found], want, score_error=score_error(cache))


@pytest.mark.parametrize("heads", [1, 8, 16, 32])
def test_masks_leave_what_was_picked_in_every_context_and_give_the_same_bits(heads):
    device, (key_width, width) = torch.device("cuda", torch.cuda.current_device()), MASKED_WIDTHS
    longest = longest_masked(heads, MASKED_WIDTHS, 2048, device)
    assert longest == max(context for most, context in MASKED_CONTEXT.items() if heads <= most)
    for context in range(2048 + MASKED, longest + 1, MASKED):
        q, k = (torch.randn(n, heads, key_width, device=device).bfloat16() for n in (MASKED, context))
        v = torch.randn(context, heads, 128 + width, device=device).bfloat16()[..., 128:]
        picked = torch.rand(MASKED, context, device=device).topk(300).indices.int()
        picked[: MASKED // 2] = picked[: MASKED // 2] % 512 + (context - 512)  # whole tiles where nothing is picked
        picked[::3, 100:] = -1
        torch.cuda.set_sync_debug_mode("error")
        out = attend_to_picked(q, k, v, picked, 0.07)
        torch.cuda.set_sync_debug_mode("default")
        seen = torch.zeros(MASKED, context + 1, dtype=torch.bool, device=device).scatter_(
            1, picked.long() % (context + 1), True
        )
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1).float() for x in (q, k, v)), attn_mask=seen[:, :context], scale=0.07
        ).transpose(0, 1)
        assert (out.float() - want).abs().max() < 0.02
        assert all(torch.equal(out, attend_to_picked(q, k, v, picked, 0.07)) for _ in range(3))
