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


def write_keys(keys: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Writes bf16 or fp32 keys `[N, 128]` into slots, int32 or int64 `[N]`, of a cache of either format. A key whose
    slot is negative or past the end is skipped. Nothing waits for the device."""
    _require(keys=keys, cache=cache, slots=slots)
    if keys.shape != (len(slots), VALUES) or keys.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"keys must be bf16 or fp32 [N={len(slots)}, {VALUES}]; got {keys.dtype} {list(keys.shape)}")
    slots = slots.long()
    block_size = cache.shape[1]
    if not len(slots) or not len(cache):
        return
    for place, rows in zip(_parts(cache), _encode(keys, cache.dtype), strict=True):
        # a key without a slot writes what another one writes, to the same place, or else what is there already
        valid = (slots >= 0) & (slots < len(cache) * block_size)
        example = valid.int().argmax(0, keepdim=True)  # an index of no dimension would be asked of the device
        target = torch.where(valid, slots, torch.where(valid.any(), slots[example], 0))
        block, offset = target // block_size, target % block_size
        instead = torch.where(valid.any(), rows[example], place[0, 0])
        place[block, offset] = torch.where(valid.unsqueeze(1), rows, instead)


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


def _encode(keys: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Keys as the parts of a cache want them."""
    if dtype == torch.bfloat16:
        return [keys.bfloat16()]
    keys = keys.float()
    amax = keys.abs().amax(1, keepdim=True).clamp(SMALLEST_AMAX, torch.finfo(torch.float32).max)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)  # 0.5 <= mantissa < 1
    scales = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
    codes = (keys / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
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
