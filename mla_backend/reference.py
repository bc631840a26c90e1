"""The oracle: what every kernel has to compute, in plain PyTorch.

Nothing here uses the library or its description of the formats, so a mistake in those shows as a difference. Attention
is computed in float64. Everything works on any device, and nothing is meant to be fast.
"""

import torch
from torch import Tensor

LATENT = 512
ROPE = 64
GROUP = 128
E4M3_MAX = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
KEY = 128
"""Values of an indexer's key."""
FP8_ROW_BYTES = LATENT + 4 * (LATENT // GROUP) + 2 * ROPE  # 656


def to_e4m3(x: Tensor) -> Tensor:
    """fp32 to e4m3 bytes (uint8): nearest, ties to even, saturating at 448; NaN becomes 0x7f."""
    rounded = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, rounded)


def to_bf16(x: Tensor) -> Tensor:
    """fp32 to bf16: nearest, ties to even; NaN becomes 0x7fc0. bf16 keeps its bits."""
    if x.dtype == torch.bfloat16:
        return x
    return x.bfloat16().view(torch.int16).masked_fill(x.isnan(), 0x7FC0).view(torch.bfloat16)


def group_scale(amax: Tensor, power_of_two: bool) -> Tensor:
    """The fp32 scale of a group with this largest magnitude: amax / 448, at least the smallest normal number.

    An infinite amax counts as the largest finite number. power_of_two rounds the scale up to one.
    """
    scale = (amax.clamp(max=torch.finfo(torch.float32).max) / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    if not power_of_two:
        return scale
    mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1
    return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())


def quantise(kv_c: Tensor, k_pe: Tensor, power_of_two: bool = False) -> Tensor:
    """Tokens as fp8_ds_mla rows: kv_c `[N, 512]` and k_pe `[N, 64]` to uint8 `[N, 656]`."""
    groups = kv_c.float().unflatten(-1, (-1, GROUP))  # [N, 4, 128]
    amax = torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1, keepdim=True)
    scales = group_scale(amax, power_of_two)
    parts = to_e4m3(groups / scales).flatten(-2), scales.squeeze(-1), to_bf16(k_pe)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def dequantise(rows: Tensor) -> Tensor:
    """Rows of a cache of either format, `[..., 656]` bytes or `[..., 576]` bf16, to float32 `[..., 576]`.

    A cache of float32 `[..., 576]`, which only the reference takes, loses nothing.
    """
    if rows.dtype in (torch.bfloat16, torch.float32):
        return rows.float()
    rows = rows.contiguous().view(torch.uint8)
    latent = rows[..., :LATENT].contiguous().view(torch.float8_e4m3fn).float()
    scales = rows[..., LATENT : LATENT + 16].contiguous().view(torch.float32)
    rope = rows[..., LATENT + 16 :].contiguous().view(torch.bfloat16).float()
    latent = latent.unflatten(-1, (-1, GROUP)) * scales.unsqueeze(-1)
    return torch.cat([latent.flatten(-2), rope], dim=-1)


def cache_write(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, power_of_two: bool = False) -> None:
    """Writes token i into slot slots[i] of `cache` `[blocks, block_size, ...]`; a slot outside of it is skipped."""
    if cache.dtype == torch.bfloat16:
        rows = to_bf16(torch.cat([kv_c, k_pe], dim=-1))
    elif cache.dtype == torch.float32:
        rows = torch.cat([kv_c, k_pe], dim=-1).float()
    else:
        rows = quantise(kv_c, k_pe, power_of_two).view(cache.dtype)
    block_size = cache.shape[1]
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if 0 <= slot < cache.shape[0] * block_size:
            cache[slot // block_size, slot % block_size] = row


def cache_rows(cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantised rows float32 `[*slots.shape, 576]` and which slots are in the cache; the others' rows are 0."""
    blocks, block_size = cache.shape[:2]
    valid = (slots >= 0) & (slots < blocks * block_size)
    if blocks == 0:
        return torch.zeros(*slots.shape, LATENT + ROPE, device=cache.device), valid
    slots = torch.where(valid, slots, 0).long()
    rows = dequantise(cache[slots // block_size, slots % block_size].flatten(slots.dim()))
    return torch.where(valid.unsqueeze(-1), rows, 0.0), valid


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Every query token attends to its own list of cache slots.

    q `[T, H, 576]`, cache `[blocks, block_size, ...]`, indices int32 `[T, topk]`. Returns, all in float64, out
    `[T, H, 512]`, lse `[T, H]` (natural logarithm) and the max logits `[T, H]`, after scaling.
    """
    rows, valid = _listed_rows(cache, indices, topk_length)
    if extra_cache is not None:
        extra_rows, extra_valid = _listed_rows(extra_cache, extra_indices, extra_topk_length)
        rows, valid = torch.cat([rows, extra_rows], dim=1), torch.cat([valid, extra_valid], dim=1)
    rows, q = rows.double(), q.double()
    scores = torch.einsum("thd,tkd->thk", q, rows) * scale
    scores = torch.where(valid.unsqueeze(1), scores, -torch.inf)
    # a column of -inf changes nothing, and lets empty lists have a maximum
    scores = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    max_logits = scores.amax(-1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse).unsqueeze(-1))
    out = torch.einsum("thk,tkd->thd", weights[..., :-1], rows[..., :LATENT])
    if sink is not None:
        out = out * torch.sigmoid(torch.where(lse == -torch.inf, 0.0, lse - sink.double())).unsqueeze(-1)
    return out, lse, max_logits


def _listed_rows(cache: Tensor, indices: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, valid = cache_rows(cache, indices)
    if length is not None:
        read = torch.arange(indices.shape[1], device=indices.device) < length.unsqueeze(1)
        rows, valid = torch.where(read.unsqueeze(-1), rows, 0.0), valid & read
    return rows, valid


def merge_partials(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges results over disjoint sets of slots, outs `[P, T, H, D]` and lses `[P, T, H]`, in float64."""
    lses = lses.double()
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse == -torch.inf, 0.0, lse))
    outs = torch.where(weights.unsqueeze(-1) == 0, 0.0, outs.double())
    return (weights.unsqueeze(-1) * outs).sum(0), lse


def convert_indices(
    positions: Tensor, block_table: Tensor, request_ids: Tensor, block_size: int, compact: bool = False
) -> tuple[Tensor, Tensor]:
    """Positions `[T, topk]` in each token's sequence to physical slots, -1 where there is none, and their counts."""
    slots = torch.full_like(positions, -1)
    for t, request in enumerate(request_ids.tolist()):
        if not 0 <= request < block_table.shape[0]:
            continue
        found = []
        for i, position in enumerate(positions[t].tolist()):
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


def dequantise_keys(cache: Tensor) -> Tensor:
    """The indexer's keys, fp32 `[blocks, block_size, 128]`, of a cache of bf16 or fp32 `[blocks, block_size, 128]`, or
    of bytes `[blocks, block_size, 132]`: in each block the e4m3 values of all its tokens, then their scales in fp32."""
    if cache.dtype != torch.uint8:
        return cache.float()
    blocks, block_size = cache.shape[:2]
    values, scales = cache.reshape(blocks, block_size * (KEY + 4)).split([block_size * KEY, block_size * 4], dim=1)
    values = values.contiguous().view(torch.float8_e4m3fn).float().view(blocks, block_size, KEY)
    return values * scales.contiguous().view(torch.float32).unsqueeze(-1)


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
