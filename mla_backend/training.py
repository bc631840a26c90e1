"""Sparse attention that can be trained: its gradients, as ops and for torch's autograd."""

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

from mla_backend import attention, library
from mla_backend.arguments import (
    call,
    described,
    named,
    require_bools,
    require_count,
    require_device_of,
    require_optional_tensors,
    require_tensors,
    result_of,
)

MAX_HEADS = 128
WIDTHS = (576, 512)
WORKSPACE_BYTES = 2**30
CPU_WORKSPACE_BYTES = 30 * 2**20
"""What malloc hands out again and again. From 32 MiB on it takes new pages from the kernel each time."""


class BackwardOrder(NamedTuple):
    """In which order contributions are added to the gradient of kv. It depends on the lists alone.

    With the order of other lists the gradient of kv is wrong. On a CPU the backward refuses one. A GPU would have to be
    waited for, so there only other shapes are refused, and the caller promises the rest.
    """

    begin: Tensor
    """int32 `[N + 1]`: where each row's pairs begin."""
    pairs: Tensor
    """int32 `[T * topk]`: query * topk + entry, by the row that the entry names; then by rising number."""


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    order: BackwardOrder | None = None,
    deterministic: bool | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Every query attends to its own list of rows, with gradients for q, kv and sink.

    Args:
        q: bf16 `[T, H, 576]`, or 512 wide where whole rows are values. H is 1 to 128.
        kv: bf16 `[N, 576]` or `[N, 512]`, as wide as q; a dimension of 1 before the last is accepted. The first 512
            values of a row are what is summed up. Sequences of a batch lie end to end.
        indices: int32 `[T, topk]`, rows of kv in any order. One below 0 or from N on is skipped; one that is listed
            twice counts twice. T * topk is below 2^31.
        scale: what scores are multiplied with before the softmax; a finite number.
        topk_length: int32 `[T]`; only the first n entries of a list count.
        sink: fp32 `[H]`; out is scaled by e^lse / (e^lse + e^sink). lse is not changed by it.
        order: what `backward_order()` returned for these very lists, to be used by many layers. Made by the backward if
            left out.
        deterministic: give kv's gradient the same bits every time. False is for atomic additions on a GPU, of other
            bits each time. None is True where `torch.use_deterministic_algorithms` is on, else the faster of the two:
            on Hopper atomic additions while kv's gradient in fp32 fits into half of L2 (about 11,000 rows on an H100),
            and True elsewhere.
        workspace_bytes: memory that the backward may use for contributions to kv's gradient, 1 or more and enough for
            one query. It changes no bits.
        batch_invariant: give a token the same bits whatever else is in the batch, as `sparse_attention` with a cache of
            format bf16 (or bf16_512) does if asked for the same.

    Returns:
        out bf16 `[T, H, 512]` and lse fp32 `[T, H]`; 0 and -inf for a query with nothing to attend to. Both have
        gradients; a second derivative raises a NotImplementedError.
    """
    require_tensors(q=q, kv=kv, indices=indices)
    require_optional_tensors(topk_length=topk_length, sink=sink)
    if kv.dim() == 3 and kv.shape[1] == 1:
        kv = kv.squeeze(1)
    _require_order(order)
    require_count("workspace_bytes", workspace_bytes, at_least=1)
    begin, pairs = (None, None) if order is None else order
    # with a tensor elsewhere torch would return the fake result
    ordered = {"order.begin": begin, "order.pairs": pairs}
    require_device_of("q", q=q, kv=kv, indices=indices, topk_length=topk_length, sink=sink, **ordered)
    return result_of(
        torch.ops.mla_backend.sparse_mla.default,
        q,
        kv,
        indices,
        scale,
        topk_length,
        sink,
        begin,
        pairs,
        deterministic,
        workspace_bytes,
        batch_invariant,
    )


def backward_order(indices: Tensor, rows: int, *, topk_length: Tensor | None = None) -> BackwardOrder:
    """Sorts lists for the backward: make it once where many layers, or a recomputation, have the same lists.

    Args:
        indices, topk_length: as in `sparse_mla`.
        rows: N, the number of rows of kv.
    """
    require_tensors(indices=indices)
    require_optional_tensors(topk_length=topk_length)
    require_count("rows", rows)
    begin = torch.empty(rows + 1, dtype=torch.int32, device=indices.device)
    pairs = torch.empty(indices.numel(), dtype=torch.int32, device=indices.device)
    scratch = None
    if indices.is_cuda and len(pairs) > 0:
        with torch.cuda.device(indices.device):
            scratch_bytes = library.order_scratch_bytes(len(pairs), rows)
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=indices.device)
    call(torch.ops.mla_backend.backward_order.default, indices, topk_length, rows, scratch, begin, pairs)
    return BackwardOrder(begin, pairs)


def sparse_delta(
    out: Tensor, d_out: Tensor, lse: Tensor, *, d_lse: Tensor | None = None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the backward needs to know of each token and head besides its rows.

    Args:
        out, d_out: bf16 `[T, H, 512]`, the output and its gradient.
        lse, d_lse: fp32 `[T, H]`, of any strides; -inf or +inf where there is nothing to attend to.
        sink: fp32 `[H]`.

    Returns:
        fp32 `[T, H]` each: delta, the sum of out * d_out (less what d_lse changes); lse to base 2, with the sink, and
        +inf where all weights are 0; with a sink each token's share of its gradient, else None.
    """
    require_tensors(out=out, d_out=d_out, lse=lse)
    require_optional_tensors(d_lse=d_lse, sink=sink)
    delta, lse2 = (torch.empty(out.shape[:2], dtype=torch.float32, device=out.device) for _ in range(2))
    d_sink = None if sink is None else torch.empty_like(delta)
    call(
        torch.ops.mla_backend.sparse_delta.default,
        readable(out),
        readable(d_out),
        lse,
        d_lse,
        sink,
        delta,
        lse2,
        d_sink,
    )
    return delta, lse2, d_sink


