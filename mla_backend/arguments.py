"""Calling the ops, and what is checked before that.

Shapes, dtypes, strides and devices are checked by the ops themselves (csrc/bindings/check.cpp), which raise ValueError.
"""

import re

import torch
from torch import Tensor

_WRONG_TYPE = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'")
_KINDS = {"Tensor": "a torch.Tensor", "Optional[Tensor]": "a torch.Tensor or None", "float": "a number", "int": "an int"}


def call(op: torch._ops.OpOverload, *arguments: object) -> None:
    """Calls an op; what torch says of an argument of a wrong type becomes a TypeError."""
    try:
        op(*arguments)
    except RuntimeError as error:
        wrong = _WRONG_TYPE.search(str(error))
        if wrong is None:
            raise
        kind, name, given = wrong.groups()
        raise TypeError(f"{name} must be {_KINDS.get(kind, kind)}; got {given}") from None


def require_tensors(**arguments: object) -> None:
    """For tensors of which something is asked before an op sees them."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}")


def require_count(name: str, value: object, at_least: int = 0) -> None:
    """For ints that have a smallest value."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name} must be {at_least} or more; got {value}")
