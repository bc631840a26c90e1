"""Sparse attention, and partial results combined."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_backend.arguments import call, require_bools, require_optional_tensors, require_tensors
from mla_backend.formats import FORMATS, format_name, format_number
from mla_backend.plan import Plan, new_workspace, plan_arguments, products_number, require_plan
from mla_backend.plan import plan as make_plan

VALUE_DIM = FORMATS["bf16"].value_dim
MAX_SLOTS = 2**31 - 1


def sparse_attention(
    q: Tensor | tuple[Tensor, Tensor],
    cache: Tensor,
    indices: Tensor,
    *,
    scale: float,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    cache_format: str | None = None,
    extra_cache_format: str | None = None,
    cache_scale: float = 1.0,
    products: str = "exact",
    plan: Plan | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_max_logits: bool = False,
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Every query token attends to its own list of cache slots. Decode and prefill are the same operation.

    Args:
        q: bf16 (fp16 with a cache of that) `[T, H, head_dim]`; head_dim is 576, or 512 for rows without rope of their
            own. 576 also as the pair `(q_nope [T, H, 512], q_rope [T, H, 64])`. H is 1 to 256. Any strides whose last
            is 1.
        cache: `[blocks, block_size, width]` of a format in `FORMATS`, or staged rows; a dimension of 1 before the last
            is accepted. Blocks and rows may be strided.
        indices: int32 `[T, topk]`, physical slots (block * block_size + offset) in any order. A slot below 0 or past
            the end of the cache is skipped; a slot that is listed twice counts twice.
        scale: what scores are multiplied with before the softmax; a finite number.
        topk_length: int32 `[T]`; only the first n slots of a token's list count.
        sink: fp32 `[H]`; out is scaled by e^lse / (e^lse + e^sink). lse is not changed by it.
        extra_cache, extra_indices, extra_topk_length: a second cache and lists into it, attended to in the same
            softmax. Its block size may differ, and its format if that has the same head_dim and number type.
        cache_format, extra_cache_format: the caches' formats, names in `FORMATS`; by default what their dtypes and
            widths say.
        cache_scale: the scale of fp8_tensor_576 and fp8_tensor_512 caches; not 0.
        products: `exact`, or `fp8` for FP8 rows only: with more than 32 heads, and lists of up to 2048 slots into rows
            of 576 numbers, a Hopper GPU then rounds queries and the weights of rows to e4m3 once, which is faster.
            Their rope part stays bf16 where the rows' is. All else is computed exactly.
        plan: what `plan()` returned for these lengths and products. Made here if left out.
        workspace: on a GPU, room for the results of tokens that the plan cuts, fp32 of `workspace_floats` numbers or
            more. Zeros before its first use, and then for any launches that come one after the other, whatever their
            shapes; launches that may overlap, on two streams, need two. Made here if left out.
        batch_invariant: give a token the same bits whatever else is in the batch, by never cutting its list. With
            a plan of your own, make the plan so.
        out, lse: where to write, `[T, H, 512]` of q's dtype and fp32 `[T, H]`, of any strides (out's last is 1).
        return_max_logits: also return the largest scaled score.

    Returns:
        out `[T, H, 512]` and lse fp32 `[T, H]`, the natural logarithm of the sum of exponentials; with
        `return_max_logits` also fp32 `[T, H]`. A row with nothing to attend to gives 0, -inf and -inf.
    """
    require_bools(return_max_logits=return_max_logits)
    way = products_number(products)
    q, q_rope = query_parts(q)
    shape = q.shape[:2]
    if out is None:
        out = torch.empty((*shape, VALUE_DIM), dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    max_logits = torch.empty(shape, dtype=torch.float32, device=q.device) if return_max_logits else None
    require_plan(plan)
    if q.is_cuda:
        require_tensors(cache=cache, indices=indices)
        require_optional_tensors(extra_indices=extra_indices)
        # of other shapes, which the op refuses, there is no plan
        lists = [indices] if extra_indices is None else [indices, extra_indices]
        if plan is None and q.dim() == 3 and all(x.dim() == 2 for x in lists):
            rows = format_name(cache, cache_format)
            plan = _own_plan(q, indices, topk_length, extra_indices, extra_topk_length, batch_invariant, rows, products)
        if workspace is None and plan is not None and q.dim() == 3 and plan.table.dim() == 2:
            workspace = new_workspace(len(plan.table), q.shape[1], q.device)
    table, launch = plan_arguments(plan)
    call(
        torch.ops.mla_backend.sparse_attention.default,
        q,
        q_rope,
        cache,
        indices,
        scale,
        topk_length,
        sink,
        extra_cache,
        extra_indices,
        extra_topk_length,
        format_number(cache_format, "cache_format"),
        format_number(extra_cache_format, "extra_cache_format"),
        cache_scale,
        way,
        table,
        launch,
        workspace,
        batch_invariant,
        out,
        lse,
        max_logits,
    )
    return (out, lse, max_logits) if return_max_logits else (out, lse)


def query_parts(q: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Queries as the ops take them: one tensor and None, or the latent and the rope part."""
    if not isinstance(q, (tuple, list)):
        require_tensors(q=q)
        return q, None
    if len(q) != 2:
        raise ValueError(f"q must be a tensor or a pair (q_nope, q_rope); got {len(q)} tensors")
    require_tensors(q_nope=q[0], q_rope=q[1])
    return q[0], q[1]


def default_scale(q: Tensor) -> float:
    """head_dim ** -0.5; any number for queries without one, which the ops refuse."""
    return q.shape[-1] ** -0.5 if q.dim() and q.shape[-1] else 1.0


def require_value_dim(name: str, value: object) -> None:
    """For functions of other packages that are told how wide values are."""
    if value != VALUE_DIM:
        raise ValueError(f"{name} must be {VALUE_DIM}; got {value}")


def _own_plan(
    q: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    extra_indices: Tensor | None,
    extra_topk_length: Tensor | None,
    batch_invariant: bool,
    cache_format: str | None,
    products: str,
) -> Plan:
    return make_plan(
        q.shape[0],
        indices.shape[-1],
        topk_length=topk_length,
        num_heads=q.shape[1],
        cache_format=cache_format,
        products=products,
        device=q.device,
        extra_topk=0 if extra_indices is None else extra_indices.shape[-1],
        extra_topk_length=extra_topk_length,
        batch_invariant=batch_invariant,
    )


def _stacked(name: str, partials: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(partials, Tensor):
        return partials
    if not isinstance(partials, Sequence) or not partials:
        raise TypeError(f"{name} must be a torch.Tensor or a sequence of one or more; got {partials!r}")
    for i, partial in enumerate(partials):
        require_tensors(**{f"{name}[{i}]": partial})
        if partial.device != partials[0].device:
            raise ValueError(f"{name}[{i}] must be on {partials[0].device} like {name}[0]; got {partial.device}")
        if partial.shape != partials[0].shape or partial.dtype != partials[0].dtype:
            raise ValueError(
                f"{name}[{i}] must be {partials[0].dtype} {list(partials[0].shape)} like {name}[0]; "
                f"got {partial.dtype} {list(partial.shape)}"
            )
    return torch.stack(tuple(partials))


def combine_partials(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Combines attention results over disjoint sets of slots by their lse, as if all had been attended to at once.

    Args:
        outs: bf16 or fp32 `[P, T, H, D]`, or P tensors `[T, H, D]`. D is at most 1024.
        lses: fp32 `[P, T, H]`, or P tensors `[T, H]`, of any strides. A result with an lse of -inf weighs nothing,
            whatever its out holds. (`flash_mla` gives empty rows +inf: turn that into -inf first.)
        out, lse: where to write, `[T, H, D]` of the dtype of outs and fp32 `[T, H]`.

    Returns:
        out and lse; 0 and -inf where every partial result was empty.
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    if lse is None:
        lse = torch.empty(outs.shape[1:-1], dtype=torch.float32, device=outs.device)
    call(torch.ops.mla_backend.combine_partials.default, outs, lses, out, lse)
    return out, lse
