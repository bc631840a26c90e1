"""What `kernels` measures: batches in a few letters, the cached tokens that they attend to, and suites of batches.

`128q1s32k` is 128 requests with 1 query token each at the end of sequences of 32 * 1024 tokens. `q4k` is one request
whose 4096 query tokens are its whole sequence. `2q512s8k_32q1s1k` is both kinds of requests in one batch.

A suite is a file. The package has some; users can write their own:

    description = "what it shows"
    peers = false                   # ours alone; the default is true

    [[cases]]                       # every batch with every head count and top-k
    batches = ["128q1s32k"]
    heads = [16, 128]
    topk = [2048]                   # the default
    formats = ["fp8_ds_mla"]        # the default is all of them

All cases of the first format are measured first, then those of the next.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "suites"
BLOCK, SETS = 64, 4
"""Slots of a cache's block, and sets of inputs that calls rotate."""
SMALLEST_CACHE = 2**20
"""Tokens. Input sets are spread over the whole cache, as requests are in a server's."""
MOST_HEADS = 256
MOST_REQUESTS = 2**20
DEFAULT_TOPK = 2048
_CHUNK = 2**27
"""Scores that are drawn at once."""


@dataclass(frozen=True)
class Batch:
    """Requests: the query tokens of each, and the length of its sequence with them."""

    spec: str
    requests: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, spec: str) -> "Batch":
        requests: list[tuple[int, int]] = []
        for part in spec.split("_"):
            found = re.fullmatch(r"(\d*)q(\d+k?)(?:s(\d+k?))?", part)
            if not found:
                of = "" if part == spec else f", of which {part!r} is none"
                raise ValueError(f"{spec!r} is no batch: that is parts like 128q1s32k, joined by _{of}")
            count, queries = int(found[1] or 1), _number(found[2])
            length = _number(found[3]) if found[3] else queries
            if not 1 <= count <= MOST_REQUESTS or not 1 <= queries <= length:
                raise ValueError(
                    f"{spec!r} is no batch: 1 to {MOST_REQUESTS} requests, and sequences at least as long as their "
                    f"query tokens; got {part!r}"
                )
            requests += [(queries, length)] * count
        return cls(spec, tuple(requests))

    @property
    def tokens(self) -> int:
        return sum(queries for queries, _ in self.requests)

    @property
    def cached(self) -> int:
        """Tokens in the cache, over all requests."""
        return sum(length for _, length in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(length for _, length in self.requests)

    @property
    def queries(self) -> int | None:
        """Query tokens of each request, where all have equally many."""
        counts = {queries for queries, _ in self.requests}
        return counts.pop() if len(counts) == 1 else None

    def blocks(self, block_size: int) -> list[int]:
        """Blocks of the cache for each request."""
        return [-(-length // block_size) for _, length in self.requests]

    def token_requests(self) -> Tensor:
        """int32 `[T]`: the request of each query token."""
        counts = torch.tensor([queries for queries, _ in self.requests])
        return torch.arange(len(self.requests), dtype=torch.int32).repeat_interleave(counts)

    def visible(self) -> Tensor:
        """int32 `[T]`: tokens of its sequence that each query token may see, itself included."""
        return torch.cat([torch.arange(n - q + 1, n + 1, dtype=torch.int32) for q, n in self.requests])


def _number(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def positions(batch: Batch, topk: int, device: torch.device | str = "cpu") -> Tensor:
    """int32 `[T, topk]`: different positions in the sequence of each query token, drawn evenly over what it may see,
    then -1 if that is fewer."""
    longest = batch.longest
    picked = torch.full((batch.tokens, topk), -1, dtype=torch.int32, device=device)
    visible, everywhere = batch.visible().to(device), torch.arange(longest, device=device)
    for tokens in torch.arange(batch.tokens, device=device).split(max(1, _CHUNK // longest)):
        scores = torch.rand(len(tokens), longest, device=device)
        scores = torch.where(everywhere < visible[tokens].unsqueeze(1), scores, -torch.inf)
        best, chosen = scores.topk(min(topk, longest), dim=1)
        picked[tokens, : chosen.shape[1]] = torch.where(best.isinf(), -1, chosen).int()
    return picked


class SuiteError(ValueError):
    """A suite that can't be used. The text names the file and the entry."""


@dataclass(frozen=True)
class Entry:
    """Batches. Each is measured with each head count, top-k and format."""

    batches: Sequence[str]
    heads: Sequence[int]
    topk: Sequence[int]
    formats: Sequence[str]


@dataclass(frozen=True)
class Suite:
    """The contents of a file."""

    name: str
    description: str
    peers: bool
    entries: Sequence[Entry]


def suite_names() -> list[str]:
    """The suites of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_suite(name_or_path: str, formats: Sequence[str]) -> Suite:
    """Reads a suite of this package by its name, or a file by its path. Raises SuiteError.

    Args:
        name_or_path: a file's name ends with .toml.
        formats: of the cache, that can be measured.
    """
    path = FOLDER / f"{name_or_path}.toml" if name_or_path in suite_names() else Path(name_or_path)
    if path.suffix != ".toml":
        raise SuiteError(
            f"no suite is called {name_or_path!r}; there are {', '.join(suite_names())}, or a file that ends with .toml"
        )
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path} is not TOML: {error}") from None
    _refuse_unknown(found, ("description", "peers", "cases"), str(path))
    found = {"description": "", "peers": True, **found}
    for name, kind, what in (("description", str, "a text"), ("peers", bool, "true or false")):
        if not isinstance(found[name], kind):
            raise SuiteError(f"{path}: {name} must be {what}, got {found[name]!r}")
    entries = found.get("cases")
    if not isinstance(entries, list) or not entries:
        raise SuiteError(f"{path} has no [[cases]]")
    read = tuple(_entry(entry, f"{path}, entry {number} of cases", formats) for number, entry in enumerate(entries, 1))
    return Suite(path.stem, found["description"], found["peers"], read)


def _entry(entry: Any, where: str, known_formats: Sequence[str]) -> Entry:
    if not isinstance(entry, dict):
        raise SuiteError(f"{where} must be a table, got {entry!r}")
    _refuse_unknown(entry, Entry.__dataclass_fields__, where)
    given = {"topk": [DEFAULT_TOPK], "formats": known_formats, **entry}

    def read(name: str, kind: type, is_good: Callable[[Any], object], what: str) -> tuple[Any, ...]:
        values = given.get(name)
        if not isinstance(values, list | tuple) or not values:
            raise SuiteError(f"{where}: {name} must be a list of {what}, got {values!r}")
        for value in values:
            try:
                good = type(value) is kind and is_good(value)
            except ValueError as error:
                raise SuiteError(f"{where}: {error}") from None
            if not good:
                raise SuiteError(f"{where}: {name} must be {what}, got {value!r}")
        return tuple(values)

    batches = read("batches", str, Batch.parse, "batches")
    heads = read("heads", int, lambda count: 1 <= count <= MOST_HEADS, f"whole numbers from 1 to {MOST_HEADS}")
    topk = read("topk", int, lambda count: count >= 1, "whole numbers, 1 or more")
    formats = read("formats", str, known_formats.__contains__, f"names out of {', '.join(known_formats)}")
    return Entry(batches, heads, topk, formats)


def _refuse_unknown(found: dict[str, Any], known: Sequence[str], where: str) -> None:
    for name in found:
        if name not in known:
            raise SuiteError(f"{where}: {name!r} is not one of {', '.join(known)}")


class CaseOfBatch:
    """A dataclass whose field `batch` is a batch as it is written."""

    batch: str

    @property
    def requests(self) -> Batch:
        return Batch.parse(self.batch)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "tokens": self.requests.tokens}
