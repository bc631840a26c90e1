"""Imported by tests that need SGLang, before they import it: skips them where it is not installed. Without a GPU,
SGLang's Triton kernels run in Triton's interpreter, and its own fixtures run on a CPU."""

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from unittest.mock import MagicMock

import pytest
import torch

from mla_backend.tried_versions import installed_sglang

if installed_sglang() is None:
    pytest.skip("SGLang is not installed (`make test-sglang` sets up an environment)", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("without a GPU set TRITON_INTERPRET=1 first, as `make test-sglang` does", allow_module_level=True)


class StandIn(types.ModuleType, importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A torchvision that has everything and does nothing. SGLang imports it for models that see."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


# Where a request's positions become slots: in a kernel of the backend's own, as SGLang's fixtures want. The plan of the
# indexer's top-k needs a GPU.
os.environ.setdefault("SGLANG_DSA_FUSE_TOPK", "0")
os.environ.setdefault("SGLANG_OPT_USE_TOPK_V2", "0")
if DEVICE == "cpu":
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    importlib.import_module("transformers.utils.import_utils").is_torchvision_available()  # it keeps the answer
    sys.meta_path.insert(0, StandIn("torchvision"))
