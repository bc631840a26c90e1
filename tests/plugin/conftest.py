"""What tests of the plugin share: the backends' modules, and for those that run vLLM a checkpoint and prompts."""

import importlib
from pathlib import Path

import pytest
import torch

from vllm_models import PROMPT_LENGTHS, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contexts are several times as long as what its indexer selects. Only the first layer selects, so that what is
    rounded differently later on can't change it: tokens can be compared with those of another implementation."""
    return make_checkpoint("glm_moe_dsa_smooth", tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Some begin alike, so that there is something to find in a prefix cache."""
    import engine_models

    shared = engine_models.prompt_of(max(PROMPT_LENGTHS), seed=1)
    alone = [engine_models.prompt_of(length, seed=10 + i) for i, length in enumerate(PROMPT_LENGTHS)]
    return [shared[: length // 2] + own[length // 2 :] for length, own in zip(PROMPT_LENGTHS, alone, strict=True)]


@pytest.fixture(scope="session")
def backend():
    return _registered("SPARSE", "backend")


@pytest.fixture(scope="session")
def dense():
    return _registered("DENSE", "dense_backend")


@pytest.fixture(scope="session")
def v4():
    return _registered("SPARSE", "deepseek_v4")


def _registered(name: str, module: str):
    from mla_backend.vllm_plugin import versions

    versions.add_backend(getattr(versions, name))
    return importlib.import_module(f"mla_backend.vllm_plugin.{module}")


@pytest.fixture
def no_values_are_read(monkeypatch):
    """Nothing reads a value of a tensor back: on a GPU each time would be a wait."""

    def refuse(*args, **kwargs):
        raise AssertionError("a value was read back from the device")

    def begin() -> None:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"):
            monkeypatch.setattr(torch.Tensor, name, refuse)

    return begin
