"""Caches of fp8_ds_mla rows with scales of every kind, and requests whose rows are staged."""

import torch
from torch import Tensor

import mla_backend
from problems import all_bytes, random_cache

SCALES = {
    "usual": None,
    "powers of two": lambda n: torch.exp2(torch.randint(-14, 1, (n, 4)).float()),
    "tiny": lambda n: torch.exp2(torch.randint(-120, -60, (n, 4)).float()) * (1 + torch.rand(n, 4)),
    "huge": lambda n: torch.exp2(torch.randint(20, 59, (n, 4)).float()) * (1 + torch.rand(n, 4)),
    "zero": lambda n: torch.rand(n, 4).where(torch.rand(n, 4) < 0.5, 0.0),
    "all zero": lambda n: torch.zeros(n, 4),
    "small rows": lambda n: torch.exp2(torch.randint(-40, -10, (n, 1)).float()) * (1 + torch.rand(n, 4)),
    "small and large rows": lambda n: torch.exp2(torch.randint(-30, 6, (n, 1)).float()) * (1 + torch.rand(n, 4)),
    "far apart": lambda n: torch.exp2(torch.randint(-40, 41, (n, 4)).float()),
    "negative": lambda n: -torch.rand(n, 4) / 64,
    "not finite": lambda n: torch.tensor([torch.inf, torch.nan, 1.0, 0.01])[torch.randint(0, 4, (n, 4))],
}
"""Scales `[n, 4]` of n rows, by name."""
FINITE = tuple(name for name in SCALES if name != "not finite")


def cache_with_scales(name: str, blocks: int, block_size: int, gap: int = 0) -> Tensor:
    """fp8_ds_mla rows of random bytes, none of them NaN, with such scales."""
    cache = random_cache("fp8_ds_mla", blocks, block_size, gap=gap)
    if SCALES[name] is not None:
        scales = SCALES[name](blocks * block_size).contiguous().view(torch.uint8).view(blocks, block_size, 16)
        cache[..., 512:528] = scales
    return cache


def new_staged(blocks: int, block_size: int, gap: int = 0) -> Tensor:
    """Room for staged rows, all bytes of it 0xff."""
    staged = mla_backend.STAGED.new_cache(blocks, block_size)
    if gap:
        page = staged.stride(0) + gap
        staged = torch.empty(blocks * page, dtype=torch.uint8).as_strided(staged.shape, (page, *staged.stride()[1:]))
    all_bytes(staged).fill_(0xFF)
    return staged
