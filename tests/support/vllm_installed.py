"""Imported by tests that need vLLM, before they import it: skips them where it, or the plugin, is not installed."""

import importlib.metadata

import pytest

from mla_backend.tried_versions import installed_vllm

if installed_vllm() is None:
    pytest.skip("vLLM is not installed (`make test-vllm` sets up an environment with it)", allow_module_level=True)
if not any(e.name == "mla_backend" for e in importlib.metadata.entry_points(group="vllm.general_plugins")):
    pytest.skip("vLLM doesn't find mla-backend's entry points (`pip install -e .`)", allow_module_level=True)
