"""The oracle: what every kernel has to compute, in plain PyTorch.

Nothing here uses the library or its description of the formats, so a mistake in those shows as a difference. Attention
is computed in float64. Everything works on any device, and nothing is meant to be fast.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from mla_backend.reference_numbers import (
    E4M3_MAX,
    dequantise_keys,
    from_e2m1,
    from_nvfp4_scales,
    from_ue8m0,
    to_e2m1,
    to_e4m3,
    to_number,
    to_nvfp4_scales,
    to_ue8m0,
)

LATENT = 512
ROPE = 64
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


class Rows(NamedTuple):
    """How a format stores a token."""

    dtype: torch.dtype
    """Of a cache tensor."""
    parts: dict[str, int]
    """Bytes of what a token consists of, in this order. Values of one byte are e4m3, of half a byte e2m1; scales of one
    byte are powers of two, those of e2m1 e4m3, of four bytes fp32."""
    latent: int = LATENT
    rope: int = ROPE
    group: int = 0
    """Latent values that share a scale."""
    trailer: int = 0
    """Of a token's bytes, the last ones that lie behind all rows of its page."""

    @property
    def width(self) -> int:
        """Last dimension of a cache tensor."""
        return sum(self.parts.values()) // self.dtype.itemsize

    @property
    def powers_of_two(self) -> bool:
        """Whether a group's scale is one."""
        return self.group > 0 and self.parts["scales"] == self.latent // self.group and not self.e2m1

    @property
    def e2m1(self) -> bool:
        """Whether latent values are e2m1."""
        return self.parts["latent"] == self.latent // 2

    @property
    def values(self) -> list[tuple[str, bool]]:
        """The parts that are values, and whether they are quantised."""
        counts = {"latent": self.latent, "rope": self.rope}
        return [(name, self.parts[name] <= count) for name, count in counts.items() if count]

    @property
    def number(self) -> torch.dtype:
        """Dtype of queries, outputs and dequantised rows."""
        return torch.bfloat16 if self.dtype == torch.uint8 else self.dtype

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """The bytes of the parts of token rows `[..., width]`."""
        parts = rows.contiguous().view(torch.uint8).split(list(self.parts.values()), dim=-1)
        return dict(zip(self.parts, parts, strict=True))


FORMATS = {
    "bf16": Rows(torch.bfloat16, {"latent": 1024, "rope": 128}),
    "fp16": Rows(torch.float16, {"latent": 1024, "rope": 128}),
    "fp8_ds_mla": Rows(torch.uint8, {"latent": 512, "scales": 16, "rope": 128}, group=128),
    "bf16_512": Rows(torch.bfloat16, {"latent": 1024}, rope=0),
    "fp8_model1": Rows(
        torch.uint8, {"latent": 448, "rope": 128, "scales": 7, "padding": 1}, latent=448, group=64, trailer=8
    ),
    "fp8_528": Rows(torch.uint8, {"latent": 512, "scales": 16}, rope=0, group=32),
    "fp8_tensor_576": Rows(torch.uint8, {"latent": 512, "rope": 64}),
    "fp8_tensor_512": Rows(torch.uint8, {"latent": 512}, rope=0),
    "nvfp4_352": Rows(torch.uint8, {"latent": 256, "rope": 64, "scales": 32}, group=16),
}
STAGED = Rows(torch.uint8, {"latent": 1024, "rope": 128, "power": 1}, trailer=1)
"""f16 latent values and bf16 rope values, which lack a power of two: 2^(power + USUAL_POWER) and 2^power."""
USUAL_POWER, LOWEST_POWER, HIGHEST_POWER, MOST_POWER = -8, -13, -1, 60
FLOAT32 = Rows(torch.float32, {"latent": 2048, "rope": 256})
"""Only the reference takes such a cache, which loses nothing."""


def format_of(cache: Tensor, format: str | None = None) -> Rows:
    """The format of this name, or the one that the cache's dtype and last dimension tell."""
    if format is not None:
        return STAGED if format == "staged" else FORMATS[format]
    dtype = torch.uint8 if cache.dtype.itemsize == 1 else cache.dtype
    return next(
        rows for rows in (FLOAT32, STAGED, *FORMATS.values()) if (dtype, cache.shape[-1]) == (rows.dtype, rows.width)
    )


