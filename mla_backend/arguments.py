"""Calls the ops, and checks arguments that Python code uses before that.

Shapes, dtypes, strides and devices are checked by the ops themselves (csrc/bindings/check.cpp), which raise ValueError.
"""

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kv_cache.arguments import require_count as require_count
from kv_cache.arguments import require_device as require_device

_WRONG_TYPE = re.compile(r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'")
_ARGUMENT = re.compile(r"^\w+(?= )|(?<= with )\w+(?=;)|(?<= without )\w+(?=;)")
_KINDS = {
    "Tensor": "a torch.Tensor",
    "Optional[Tensor]": "a torch.Tensor or None",
    "float": "a number",
    "int": "an int",
    "bool": "a bool",
    "Optional[bool]": "a bool or None",
    "List[int]": "a list of ints",
}


Places = tuple[tuple[int, str], ...]

_PLACES: dict[torch._ops.OpOverload, tuple[Places, tuple[int, ...], Places, Places]] = {}


@torch.compiler.assume_constant_result
def _places(op: torch._ops.OpOverload) -> tuple[Places, tuple[int, ...], Places, Places]:
    """Which arguments of an op are tensors, with their names; which of these the op writes; and which are bools and
    floats."""
    if op not in _PLACES:
        arguments = list(enumerate(op._schema.arguments))
        tensors = [(i, a) for i, a in arguments if "Tensor" in str(a.type)]
        written = tuple(i for i, a in tensors if a.alias_info is not None and a.alias_info.is_write)
        bools, floats = (tuple((i, a.name) for i, a in arguments if str(a.type) == kind) for kind in ("bool", "float"))
        _PLACES[op] = tuple((i, a.name) for i, a in tensors), written, bools, floats
    return _PLACES[op]


def call(op: torch._ops.OpOverload, *arguments: object) -> None:
    """Calls an op. The ops know nothing of autograd: an argument that requires a gradient is refused, and what is
    written counts as changed. torch's error for an argument of a wrong type becomes a TypeError."""
    tensors, written, *_ = _places(op)
    require_no_gradient((name, arguments[i]) for i, name in tensors)
    result_of(op, *arguments)
    if not torch.compiler.is_compiling():  # what torch.compile traces counts its writes by itself
        torch.autograd.graph.increment_version([arguments[i] for i in written if arguments[i] is not None])


def result_of(op: torch._ops.OpOverload, *arguments: object) -> Any:
    """Calls an op that autograd knows. torch's error for an argument of a wrong type becomes a TypeError."""
    tensors, _, bools, floats = _places(op)
    require_bools(**{name: None for i, name in bools if arguments[i] is None})  # torch takes it for False
    for i, name in floats:
        if isinstance(arguments[i], Tensor):  # torch takes one of one number
            require_no_gradient([(name, arguments[i])])
    if forward_ad._current_level >= 0:  # else there are none; asking each tensor takes microseconds
        _require_no_tangent((name, arguments[i]) for i, name in tensors)
    try:
        return op(*arguments)
    except ValueError as error:
        if str(error).endswith("; got None"):  # a tensor that may not be left out: torch lets None through
            raise TypeError(str(error)) from None
        raise
    except RuntimeError as error:
        require_tensors(**{name: arguments[i] for i, name in tensors if isinstance(arguments[i], Tensor)})
        wrong = _WRONG_TYPE.search(str(error))
        if wrong is None:
            raise
        kind, name, given = wrong.groups()
        if given == "int" and "Tensor" not in kind:
            raise ValueError(
                f"{name} must be {_KINDS.get(kind, kind)} that fits into 64 bits; got a larger one"
            ) from None
        raise TypeError(f"{name} must be {_KINDS.get(kind, kind)}; got {given}") from None


def require_no_gradient(arguments: Iterable[tuple[str, object]]) -> None:
    """For what an op gives no gradient: names of arguments, and what they are."""
    if forward_ad._current_level >= 0:
        arguments = list(arguments)
        _require_no_tangent(arguments)
    if not torch.is_grad_enabled():
        return
    for name, value in arguments:
        if getattr(value, "requires_grad", False):
            raise ValueError(
                f"{name} must be without requires_grad, as this op has no backward for it: detach it, or call under "
                "torch.no_grad(); got a tensor that requires a gradient"
            )


def _require_no_tangent(arguments: Iterable[tuple[str, object]]) -> None:
    """No op has a forward-mode derivative: torch would drop tangents, or take them for zeros."""
    for name, value in arguments:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise ValueError(
                f"{name} must be without a forward-mode gradient (as of torch.func.jvp), as only backward() is there; "
                "got a dual tensor"
            )


def require_own_memory(**arguments: Tensor | None) -> None:
    """For functions that give ops copies of their arguments: the first one, which is written, shares no memory with
    itself or the others."""
    (name, written), *others = ((name, value) for name, value in arguments.items() if value is not None)
    names = ",".join([name, *(name for name, _ in others)])
    result_of(torch.ops.mla_backend.own_memory.default, written, [value for _, value in others], names)


def require_tensors(**arguments: object) -> None:
    """For tensors that Python code uses before an op sees them."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor; got {type(value).__name__}")
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            kind = "that is nested" if value.is_nested else "that is quantised" if value.is_quantized else None
            raise TypeError(f"{name} must be a dense tensor; got one {kind or f'of {value.layout}'}")


def require_optional_tensors(**arguments: object) -> None:
    """The same for those that may be None."""
    require_tensors(**{name: value for name, value in arguments.items() if value is not None})


def require_device_of(first: str, **arguments: Tensor | None) -> None:
    """For tensors that have to be where the one named `first` is."""
    device = arguments[first].device
    for name, value in arguments.items():
        if value is not None and value.device != device:
            raise ValueError(f"{name} must be on {device} like {first}; got a tensor on {value.device}")


def require_bools(**arguments: object) -> None:
    """For bools that Python code uses: anything would do there."""
    for name, value in arguments.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool; got {type(value).__name__}")


def require_number(name: str, value: object) -> None:
    """For finite numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {type(value).__name__}")
    if not abs(value) <= sys.float_info.max:
        given = value if isinstance(value, float) else "a larger one"
        raise ValueError(f"{name} must be a finite number; got {given}")


def dtype_name(dtype: torch.dtype) -> str:
    """Without the module, as errors have it."""
    return str(dtype).removeprefix("torch.")


def described_bytes(count: int) -> str:
    """A size, exactly and in a unit to read: 151296 bytes (147.8 KiB)."""
    power = (count.bit_length() - 1) // 10
    return f"{count} bytes" + (f" ({count / 1024**power:.4g} {' KMGTP'[power]}iB)" if 0 < power < 6 else "")


def described(x: Tensor) -> str:
    """What was given: dtype and shape."""
    return f"{dtype_name(x.dtype)} {list(x.shape)}"


@contextlib.contextmanager
def named(**names: str) -> Iterator[None]:
    """Renames the argument `ours` to `theirs` in errors, where they begin and behind with: named(ours="theirs")."""
    try:
        yield
    except (TypeError, ValueError, FileNotFoundError) as error:
        renamed = _ARGUMENT.sub(lambda found: names.get(found[0], found[0]), str(error))
        if renamed == str(error):
            raise
        raise type(error)(renamed) from None
