"""What tests of commands that run models share: a small model, and stand-ins for vLLM and SGLang."""

from pathlib import Path

import pytest

import engine_models
from commands import FAKE_SGLANG, FAKE_VLLM


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> Path:
    return engine_models.save_small(tmp_path_factory.mktemp("small"))


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch) -> Path:
    """The folder where it notes what happens."""
    monkeypatch.setenv("PYTHONPATH", FAKE_VLLM)
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path))
    return tmp_path


@pytest.fixture
def fake_sglang(tmp_path, monkeypatch) -> Path:
    """The folder where it notes what happens."""
    monkeypatch.setenv("PYTHONPATH", FAKE_SGLANG)
    monkeypatch.setenv("FAKE_SGLANG", str(tmp_path))
    return tmp_path
