"""Loads the shared library that holds every op, and asks it what it is."""

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import torch

LIBRARY_VARIABLE = "MLA_BACKEND_LIBRARY"
CPU_KERNEL_VARIABLE = "MLA_BACKEND_CPU_KERNEL"


class LibraryError(ImportError):
    """The shared library is missing or does not load."""


def library_path() -> Path:
    """The library in use: the one inside the package, unless MLA_BACKEND_LIBRARY names another."""
    return Path(os.environ.get(LIBRARY_VARIABLE) or Path(__file__).parent / "libmla_backend.so").absolute()


def _load() -> ctypes.CDLL:
    path = library_path()
    if not path.is_file():
        raise LibraryError(
            f"mla-backend: there is no file {path}{_named_by_the_user()}. "
            "The package is installed with `pip install .`; "
            f"in a source tree, `pip install -e .` builds it in place."
        )
    try:
        torch.ops.load_library(path)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(
            f"mla-backend: {path} does not load under torch {torch.__version__} (2.10 or newer is needed): {error}"
        ) from error
    try:
        library.mla_backend_about.restype = ctypes.c_char_p
        library.mla_backend_cuda_kernels.restype = ctypes.c_char_p
    except AttributeError:
        raise LibraryError(f"mla-backend: {path} is a library, but not this package's{_named_by_the_user()}.") from None
    return library


def _named_by_the_user() -> str:
    return f" ({LIBRARY_VARIABLE} names it)" if os.environ.get(LIBRARY_VARIABLE) else ""


_library = _load()


def about() -> dict[str, Any]:
    """How the library was built, the cache formats it knows, and its CPU kernels."""
    return json.loads(_library.mla_backend_about())


def cuda_kernels() -> list[dict[str, Any]]:
    """Every CUDA kernel as loaded on the current device: registers, spills, shared memory, occupancy, or an error."""
    return json.loads(_library.mla_backend_cuda_kernels())


def cuda_workers(capability_major: int, processors: int, num_heads: int, num_tokens: int | None = None) -> int:
    """Rows that a plan should have for a GPU, unless said otherwise; for any number of tokens if that is left out."""
    tokens = ctypes.c_int64(2**31 - 1 if num_tokens is None else num_tokens)
    return _library.mla_backend_cuda_workers(capability_major, processors, tokens, num_heads)


def cuda_plan(
    num_tokens: int,
    topk: int,
    workers: int,
    *,
    topk_length: torch.Tensor | None = None,
    extra_topk: int = 0,
    extra_topk_length: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The table that `plan` makes on a GPU, int32 `[workers, 8]`, but made by the CPU: tests hold one against the
    other, and try a GPU's plans where there is none. Lengths are int32 `[T]`, as for `plan`."""
    lengths = {"topk_length": topk_length, "extra_topk_length": extra_topk_length}
    for name, length in lengths.items():
        if length is not None and (length.dtype, tuple(length.shape)) != (torch.int32, (num_tokens,)):
            raise ValueError(f"{name} must be int32 [{num_tokens}]; got {length.dtype} {list(length.shape)}")
    kept = [None if length is None else length.cpu().contiguous() for length in lengths.values()]
    pointers = [ctypes.c_void_p(None if length is None else length.data_ptr()) for length in kept]
    rows = torch.empty((workers, 8), dtype=torch.int32)
    _library.mla_backend_cuda_plan(
        num_tokens,
        topk,
        extra_topk,
        *pointers,
        ctypes.c_bool(batch_invariant),
        ctypes.c_void_p(rows.data_ptr()),
        workers,
    )
    return rows


def select_cuda_kernel(name: str) -> None:
    """Which CUDA attention kernels are used from now on: the best ones ("auto"), nothing but the portable one
    ("portable"), or the best ones without blocks that read one another's shared memory ("unclustered"), which is what
    a race detector can follow."""
    if not _library.mla_backend_select_cuda_kernel(str(name).encode()):
        raise ValueError(f"name must be auto, portable or unclustered; got {name!r}")


def cpu_kernel() -> str:
    """The name of the CPU attention kernel in use."""
    return next(kernel["name"] for kernel in about()["cpu_kernels"] if kernel["active"])


def select_cpu_kernel(name: str) -> None:
    """Use a certain CPU attention kernel from now on, or with "auto" the fastest that this CPU can run.

    The environment variable MLA_BACKEND_CPU_KERNEL does the same at import.
    """
    if not _library.mla_backend_select_cpu_kernel(str(name).encode()):
        usable = [kernel["name"] for kernel in about()["cpu_kernels"] if kernel["usable"]]
        raise ValueError(f"name must be auto or a kernel that this CPU can run ({', '.join(usable)}); got {name!r}")


if os.environ.get(CPU_KERNEL_VARIABLE):
    try:
        select_cpu_kernel(os.environ[CPU_KERNEL_VARIABLE])
    except ValueError as error:
        raise LibraryError(f"mla-backend: the environment variable {CPU_KERNEL_VARIABLE}: {error}") from None
