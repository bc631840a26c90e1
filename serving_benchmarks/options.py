"""What the command lines of all commands share: argument types whose errors say what was expected, and options.

argparse puts the option's name before the text of an error: "argument --heads: must be 1 or more; got 0". A default
that is a string goes through the type as well, so it is written as a user would write it.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from serving_benchmarks.results.file import why_no_gpu


class Refused(Exception):
    """A command can't do what it was asked for. The text says why in one line; the exit status is 2."""


def whole(smallest: int, largest: float = math.inf) -> Callable[[str], int]:
    """The type of whole numbers from `smallest` to `largest`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = smallest - 1
        if not smallest <= value <= largest:
            bound = "or more" if largest == math.inf else f"to {largest}"
            raise argparse.ArgumentTypeError(f"must be a whole number, {smallest} {bound}; got {text!r}")
        return value

    return read


count = whole(1)
count_or_none = whole(0)  # 0 for none
rounds = whole(2)  # one alone has no spread


def positive(text: str, most: float = math.inf) -> float:
    """A finite number above 0, `most` or less."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most or value == math.inf:
        bound = "" if most == math.inf else f" and at most {most}"
        raise argparse.ArgumentTypeError(f"must be a number above 0{bound}; got {text!r}")
    return value


def lengths(text: str) -> tuple[int, int]:
    """The type of a prompt's tokens and those after it, such as 4096+64."""
    found = re.fullmatch(r"([1-9]\d*)\+([1-9]\d*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be tokens of prompts and after them, such as 4096+64; got {text!r}")
    return int(found[1]), int(found[2])


def load(text: str) -> tuple[tuple[int, int], int]:
    """The type of lengths and requests in flight, such as 4096+64/16."""
    tokens, _, in_flight = text.partition("/")
    return lengths(tokens), count(in_flight)


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """The type of names that are known. For lists; a single value has argparse's `choices`."""

    def read(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}; got {text!r}")
        return text

    return read


def listed(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of lists with commas, such as 16,64,128. What is named twice counts once.

    `item` may raise ValueError: its text becomes the error's.
    """

    def read(text: str) -> list[Any]:
        parts = [part.strip() for part in text.split(",")]
        if not all(parts):
            raise argparse.ArgumentTypeError(f"must be a list with commas between its items; got {text!r}")
        try:
            return list(dict.fromkeys(map(item, parts)))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


names = listed(str)


def add_list(parser: argparse._ActionsContainer, name: str, item: Callable[[str], Any], told: str, default: Any = None):
    """An option that takes a list. Its help ends with the default, if it has one."""
    told, metavar = f"{told}; default: %(default)s" if default else told, f"{name[2:].upper()},..."
    parser.add_argument(name, type=listed(item), default=default, metavar=metavar, help=told)


def json_object(text: str) -> dict[str, Any]:
    """An object of JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be an object {{...}}; got {text!r}")
    return value


def new_file(text: str) -> Path:
    """A file that can be written, which is tried before anything is measured.

    A file that exists is left as it is. One that does not exist is not left behind empty.
    """
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        exists = path.exists()
        with path.open("ab"):  # changes nothing
            pass
        if not exists:
            path.resolve().unlink()  # the target of a link, not the link
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't be written: {error}") from None
    return path


def new_folder(text: str) -> Path:
    """A folder to write to, which is made if it does not exist."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise argparse.ArgumentTypeError(f"must be a folder, or the name of a new one; {path} is a file") from None
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't be made: {error}") from None
    return path


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option --output FILE of every command that measures."""
    told = "write the results and their environment as JSON"
    parser.add_argument("--output", type=new_file, metavar="FILE", help=told)


def add_rounds(parser: argparse.ArgumentParser, default: int, number: Callable[[str], int] = rounds) -> None:
    """The option --rounds N, of a type `number`."""
    told = "how often each candidate is timed, interleaved with the others; default: %(default)s"
    parser.add_argument("--rounds", type=number, default=default, metavar="N", help=told)


def require_gpu() -> None:
    """Refuses where there is no GPU, or no library that was built for one."""
    if why_not := why_no_gpu():
        raise Refused(why_not)
