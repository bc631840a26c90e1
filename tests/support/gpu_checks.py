"""How tests on a GPU hold a launch to the oracle, and choose its kernels."""

from contextlib import contextmanager

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
