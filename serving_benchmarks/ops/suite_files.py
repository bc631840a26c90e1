"""Suites: files that name the cases of a benchmark, those of this package and a user's own.

    description = "what it shows"
    peers = false                   # ours alone; left out, the peers are measured too

    [[cases]]                       # every batch with every head count and top-k
    batches = ["128q1s32k"]
    heads = [16, 128]
    topk = [2048]                   # the default
    formats = ["fp8_ds_mla"]        # the default is all of them

All cases are gone through with the first format, then with the next.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_benchmarks.ops.batches import Batch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "suites"
MOST_HEADS = 256
DEFAULT_TOPK = 2048


class SuiteError(ValueError):
    """A suite that can't be used: the text names the file and the entry."""


@dataclass(frozen=True)
class Entry:
    """Batches, each of which is measured with each head count and top-k, from each of the formats."""

    batches: tuple[str, ...]
    heads: tuple[int, ...]
    topk: tuple[int, ...]
    formats: tuple[str, ...]


@dataclass(frozen=True)
class Suite:
    """What a file says."""

    name: str
    description: str
    peers: bool
    entries: tuple[Entry, ...]


def names() -> list[str]:
    """The suites of this package."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name_or_path: str, formats: Sequence[str]) -> Suite:
    """A suite of this package by its name, or a file by its path; `formats` are those that can be measured.

    Raises SuiteError.
    """
    path = FOLDER / f"{name_or_path}.toml" if name_or_path in names() else Path(name_or_path)
    if path.suffix != ".toml":
        raise SuiteError(f"no suite is called {name_or_path!r}: {', '.join(names())}, or a file that ends with .toml")
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise SuiteError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path} is no TOML: {error}") from None
    _refuse_unknown(found, ("description", "peers", "cases"), str(path))
    description, peers = found.get("description", ""), found.get("peers", True)
    if not isinstance(description, str):
        raise SuiteError(f"{path}: description must be a text, got {description!r}")
    if not isinstance(peers, bool):
        raise SuiteError(f"{path}: peers must be true or false, got {peers!r}")
    entries = found.get("cases")
    if not isinstance(entries, list) or not entries:
        raise SuiteError(f"{path} has no [[cases]]")
    read = tuple(_entry(entry, f"{path}, entry {number} of cases", formats) for number, entry in enumerate(entries, 1))
    return Suite(path.stem, description, peers, read)


def _entry(entry: Any, where: str, known_formats: Sequence[str]) -> Entry:
    if not isinstance(entry, dict):
        raise SuiteError(f"{where} must be a table, got {entry!r}")
    _refuse_unknown(entry, Entry.__dataclass_fields__, where)
    batches = _list(entry, "batches", str, None, where)
    for batch in batches:
        try:
            Batch.parse(batch)
        except ValueError as error:
            raise SuiteError(f"{where}: batches: {error}") from None
    formats = _list(entry, "formats", str, known_formats, where)
    for name in formats:
        if name not in known_formats:
            raise SuiteError(f"{where}: formats: {name!r} is not one of {', '.join(known_formats)}")
    heads = _list(entry, "heads", int, None, where)
    if not 1 <= min(heads) <= max(heads) <= MOST_HEADS:
        raise SuiteError(f"{where}: heads must be 1 to {MOST_HEADS}, got {heads}")
    topk = _list(entry, "topk", int, [DEFAULT_TOPK], where)
    if min(topk) < 1:
        raise SuiteError(f"{where}: topk must be 1 or more, got {topk}")
    return Entry(tuple(batches), tuple(heads), tuple(topk), tuple(formats))


def _list(entry: dict[str, Any], name: str, kind: type, default: Sequence[Any] | None, where: str) -> list[Any]:
    values = entry.get(name, default)
    if values is None:
        raise SuiteError(f"{where} has no {name}")
    if not isinstance(values, list | tuple) or not values or any(type(value) is not kind for value in values):
        what = {str: "texts", int: "whole numbers"}[kind]
        raise SuiteError(f"{where}: {name} must be a list of {what}, got {values!r}")
    return list(values)


def _refuse_unknown(found: dict[str, Any], known: Sequence[str], where: str) -> None:
    for name in found:
        if name not in known:
            raise SuiteError(f"{where}: {name!r} is not one of {', '.join(known)}")
