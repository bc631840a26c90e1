"""The formats of the indexer's keys, 128 values a token, and how they are written: FP8 and bf16 in plain PyTorch.

`fp8` is what DeepSeek-V3.2's indexer reads in vLLM: in each block first the e4m3 values of all its tokens, then one
fp32 scale a token, which is a power of two. `mxfp4_68` is what vLLM calls mxfp4: in each block first the values of all
its tokens, e2m1 pairs of 64 bytes a token with the even one in the low four bits, then four ue8m0 scales a token, of 32
values each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_backend import library  # noqa: F401  (registers the ops)
from mla_backend.arguments import (
    call,
    described,
    dtype_name,
    require_device_of,
    require_no_gradient,
    require_own_memory,
    require_tensors,
)

VALUES = 128
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4
"""The smallest amax that a scale is made from, as in vLLM."""
GROUP = 32
"""MXFP4 values with one scale."""
MANTISSA, EXPONENT = 0x007FFFFF, 0x7F800000
"""Bits of an fp32 number."""


@dataclass(frozen=True)
class KeyFormat:
    """How an indexer's keys lie in a cache tensor `[blocks, block_size, width]`."""

    name: str
    quantised: bool
    token_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a cache tensor."""
        return torch.uint8 if self.quantised else torch.bfloat16

    @property
    def width(self) -> int:
        """Last dimension of a cache tensor."""
        return self.token_bytes // self.dtype.itemsize

    def page_bytes(self, block_size: int) -> int:
        """Bytes from one block of so many tokens to the next."""
        return block_size * self.token_bytes


KEY_FORMATS = {
    "bf16": KeyFormat("bf16", quantised=False, token_bytes=2 * VALUES),
    "fp8": KeyFormat("fp8", quantised=True, token_bytes=VALUES + 4),
    "mxfp4_68": KeyFormat("mxfp4_68", quantised=True, token_bytes=VALUES // 2 + VALUES // GROUP),
}


class KeyAddresses:
    """The addresses of some tokens' keys, in any cache of one shape. Computed once for all layers of a model.

    A key whose slot is negative or past the end is not kept. Their number is on the device, and asking for it would
    wait. So in place of such a key, one that has a slot is written a second time, to its own address.

    Args:
        cache: of any format; its shape, strides and dtype count. A block has to lie in one piece.
        slots: int32 or int64 `[N]`.
        any_valid: one or more of the slots are known to be in the cache. Otherwise each write checks.

    Attributes:
        source: int64 `[N]`: which key is written instead of each.
    """

    def __init__(self, cache: Tensor, slots: Tensor, *, any_valid: bool = False):
        _require(cache=cache, slots=slots)
        blocks, block_size, _ = cache.shape
        self._slots = slots.long() if _is_mxfp4(cache) else None
        if self._slots is not None:
            self.source = torch.arange(len(slots), device=slots.device)
            return
        self._dtype, words, scales = _words(cache)
        slots = slots.long()
        valid = (slots >= 0) & (slots < blocks * block_size)
        example = valid.int().argmax(0, keepdim=True)  # an index of no dimension would be asked of the device
        self.source = torch.where(valid, torch.arange(len(slots), device=slots.device), example)
        target = slots[self.source]
        self._any_valid: Tensor | None = None
        if not any_valid:
            self._any_valid = valid.any()
            target = torch.where(self._any_valid, target, 0)
        block, offset = (target // block_size).unsqueeze(1), (target % block_size).unsqueeze(1)
        start = block * cache.view(self._dtype).stride(0)
        # int64 [N, words]: the address of each word of a key, in words from the first one of the cache
        self._index = start + offset * words + torch.arange(words, device=slots.device)
        if scales:
            self._index = torch.cat([self._index, start + block_size * words + offset], dim=1)

    def write(self, keys: Tensor, cache: Tensor) -> None:
        """Writes bf16 or fp32 keys `[N, 128]` that have been rearranged by `source`."""
        if not cache.numel():
            return
        if self._slots is not None:
            return call(torch.ops.mla_backend.write_mxfp4_keys.default, keys, cache, self._slots)
        parts = [part.view(self._dtype) for part in _encode(keys, cache.dtype)]
        words = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        flat = _as_one_row(cache.view(self._dtype))
        if self._any_valid is not None:
            words = torch.where(self._any_valid, words, flat[self._index])
        flat[self._index] = words


def write_keys(keys: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes keys into slots of a cache, rounded as its format wants it. A key whose slot is negative or past the end
    is skipped. Nothing waits for the device.

    Args:
        keys: bf16 or fp32 `[N, 128]`.
        cache: bf16 `[blocks, block_size, 128]`, or uint8 `[blocks, block_size, 132]` (`fp8`) or
            `[blocks, block_size, 68]` (`mxfp4_68`).
        slots: int32 or int64 `[N]`: block * block_size + offset in it.
    """
    _require(keys=keys, cache=cache, slots=slots)
    if keys.shape != (len(slots), VALUES) or keys.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"keys must be bf16 or fp32 [N={len(slots)}, {VALUES}]; got {described(keys)}")
    require_own_memory(cache=cache, keys=keys, slots=slots)
    if _is_mxfp4(cache):
        call(torch.ops.mla_backend.write_mxfp4_keys.default, keys, cache, slots.long())
    elif len(slots):
        addresses = KeyAddresses(cache, slots)
        addresses.write(keys[addresses.source], cache)


