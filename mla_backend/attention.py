"""Sparse attention, its plan, and the merge of partial results."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mla_backend import library
from mla_backend.arguments import (
    call,
    require_bools,
    require_count,
    require_device,
    require_optional_tensors,
    require_tensors,
)
from mla_backend.formats import FORMATS, format_name, format_number

VALUE_DIM = FORMATS["bf16"].value_dim
PLAN_COLUMNS = 8
MAX_SLOTS = 2**31 - 1
_ABOUT = library.about()
FEW_TOKENS: int = _ABOUT["few_tokens"]
"""From this number of tokens on, plans always have the same number of rows: those of fewer tokens are fitted to their
number."""


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
    plan: Tensor | None = None,
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
        cache_scale: the scale of fp8_tensor_576 caches; not 0.
        plan: what `plan()` returned for these lengths. Made here if left out.
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
    q, q_rope = query_parts(q)
    shape = q.shape[:2]
    if out is None:
        out = torch.empty((*shape, VALUE_DIM), dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    max_logits = torch.empty(shape, dtype=torch.float32, device=q.device) if return_max_logits else None
    if q.is_cuda:
        require_tensors(cache=cache, indices=indices)
        require_optional_tensors(extra_indices=extra_indices, plan=plan)
        # of other shapes, which the op refuses, there is no plan
        lists = [indices] if extra_indices is None else [indices, extra_indices]
        if plan is None and q.dim() == 3 and all(x.dim() == 2 for x in lists):
            rows = format_name(cache, cache_format)
            plan = _own_plan(q, indices, topk_length, extra_indices, extra_topk_length, batch_invariant, rows)
        if workspace is None and plan is not None and q.dim() == 3 and plan.dim() == 2:
            workspace = new_workspace(plan.shape[0], q.shape[1], q.device)
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
        plan,
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


def new_workspace(workers: int, num_heads: int, device: torch.device) -> Tensor:
    """A workspace for a plan of so many workers, ready for its first use."""
    workspace = torch.empty(workspace_floats(workers, num_heads), dtype=torch.float32, device=device)
    workspace[workspace.shape[0] - workers * num_heads * _ABOUT["workspace_counters"] :].zero_()
    return workspace


def workspace_floats(workers: int, num_heads: int) -> int:
    """How many fp32 numbers `sparse_attention` needs as a workspace on a GPU: for each worker and head two partial
    results, and counters at the end. The counters are why it begins as zeros; every launch leaves them so."""
    return workers * num_heads * _ABOUT["workspace_floats"]


@torch.compiler.assume_constant_result
def default_workers(
    device: torch.device,
    num_heads: int,
    num_tokens: int | None,
    slots: int | None = None,
    cache_format: str | None = None,
) -> int:
    """Rows of a plan, unless said otherwise: what keeps a device's processors busy. Few tokens on a GPU get a plan of
    their own, of fewer rows if a token has few slots; None stands for any number."""
    number = format_number(cache_format, "cache_format")
    if device.type == "cuda":
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        return library.cuda_workers(library.describe_device(index), num_heads, num_tokens, slots, number)
    return _ABOUT["plan_workers_per_thread"] * torch.get_num_threads()


def _own_plan(
    q: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    extra_indices: Tensor | None,
    extra_topk_length: Tensor | None,
    batch_invariant: bool,
    cache_format: str | None,
) -> Tensor:
    return plan(
        q.shape[0],
        indices.shape[-1],
        topk_length=topk_length,
        num_heads=q.shape[1],
        cache_format=cache_format,
        device=q.device,
        extra_topk=0 if extra_indices is None else extra_indices.shape[-1],
        extra_topk_length=extra_topk_length,
        batch_invariant=batch_invariant,
    )


def plan(
    num_tokens: int,
    topk: int,
    *,
    topk_length: Tensor | None = None,
    extra_topk: int = 0,
    extra_topk_length: Tensor | None = None,
    batch_invariant: bool = False,
    num_heads: int = 128,
    cache_format: str | None = None,
    workers: int | None = None,
    device: torch.device | str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decides which worker attends to which part of which token's list; unequal lengths are balanced.

    The plan depends on the lengths and not on the slots, so one plan serves every layer of a model. Recompute it
    into `out` when the lengths change; nothing is synchronised.

    Args:
        num_tokens, topk, extra_topk: T and the widths of the index lists.
        topk_length, extra_topk_length: int32 `[T]`, as for `sparse_attention`.
        batch_invariant: never cut a token's list, so that its bits don't depend on its neighbours.
        num_heads: query heads; on a GPU the fewer there are, the more workers share the tokens.
        cache_format: of the rows that are read, by default `fp8_ds_mla`. A plan suits all of them, but is fastest for
            these. Staged rows have no name: leave it out.
        workers: rows of the table; by default what keeps the device busy. On a CPU that is twice as many as torch has
            threads, which take them in turn.
        device: where the table is made; by default where the lengths are.
        out: a table to write into, int32 `[workers, 8]`.

    Returns:
        int32 `[workers, 8]`. The columns are those of PlanRow in csrc/include/mla/plan.h: the tokens a worker takes
        (begin, end), the tiles at which it begins in the first and ends in the last of them, which part of its
        first token it holds, into how many parts the token it leaves open is cut, where its partial results go,
        and the slots in a tile.
    """
    require_count("num_tokens", num_tokens)
    require_count("topk", topk)
    require_count("extra_topk", extra_topk)
    require_optional_tensors(topk_length=topk_length, extra_topk_length=extra_topk_length)
    format_number(cache_format, "cache_format")
    if out is not None and (workers is not None or device is not None):
        raise ValueError("out must be given alone, as it has workers and a device already; got more")
    if out is None:
        if device is None:
            device = next((t.device for t in (topk_length, extra_topk_length) if t is not None), "cpu")
        else:
            require_device("device", device)
        if workers is None:
            require_count("num_heads", num_heads, at_least=1)
            # neither a compiled function's plan nor a batch-invariant one may be made for one number of tokens or slots
            any_number = batch_invariant or torch.compiler.is_compiling()
            tokens, slots = (None, None) if any_number else (num_tokens, topk + extra_topk)
            workers = default_workers(torch.device(device), num_heads, tokens, slots, cache_format)
        require_count("workers", workers, at_least=1)
        out = torch.empty((workers, PLAN_COLUMNS), dtype=torch.int32, device=device)
    call(
        torch.ops.mla_backend.plan.default,
        topk_length,
        extra_topk_length,
        num_tokens,
        topk,
        extra_topk,
        batch_invariant,
        out,
    )
    return out


