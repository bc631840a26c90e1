"""What commands share: sizes as users write them, and tables without padding."""

import argparse
import re
import sys
from fractions import Fraction
from typing import TextIO

from rich.console import Console

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
SIZES = "a size such as 4G, 512M or 8GiB"


def byte_size(text: str) -> int:
    """The bytes of 4G, 512M, 8GiB or a plain number. K, M, G and T are powers of 1024; a lone k, m, g or t is one of
    1000, as in vLLM."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"must be {SIZES}; got {text!r}")
    number, unit, byte = found.groups()
    base = 1000 if unit.islower() and not byte else 1024
    return int(Fraction(number) * base ** " kmgt".index(unit.lower() or " "))


def whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more; got {text!r}")
    return int(text)


def console(width: int | None = None, **options: bool) -> Console:
    """Prints to standard output. Where that is no terminal, no line ends with the padding of a table."""
    unpadded = None if sys.stdout.isatty() else _Unpadded(sys.stdout)
    return Console(file=unpadded, width=width, highlight=False, **options)


class _Unpadded:
    """A text file without spaces at the ends of lines. The console writes whole lines."""

    def __init__(self, file: TextIO):
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)
