"""How a call of attention is launched, and how its work is split: decided once, before the call."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mla_backend import library
from mla_backend.arguments import call, require_bools, require_count, require_device, require_optional_tensors
from mla_backend.formats import FORMATS, format_number

PLAN_COLUMNS = 8
_ABOUT = library.about()
KERNELS: tuple[str, ...] = tuple(_ABOUT["kernels"])
PRODUCTS: tuple[str, ...] = tuple(_ABOUT["products"])
MAX_HEADS = 64 * 256
"""Of all queries of a request, in dense attention."""


class Launch(NamedTuple):
    """What runs, as shapes alone decide it: host data, which `print` shows."""

    kernel: str
    """`cpu`; on GPUs `swap_ab` (tokens are the rows of wgmma, heads its columns), `m64` (heads are the rows), `m64_fp8`
    (the same with FP8 products; a call with longer lists than it takes runs `m64`) or `portable`."""
    heads_per_cta: int
    splits: int
    """Of every token. 1: tokens stay whole if all lists are full. 0: tokens are split where the load says."""
    cluster: int
    """CTAs of a cluster, which combine a token's splits in distributed shared memory; 1: none."""
    rounds: int
    """Whole tokens that a CTA takes one after the other; 0 if tokens are split, or their number was not known."""
    ctas: int
    """For each group of heads, and entries of the plan. On a CPU: items of work, which its threads take in turn."""

    def numbers(self) -> list[int]:
        """As the ops take it: struct Launch of csrc/include/mla/schedule/launch.h."""
        if self.kernel not in KERNELS:
            raise ValueError(f"launch.kernel must be one of {', '.join(KERNELS)}; got {self.kernel!r}")
        return [KERNELS.index(self.kernel), *self[1:]]


class Bounds(NamedTuple):
    """What buffers have to hold."""

    ctas: int
    """Entries of a plan."""
    workspace_floats: int
    """fp32 numbers of a workspace; 0 on a CPU."""


class Plan(NamedTuple):
    """How a call is launched and what each CTA does. One plan serves all layers whose lists have the same lengths."""

    table: Tensor
    """int32 `[ctas, 8]`, on the device of the call. The columns are those of PlanEntry in csrc/include/mla/plan.h: the
    tokens a CTA takes (begin, end), the tiles at which it begins in the first and ends in the last of them, which split
    of its first token it holds, how many splits the token has that it begins and leaves open, where its partial
    results go, and the slots in a tile."""
    launch: Launch

    @staticmethod
    def bounds(num_heads: int, device: torch.device | str, *, queries: int = 1) -> Bounds:
        """What suffices for the default plans of any number of tokens and slots, to make buffers that captured graphs
        keep.

        Args:
            num_heads: query heads.
            queries: of dense attention: up to so many queries of a request, whose heads count together.
        """
        require_count("num_heads", num_heads, at_least=1)
        require_count("queries", queries, at_least=1)
        device = torch.device(device)
        if device.type != "cuda":
            return Bounds(_cpu_ctas(), 0)
        gpu = library.describe_gpu(_index_of(device))
        ctas = [most_ctas(gpu, num_heads * n) for n in range(1, queries + 1)]
        return Bounds(max(ctas), max(workspace_floats(n, num_heads * (i + 1)) for i, n in enumerate(ctas)))


def require_plan(plan: Plan | None, name: str = "plan") -> None:
    """For plans that Python code takes apart."""
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"{name} must be what mla_backend.plan returned; got {type(plan).__name__}")


def plan_arguments(plan: Plan | None) -> tuple[Tensor | None, list[int]]:
    """A plan as the ops take it; see require_plan()."""
    return (None, []) if plan is None else (plan.table, plan.launch.numbers())


def products_number(products: str, cache_format: str | None = None) -> int:
    """How rows are multiplied, as the ops take it; rows whose latent values are not e4m3 have one way."""
    if not isinstance(products, str):
        raise TypeError(f"products must be a str; got {type(products).__name__}")
    if products not in PRODUCTS:
        raise ValueError(f"products must be one of {', '.join(PRODUCTS)}; got {products!r}")
    if products == "fp8" and cache_format is not None and not FORMATS[cache_format].fp8:
        raise ValueError(
            f"products must be 'exact' with {cache_format} rows, whose latent values are not e4m3; got {products!r}"
        )
    return PRODUCTS.index(products)


def new_workspace(ctas: int, num_heads: int, device: torch.device) -> Tensor:
    """A workspace for a plan of so many CTAs, ready for its first use."""
    workspace = torch.empty(workspace_floats(ctas, num_heads), dtype=torch.float32, device=device)
    workspace[workspace.shape[0] - ctas * num_heads * _ABOUT["workspace_counters"] :].zero_()
    return workspace