def sparse_mla_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor,
    *,
    scale: float,
    d_lse: Tensor | None = None,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    order: BackwardOrder | None = None,
    deterministic: bool | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    workspace: Tensor | None = None,
    d_q: Tensor | None = None,
    d_kv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of `sparse_mla`, for who calls it without autograd.

    Args:
        q, kv, indices, scale, topk_length, sink, order, deterministic, workspace_bytes: as in `sparse_mla`.
        out, lse: what `sparse_mla` returned.
        d_out, d_lse: the gradients with respect to them.
        workspace: uint8 `[bytes]` on the device of q and aligned to 16 bytes, to be used in place of workspace_bytes of
            new memory. Atomic additions use neither.
        d_q, d_kv: where to write, bf16 of the shapes of q and kv.

    Returns:
        d_q bf16 `[T, H, width]`, d_kv bf16 `[N, width]`, and d_sink fp32 `[H]` or None.
    """
    require_tensors(q=q, kv=kv, indices=indices, out=out, lse=lse, d_out=d_out)
    require_optional_tensors(topk_length=topk_length, sink=sink, d_lse=d_lse, workspace=workspace, d_q=d_q, d_kv=d_kv)
    _require_order(order)
    if deterministic is not None:
        require_bools(deterministic=deterministic)
    require_count("workspace_bytes", workspace_bytes, at_least=1)
    _require_arguments(q, kv, indices)
    if out.shape != (*q.shape[:2], attention.VALUE_DIM):
        raise ValueError(f"out must be bfloat16 [T={q.shape[0]}, H={q.shape[1]}, 512]; got {list(out.shape)}")
    q, kv, d_out = readable(q), readable(kv), readable(d_out)
    if d_q is None:
        d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if d_kv is None:
        d_kv = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    delta, lse2, d_sink = sparse_delta(out, d_out, lse, d_lse=d_lse, sink=sink)
    if d_sink is not None:
        d_sink = d_sink.sum(0)

    in_order = adds_in_order(deterministic, kv)
    if workspace is not None:
        _require_workspace(workspace, q)
    if order is not None:
        _require_order_of(order, indices, len(kv))
        if indices.is_cpu:
            _require_same_order(order, indices, topk_length)
    accumulator = None if in_order else torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
    add_gradients(
        q,
        kv,
        indices,
        topk_length,
        d_out,
        lse2,
        delta,
        scale=scale,
        order=order,
        workspace=workspace_bytes if workspace is None else workspace,
        in_order=in_order,
        accumulator=accumulator,
        d_q=d_q,
        d_kv=d_kv,
    )
    return d_q, d_kv, d_sink


def add_gradients(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    d_out: Tensor,
    lse2: Tensor,
    delta: Tensor,
    *,
    scale: float,
    in_order: bool,
    d_q: Tensor,
    d_kv: Tensor | None,
    accumulator: Tensor | None = None,
    continues: bool = False,
    order: BackwardOrder | None = None,
    workspace: int | Tensor = WORKSPACE_BYTES,
) -> None:
    """The backward of some queries, after `sparse_delta`, for who goes through all queries part by part.

    Args:
        in_order: what `adds_in_order` says.
        d_kv: kv's gradient, which the last part writes; None before that.
        accumulator: fp32 of the shape of kv, where parts leave their sums. It begins as zeros, unless in_order. None if
            one part is all and in_order.
        continues: whether earlier parts have added to the accumulator.
        workspace: bytes, or the memory itself.
        The others are those of `sparse_mla_backward`.
    """
    queries, width, pairs_per_query = q.shape[0], q.shape[2], indices.shape[-1]
    given = isinstance(workspace, Tensor)
    with named(workspace_bytes="workspace") if given else contextlib.nullcontext():
        groups, block = _blocks(q, indices, workspace.numel() if given else workspace)

    def main(first: int, count: int, contributions: Tensor | None, accumulator: Tensor | None) -> None:
        call(
            torch.ops.mla_backend.sparse_backward.default,
            q,
            kv,
            indices,
            topk_length,
            scale,
            d_out,
            lse2,
            delta,
            first,
            count,
            d_q,
            contributions,
            accumulator,
            d_kv,
        )

    if not in_order:
        main(0, queries, None, accumulator)
        if d_kv is not None:
            # A sum of nothing: the op refuses what it could not write.
            begin, pairs = (torch.zeros(n, dtype=torch.int32, device=q.device) for n in (len(kv) + 1, 0))
            nothing = kv.new_empty(1, 0, width)
            call(torch.ops.mla_backend.backward_sum.default, begin, pairs, nothing, 0, 0, False, None, None, d_kv)
            d_kv.copy_(accumulator)
        return

    if given:
        used = workspace[: groups * block * pairs_per_query * width * 2]
        contributions = used.view(torch.bfloat16).view(groups, block * pairs_per_query, width)
    else:
        contributions = torch.empty(groups, block * pairs_per_query, width, dtype=torch.bfloat16, device=q.device)
    if order is None:
        order = backward_order(indices, len(kv), topk_length=topk_length)
    following = None
    if block < queries:
        following = torch.empty(len(kv), dtype=torch.int32, device=q.device)
        if accumulator is None:
            accumulator = torch.empty(kv.shape, dtype=torch.float32, device=q.device)
    for first in range(0, max(queries, 1), max(block, 1)):
        count = min(block, queries - first)
        main(first, count, contributions, None)
        call(
            torch.ops.mla_backend.backward_sum.default,
            *order,
            contributions,
            first * pairs_per_query,
            count * pairs_per_query,
            continues,
            following,
            accumulator,
            d_kv if first + count == queries else None,
        )


def _require_arguments(q: Tensor, kv: Tensor, indices: Tensor) -> None:
    if kv.dtype != torch.bfloat16 or kv.dim() != 2 or kv.shape[1] not in WIDTHS:
        raise ValueError(f"kv must be bfloat16 [N, 576 or 512]; got {described(kv)}")
    if q.dtype != torch.bfloat16 or q.dim() != 3 or q.shape[2] != kv.shape[1]:
        raise ValueError(f"q must be bfloat16 [T, H, {kv.shape[1]}], as wide as kv; got {described(q)}")
    if not 1 <= q.shape[1] <= MAX_HEADS:
        raise ValueError(f"q must be of 1 to {MAX_HEADS} heads; got {described(q)}")
    require_device_of("q", q=q, kv=kv)
    if indices.dim() != 2 or len(indices) != len(q):
        raise ValueError(f"indices must be int32 [T={len(q)}, topk]; got {described(indices)}")


def _require_order(order: object) -> None:
    if order is not None and not isinstance(order, BackwardOrder):
        raise TypeError(f"order must be what backward_order returned, or None; got {type(order).__name__}")
    if order is not None:
        require_tensors(**{f"order.{name}": tensor for name, tensor in order._asdict().items()})


def _require_order_of(order: BackwardOrder, indices: Tensor, rows: int) -> None:
    """Whether an order can be of these lists."""
    for name, x, size in (("begin", order.begin, rows + 1), ("pairs", order.pairs, indices.numel())):
        if x.dtype != torch.int32 or x.shape != (size,) or x.device != indices.device:
            raise ValueError(
                f"order must be of these lists, with {name} int32 [{size}] on {indices.device}; "
                f"got {described(x)} on {x.device}"
            )


def _require_same_order(order: BackwardOrder, indices: Tensor, topk_length: Tensor | None) -> None:
    """Whether it is of these lists, by sorting them again: a small part of the backward, and on a CPU nothing waits."""
    begin, pairs = backward_order(indices, len(order.begin) - 1, topk_length=topk_length)
    sorted_pairs = slice(int(begin[-1]))  # behind them are those of no row
    if not torch.equal(order.begin, begin) or not torch.equal(order.pairs[sorted_pairs], pairs[sorted_pairs]):
        raise ValueError("order must be of these lists; got the order of others")


def dense_last(x: Tensor) -> Tensor:
    """The tensor, or a copy where its last stride is not 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def readable(x: Tensor) -> Tensor:
    """The tensor, or a copy where the kernels could not read it: its last stride must be 1, and on a GPU rows begin at
    multiples of 16 bytes."""
    readable = x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1
    if readable and x.is_cuda:
        size = x.element_size()
        strides = (stride for stride, n in zip(x.stride()[:-1], x.shape, strict=False) if n > 1)
        readable = x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in strides)
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def adds_in_order(deterministic: bool | None, kv: Tensor) -> bool:
    """Whether contributions are written and then added in order. Hopper's atomic additions are faster while kv's fp32
    gradient fits into half of its L2, and slower from all of it on."""
    if not kv.is_cuda:
        return True
    if deterministic is not None:
        return deterministic
    if torch.are_deterministic_algorithms_enabled():
        return True
    l2_bytes = torch.cuda.get_device_properties(kv.device).L2_cache_size
    return not library.describe_gpu(kv.device.index)["hopper"] or 2 * kv.numel() * 4 > l2_bytes


