"""How tests on a GPU hold a launch to the oracle, choose its kernels, and capture it."""

from contextlib import contextmanager

import torch

from mla_backend import library
from problems import CUDA_KERNEL, MAGNITUDE


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
