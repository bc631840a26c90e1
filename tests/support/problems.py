"""Random problems for the ops, and the one tolerance for all answers."""

import os
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import mla_backend
from mla_backend import library, reference

FORMATS = tuple(mla_backend.FORMATS)
BASIC = ("bf16", "fp8_ds_mla")
"""One for each way to multiply: plain rows, which other formats become too, and fp8 rows with fp32 scales."""
FP8 = tuple(name for name, fmt in mla_backend.FORMATS.items() if fmt.fp8)
WAYS = (*((fmt, "exact") for fmt in FORMATS), *((fmt, "fp8") for fmt in FP8))
"""Formats and the products that they may have."""
BASIC_WAYS = tuple((fmt, products) for fmt, products in WAYS if fmt in BASIC)
PARTS = tuple(
    (fmt, part)
    for fmt in FORMATS
    for part in reference.FORMATS[fmt].parts
    if part != "padding" and (fmt, part) != ("nvfp4_352", "latent")
)
"""Formats and what may be NaN of their rows: e2m1 has none."""
WITH_ROPE = tuple(name for name, fmt in mla_backend.FORMATS.items() if fmt.head_dim == 576)
"""Formats whose queries are of 576 dims, 64 of them the rope's own."""
PARTNERS = {name: BASIC if name in BASIC else (name,) for name in FORMATS}
PARTNERS |= {name: ("bf16_512", "fp8_model1", "fp8_528") for name in ("bf16_512", "fp8_model1", "fp8_528")}
"""Which formats a second cache may have."""
BLOCK_SIZES = (1, 2, 7, 16, 61, 64, 69, 256, 576)
CUDA_KERNEL = os.environ.get("MLA_TEST_CUDA_KERNEL", "auto")
"""Which the tests use: a race detector can follow "unclustered"."""
CPU_KERNELS = tuple(k["name"] for k in library.about()["cpu_kernels"] if k["usable"])
SCALE = 576**-0.5
MAGNITUDE = 0.1
"""Of cached values. With queries of 1 / MAGNITUDE the scores spread by about 1."""


class Arguments:
    """What all problems share: dataclasses of a function's arguments."""

    def but(self, **changes):
        return replace(self, **changes)

    def to(self, device: str):
        """A copy whose tensors have the same strides and gaps there."""
        there = {name: copy_with_gaps(x, device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **there)

    def hold(self, got: tuple[Tensor, ...], magnitude: float = MAGNITUDE, larger_scores: float = 1.0) -> None:
        """Holds an answer to the oracle. FP8 products may be computed exactly, else they are held to their model."""
        error = score_error(self.cache, got[0].device.type) * larger_scores
        if self.products == "exact":
            return assert_accurate(got, self.oracle(), magnitude, score_error=error)
        try:
            assert_accurate(got, self.but(products="exact").oracle(), magnitude, score_error=error, distance=1e-5)
        except AssertionError:
            error = 2.0**-7 * larger_scores  # accumulators of 576 dims keep 14 bits
            assert_accurate(got, self.oracle(), magnitude, score_error=error, products="fp8")


@dataclass
class SparseProblem(Arguments):
    """The arguments of sparse_attention."""

    q: Tensor | tuple[Tensor, Tensor]
    cache: Tensor
    indices: Tensor
    scale: float = SCALE
    topk_length: Tensor | None = None
    sink: Tensor | None = None
    extra_cache: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_topk_length: Tensor | None = None
    cache_format: str | None = None
    extra_cache_format: str | None = None
    cache_scale: float = 1.0
    products: str = "exact"

    def solve(self, **options) -> tuple[Tensor, Tensor, Tensor]:
        """Our answer: out, lse, max_logits, written over poisoned memory."""
        q = self.q[0] if isinstance(self.q, tuple) else self.q
        (tokens, heads), device = q.shape[:2], q.device
        out = torch.full((tokens, heads, 512), torch.nan, dtype=q.dtype, device=device)
        lse = torch.full((tokens, heads), torch.nan, device=device)
        given = {**vars(self), "out": out, "lse": lse, "return_max_logits": True, **options}
        found = mla_backend.sparse_attention(**given)
        assert found[0] is given["out"] and found[1] is given["lse"]
        return found

    def oracle(self) -> tuple[Tensor, Tensor, Tensor]:
        return reference.sparse_attention(**vars(self))

    def check(self, magnitude: float = MAGNITUDE, device: str = "cpu", larger_scores: float = 1.0, **options) -> None:
        """On a GPU with and without max logits, which other kernels find: other results are the same, bit for bit."""
        there = self.to(device)
        got = there.solve(**options)
        self.hold(got, magnitude, larger_scores)
        if device == "cuda":
            without = there.solve(**options, return_max_logits=False)
            assert all(torch.equal(a, b) for a, b in zip(got, without, strict=False))

    def poisoned(self) -> "SparseProblem":
        """The same, but all bytes of its caches that no list names are 0xff: NaN in every type of number."""
        changes = {}
        for name, indices, length in (
            ("cache", self.indices, self.topk_length),
            ("extra_cache", self.extra_indices, self.extra_topk_length),
        ):
            cache = getattr(self, name)
            if cache is None or cache.shape[0] == 0:
                continue
            named = torch.arange(indices.shape[1]) < (indices.shape[1] if length is None else length.unsqueeze(1))
            slots = indices[named.expand_as(indices)].long()
            slots = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])]
            rows = reference.format_of(cache, getattr(self, f"{name}_format"))
            address = reference.token_address(rows, cache, slots)
            poison = copy_with_gaps(cache)
            all_bytes(poison).fill_(0xFF)
            poison[address] = cache[address]
            poison_padding(rows, poison, slots)
            changes[name] = poison
        return self.but(**changes)


