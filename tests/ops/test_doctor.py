"""mla-backend doctor: what it says, and that it says it even when the library is broken."""

import json
import os
import subprocess
import sys

import pytest
import torch

from mla_backend import cli, doctor, library, tried_versions


def run_doctor(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "mla_backend", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_json_reports_everything(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["torch"] == {
        "version": torch.__version__,
        "supported": True,
        "why": None,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }
    assert report["library"]["loads"] and report["library"]["formats"]
    kernels = report["library"]["cpu_kernels"]
    assert sum(k["active"] for k in kernels) == 1 and kernels[-1]["name"] == "portable" and kernels[-1]["usable"]
    assert {v["what"] for v in report["can_run"] if v["runs"]} >= {"every op on the CPU"}
    assert all(v["why"] for v in report["can_run"] if not v["runs"]), "what doesn't run has a reason"


@pytest.mark.parametrize("options", [(), ("--brief",)])
def test_text_names_the_kernel_in_use(options, capsys):
    assert cli.main(["doctor", *options]) == 0
    (kernel,) = [kernel["name"] for kernel in library.about()["cpu_kernels"] if kernel["active"]]
    said = capsys.readouterr().out
    assert f"attention kernel {kernel}" in said and said.startswith("What runs here") == bool(options)


NOT_OURS = [p for name in ("c10", "shm") if os.path.exists(p := f"{torch.__path__[0]}/lib/lib{name}.so")]


@pytest.mark.parametrize(
    ("environment", "texts"),
    [
        ({"MLA_BACKEND_CPU_KERNEL": "sse9"}, ["environment variable MLA_BACKEND_CPU_KERNEL: name must be auto or"]),
        ({"MLA_BACKEND_LIBRARY": "/a[/b]/c.so"}, ["does not load", "there is no file /a[/b]/c.so", "pip install"]),
        ({"MLA_BACKEND_LIBRARY": NOT_OURS[0]}, ["is a library, but not this package's"]),
        ({"MLA_BACKEND_LIBRARY": __file__}, ["does not load under torch"]),
    ],
    ids=["kernel", "nothing", "another", "no library"],
)
def test_wrong_settings_are_explained_not_thrown(environment, texts):
    done = run_doctor(**environment)
    assert done.returncode == 1 and not done.stderr
    said = " ".join(done.stdout.split())
    assert all(text in said for text in texts), said


def test_using_the_package_without_its_library_is_an_import_error():
    code = "import mla_backend; mla_backend.sparse_attention"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "MLA_BACKEND_LIBRARY": "/does/not/exist.so"},
    )
    assert "ImportError: mla-backend: there is no file /does/not/exist.so (MLA_BACKEND_LIBRARY names it)" in done.stderr


def test_the_environment_selects_a_cpu_kernel():
    report = json.loads(run_doctor("--json", MLA_BACKEND_CPU_KERNEL="portable").stdout)
    assert [k["name"] for k in report["library"]["cpu_kernels"] if k["active"]] == ["portable"]


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.23.0", True), ("0.32.1", True), ("0.33.0rc1", True), ("0.3.0", False), ("0.34.0", False)],
)
def test_untried_vllm_versions_are_named_as_such(monkeypatch, version, supported):
    monkeypatch.setattr(tried_versions.importlib.metadata, "version", lambda name: version)
    found = doctor.examine()["vllm"]
    assert found["supported"] is supported
    assert supported or "0.23, 0.32, 0.33" in found["why"]


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["cure"])
    assert "invalid choice: 'cure'" in capsys.readouterr().err
