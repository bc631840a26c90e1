"""How tests on a GPU hold a launch to the oracle, choose its kernels, and capture it."""

import importlib
import inspect
from collections.abc import Callable
from contextlib import contextmanager

import torch

from mla_backend import library
from problems import CUDA_KERNEL, MAGNITUDE


def on_either_device(*names: str) -> dict[str, Callable]:
    """The tests in tests/ops/test_NAME.py that have a `device`, by name. A module of tests/gpu takes them over."""
    modules = [importlib.import_module(f"tests.ops.test_{name}") for name in names]
    tests = {name: test for module in modules for name, test in vars(module).items() if name.startswith("test_")}
    return {name: test for name, test in tests.items() if "device" in inspect.signature(test).parameters}


def check(problem, magnitude=MAGNITUDE, **options):
    problem.check(magnitude, "cuda", **options)


@contextmanager
def chosen_kernel(name):
    """Within it, the kernels of this name are used."""
    library.select_cuda_kernel(name)
    try:
        yield
    finally:
        library.select_cuda_kernel(CUDA_KERNEL)


@contextmanager
def nothing_waits():
    """Within it, whatever waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(function):
    """A graph of a function's launches, and what it returned."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    return graph, found
