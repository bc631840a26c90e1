"""The plugin and SGLang's lists of backends: it is there in every process, and speaks where it can't be used."""

import functools
import importlib.metadata
import inspect
import logging
import re
import sys
from pathlib import Path

import pytest

import mla_backend.sglang_plugin as plugin
from commands import in_python
from mla_backend import tried_versions
from mla_backend.sglang_plugin import versions

GUIDE = Path(__file__).parents[2] / "docs" / "sglang.md"


def test_without_sglang_it_says_so_and_imports_nothing_of_it(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(versions, "installed_sglang", lambda: None)
    for name in [name for name in sys.modules if name.startswith("sglang.")]:
        monkeypatch.delitem(sys.modules, name)
    plugin.register()
    (said,) = caplog.messages
    assert "not installed" in said and all(version in said for version in tried_versions.SGLANG)


def test_sglang_finds_the_entry_point():
    found = importlib.metadata.entry_points(group="sglang.srt.plugins", name="mla_backend")
    if not found:
        pytest.skip("mla-backend's entry points are not installed (`pip install -e .`)")
    (entry,) = {entry.value: entry for entry in found}.values()
    assert inspect.isfunction(entry.load()) and inspect.getdoc(entry.load()).startswith("Entry point `sglang.srt.plug")


@pytest.fixture
def sglang():
    import sglang_installed  # noqa: F401


def test_the_installed_version_has_all_that_the_plugin_needs(sglang):
    assert versions.missing() is None


def test_a_process_of_sglangs_understands_the_guides_options_once_it_has_loaded_plugins(sglang):
    if not importlib.metadata.entry_points(group="sglang.srt.plugins", name="mla_backend"):
        pytest.skip("mla-backend's entry points are not installed (`pip install -e .`)")
    guide = GUIDE.read_text()
    command, mtp = re.search(r"^sglang serve (.*)$", guide, re.M)[1], re.search(r"`(--speculative-algo.*?)`", guide)[1]
    path = ":".join(path for path in sys.path if path)
    done = in_python("-c", PROCESS, *f"{command} {mtp}".split(), PYTHONPATH=path)
    assert done.stdout.split()[-5:] == ["sparse_mla", "8", "True", "1", "1"], done.stderr


PROCESS = """
import sys
import sglang_installed
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
given = prepare_server_args(sys.argv[1:])
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.plugins.hook_registry import HookRegistry
from mla_backend.sglang_plugin import register
register()
known = "sparse_mla" in ATTENTION_BACKENDS, ATTENTION_BACKEND_CHOICES.count("sparse_mla"), len(HookRegistry._patched)
print(given.attention_backend, given.tp_size, *known)
"""


FUNCTIONS = sorted(where for where, arguments in versions.NEEDED.items() if arguments is not None)


@pytest.mark.parametrize("where", FUNCTIONS)
def test_a_function_with_other_arguments_is_named_and_nothing_is_registered(sglang, where, monkeypatch, caplog):
    module, path = where.split(":")
    *outer, name = path.split(".")
    owner = functools.reduce(getattr, outer, importlib.import_module(module))
    monkeypatch.setattr(owner, name, lambda self, something_new: None)
    called = []
    monkeypatch.setattr("sglang.srt.arg_groups.choices.add_attention_backend_choices", called.append)
    with caplog.at_level(logging.ERROR):
        plugin.register()
    (said,) = caplog.messages
    assert path in said and module in said and "something_new" in said and not called


def test_a_version_that_lacks_something_is_told_so(sglang, monkeypatch):
    monkeypatch.delattr("sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend._forward_fa3")
    assert "_forward_fa3" in versions.missing()


def test_products_of_another_word_are_refused_before_anything_is_loaded(sglang, monkeypatch, caplog):
    monkeypatch.setenv(plugin.PRODUCTS_VARIABLE, "fast")
    plugin.register()
    assert "MLA_PRODUCTS must be one of exact, fp8; got 'fast'" in caplog.text


def test_a_package_that_sglang_itself_lacks_is_named(monkeypatch):
    def absent(*_):
        raise ModuleNotFoundError("No module named 'torchvision.io'", name="torchvision.io")

    monkeypatch.setattr(versions, "_find", absent)
    monkeypatch.setattr(versions, "installed_sglang", lambda: "9.9.9")
    said = versions.missing()
    assert "torchvision" in said and not any(version in said for version in tried_versions.SGLANG)


def test_an_unknown_version_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(versions, "installed_sglang", lambda: "9.9.9")
    monkeypatch.delenv("MLA_BACKEND_WARNED_OF_SGLANG", raising=False)
    versions.warn_if_untried()
    versions.warn_if_untried()
    (said,) = caplog.messages
    assert "9.9.9" in said