def all_bytes(x: Tensor) -> Tensor:
    """Every byte of a tensor's memory, gaps included."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def copy_with_gaps(x: Tensor, device: str = "cpu") -> Tensor:
    """A copy with the same strides; what lies in the gaps comes along."""
    copy = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).to(device, copy=True)
    return copy.as_strided(x.shape, x.stride(), x.storage_offset())


def poison_padding(rows: reference.Rows, cache: Tensor, slots: Tensor) -> None:
    if "padding" in rows.parts:
        block, row, element = reference.token_address(rows, cache, slots)
        cache[block, row[..., -1:], element[..., -1:]] = 0xFF


def write_part(cache: Tensor, fmt: str, slot: int, part: str, values: Tensor) -> None:
    """Overwrites the first bytes of a part (latent, scales or rope) of a cached token."""
    rows = reference.FORMATS[fmt]
    address = reference.token_address(rows, cache, torch.tensor(slot))
    token = cache[address].view(torch.uint8)
    rows.split(token)[part][: len(values)] = values
    cache[address] = token.view(cache.dtype)


def scale_of(fmt: str, magnitude: float = MAGNITUDE) -> float:
    """The scale of a cache of values of this size."""
    return magnitude / 64 if mla_backend.FORMATS[fmt].scale == "tensor" else 1.0


def random_cache(fmt: str, blocks: int, block_size: int, magnitude: float = MAGNITUDE, gap: int = 0) -> Tensor:
    """A cache whose every slot holds random values; the scale groups of a quantised one are of unequal size. Padding,
    and `gap` elements more after each page, are NaN."""
    cache = mla_backend.FORMATS[fmt].new_cache(blocks, block_size)
    if gap:
        page = cache.stride(0) + gap
        cache = torch.zeros(blocks * page, dtype=cache.dtype).as_strided(cache.shape, (page, *cache.stride()[1:]))
    rows, slots = reference.FORMATS[fmt], torch.arange(blocks * block_size)
    kv_c, k_pe = torch.randn(len(slots), rows.latent) * magnitude, torch.randn(len(slots), rows.rope) * magnitude
    if rows.group:
        smaller = torch.exp2(-torch.randint(0, 5, (len(slots), rows.latent // rows.group)).float())
        kv_c *= smaller.repeat_interleave(rows.group, 1)
    all_bytes(cache).fill_(0xFF)
    reference.cache_write(kv_c, k_pe, cache, slots, scale=scale_of(fmt, magnitude))
    poison_padding(rows, cache, slots)
    return cache


def apart(q: Tensor, fmt: str, gap: int) -> Tensor | tuple[Tensor, Tensor]:
    """Queries with their rope apart, where there is any, in the middle of wider rows."""
    if fmt not in WITH_ROPE:
        return q
    wide = torch.randn(*q.shape[:-1], 64 + gap, device=q.device).to(q.dtype)
    wide[..., gap - 21 : gap + 43] = q[..., 512:]
    return q[..., :512], wide[..., gap - 21 : gap + 43]


def with_row_gaps(cache: Tensor, fmt: str, gap: int) -> Tensor:
    """The same rows with gaps between pages, and between rows where the format allows any."""
    form, (blocks, block_size, width) = mla_backend.FORMATS[fmt], cache.shape
    shape = blocks, block_size + 2, width + (0 if form.scales_at == "end_of_page" else gap)
    wide = torch.full(shape, 255, dtype=torch.uint8, device=cache.device).to(form.dtype)[:, :block_size, :width]
    return wide.copy_(cache)


def random_problem(
    fmt: str = "fp8_ds_mla",
    tokens: int = 2,
    heads: int = 16,
    topk: int = 100,
    blocks: int = 8,
    block_size: int = 16,
    magnitude: float = MAGNITUDE,
    gap: int = 0,
    **more,
) -> SparseProblem:
    """Random slots, most of them valid, some below 0 and some past the end."""
    slots = blocks * block_size
    indices = torch.randint(-slots // 8 - 1, slots + slots // 8 + 1, (tokens, topk), dtype=torch.int32)
    form = mla_backend.FORMATS[fmt]
    return SparseProblem(
        (torch.randn(tokens, heads, form.head_dim) / magnitude).to(form.number),
        random_cache(fmt, blocks, block_size, magnitude, gap),
        indices,
        cache_scale=scale_of(fmt, magnitude),
        **more,
    )


@st.composite
def problems(draw, max_tokens=4, max_heads=128, max_topk=300, formats=FORMATS):
    """Problems of any shape and with any of the optional arguments."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    tokens = draw(st.integers(0, max_tokens))
    heads = draw(st.integers(1, max_heads))
    topk = draw(st.one_of(st.just(0), st.integers(1, max_topk)))
    fmt = draw(st.sampled_from(formats))
    problem = random_problem(fmt, tokens, heads, topk, **draw(pages()))
    if draw(st.booleans()):
        problem.cache_format = fmt
    if draw(st.booleans()):
        problem.topk_length = torch.randint(-3, topk + 4, (tokens,), dtype=torch.int32)
    if draw(st.booleans()):
        problem.sink = torch.randn(heads) * 3
        problem.sink[0] = draw(st.sampled_from([torch.inf, -torch.inf, 0.0]))
    if draw(st.booleans()):
        extra_fmt = draw(st.sampled_from(PARTNERS[fmt]))
        extra = random_problem(extra_fmt, tokens, heads, draw(st.integers(0, 100)), **draw(pages()))
        fmt = fmt if extra_fmt in FP8 else extra_fmt
        problem.extra_cache, problem.extra_indices = extra.cache, extra.indices
        if draw(st.booleans()):
            problem.extra_topk_length = torch.randint(0, extra.indices.shape[1] + 1, (tokens,), dtype=torch.int32)
    if fmt in FP8:
        problem.products = draw(st.sampled_from(["exact", "fp8"]))
    return problem.poisoned()


