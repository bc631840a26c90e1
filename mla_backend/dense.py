"""Dense attention: every query attends to its request's whole sequence, which a page table finds."""

import torch
from torch import Tensor

from mla_backend import attention
from mla_backend.arguments import call, named, require_tensors
from mla_backend.formats import format_name, format_number
from mla_backend.plan import MAX_HEADS, Plan, new_workspace, plan_arguments, products_number, require_plan
from mla_backend.plan import plan as make_plan


def dense_attention(
    q: Tensor | tuple[Tensor, Tensor],
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
    cache_format: str | None = None,
    cache_scale: float = 1.0,
    products: str = "exact",
    plan: Plan | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The queries of each request attend to the request's whole sequence. All of them read its cache once.

    Args:
        q: bf16 (fp16 with a cache of that) `[B, S, H, head_dim]`: S queries of each of B requests. head_dim is 576, or
            512 for rows without rope of their own. 576 also as the pair `(q_nope [B, S, H, 512], q_rope
            [B, S, H, 64])`. S is at most 64, H 1 to 256. Any strides whose last is 1.
        cache: `[blocks, block_size, width]` of a format in `FORMATS`; a dimension of 1 before the last is accepted.
            Blocks and rows may be strided.
        block_table: int32 `[B, max_blocks]`, the blocks of each request's sequence in their order. Entries beyond a
            sequence's end are never read. Positions in a block outside the cache are skipped.
        lengths: int32 `[B]`, the tokens of each sequence. Below 0 is 0; a sequence ends where its row of block_table
            does.
        scale: what scores are multiplied with before the softmax; a finite number.
        causal: a request's last query sees the whole sequence, the one before it one token less, and so on.
        cache_format: the cache's format, a name in `FORMATS`; by default what its dtype and width say.
        cache_scale: the scale of fp8_tensor_576 caches; not 0.
        products: `exact`, or `fp8` with FP8 rows, as for `sparse_attention`. All kernels compute exactly so far.
        plan: what `plan(B, max_blocks * block_size, topk_length=lengths, num_heads=S * H, cache_format=...)` returned.
            Made here if left out.
        workspace: on a GPU, memory for partial results, as for `sparse_attention`; of `workspace_floats(ctas, S * H)`
            fp32 numbers. Made here if left out.
        batch_invariant: give a request the same bits whatever else is in the batch, by never cutting its sequence.
            With a plan of your own, make the plan so.
        out, lse: where to write, `[B, S, H, 512]` of q's dtype and fp32 `[B, H, S]`, of any strides (out's last is 1).

    Returns:
        out `[B, S, H, 512]` and lse fp32 `[B, H, S]`, the natural logarithm of the sum of exponentials. A query with
        nothing to attend to gives 0 and -inf.
    """
    require_tensors(cache=cache, block_table=block_table, lengths=lengths)
    require_plan(plan)
    way = products_number(products)
    q, q_rope = attention.query_parts(q)
    requests = q.shape[:-1]
    if out is None:
        out = torch.empty((*requests, attention.VALUE_DIM), dtype=q.dtype, device=q.device)
    if lse is None:  # [B, H, S], of which the kernels write [B, S, H]
        lse = torch.empty(requests, dtype=torch.float32, device=q.device).transpose(-1, -2)
    if q.is_cuda and q.dim() == 4 and block_table.dim() == 2 and cache.dim() >= 3:  # else the op refuses
        rows = q.shape[1] * q.shape[2]
        if plan is None:
            slots = min(block_table.shape[1] * cache.shape[1], attention.MAX_SLOTS)
            with named(topk_length="lengths"):
                plan = make_plan(
                    q.shape[0],
                    slots,
                    topk_length=lengths,
                    num_heads=min(max(rows, 1), MAX_HEADS),  # the op refuses others
                    cache_format=format_name(cache, cache_format),
                    device=q.device,
                    batch_invariant=batch_invariant,
                )
        if workspace is None and plan.table.dim() == 2:
            workspace = new_workspace(len(plan.table), rows, q.device)
    table, launch = plan_arguments(plan)
    call(
        torch.ops.mla_backend.dense_attention.default,
        q,
        q_rope,
        cache,
        block_table,
        lengths,
        scale,
        causal,
        format_number(cache_format, "cache_format"),
        cache_scale,
        way,
        table,
        launch,
        workspace,
        batch_invariant,
        out,
        lse,
    )
    return out, lse
