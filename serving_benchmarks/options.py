"""What the command lines of all commands share: argument types whose errors say what was expected, and options.

argparse puts the option's name before the text of an error: "argument --heads: must be 1 or more; got 0". A default
that is a string goes through the type as well, so it is written as a user would write it.
"""

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mla_backend import doctor, terminal


class Refused(Exception):
    """A command can't do what it was asked for. The text says why in one line; the exit status is 2."""


def checked(read: Callable[[str], Any], good: Callable[[Any], object], what: str) -> Callable[[str], Any]:
    """A type of values that `read` makes of a text. `what` they are is told where it can't or they are not good."""

    def parse(text: str) -> Any:
        try:
            value = read(text)
            if good(value):
                return value
        except (ValueError, TypeError, re.error):
            pass
        raise argparse.ArgumentTypeError(f"must be {what}; got {text!r}")

    return parse


def whole(smallest: int, largest: float = math.inf) -> Callable[[str], int]:
    """The type of whole numbers from `smallest` to `largest`."""
    bound = "or more" if largest == math.inf else f"to {largest}"
    return checked(int, lambda value: smallest <= value <= largest, f"a whole number, {smallest} {bound}")


count = whole(1)
rounds = whole(2)  # one alone has no spread
positive = checked(float, lambda value: 0 < value < math.inf, "a number above 0")
share = checked(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")
size = checked(terminal.byte_size, bool, terminal.SIZES)
json_object = checked(json.loads, lambda value: isinstance(value, dict), "an object of JSON, {...}")
pattern = checked(re.compile, bool, "a regular expression")
_ALLOWED = "0 or a percentage from 1 up, such as 5%"  # 0.05 could be 5%
percentage = checked(lambda text: float(text.rstrip("% ")) / 100, lambda x: x == 0 or 0.01 <= x < math.inf, _ALLOWED)


def load(text: str) -> tuple[tuple[int, int], int | None]:
    """The type of lengths and requests in flight, such as 4096+64/16; None for all of them."""
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)(?:/([1-9]\d*))?", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be tokens of prompts and after them, such as 4096+64/16; got {text!r}")
    return (int(found[1]), int(found[2])), int(found[3]) if found[3] else None


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """The type of names that are known. For lists; a single value has argparse's `choices`."""
    return checked(str, lambda name: name in known, f"of {', '.join(known)}")


def listed(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of lists with commas, such as 16,64,128. What is named twice counts once.

    `item` may raise ValueError: its text becomes the error's.
    """

    def read(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",")]
        try:
            if not all(parts):
                raise ValueError(f"must be a list with commas between its items; got {text!r}")
            return list(dict.fromkeys(map(item, parts)))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


names = listed(str)


Options = argparse._ActionsContainer  # a parser, or a group of its options


def add(parser: Options, name: str, item: Callable[[str], Any], told: str, default: Any = None, metavar: str = "N"):
    """An option with one value. Its help ends with the default, unless `told` says what that is."""
    told += "" if default is None or "default:" in told else "; default: %(default)s"
    parser.add_argument(name, type=item, default=default, metavar=metavar, help=told)


def add_list(parser: Options, name: str, item: Callable[[str], Any], told: str, default: Any = None):
    add(parser, name, listed(item), told, default, f"{name[2:].upper()},...")


def folder_in_one(text: str) -> Path:
    """A folder that exists, or can be made in one that does."""
    if not Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"can't be made: there is no folder {Path(text).resolve().parent}")
    return Path(text)


def new_folder(text: str) -> Path:
    """A folder to write to, which is made if it does not exist. The one that it is in must be there."""
    try:
        folder_in_one(text).mkdir(exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't be made: {error}") from None
    return Path(text)


def new_file(text: str) -> Path:
    """A file whose folder can be written to, which is tried before anything is measured."""
    if text == "-":
        raise argparse.ArgumentTypeError("must be a file; got '-'")
    folder = Path(text).resolve().parent
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"can't be written: there is no folder {folder}")
    if Path(text).is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"can't be written: {text}")
    return Path(text)


def add_output(parser: argparse.ArgumentParser) -> None:
    add(parser, "--output", new_file, "write the results and their environment as JSON", metavar="FILE")


def add_rounds(parser: argparse.ArgumentParser, default: int, number: Callable[[str], int] = rounds) -> None:
    add(parser, "--rounds", number, "how often each candidate is timed, interleaved with the others", default)


def require_gpu() -> None:
    """Refuses where there is no GPU, or no library that was built for one."""
    report = doctor.examine()
    if not report["gpus"]["devices"]:
        raise Refused(f"no NVIDIA GPU to measure on: {report['gpus']['why']}")
    if not report["library"]["cuda_archs"]:
        raise Refused("the library was built without CUDA")