def group_scale(amax: Tensor, power_of_two: bool) -> Tensor:
    """The fp32 scale of a group with this largest magnitude: amax / 448, at least the smallest normal number.

    An infinite amax counts as the largest finite number. power_of_two rounds the scale up to one.
    """
    scale = (amax.clamp(max=torch.finfo(torch.float32).max) / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    if not power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def quantise(
    kv_c: Tensor, k_pe: Tensor | None, power_of_two: bool = False, *, format: str = "fp8_ds_mla", scale: float = 1.0
) -> Tensor:
    """Tokens as rows of a format: kv_c `[N, latent]` and k_pe `[N, rope]` to `[N, width]`, scales last in fp8_model1.

    power_of_two is about fp32 scales, scale about fp8_tensor_576 and fp8_tensor_512.
    """
    return _quantise(FORMATS[format], kv_c, k_pe, power_of_two, scale)


def _quantise(rows: Rows, kv_c: Tensor, k_pe: Tensor | None, power_of_two: bool, scale: float) -> Tensor:
    given, parts = {"latent": kv_c, "rope": k_pe}, {}
    for name, quantised in rows.values:
        if not quantised:
            parts[name] = to_number(given[name], rows.number)
        elif name == "latent" and rows.group:
            groups = kv_c.float().unflatten(-1, (-1, rows.group))
            amax = torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1, keepdim=True)
            if rows.e2m1:
                parts["scales"], scales = to_nvfp4_scales(amax)
                parts["latent"] = to_e2m1((groups * (1 / scales)).flatten(-2))
                continue
            scales = group_scale(amax, power_of_two or rows.powers_of_two)
            parts["latent"] = to_e4m3(groups / scales).flatten(-2)
            parts["scales"] = (to_ue8m0(scales) if rows.powers_of_two else scales).squeeze(-1)
        else:
            parts[name] = to_e4m3(given[name].float() / torch.tensor(scale, device=kv_c.device))
    if "padding" in rows.parts:
        parts["padding"] = torch.zeros(len(kv_c), rows.parts["padding"], dtype=torch.uint8, device=kv_c.device)
    as_bytes = [parts[name].contiguous().view(torch.uint8) for name in rows.parts]
    return torch.cat(as_bytes, dim=-1).view(rows.dtype)


def _dense(part: Tensor) -> Tensor:
    """A copy that can be viewed as other numbers, even if it has one row or none."""
    return part.clone(memory_format=torch.contiguous_format)


def _stored_values(rows: Rows, cached: Tensor, scale: float) -> list[Tensor]:
    """Latent and rope values of token rows `[..., width]`: in float32 where they are e4m3, else as they are stored."""
    parts = rows.split(cached)
    if rows is STAGED:
        kinds = {"latent": torch.half, "rope": torch.bfloat16, "power": torch.int8}
        latent, rope, power = (_dense(parts[name]).view(kind).double() for name, kind in kinds.items())
        return [(latent * torch.exp2(power + USUAL_POWER)).float(), (rope * torch.exp2(power)).float()]
    values = []
    for name, quantised in rows.values:
        part = parts[name].contiguous()
        if not quantised:
            values.append(part.view(rows.number))
            continue
        is_e2m1 = rows.e2m1 and name == "latent"
        numbers = from_e2m1(part) if is_e2m1 else part.view(torch.float8_e4m3fn).float()
        if rows.group and name == "latent":
            scales = _group_scales(rows, parts["scales"])
            numbers = (numbers.unflatten(-1, (-1, rows.group)) * scales.unsqueeze(-1)).flatten(-2)
        else:
            numbers = numbers * torch.tensor(scale, device=numbers.device)
        values.append(numbers)
    return values


def _group_scales(rows: Rows, stored: Tensor) -> Tensor:
    stored = stored.contiguous()
    if rows.e2m1:
        return from_nvfp4_scales(stored)
    return from_ue8m0(stored) if rows.powers_of_two else stored.view(torch.float32)


