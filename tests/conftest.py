"""What all tests share: reproducible random numbers, and which of them run here."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from mla_backend import library
from problems import CPU_KERNELS, CUDA_KERNEL

settings.register_profile(
    "quick",
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=300, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_sessionstart() -> None:
    if library.about()["cuda_archs"]:
        library.select_cuda_kernel(CUDA_KERNEL)


def pytest_configure(config: pytest.Config) -> None:
    # the workers of pytest-xdist, and the programs that they start, share the cores, so that no thread waits for one
    # that has no core
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // workers)
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # by itself each vLLM binds its threads to the same cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None if torch.cuda.is_available() else "no NVIDIA GPU (torch.cuda.is_available() is False)"
    if reason is None and not library.about()["cuda_archs"]:
        reason = "the library was built without CUDA"
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(20251120)


@pytest.fixture(scope="session")
def device() -> str:
    """Where tests run that can run on either. tests/gpu has one of its own, and takes over some of the others."""
    return "cpu"


@pytest.fixture
def children_hear_ctrl_c() -> Iterator[None]:
    """For tests that send SIGINT to what they start. It is ignored in a script's background, and who is started there
    inherits that; a handler they don't."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(params=CPU_KERNELS)
def cpu_kernel(request: pytest.FixtureRequest):
    """Runs a test once with every CPU kernel that this machine can run."""
    library.select_cpu_kernel(request.param)
    yield request.param
    library.select_cpu_kernel("auto")
