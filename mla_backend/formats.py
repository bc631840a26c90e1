"""The cache formats, as the library describes them (csrc/include/mla/format.h)."""

from dataclasses import dataclass

import torch

from mla_backend import library
from mla_backend.arguments import require_tensors


@dataclass(frozen=True)
class CacheFormat:
    """How one cached token is laid out: its latent values, their scales, then its rope values in bf16."""

    name: str
    quantised: bool
    """Latent values are e4m3 with a scale a group; otherwise bf16."""
    latent: int
    rope: int
    value_dim: int
    """How many of a query's dims attention sums up."""
    group: int
    """Latent values that share a scale; 0 where there are no scales."""
    scale: str
    """What a scale is: none, fp32, or ue8m0 (a power of two in a byte)."""
    scale_place: str
    """Where the scales lie: in_row, or end_of_page."""
    scale_offset: int
    """Bytes from the start of a token to its scales."""
    rope_offset: int
    token_bytes: int

    @property
    def head_dim(self) -> int:
        """Length of a query, and of a dequantised row."""
        return self.latent + self.rope

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a cache tensor."""
        return torch.uint8 if self.quantised else torch.bfloat16

    @property
    def accepted_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that a cache tensor may come in."""
        return (torch.uint8, torch.int8, torch.float8_e4m3fn) if self.quantised else (torch.bfloat16,)

    @property
    def width(self) -> int:
        """Last dimension of a cache tensor."""
        return self.token_bytes // self.dtype.itemsize

    def new_cache(self, blocks: int, block_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A cache of zeros, `[blocks, block_size, width]`."""
        return torch.zeros(blocks, block_size, self.width, dtype=self.dtype, device=device)


FORMATS: dict[str, CacheFormat] = {entry["name"]: CacheFormat(**entry) for entry in library.about()["formats"]}


def format_of(cache: torch.Tensor) -> CacheFormat:
    """The format of a cache tensor, which follows from its dtype and its last dimension."""
    require_tensors(cache=cache)
    for candidate in FORMATS.values():
        if cache.shape[-1:] == (candidate.width,) and cache.dtype in candidate.accepted_dtypes:
            return candidate
    accepted = ", ".join(f"{f.name} (last dimension {f.width}, {f.dtype})" for f in FORMATS.values())
    raise ValueError(f"cache must be of a known format: {accepted}; got {cache.dtype} {list(cache.shape)}")