def dequantise(cached: Tensor, format: str | None = None, *, scale: float = 1.0) -> Tensor:
    """Token rows `[..., width]`, as quantise() makes them, to float32 `[..., head_dim]`."""
    return torch.cat([part.float() for part in _stored_values(format_of(cached, format), cached, scale)], dim=-1)


def token_address(rows: Rows, cache: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    """Three indices, which broadcast to `[*slots.shape, width]`: where slots' tokens lie in `cache` `[blocks,
    block_size, width]`."""
    block_size, width = cache.shape[1], rows.width
    slots = slots.unsqueeze(-1)
    block, offset = slots // block_size, slots % block_size
    element = torch.arange(width, device=slots.device)
    if rows.trailer:  # a page is all its rows, then all their trailers
        row = width - rows.trailer
        behind = block_size * row + offset * rows.trailer + element - row
        byte = torch.where(element < row, offset * row + element, behind)
        return block, byte // width, byte % width
    return block, offset, element


def _as_stored(rows: Rows, cache: Tensor) -> Tensor:
    """`[blocks, block_size, width]` of the format's dtype, without a dimension of 1 for the kv head."""
    return (cache.squeeze(2) if cache.dim() == 4 else cache).view(rows.dtype)


def cache_write(
    kv_c: Tensor,
    k_pe: Tensor | None,
    cache: Tensor,
    slots: Tensor,
    power_of_two: bool = False,
    *,
    format: str | None = None,
    scale: float = 1.0,
) -> None:
    """Writes token i into slot slots[i] of `cache` `[blocks, block_size, ...]`; a slot outside of it is skipped."""
    rows = format_of(cache, format)
    stored = _as_stored(rows, cache)
    tokens = _quantise(rows, kv_c, k_pe, power_of_two, scale)
    kept = (slots >= 0) & (slots < cache.shape[0] * cache.shape[1])
    stored[token_address(rows, stored, slots[kept].long())] = tokens[kept]


def _cached(rows: Rows, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Token rows `[*slots.shape, width]`, and which slots are in the cache; the others' rows are zeros."""
    blocks, block_size = cache.shape[:2]
    valid = (slots >= 0) & (slots < blocks * block_size)
    if blocks == 0:
        return torch.zeros(*slots.shape, rows.width, dtype=rows.dtype, device=cache.device), valid
    stored = _as_stored(rows, cache)
    found = stored[token_address(rows, stored, torch.where(valid, slots, 0).long())]
    return found.masked_fill(~valid.unsqueeze(-1), 0), valid


def cache_rows(cache: Tensor, slots: Tensor, *, format: str | None = None, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Dequantised rows float32 `[*slots.shape, head_dim]` and which slots are in the cache; the others' rows are 0."""
    rows = format_of(cache, format)
    found, valid = _cached(rows, cache, slots)
    values = torch.cat([part.float() for part in _stored_values(rows, found, scale)], dim=-1)
    return torch.where(valid.unsqueeze(-1), values, 0.0), valid


def cache_gather(cache: Tensor, slots: Tensor, *, format: str | None = None, scale: float = 1.0) -> Tensor:
    """Rows `[N, head_dim]` in the format's 16-bit numbers; zeros where the slot is not in the cache."""
    rows = format_of(cache, format)
    found, valid = _cached(rows, cache, slots)
    values = torch.cat([to_number(part, rows.number) for part in _stored_values(rows, found, scale)], dim=-1)
    return values.masked_fill(~valid.unsqueeze(-1), 0.0)


def sparse_attention(
    q: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Every query token attends to its own list of cache slots.

    q `[T, H, head_dim]`, cache `[blocks, block_size, ...]`, indices int32 `[T, topk]`. Returns, all in float64, out
    `[T, H, 512]`, lse `[T, H]` (natural logarithm) and the max logits `[T, H]`, after scaling.

    Products `fp8` are a model of what FP8 tensor cores are given, with errors of their size, not their bits.
    """
    lists = [(cache, indices, topk_length, cache_format)]
    if extra_cache is not None:
        lists.append((extra_cache, extra_indices, extra_topk_length, extra_cache_format))
    found = []
    for one, slots, length, name in lists:
        rows, valid = _listed_rows(one, slots, length, name, cache_scale)
        form, queries, rows = format_of(one, name), q.double(), rows.double()
        scores = _scores(_fp8_queries(queries, form) if products == "fp8" else queries, rows, scale)
        scales = torch.where(valid.unsqueeze(-1), _fp8_scales(form, one, slots), 0.0)
        found.append((scores.mT, rows, valid, scales))
    scores, rows, valid, scales = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return _weigh(scores.mT, rows, valid, sink, scales if products == "fp8" else None)


def _fp8_queries(q: Tensor, rows: Rows) -> Tensor:
    """Queries whose products with e4m3 numbers are of e4m3 numbers: these are rounded, times a power of two for each
    head whose largest becomes 2^7 or more, and less than 2^8."""
    count = sum({"latent": rows.latent, "rope": rows.rope}[name] for name, is_e4m3 in rows.values if is_e4m3)
    rounded, exact = q.split([count, q.shape[-1] - count], dim=-1)
    power = torch.exp2(torch.frexp(rounded.abs().amax(-1, keepdim=True))[1].double() - 8)
    return torch.cat([_nearest_e4m3(rounded / power) * power, exact], dim=-1)


def _fp8_scales(rows: Rows, cache: Tensor, slots: Tensor) -> Tensor:
    """What the e4m3 numbers of each 32 of a cached token's 512 values are multiplied with, `[*slots.shape, 16]`; 0 for
    other numbers, and 1 where a scale is the caller's."""
    if rows.group:
        stored = _group_scales(rows, rows.split(_cached(rows, cache, slots)[0])["scales"])
        scales = stored.repeat_interleave(rows.group // 32, -1)
    else:
        scales = torch.ones(*slots.shape, LATENT // 32, device=slots.device)
    return torch.nn.functional.pad(scales, (0, LATENT // 32 - scales.shape[-1])).double()


def _fp8_sum(weights: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """weights `[T, H, K]` times values `[T, K, 512]`, where e4m3 numbers meet e4m3 ones: weights times a group's scale,
    brought to 2^6 by what makes the head's largest 1."""
    largest = (weights * scales.abs().amax(-1).unsqueeze(1)).amax(-1, keepdim=True)
    unit = torch.where(largest == 0, 1.0, largest) * 2.0**-6
    out = []
    for scale, own in zip(scales.unbind(-1), values.unflatten(-1, (-1, 32)).unbind(-2), strict=True):
        scale = scale.unsqueeze(1)
        rounded = _nearest_e4m3(weights * scale / unit) * unit / scale
        out.append(torch.einsum("thk,tkd->thd", torch.where(scale == 0, weights, rounded), own))
    return torch.cat(out, dim=-1)


def _nearest_e4m3(x: Tensor) -> Tensor:
    return to_e4m3(x.float()).view(torch.float8_e4m3fn).double()


def _scores(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    return torch.einsum("thd,tkd->thk", q, rows) * scale


def _attend(q: Tensor, rows: Tensor, valid: Tensor, scale: float, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Attention to rows `[T, K, head_dim]` that are zeros unless valid `[T, K]`; autograd can follow."""
    return _weigh(_scores(q, rows, scale), rows, valid, sink)


def _weigh(
    scores: Tensor, rows: Tensor, valid: Tensor, sink: Tensor | None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with scores `[T, H, K]`, and with FP8 products if scales are given."""
    weights, lse, max_logits = _softmax(torch.where(valid.unsqueeze(1), scores, -torch.inf))
    values = rows[..., :LATENT]
    if scales is None or scales.shape[1] == 0:
        out = torch.einsum("thk,tkd->thd", weights, values)
    else:
        out = _fp8_sum(weights, scales, values)
    if sink is not None:
        empty = lse == -torch.inf
        finite = torch.where(empty, 0.0, lse)
        out = out * torch.where(empty, 1.0, torch.sigmoid(finite - sink.to(scores.dtype))).unsqueeze(-1)
    return out, lse, max_logits


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, their lse and the largest score, over the last dimension. A row of nothing but -inf has weights of 0."""
    # a column of -inf changes nothing, and lets empty lists have a maximum
    scores = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    max_logits = scores.detach().amax(-1)
    reference = torch.where(max_logits == -torch.inf, 0.0, max_logits)
    weights = torch.exp(scores - reference.unsqueeze(-1))
    total = weights.sum(-1)
    empty = total == 0
    some = torch.where(empty, 1.0, total)  # no logarithm of 0, whose gradient would be NaN even where it is not used
    lse = torch.where(empty, -torch.inf, reference + torch.log(some))
    return (weights / some.unsqueeze(-1))[..., :-1], lse, max_logits


def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    *,
    scale: float,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to listed rows of kv `[N, head_dim]` that autograd can differentiate, in q's dtype: out and lse."""
    rows, valid = _named_rows(kv, indices, topk_length)
    return _attend(q, rows, valid, scale, sink)[:2]


def _named_rows(kv: Tensor, indices: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows of kv `[T, topk, head_dim]`, zeros where an entry is not valid `[T, topk]`."""
    valid = (indices >= 0) & (indices < len(kv))
    if length is not None:
        valid = valid & (torch.arange(indices.shape[1], device=indices.device) < length.unsqueeze(1))
    if len(kv) == 0:
        return kv.new_zeros(*indices.shape, kv.shape[1]), valid
    rows = kv[torch.where(valid, indices, 0).long()]
    return torch.where(valid.unsqueeze(-1), rows, 0.0), valid


def sparse_mla_backward(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    d_out: Tensor,
    *,
    scale: float,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    d_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of `sparse_mla` in closed form and float64: of q, kv and the sink.

    d_lse, the gradient with respect to lse, goes with no sink: lse is without it, the weights are with it.
    """
    q, kv, d_out = q.double(), kv.double(), d_out.double()
    sink = None if sink is None else sink.double()
    rows, valid = _named_rows(kv, indices, topk_length)
    out, lse, _ = _attend(q, rows, valid, scale, sink)
    total = lse if sink is None else torch.logaddexp(lse, sink)
    total = torch.where(total == -torch.inf, torch.inf, total)  # with nothing to attend to every weight is 0
    scores = torch.einsum("thd,tkd->thk", q, rows) * scale
    weights = torch.where(valid.unsqueeze(1), torch.exp(scores - total.unsqueeze(-1)), 0.0)
    delta = (d_out * out).sum(-1)
    d_weights = torch.einsum("thd,tkd->thk", d_out, rows[..., :LATENT])
    d_scores = scale * weights * (d_weights - (delta if d_lse is None else delta - d_lse).unsqueeze(-1))
    d_q = torch.einsum("thk,tkd->thd", d_scores, rows)
    d_rows = torch.einsum("thk,thd->tkd", d_scores, q)
    d_rows[..., :LATENT] += torch.einsum("thk,thd->tkd", weights, d_out)
    d_kv = torch.zeros_like(kv)
    d_kv.index_add_(0, indices[valid].long(), d_rows[valid])
    if sink is None:
        return d_q, d_kv, None
    return d_q, d_kv, -torch.where(delta == 0, 0.0, torch.exp(sink - total) * delta).sum(0)


def _listed_rows(
    cache: Tensor, indices: Tensor, length: Tensor | None, format: str | None, scale: float
) -> tuple[Tensor, Tensor]:
    rows, valid = cache_rows(cache, indices, format=format, scale=scale)
    if length is not None:
        read = torch.arange(indices.shape[1], device=indices.device) < length.unsqueeze(1)
        rows, valid = torch.where(read.unsqueeze(-1), rows, 0.0), valid & read
    return rows, valid


def dense_attention(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    causal: bool = True,
    cache_format: str | None = None,
    cache_scale: float = 1.0,
    products: str = "exact",
) -> tuple[Tensor, Tensor]:
    """Every query attends to its request's sequence; if causal, the last query to all of it, the one before it to one
    token less, and so on.

    q `[B, S, H, head_dim]`, cache `[blocks, block_size, ...]`, block_table int32 `[B, max_blocks]`, lengths int32
    `[B]`. Returns in float64 out `[B, S, H, 512]` and lse `[B, H, S]` (natural logarithm).
    """
    requests, queries, heads, _ = q.shape
    out = torch.zeros(requests, queries, heads, LATENT, dtype=torch.float64, device=q.device)
    lse = torch.full((requests, heads, queries), -torch.inf, dtype=torch.float64, device=q.device)
    block_size, longest = cache.shape[1], block_table.shape[1] * cache.shape[1]
    how = {"scale": scale, "cache_format": cache_format, "cache_scale": cache_scale, "products": products}
    for i, length in enumerate(lengths.clamp(0, longest).tolist()):
        positions = torch.arange(length, device=q.device)
        blocks = block_table[i, positions // block_size].long()
        slots = torch.where(blocks < 0, -1, blocks * block_size + positions % block_size)
        for j in range(queries):
            seen = slots[: max(length - (queries - 1 - j if causal else 0), 0)].unsqueeze(0)
            out[i, j], lse[i, :, j], _ = sparse_attention(q[i, j].unsqueeze(0), cache, seen, **how)
    return out, lse


def flex_mla(
    q: Tensor, kv: Tensor, seen: Tensor, *, scale: float, score_mod: Callable | None = None
) -> tuple[Tensor, Tensor]:
    """Attention to the rows that each query sees, that autograd can differentiate, in q's dtype.

    q `[B, h, s, head_dim]`, kv `[B, 1, t, head_dim]`, seen bool `[B or 1, h or 1, s, t]`. Returns out `[B, h, s, 512]`
    and lse `[B, h, s]`.
    """
    seen = seen.expand(q.shape[0], q.shape[1], -1, -1)
    rows = kv.squeeze(1).masked_fill(~seen.any(1).any(1).unsqueeze(-1), 0.0)
    scores = torch.einsum("bhsd,btd->bhst", q, rows) * scale
    if score_mod is not None:
        given = scores  # create_mask maps any function over all indices
        scores = create_mask(lambda b, h, i, j: score_mod(given[b, h, i, j], b, h, i, j), *scores.shape, scores.device)
    weights, lse, _ = _softmax(torch.where(seen, scores, -torch.inf))
    return torch.einsum("bhst,btd->bhsd", weights, rows[..., :LATENT]), lse


def combine_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Combines results over disjoint sets of slots, outs `[P, T, H, D]` and lses `[P, T, H]`, in float64."""
    lses = lses.double()
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse == -torch.inf, 0.0, lse))
    outs = torch.where(weights.unsqueeze(-1) == 0, 0.0, outs.double())
    return (weights.unsqueeze(-1) * outs).sum(0), lse


def stage_rows(
    cache: Tensor, block_table: Tensor, lengths: Tensor, *, staged_table: Tensor | None = None, out: Tensor
) -> None:
    """Rows of requests, from an fp8_ds_mla cache to a staged one, `out` `[blocks, block_size, 1153]`."""
    rows = FORMATS["fp8_ds_mla"]
    cache = _as_stored(rows, cache)
    requests, block_size = len(block_table), cache.shape[1]
    if staged_table is None:
        staged_table = torch.arange(block_table.numel(), device=cache.device).view(block_table.shape)
    for request in range(requests):
        most = block_table.shape[1] * block_size
        row = torch.arange(int(lengths[request].clamp(0, most)), device=cache.device)
        slot, staged = (
            t[request, row // block_size].long() * block_size + row % block_size for t in (block_table, staged_table)
        )
        ends = (slot, cache), (staged, out)
        valid = torch.stack([(s >= 0) & (s < c.shape[0] * block_size) for s, c in ends]).all(0)
        out[token_address(STAGED, out, staged[valid])] = _staged(cache[token_address(rows, cache, slot[valid])])


def _staged(cached: Tensor) -> Tensor:
    """fp8_ds_mla rows `[N, 656]` as staged ones `[N, 1153]`."""
    parts = {name: _dense(part) for name, part in FORMATS["fp8_ds_mla"].split(cached).items()}
    scales = parts["scales"].view(torch.float32)
    largest = torch.where(scales.isnan(), 0, scales.abs()).amax(-1)
    largest = torch.where(scales.isnan().all(-1), torch.inf, largest)
    power = torch.frexp(largest)[1].clamp(-MOST_POWER, MOST_POWER)  # of a power of two above the largest scale
    power = torch.where(largest.isinf(), MOST_POWER, power)
    usual = ((power >= LOWEST_POWER) & (power <= HIGHEST_POWER)) | (largest <= SMALLEST_SCALE)
    power = torch.where(usual, 0, power - USUAL_POWER).unsqueeze(-1)
    factors = torch.ldexp(scales, -USUAL_POWER - power).half()
    numbers = parts["latent"].view(torch.float8_e4m3fn).float().unflatten(-1, (-1, 128))
    latent = (numbers * factors.float().unsqueeze(-1)).half().flatten(-2)
    rope = torch.ldexp(parts["rope"].view(torch.bfloat16).float(), -power).bfloat16()
    return torch.cat([part.contiguous().view(torch.uint8) for part in (latent, rope, power.to(torch.int8))], dim=-1)


def convert_indices(
    positions: Tensor,
    block_table: Tensor,
    request_ids: Tensor,
    block_size: int,
    compact: bool = False,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> tuple[Tensor, Tensor]:
    """Positions `[T, topk]` in each token's sequence to physical slots, -1 where there is none, and their counts.

    A rank keeps the runs of `interleave` positions that it gets in a round robin, one after the other.
    """
    slots = torch.full_like(positions, -1)
    for t, request in enumerate(request_ids.tolist()):
        if not 0 <= request < block_table.shape[0]:
            continue
        found = []
        for i, position in enumerate(positions[t].tolist()):
            run, offset = divmod(position, interleave)
            if run % ranks != rank:
                continue
            position = run // ranks * interleave + offset
            page = position // block_size
            slot = -1
            if position >= 0 and page < block_table.shape[1] and block_table[request, page] >= 0:
                slot = int(block_table[request, page]) * block_size + position % block_size
            if slot > torch.iinfo(torch.int32).max:
                slot = -1
            if not compact:
                slots[t, i] = slot
            elif slot >= 0:
                found.append(slot)
        slots[t, : len(found)] = torch.tensor(found, dtype=slots.dtype)
    return slots, (slots >= 0).sum(1, dtype=torch.int32)


def rotate_queries(
    queries: Tensor,
    index_queries: Tensor,
    weights: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    index_cos_sin: Tensor | None = None,
    weight_scale: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of attention `[T, H, 64]` and of the indexer `[T, I, 128]`, rotated to their positions; the latter as
    e4m3 numbers, each head's divided by a power of two, by which its weight is multiplied."""

    def rotated(x: Tensor, cos_sin: Tensor, neighbours: bool) -> Tensor:
        cosine, sine = cos_sin[positions.clamp(0, len(cos_sin) - 1)].float().unsqueeze(1).chunk(2, dim=-1)
        pairs = x.float().unflatten(-1, (-1, 2) if neighbours else (2, -1))
        dim = -1 if neighbours else -2
        a, b = pairs.unbind(dim)
        return torch.stack([a * cosine - b * sine, b * cosine + a * sine], dim).flatten(-2)

    turned = rotated(index_queries[..., :ROPE], cos_sin if index_cos_sin is None else index_cos_sin, interleaved)
    turned = torch.cat([turned, index_queries[..., ROPE:]], dim=-1)
    scales = group_scale(torch.where(turned.isnan(), 0, turned.abs()).amax(-1), power_of_two=True)
    rounded = to_e4m3(turned / scales.unsqueeze(-1)).view(torch.float8_e4m3fn)
    return to_number(rotated(queries, cos_sin, True), torch.bfloat16), rounded, weights.float() * weight_scale * scales


def index_scores(
    queries: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    requests: Tensor,
    lengths: Tensor,
    positions: int,
) -> Tensor:
    """The indexer's score of each key of a token's context: the sum over heads of weight * relu(query . key).

    queries `[T, H, 128]`, weights fp32 `[T, H]`, requests and lengths `[T]`. Returns fp32 `[T, positions]`, computed in
    float64: -inf where the position has no key, or the token doesn't see it.
    """
    keys, (blocks, block_size) = dequantise_keys(cache), cache.shape[:2]
    scores = torch.full((len(queries), positions), -torch.inf, device=queries.device)
    numbers = torch.arange(positions, device=queries.device)
    for request, row in enumerate(block_table.long()):
        tokens = (requests == request).nonzero().squeeze(1)
        listed = numbers[numbers // block_size < len(row)]
        block = row[listed // block_size]
        found = (block >= 0) & (block < blocks)
        listed, block = listed[found], block[found]
        products = torch.relu(
            queries[tokens].double() @ keys[block, listed % block_size].double().t()
        )  # [tokens, H, keys]
        rows = torch.full((len(tokens), positions), -torch.inf, dtype=torch.float64, device=queries.device)
        rows[:, listed] = torch.einsum("th,thk->tk", weights[tokens].double(), products)
        scores[tokens] = rows.float()
    return scores.masked_fill(numbers >= lengths.unsqueeze(1), -torch.inf)


def select_top(scores: Tensor, lengths: Tensor, topk: int) -> Tensor:
    """The positions of the topk largest of each token's first scores, by rising position, then -1: int32 `[T, topk]`.

    NaN counts as the largest. Of equal scores the earlier ones are chosen. -inf is never chosen, unless a token has no
    more than topk scores: then it gets all of them.
    """
    chosen = torch.full((len(scores), topk), -1, dtype=torch.int32, device=scores.device)
    for row, own, length in zip(chosen, scores, lengths.clamp(0, scores.shape[1]).tolist(), strict=True):
        if length <= topk:
            row[:length] = torch.arange(length, device=row.device)
            continue
        seen = own[:length].cpu()  # a GPU sorts NaN by its sign
        best = seen.sort(descending=True, stable=True).indices[:topk]
        best = best[seen[best] != -torch.inf].sort().values
        row[: len(best)] = best
    return chosen


def select_tokens(
    queries: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor | None,
    requests: Tensor,
    lengths: Tensor,
    topk: int,
    slots_of: tuple[Tensor, int] | None = None,
    candidates: tuple[Tensor, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The positions of each token's topk best keys, as index_scores and select_top find them, and their scores, -inf
    where there is no position: int32 and fp32 `[T, topk]`.

    Without a block table the cache is the keys of one sequence `[N, 128]`. With slots_of, a block table and its block
    size, positions become slots. With candidates, int32 `[T, B]` and a block size, tokens that see more than topk
    positions choose from these blocks of them, rising, -1 behind the last.
    """
    if block_table is None:
        cache, block_table = cache.unsqueeze(1), torch.arange(len(cache), device=cache.device).unsqueeze(0)
    # one position without a key stands for all that follow
    positions = min(int(lengths.max()) if len(lengths) else 0, max(block_table.shape[1] * cache.shape[1], topk) + 1)
    scores = index_scores(queries, weights, cache, block_table, requests, lengths, max(positions, 0))
    if candidates is not None:
        blocks, size = candidates
        every = -(-scores.shape[1] // size)
        at = torch.where((blocks < 0) | (blocks >= every), every, blocks).long()
        kept = torch.zeros(len(scores), every + 1, dtype=torch.bool, device=scores.device).scatter_(1, at, True)
        kept = kept[:, :every].repeat_interleave(size, 1)[:, : scores.shape[1]] | (lengths <= topk).unsqueeze(1)
        scores = scores.masked_fill(~kept, -torch.inf)
    chosen = select_top(scores, lengths, topk)
    padded = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    own = padded.gather(1, torch.where(chosen < 0, scores.shape[1], chosen).long())
    if slots_of is not None:
        chosen, _ = convert_indices(chosen, slots_of[0], requests, slots_of[1])
    return chosen, own