def _stacked(name: str, parts: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(parts, Tensor):
        return parts
    if not isinstance(parts, Sequence) or not parts:
        raise TypeError(f"{name} must be a torch.Tensor or a sequence of one or more; got {parts!r}")
    for i, part in enumerate(parts):
        require_tensors(**{f"{name}[{i}]": part})
        if part.device != parts[0].device:
            raise ValueError(f"{name}[{i}] must be on {parts[0].device} like {name}[0]; got {part.device}")
        if part.shape != parts[0].shape or part.dtype != parts[0].dtype:
            raise ValueError(
                f"{name}[{i}] must be {parts[0].dtype} {list(parts[0].shape)} like {name}[0]; "
                f"got {part.dtype} {list(part.shape)}"
            )
    return torch.stack(tuple(parts))


def merge_partials(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention results over disjoint sets of slots by their lse, as if all had been attended to at once.

    Args:
        outs: bf16 or fp32 `[P, T, H, D]`, or P tensors `[T, H, D]`. D is at most 1024.
        lses: fp32 `[P, T, H]`, or P tensors `[T, H]`, of any strides. A part with an lse of -inf weighs nothing,
            whatever its out holds. (`flash_mla` gives empty rows +inf: turn that into -inf first.)
        out, lse: where to write, `[T, H, D]` of the dtype of outs and fp32 `[T, H]`.

    Returns:
        out and lse; 0 and -inf where every part was empty.
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    if lse is None:
        lse = torch.empty(outs.shape[1:-1], dtype=torch.float32, device=outs.device)
    call(torch.ops.mla_backend.merge_partials.default, outs, lses, out, lse)
    return out, lse
