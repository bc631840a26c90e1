"""How tests on a GPU hold a launch to the oracle, and choose its kernels."""

from contextlib import contextmanager

import torch

from mla_backend import library
from problems import CUDA_KERNEL, assert_accurate, score_error


def check(problem, magnitude=0.1, **options):
    """With and without largest scores, which other kernels find: their other results are the same, bit for bit."""
    on_gpu = problem.to("cuda")
    got = on_gpu.solve(**options)
    assert_accurate(got, problem.oracle(), magnitude, score_error=score_error(problem.cache))
    without = on_gpu.solve(**options, return_max_logits=False)
    assert all(torch.equal(a, b) for a, b in zip(got, without, strict=False))


@contextmanager
def chosen_kernel(name):
    """Within it, the kernels of this name are used."""
    library.select_cuda_kernel(name)
    try:
        yield
    finally:
        library.select_cuda_kernel(CUDA_KERNEL)
