"""The formats of the indexer's keys, 128 values a token, and how they are written and read, in plain PyTorch.

`fp8` is what DeepSeek-V3.2's indexer reads in vLLM: in each block first the e4m3 values of all its tokens, then one
fp32 scale a token, which is a power of two.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_backend.arguments import require_tensors

VALUES = 128
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-4
"""Of the values that share a scale, as in vLLM."""
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


KEY_FORMATS = {
    "bf16": KeyFormat("bf16", quantised=False, token_bytes=2 * VALUES),
    "fp8": KeyFormat("fp8", quantised=True, token_bytes=VALUES + 4),
}


class KeyPlaces:
    """Where the keys of some tokens go, in any cache of one shape: looked up once, for the layers of a model.

    A key whose slot is negative or past the end is not kept. Nothing waits for the device, so nobody counts those that
    are: in place of a key without a slot, one that has a slot is written again, to the same place.

    Args:
        cache: of either format; its shape, strides and dtype count. A block has to lie in one piece.
        slots: int32 or int64 `[N]`.
        some: that one or more of the slots are in the cache is known; otherwise each write makes sure.

    Attributes:
        source: int64 `[N]`: the key that is written in place of each.
    """

    def __init__(self, cache: Tensor, slots: Tensor, *, some: bool = False):
        _require(cache=cache, slots=slots)
        blocks, block_size, _ = cache.shape
        self._dtype, words, scales = _words(cache)
        slots = slots.long()
        valid = (slots >= 0) & (slots < blocks * block_size)
        example = valid.int().argmax(0, keepdim=True)  # an index of no dimension would be asked of the device
        self.source = torch.where(valid, torch.arange(len(slots), device=slots.device), example)
        target = slots[self.source]
        self._some: Tensor | None = None
        if not some:
            self._some = valid.any()
            target = torch.where(self._some, target, 0)
        block, offset = (target // block_size).unsqueeze(1), (target % block_size).unsqueeze(1)
        start = block * cache.view(self._dtype).stride(0)
        # int64 [N, words]: of each word of a key its place in the cache, seen as one row of words
        self._index = start + offset * words + torch.arange(words, device=slots.device)
        if scales:
            self._index = torch.cat([self._index, start + block_size * words + offset], dim=1)

    def write(self, keys: Tensor, cache: Tensor) -> None:
        """Writes bf16 or fp32 keys `[N, 128]` that have been rearranged by `source`."""
        if not cache.numel():
            return
        parts = [part.view(self._dtype) for part in _encode(keys, cache.dtype)]
        words = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        flat = _as_one_row(cache.view(self._dtype))
        if self._some is not None:
            words = torch.where(self._some, words, flat[self._index])
        flat[self._index] = words


def write_keys(keys: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes bf16 or fp32 keys `[N, 128]` into slots, int32 or int64 `[N]`, of a cache of either format. A key whose
    slot is negative or past the end is skipped. Nothing waits for the device."""
    _require(keys=keys, cache=cache, slots=slots)
    if keys.shape != (len(slots), VALUES) or keys.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"keys must be bf16 or fp32 [N={len(slots)}, {VALUES}]; got {keys.dtype} {list(keys.shape)}")
    if len(slots):
        places = KeyPlaces(cache, slots)
        places.write(keys[places.source], cache)


def gather_keys(cache: Tensor, slots: Tensor) -> Tensor:
    """Reads keys, dequantised: fp32 `[N, 128]`, zeros where a slot is not in the cache."""
    _require(cache=cache, slots=slots)
    slots = slots.long()
    block_size = cache.shape[1]
    valid = (slots >= 0) & (slots < len(cache) * block_size)
    if not len(cache):
        return torch.zeros(len(slots), VALUES, device=cache.device)
    target = torch.where(valid, slots, 0)
    values, *scales = (place[target // block_size, target % block_size] for place in _parts(cache))
    keys = values.view(torch.float8_e4m3fn).float() * scales[0] if scales else values.float()
    return keys.masked_fill(~valid.unsqueeze(1), 0.0)


def _parts(cache: Tensor) -> list[Tensor]:
    """Views of the values `[blocks, block_size, 128]` and, where there are some, the scales `[blocks, block_size, 1]`
    of a cache tensor."""
    blocks, block_size, _ = cache.shape
    if cache.dtype == torch.bfloat16:
        return [cache]
    bytes_ = cache.view(blocks, -1)
    values, scales = bytes_.split([block_size * VALUES, block_size * 4], dim=1)
    return [values.view(blocks, block_size, VALUES), scales.view(torch.float32).view(blocks, block_size, 1)]


def _words(cache: Tensor) -> tuple[torch.dtype, int, int]:
    """What a key is written as: words of this dtype, so many for its values and so many for its scale."""
    return (torch.bfloat16, VALUES, 0) if cache.dtype == torch.bfloat16 else (torch.int32, VALUES // 4, 1)


def _as_one_row(cache: Tensor) -> Tensor:
    """All that lies between its first and its last word."""
    blocks, *of_a_block = cache.shape
    return cache.as_strided(((blocks - 1) * cache.stride(0) + of_a_block[0] * of_a_block[1],), (1,))


def _encode(keys: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Keys as the parts of a cache want them."""
    if dtype == torch.bfloat16:
        return [keys.bfloat16()]
    keys = keys.float()
    largest = torch.finfo(torch.float32).max
    amax = torch.linalg.vector_norm(keys, torch.inf, dim=1, keepdim=True).clamp(SMALLEST_AMAX, largest)
    # up to the next power of two: any bit of the mantissa carries into the exponent, then the mantissa goes
    scales = ((amax / E4M3_MAX).view(torch.int32) + MANTISSA & EXPONENT).view(torch.float32)
    codes = (keys / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return [codes, scales]


def _require(**arguments: Tensor) -> None:
    require_tensors(**arguments)
    cache, slots = arguments["cache"], arguments["slots"]
    if cache.dim() != 3 or (cache.dtype, cache.shape[-1]) not in {(f.dtype, f.width) for f in KEY_FORMATS.values()}:
        accepted = ", ".join(f"{f.name} ({f.dtype} [blocks, block_size, {f.width}])" for f in KEY_FORMATS.values())
        raise ValueError(f"cache must be of a known format: {accepted}; got {cache.dtype} {list(cache.shape)}")
    if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots must be int32 or int64 [N]; got {slots.dtype} {list(slots.shape)}")
    for name, tensor in arguments.items():
        if tensor.device != cache.device:
            raise ValueError(f"{name} must be on {cache.device} like cache; got {tensor.device}")