def _is_mxfp4(cache: Tensor) -> bool:
    return cache.dtype == torch.uint8 and cache.shape[2] == KEY_FORMATS["mxfp4_68"].width


def _words(cache: Tensor) -> tuple[torch.dtype, int, int]:
    """The words that a key is written as: their dtype, how many hold its values, and how many its scale."""
    return (torch.bfloat16, VALUES, 0) if cache.dtype == torch.bfloat16 else (torch.int32, VALUES // 4, 1)


def _as_one_row(cache: Tensor) -> Tensor:
    """The memory from its first to its last word, gaps included."""
    blocks, *of_a_block = cache.shape
    return cache.as_strided(((blocks - 1) * cache.stride(0) + of_a_block[0] * of_a_block[1],), (1,))


def _encode(keys: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Keys as a cache keeps them: their values and, in FP8, their scales."""
    if dtype == torch.bfloat16:
        return [keys.bfloat16()]
    keys = keys.float()
    largest = torch.finfo(torch.float32).max
    amax = torch.linalg.vector_norm(keys, torch.inf, dim=1, keepdim=True).clamp(SMALLEST_AMAX, largest)
    # up to the next power of two: any bit of the mantissa carries into the exponent, then the mantissa goes
    scales = ((amax / E4M3_MAX).view(torch.int32) + MANTISSA & EXPONENT).view(torch.float32)
    values = (keys / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return [values, scales]


def _require(**arguments: Tensor) -> None:
    require_tensors(**arguments)
    cache, slots = arguments["cache"], arguments["slots"]
    if cache.dim() != 3 or (cache.dtype, cache.shape[-1]) not in {(f.dtype, f.width) for f in KEY_FORMATS.values()}:
        accepted = ", ".join(
            f"{f.name} ({dtype_name(f.dtype)} [blocks, block_size, {f.width}])" for f in KEY_FORMATS.values()
        )
        raise ValueError(f"cache must be of a known format: {accepted}; got {described(cache)}")
    _require_blocks(cache)
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots must be int32 or int64 [N]; got {described(slots)}")
    require_no_gradient(arguments.items())
    require_device_of("cache", **arguments)


def _require_blocks(cache: Tensor) -> None:
    blocks, block_size, width = cache.shape
    if block_size == 0:
        raise ValueError(f"cache must be of a block size of 1 or more; got {described(cache)}")
    between, *strides = cache.stride()
    if strides[1] != 1 or (block_size > 1 and strides[0] != width):
        raise ValueError(f"cache must be of blocks that lie in one piece, of strides {width} and 1; got {strides}")
    if blocks > 1 and between < block_size * width:
        raise ValueError(f"cache must be of blocks that share no memory; got one every {between} of its numbers")
    if cache.dtype == torch.uint8 and (cache.storage_offset() % 4 or (blocks > 1 and between % 4)):
        raise ValueError("cache must be of blocks that begin at multiples of 4 bytes; got others")
