"""What the Python side checks of arguments; shapes, dtypes, strides and devices are checked by the ops themselves
(csrc/bindings/check.cpp), which raise ValueError."""

import torch
from torch import Tensor


def require_tensors(**arguments: object) -> None:
    """Every argument is a tensor or None, else TypeError. Those that may not be None go through `require_tensor`."""
    for name, value in arguments.items():
        if value is not None:
            require_tensor(name, value)


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}")


def require_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")


def require_count(name: str, value: object, at_least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name} must be {at_least} or more; got {value}")
