"""Loads the shared library that holds every op, and asks it what it is."""

import ctypes
import functools
import json
import os
from pathlib import Path
from typing import Any

import torch

from mla_backend.tried_versions import torch_needed

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
            f"mla-backend: {path} does not load under torch {torch.__version__} "
            f"({torch_needed()} or newer is needed): {error}"
        ) from error
    try:
        library.mla_backend_about.restype = ctypes.c_char_p
        library.mla_backend_cuda_kernels.restype = ctypes.c_char_p
        library.mla_backend_describe_gpu.restype = ctypes.c_char_p
        library.mla_backend_order_scratch_bytes.restype = ctypes.c_int64
        library.mla_backend_select_workspace_bytes.restype = ctypes.c_int64
    except AttributeError:
        raise LibraryError(f"mla-backend: {path} is a library, but not this package's{_named_by_the_user()}.") from None
    return library


def _named_by_the_user() -> str:
    return f" ({LIBRARY_VARIABLE} names it)" if os.environ.get(LIBRARY_VARIABLE) else ""


_library = _load()


def about() -> dict[str, Any]:
    """How the library was built, its ops, the cache formats it knows, and its CPU kernels."""
    return json.loads(_library.mla_backend_about())


def cuda_kernels() -> list[dict[str, Any]]:
    """Every CUDA kernel as loaded on the current device: registers, spills, shared memory, occupancy, or an error."""
    return json.loads(_library.mla_backend_cuda_kernels())


LAUNCH_NUMBERS = 6
"""Of struct Launch, csrc/include/mla/schedule/launch.h."""


class Gpu(ctypes.Structure):
    """struct Gpu of the same file."""

    _fields_ = (
        ("multiprocessors", ctypes.c_int32),
        ("hopper", ctypes.c_int32),
        ("clusters", ctypes.c_int32 * 17),
        ("clock_ghz", ctypes.c_double),
        ("memory_tbs", ctypes.c_double),
    )


@functools.cache  # every backward asks
def describe_gpu(index: int) -> dict[str, Any]:
    """What decides how attention is launched on a GPU of this machine, by its CUDA device number: its multiprocessors,
    whether it runs the Hopper kernels, how many clusters of each number of CTAs run at once, its clock and its memory's
    bandwidth."""
    gpu = json.loads(_library.mla_backend_describe_gpu(index))
    if "error" in gpu:
        raise RuntimeError(gpu["error"])
    clocks = {"clock_ghz": gpu.pop("clock_khz") * 1e-6, "memory_tbs": gpu.pop("memory_mbs") * 1e-6}
    return {**gpu, **clocks}


@functools.lru_cache(maxsize=4096)  # a server asks for each of its batch sizes in every step
def launch_numbers(
    gpu: int,
    heads: int,
    tokens: int | None,
    slots: int | None,
    cache_format: int,
    batch_invariant: bool,
    products: int,
) -> tuple[int, ...]:
    """How attention is launched on a GPU. Without tokens or slots (of a token, in all lists) it suits any number. The
    format is the number of one, -1 is fp8_ds_mla; products are a number, too."""
    describe_gpu(gpu)  # raises an error where there is none
    numbers, most = (ctypes.c_int32 * LAUNCH_NUMBERS)(), 2**31 - 1
    tokens, slots = (ctypes.c_int64(-1 if n is None else min(n, most)) for n in (tokens, slots))
    _library.mla_backend_launch(gpu, tokens, slots, heads, cache_format, batch_invariant, products, numbers)
    return tuple(numbers)


def weigh(*arguments: Any) -> int:
    """The cost model on any GPU, for whoever fits it: mla_backend_weigh of csrc/bindings/about.cpp."""
    return _library.mla_backend_weigh(*arguments)


def backward_group_heads(device: torch.device) -> int:
    """Heads whose contributions to the gradient of kv the backward's kernel adds up before it writes them."""
    if device.type != "cuda":
        return _library.mla_backend_backward_group_heads(-1)
    return _library.mla_backend_backward_group_heads(
        torch.cuda.current_device() if device.index is None else device.index
    )


def order_scratch_bytes(pairs: int, rows: int) -> int:
    """Bytes that the op `backward_order` works in on the current GPU."""
    return _library.mla_backend_order_scratch_bytes(ctypes.c_int64(pairs), rows)


def select_workspace_bytes(device: torch.device, tokens: int, heads: int, positions: int, topk: int) -> int:
    """Bytes that the op `select_tokens` works in."""
    gpu = -1
    if device.type == "cuda":
        gpu = torch.cuda.current_device() if device.index is None else device.index
    return _library.mla_backend_select_workspace_bytes(gpu, *map(ctypes.c_int64, (tokens, heads, positions, topk)))


def select_cuda_kernel(name: str) -> None:
    """For debugging: which CUDA attention kernels are used from now on. "auto" is the best ones, "portable" only the
    portable one, "unclustered" the best ones without clusters, whose shared memory a race detector can't follow."""
    if not _library.mla_backend_select_cuda_kernel(str(name).encode()):
        raise ValueError(f"name must be auto, portable or unclustered; got {name!r}")
    describe_gpu.cache_clear()
    launch_numbers.cache_clear()


def select_cpu_kernel(name: str) -> None:
    """Selects the CPU kernels that are used from now on; "auto" is the fastest that this CPU can run.

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
