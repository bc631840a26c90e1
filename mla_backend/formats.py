"""The cache formats, as the library describes them (csrc/include/mla/format.h)."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch

from mla_backend import library
from mla_backend.arguments import described, dtype_name, require_count, require_device, require_tensors


@dataclass(frozen=True)
class CacheFormat:
    """How one cached token is laid out: its latent values, their scales (unless they lie at the page's end), then its
    rope values."""

    name: str
    code: str
    """How latent values are stored: bf16, f16, e4m3 or e2m1."""
    latent: int
    rope_code: str
    """How rope values are stored."""
    rope: int
    value_dim: int
    """How many of a row's dims attention sums up."""
    scale: str
    """What a scale is: none, fp32, ue8m0 (a power of two in a byte), e4m3, tensor (the caller has one for all rows), or
    power (an int8, of staged rows)."""
    group: int
    """Latent values that share a scale; 0 where there are no groups."""
    scales_at: str
    """Where the scales lie: nowhere, in_row (between latent and rope values), end_of_row, or end_of_page."""
    scale_bytes: int
    """Bytes of a token's scales, padding included."""
    scale_offset: int
    """Bytes from the start of a row to its scales, where they lie in it."""
    rope_offset: int
    row_bytes: int
    """Bytes from a row to the next one."""
    token_bytes: int
    """Bytes of a token, scales at the page's end included."""
    page_alignment: int
    """A page of a new cache is padded to a multiple of so many bytes."""

    @property
    def head_dim(self) -> int:
        """Length of a query, and of a dequantised row."""
        return self.latent + self.rope

    @property
    def fp8(self) -> bool:
        """Whether latent values are e4m3."""
        return self.code == "e4m3"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of a cache tensor."""
        return {"bf16": torch.bfloat16, "f16": torch.float16}[self.code] if self.scale == "none" else torch.uint8

    @property
    def number(self) -> torch.dtype:
        """Dtype of queries, outputs and dequantised rows."""
        return torch.float16 if self.dtype == torch.float16 else torch.bfloat16

    @property
    def accepted_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that a cache tensor may come in."""
        return (self.dtype,) if self.scale == "none" else (torch.uint8, torch.int8, torch.float8_e4m3fn)

    @property
    def width(self) -> int:
        """Last dimension of a cache tensor."""
        return self.token_bytes // self.dtype.itemsize

    def page_bytes(self, block_size: int) -> int:
        """Bytes from one page of a new cache to the next."""
        require_count("block_size", block_size, at_least=1)
        return -(-block_size * self.token_bytes // self.page_alignment) * self.page_alignment

    def new_cache(self, blocks: int, block_size: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """A cache of zeros, `[blocks, block_size, width]`."""
        require_count("blocks", blocks)
        require_device("device", device)
        memory = torch.zeros(blocks * self.page_bytes(block_size), dtype=torch.uint8, device=device)
        return self.in_memory(memory, block_size)

    def in_memory(self, memory: torch.Tensor, block_size: int) -> torch.Tensor:
        """A cache of as many blocks as memory, uint8 `[bytes]`, has room for."""
        require_tensors(memory=memory)
        if memory.dtype != torch.uint8 or memory.dim() != 1:
            raise ValueError(f"memory must be uint8 [bytes]; got {described(memory)}")
        if not memory.is_contiguous() or memory.storage_offset() % self.dtype.itemsize:
            raise ValueError(
                f"memory must be in one piece, at a multiple of {self.dtype.itemsize} bytes; got other memory"
            )
        page = self.page_bytes(block_size)
        blocks = len(memory) // page
        pages = memory[: blocks * page].view(blocks, page).view(self.dtype)
        return pages[:, : block_size * self.width].unflatten(1, (block_size, self.width))


class Formats(dict[str, CacheFormat]):
    """Formats by name. An unknown name is a KeyError that says which ones are like it."""

    def __missing__(self, name: object) -> NoReturn:
        like = [known for known in self if str(name) in known] or difflib.get_close_matches(str(name), self) or self
        raise KeyError(f"no cache format is called {name!r}; there is {', '.join(like)}")


FORMATS = Formats({entry["name"]: CacheFormat(**entry) for entry in library.about()["formats"]})
STAGED = FORMATS.pop("staged")
"""What `stage_rows` makes of fp8_ds_mla rows, for `sparse_attention` to read. No cache is kept in it."""
_NUMBERS = {name: number for number, name in enumerate(FORMATS)}


def format_of(cache: torch.Tensor, name: str | None = None) -> CacheFormat:
    """The format of a cache tensor: the one of this name, or the one that its dtype and last dimension tell."""
    require_tensors(cache=cache)
    format_number(name, "name")
    known = FORMATS.values() if name is None else [FORMATS[name]]
    fitting = _fitting(cache, known)
    if not fitting:
        accepted = ", ".join(f"{f.name} ({f.width} {dtype_name(f.dtype)})" for f in known)
        raise ValueError(
            f"cache must be of a known format, by last dimension and dtype: {accepted}; got {described(cache)}"
        )
    if len(fitting) > 1:
        raise ValueError(f"name must be one of {', '.join(f.name for f in fitting)}; got None")
    return fitting[0]


def format_name(cache: torch.Tensor, name: str | None) -> str | None:
    """The name of a cache's format, given or told by the cache; None where neither tells one, for the op to refuse."""
    if name is not None:
        return name
    fitting = _fitting(cache, FORMATS.values())
    return fitting[0].name if len(fitting) == 1 else None


def _fitting(cache: torch.Tensor, known: Iterable[CacheFormat]) -> list[CacheFormat]:
    return [f for f in known if cache.shape[-1:] == (f.width,) and cache.dtype in f.accepted_dtypes]


def format_number(name: str | None, argument: str) -> int:
    """A format as the ops name it; -1 for None."""
    if name is None:
        return -1
    if not isinstance(name, str) or name not in _NUMBERS:
        raise ValueError(f"{argument} must be None or one of {', '.join(FORMATS)}; got {name!r}")
    return _NUMBERS[name]