def _blocks(q: Tensor, indices: Tensor, workspace_bytes: int) -> tuple[int, int]:
    """Groups of heads, and queries of a block whose contributions fit; blocks are about equally large."""
    require_count("workspace_bytes", workspace_bytes)
    queries, heads, width = q.shape
    groups = -(-heads // library.backward_group_heads(q.device))
    needed = groups * indices.shape[-1] * width * q.element_size()
    if workspace_bytes < needed:
        raise ValueError(f"workspace_bytes must be {needed} or more, for one query; got {workspace_bytes}")
    if q.device.type == "cpu":
        enough = max(CPU_WORKSPACE_BYTES, 4 * torch.get_num_threads() * needed)
        workspace_bytes = min(workspace_bytes, enough)
    most = queries if needed == 0 else min(queries, workspace_bytes // needed)
    if most == 0:
        return groups, 0
    if q.is_cuda and most < queries:  # whole rounds of a GPU's processors
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        if whole := most * groups // processors * processors // groups:
            return groups, whole
    blocks = -(-queries // most)
    return groups, -(-queries // blocks)


def _require_workspace(workspace: Tensor, q: Tensor) -> None:
    if workspace.dtype != torch.uint8 or workspace.dim() != 1 or workspace.stride(0) != 1:
        raise ValueError(f"workspace must be uint8 [bytes], contiguous; got {described(workspace)}")
    require_device_of("q", q=q, workspace=workspace)
    if workspace.data_ptr() % 16:
        raise ValueError("workspace must be aligned to 16 bytes; got one that begins between")


# ---- For autograd and torch.compile ----------------------------------------------------------------------
#
# Each is one opaque op to torch.compile, as the backward's blocks depend on the device.

_ARGUMENTS = (
    "Tensor q, Tensor kv, Tensor indices, float scale, Tensor? topk_length, Tensor? sink, "
    "Tensor? order_begin, Tensor? order_pairs, bool? deterministic, int workspace_bytes"
)
"""Of both ops, in this order."""


@torch.library.custom_op(
    "mla_backend::sparse_mla", mutates_args=(), schema=f"({_ARGUMENTS}, bool batch_invariant) -> (Tensor, Tensor)"
)
def _sparse_mla(
    q, kv, indices, scale, topk_length, sink, order_begin, order_pairs, deterministic, workspace_bytes, batch_invariant
):
    _require_arguments(q, kv, indices)
    if any(x is not None and x.requires_grad for x in (q, kv, sink)):
        _blocks(q, indices, workspace_bytes)  # what the backward would refuse
    if order_begin is not None and order_pairs is not None:
        _require_order_of(BackwardOrder(order_begin, order_pairs), indices, len(kv))
    with named(cache="kv"):
        return attention.sparse_attention(
            dense_last(q),
            dense_last(kv).unsqueeze(1),
            indices,
            scale=scale,
            topk_length=topk_length,
            sink=sink,
            batch_invariant=batch_invariant,
        )


@_sparse_mla.register_fake
def _(q, *_):
    return q.new_empty((*q.shape[:2], attention.VALUE_DIM)), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op(
    "mla_backend::sparse_mla_backward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse) -> (Tensor, Tensor, Tensor)",
)
def _sparse_mla_backward(
    q, kv, indices, scale, topk_length, sink, begin, pairs, deterministic, workspace_bytes, *outputs
):
    *outputs, d_lse = outputs
    d_q, d_kv, d_sink = sparse_mla_backward(
        q,
        kv,
        indices,
        *outputs,
        scale=scale,
        d_lse=d_lse,
        topk_length=topk_length,
        sink=sink,
        order=None if begin is None or pairs is None else BackwardOrder(begin, pairs),
        deterministic=deterministic,
        workspace_bytes=workspace_bytes,
    )
    return d_q, d_kv, q.new_empty(0, dtype=torch.float32) if d_sink is None else d_sink


@_sparse_mla_backward.register_fake
def _(q, kv, indices, scale, topk_length, sink, *_):
    d_sink = q.new_empty(0 if sink is None else q.shape[1], dtype=torch.float32)
    return q.new_empty(q.shape), kv.new_empty(kv.shape), d_sink


def _keep_for_backward(ctx, inputs, output) -> None:
    arguments = inputs[:-1]  # all but batch_invariant
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *(x if isinstance(x, Tensor) else None for x in arguments))
    ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]


def _backward(ctx, d_out, d_lse):
    out, lse, *tensors = ctx.saved_tensors
    arguments = [other if tensor is None else tensor for tensor, other in zip(tensors, ctx.others, strict=True)]
    if d_out is None:
        d_out = torch.zeros_like(out)
    d_q, d_kv, d_sink = torch.ops.mla_backend.sparse_mla_backward.default(*arguments, out, lse, d_out, d_lse)
    return d_q, d_kv, None, None, None, d_sink if d_sink.numel() else None, *[None] * 5


def _refuse_second_derivative(ctx, *gradients):
    raise NotImplementedError("sparse_mla has no second derivative")


_sparse_mla.register_autograd(_backward, setup_context=_keep_for_backward)
_sparse_mla_backward.register_autograd(_refuse_second_derivative, setup_context=lambda ctx, inputs, output: None)
