"""What tests of commands that run models share: a small model, and stand-ins for vLLM and SGLang."""

from pathlib import Path

import pytest

import engine_models
from commands import FAKE_SGLANG, FAKE_VLLM


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> Path:
    return engine_models.save_small(tmp_path_factory.mktemp("small"))


def _stand_in(name: str, python_path: str):
    """The folder where a stand-in for an engine notes what happens."""

    @pytest.fixture
    def folder(tmp_path, monkeypatch) -> Path:
        monkeypatch.setenv("PYTHONPATH", python_path)
        monkeypatch.syspath_prepend(python_path.partition(":")[0])
        monkeypatch.setenv(name, str(tmp_path))
        return tmp_path

    return folder


fake_vllm, fake_sglang = _stand_in("FAKE_VLLM", FAKE_VLLM), _stand_in("FAKE_SGLANG", FAKE_SGLANG)
