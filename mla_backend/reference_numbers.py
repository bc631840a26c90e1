"""The numbers of caches, as bytes, for `reference`."""

import torch
from torch import Tensor

E4M3_MAX = 448.0
KEY = 128
"""Values of an indexer's key."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def to_e4m3(x: Tensor) -> Tensor:
    """fp32 to e4m3 bytes (uint8): nearest, ties to even, saturating at 448; NaN becomes 0x7f."""
    rounded = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, rounded)


def to_number(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 to bf16 or fp16: nearest, ties to even; NaN becomes 0x7fc0 or 0x7e00. What has the dtype keeps its bits."""
    if x.dtype == dtype:
        return x
    nan = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}.get(dtype)
    x = x.float()
    return x if nan is None else x.to(dtype).view(torch.int16).masked_fill(x.isnan(), nan).view(dtype)


def to_e2m1(x: Tensor) -> Tensor:
    """fp32 `[..., N]` to e2m1, two in a byte, the first in the low bits: nearest, ties to even, saturating at 6; NaN
    becomes 6."""
    size = x.abs().double().nan_to_num(E2M1[-1]).clamp(max=E2M1[-1])
    above = torch.tensor(E2M1[1:], dtype=torch.double, device=x.device)
    below = torch.tensor(E2M1[:-1], dtype=torch.double, device=x.device)
    middle, even = (above + below) / 2, torch.arange(7, device=x.device) % 2 == 0
    number = ((size.unsqueeze(-1) > middle) | ((size.unsqueeze(-1) == middle) & ~even)).sum(-1)
    number += 8 * (x.signbit() & ~x.isnan())
    low, high = number.unflatten(-1, (-1, 2)).to(torch.uint8).unbind(-1)
    return low | high << 4


def from_e2m1(pairs: Tensor) -> Tensor:
    """Bytes `[..., N]` as float32 `[..., 2 * N]`."""
    numbers = torch.tensor([*E2M1, *(-x for x in E2M1)], device=pairs.device)
    return numbers[torch.stack([pairs & 15, pairs >> 4], dim=-1).long()].flatten(-2)


def to_nvfp4_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of groups of e2m1 numbers with these largest magnitudes `[..., 32, 1]`: as bytes `[..., 32]` in the
    order of a row, and as float32 `[..., 32, 1]`."""
    stored = to_e4m3((amax * (1 / 6)).clamp(min=2.0**-9))
    in_order = stored.squeeze(-1).unflatten(-1, (8, 4)).transpose(-1, -2).flatten(-2)
    return in_order, stored.view(torch.float8_e4m3fn).float()


def from_nvfp4_scales(stored: Tensor) -> Tensor:
    """A row's scales, bytes `[..., 32]`, as float32 in the groups' order."""
    in_order = stored.unflatten(-1, (4, 8)).transpose(-1, -2).flatten(-2).contiguous()
    return in_order.view(torch.float8_e4m3fn).float()


def to_ue8m0(powers: Tensor) -> Tensor:
    """Powers of two as bytes: their exponents, from -127 on."""
    return (torch.frexp(powers)[1] - 1 + 127).to(torch.uint8)


def from_ue8m0(scales: Tensor) -> Tensor:
    """Bytes that are powers of two as float32: 2^(byte - 127), and NaN for 255."""
    return torch.exp2(scales.double() - 127).float().masked_fill(scales == 255, torch.nan)


def dequantise_keys(cache: Tensor) -> Tensor:
    """The indexer's keys, fp32 `[blocks, block_size, 128]`, of a cache of fp32 or of a format of docs/formats.md."""
    if cache.dtype != torch.uint8:
        return cache.float()
    blocks, block_size, width = cache.shape
    values, scales = cache.reshape(blocks, -1).split([block_size * (width - 4), block_size * 4], dim=1)
    if width == KEY // 2 + 4:
        numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], device=cache.device)
        codes = torch.stack([values & 15, values >> 4], dim=-1).view(blocks, block_size, 4, KEY // 4)
        powers = (scales.int() << 23).view(torch.float32).masked_fill(scales == 255, torch.nan)
        powers = powers.masked_fill(scales == 0, 2.0**-127).view(blocks, block_size, 4, 1)
        return (numbers[codes.int()] * powers).flatten(2)
    values = values.contiguous().view(torch.float8_e4m3fn).float().view(blocks, block_size, KEY)
    return values * scales.contiguous().view(torch.float32).unsqueeze(-1)
