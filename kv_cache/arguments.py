"""What is checked of an argument before it is used. mla_backend checks with these, too."""

import sys

import torch


def require_a(kind: type, **arguments: object) -> None:
    """For classes of this package."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a kv_cache.{kind.__name__}; got {type(value).__name__}")


def require_count(name: str, value: object, at_least: int = 0) -> None:
    """For ints of 64 bits that have a smallest value."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int; got {type(value).__name__}")
    if value < at_least:
        raise ValueError(f"{name} must be {at_least} or more; got {value}")
    if value > sys.maxsize:
        raise ValueError(f"{name} must be {sys.maxsize} or less; got {value}")


def require_device(name: str, device: object) -> None:
    """For devices that tensors are made on."""
    try:
        torch.empty(0, device=torch.device(device))
    except (AssertionError, RuntimeError, TypeError) as error:  # the first from a torch without CUDA
        kind = TypeError if isinstance(error, TypeError) else ValueError
        reason = str(error).partition("\n")[0]
        raise kind(f"{name} must be an available device; got {device!r}: {reason}") from error