def workspace_floats(ctas: int, num_heads: int) -> int:
    """How many fp32 numbers `sparse_attention` needs as a workspace on a GPU: for each CTA and head two partial
    results, and counters at the end. The counters are why it begins as zeros; every launch leaves them so."""
    return ctas * num_heads * _ABOUT["workspace_floats"]


def _cpu_ctas() -> int:
    return _ABOUT["plan_ctas_per_thread"] * torch.get_num_threads()


def _index_of(device: torch.device) -> int:
    torch.cuda.init()
    return torch.cuda.current_device() if device.index is None else device.index


def most_ctas(gpu: dict[str, Any], heads: int) -> int:
    """What no launch has more of: all its CTAs run at once, one for each multiprocessor and 64 heads on Hopper, two for
    each 16 heads on other GPUs."""
    at_once, heads_per_cta = (1, 64) if gpu["hopper"] else (2, 16)
    return max(at_once * gpu["multiprocessors"] // -(-heads // heads_per_cta), 1)


@torch.compiler.assume_constant_result
def choose_launch(
    device: torch.device | str,
    num_heads: int,
    num_tokens: int | None,
    slots: int | None,
    cache_format: str | None = None,
    batch_invariant: bool = False,
    products: str = "exact",
) -> Launch:
    """The fastest launch, by the cost model of csrc/include/mla/schedule/cost.h.

    Args:
        num_tokens, slots: of a call, and of a token in all lists. None: any number. With `batch_invariant` neither
            changes the launch.
        cache_format: a name in `FORMATS`; by default `fp8_ds_mla`.
        products: of the call.
    """
    device = torch.device(device)
    number = format_number(cache_format, "cache_format")
    way = products_number(products, cache_format)
    if device.type != "cuda":
        return Launch("cpu", num_heads, 0, 1, 0, _cpu_ctas())
    if num_heads > MAX_HEADS:
        raise ValueError(f"num_heads must be {MAX_HEADS} or less on a GPU; got {num_heads}")
    kernel, *numbers = library.launch_numbers(
        _index_of(device), num_heads, num_tokens, slots, number, batch_invariant, way
    )
    return Launch(KERNELS[kernel], *numbers)


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
    products: str = "exact",
    launch: Launch | None = None,
    device: torch.device | str | None = None,
    out: Plan | None = None,
) -> Plan:
    """Decides how a call is launched, and which CTA attends to which split of which token's list; unequal lengths are
    balanced.

    The plan depends on the lengths and not on the slots, so one plan serves every layer of a model. Recompute it
    into `out` when the lengths change; nothing is synchronised.

    Args:
        num_tokens, topk, extra_topk: T and the widths of the index lists.
        topk_length, extra_topk_length: int32 `[T]`, as for `sparse_attention`.
        batch_invariant: never split a token's list, so that its bits don't depend on its neighbours.
        num_heads: query heads; on a GPU the fewer there are, the more CTAs share the tokens.
        cache_format: of the rows that are read, by default `fp8_ds_mla`. A plan suits all of them, but is fastest for
            these. Staged rows have no name: leave it out.
        products: of the calls that it is for.
        launch: how, instead of the fastest by the cost model. On a CPU it has twice as many items of work as torch has
            threads.
        device: where the table is made; by default where the lengths are.
        out: a plan whose table, int32 `[launch.ctas, 8]`, is written. Its launch stays.

    Returns:
        The table and the launch.
    """
    require_count("num_tokens", num_tokens)
    require_count("topk", topk)
    require_count("extra_topk", extra_topk)
    require_bools(batch_invariant=batch_invariant)
    require_optional_tensors(topk_length=topk_length, extra_topk_length=extra_topk_length)
    format_number(cache_format, "cache_format")
    products_number(products, cache_format)
    require_plan(out, "out")
    if out is not None and (launch is not None or device is not None):
        raise ValueError("out must be given alone, as it has a launch and a device already; got more")
    if out is None:
        if device is None:
            device = next((t.device for t in (topk_length, extra_topk_length) if t is not None), "cpu")
        else:
            require_device("device", device)
        if launch is None:
            require_count("num_heads", num_heads, at_least=1)
            # a compiled function's plan must not be made for one number of tokens or slots
            any_number = torch.compiler.is_compiling()
            tokens, slots = (None, None) if any_number else (num_tokens, topk + extra_topk)
            launch = choose_launch(device, num_heads, tokens, slots, cache_format, batch_invariant, products)
        elif not isinstance(launch, Launch):
            raise TypeError(f"launch must be a Launch; got {type(launch).__name__}")
        require_count("launch.ctas", launch.ctas, at_least=1)
        out = Plan(torch.empty((launch.ctas, PLAN_COLUMNS), dtype=torch.int32, device=device), launch)
    call(
        torch.ops.mla_backend.plan.default,
        topk_length,
        extra_topk_length,
        num_tokens,
        topk,
        extra_topk,
        batch_invariant,
        out.launch.numbers(),
        out.table,
    )
    return out