@st.composite
def pages(draw):
    """Blocks, up to a thousand slots in all, at any distance from each other."""
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    return {
        "blocks": draw(st.integers(0, min(20, max(2, 1000 // block_size)))),
        "block_size": block_size,
        "gap": draw(st.sampled_from([0, 0, 8, 5])),
    }


def assert_accurate(
    got: tuple[Tensor, ...],
    want: tuple[Tensor, ...],
    magnitude: float = MAGNITUDE,
    *,
    score_error: float = 0.0,
    distance: float = 5e-6,
    products: str = "exact",
) -> None:
    """The contract's tolerance, for (out, lse) or (out, lse, max_logits) over a cache of values of this magnitude."""
    out, exact = got[0].double().cpu(), want[0].double().cpu()
    difference, size, least = (out - exact).abs(), exact.abs(), 8e-4 * magnitude / MAGNITUDE
    allowed = torch.clamp(size * (2.01 / 128), min=least)
    if products == "fp8":  # P is off by 2^-4 in both, and a head's row by no more; single values cancel out
        difference, size, distance = difference.norm(dim=-1), size.norm(dim=-1), 2e-3
        allowed = torch.clamp(size / 8, min=least * exact.shape[-1] ** 0.5)
    assert not out.isnan().any(), "out has NaN"
    assert (difference <= allowed).all(), (
        f"out is off by {difference.max():.3g} (worst ratio {(difference / allowed).max():.2f})"
    )
    norms = (out * out + exact * exact).sum()
    if norms > 0:
        apart = 1 - 2 * (out * exact).sum() / norms
        assert apart < distance, f"out's cosine distance is {apart:.3g}"
    for name, got_row, want_row in zip(("lse", "max_logits"), got[1:], want[1:], strict=False):
        assert_scores_accurate(name, got_row, want_row, score_error)


def score_error(cache: Tensor, device: str = "cuda") -> float:
    """What the contract allows scores that spread by 1 to be off besides, on the current GPU: Hopper's kernels for fp8
    rows with fp32 scales round, and `swap_ab` with one scale. Others become bf16 rows, and lose nothing."""
    hopper = device == "cuda" and torch.cuda.get_device_capability()[0] == 9
    rounding = (mla_backend.FORMATS[name].width for name in ("fp8_ds_mla", "fp8_tensor_576"))
    return 2.0**-9 if hopper and cache.element_size() == 1 and cache.shape[-1] in rounding else 0.0


def assert_scores_accurate(name: str, got: Tensor, want: Tensor, score_error: float = 0.0) -> None:
    got, want = got.double().cpu(), want.double().cpu()
    assert not got.isnan().any(), f"{name} has NaN"
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite]), f"{name} differs where it should be infinite"
    difference = (got - want)[~infinite].abs()
    allowed = 1e-6 + score_error + want[~infinite].abs() * (8.01 / 65536)
    assert (difference <= allowed).all(), f"{name} is off by {difference.max():.3g}"


@st.composite
def partials_to_combine(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """The arguments of combine_partials. Some are empty, whatever they hold."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    partials, tokens, heads = draw(st.integers(1, 70)), draw(st.integers(0, 5)), draw(st.integers(1, 20))
    dim, dtype = draw(st.sampled_from([1, 64, 512, 1024])), draw(st.sampled_from([torch.float32, torch.bfloat16]))
    outs, lses = torch.randn(partials, tokens, heads, dim).to(dtype), torch.randn(partials, tokens, heads) * 20
    lses[torch.rand(lses.shape) < 0.2] = -torch.inf
    outs[lses == -torch.inf] = torch.nan
    return outs, lses
