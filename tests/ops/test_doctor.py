"""mla-backend doctor: what it says, and that it says it even when the library is broken."""

import io
import json
import os
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from mla_backend import cli, doctor, library, tried_versions


def run_doctor(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "mla_backend.cli", "doctor", *arguments],
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


def test_text_names_the_kernel_in_use():
    done = run_doctor()
    assert done.returncode == 0 and not done.stderr
    (kernel,) = [kernel["name"] for kernel in library.about()["cpu_kernels"] if kernel["active"]]
    assert f"attention kernel {kernel}" in done.stdout


def test_a_missing_library_is_explained_not_thrown():
    done = run_doctor(MLA_BACKEND_LIBRARY="/does/not/exist.so")
    assert done.returncode == 1 and not done.stderr
    assert "does not load" in done.stdout and "pip install" in done.stdout


def test_a_file_that_is_no_library_is_explained(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    done = run_doctor("--json", MLA_BACKEND_LIBRARY=str(broken))
    assert done.returncode == 1
    assert "does not load under torch" in json.loads(done.stdout)["library"]["why"]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"MLA_BACKEND_CPU_KERNEL": "sse9"}, "the environment variable MLA_BACKEND_CPU_KERNEL: name must be auto or"),
        ({"MLA_BACKEND_LIBRARY": "libm.so.6"}, "there is no file"),
        ({"MLA_BACKEND_LIBRARY": "/a[/b]/c.so"}, "there is no file /a[/b]/c.so"),
    ],
)
def test_wrong_settings_are_explained(environment, text):
    done = run_doctor(**environment)
    assert done.returncode == 1 and not done.stderr
    assert text in " ".join(done.stdout.split())


def test_another_library_is_told_from_ours():
    other = next(
        p for p in (torch.__path__[0] + "/lib/libc10.so", torch.__path__[0] + "/lib/libshm.so") if os.path.exists(p)
    )
    done = run_doctor(MLA_BACKEND_LIBRARY=other)
    assert done.returncode == 1 and "is a library, but not this package's" in " ".join(done.stdout.split())


def test_brief_says_only_what_runs():
    done = run_doctor("--brief")
    assert done.returncode == 0 and done.stdout.startswith("What runs here") and "attention kernel" in done.stdout


def test_using_the_package_without_its_library_is_an_import_error():
    code = "import mla_backend; mla_backend.sparse_attention"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "MLA_BACKEND_LIBRARY": "/does/not/exist.so"},
    )
    assert "ImportError: mla-backend: there is no file /does/not/exist.so (MLA_BACKEND_LIBRARY names it)" in done.stderr


@pytest.mark.parametrize("name", [k["name"] for k in library.about()["cpu_kernels"] if k["usable"]])
def test_the_environment_selects_a_cpu_kernel(name):
    report = json.loads(run_doctor("--json", MLA_BACKEND_CPU_KERNEL=name).stdout)
    assert [k["name"] for k in report["library"]["cpu_kernels"] if k["active"]] == [name]


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.23.0", True), ("0.32.1", True), ("0.33.0rc1", True), ("0.3.0", False), ("0.34.0", False)],
)
def test_untried_vllm_versions_are_named_as_such(monkeypatch, version, supported):
    monkeypatch.setattr(tried_versions.importlib.metadata, "version", lambda name: version)
    found = doctor.examine()["vllm"]
    assert found["supported"] is supported
    assert supported or "0.23, 0.32, 0.33" in found["why"]


def test_text_tells_how_many_clusters_a_gpu_holds_or_why_that_is_unknown():
    gpu = {"name": "GPU", "capability": "9.0", "multiprocessors": 132, "memory_bytes": 80 * 2**30}
    report = doctor.examine()
    report["gpus"] = {
        "why": None,
        "kernels": [],
        "devices": [
            {**gpu, "clusters": {2: 66, 3: 39, 4: 30, 5: 24, 6: 17, 8: 15, 16: 7}},
            {**gpu, "clusters_error": "mla_backend: clusters of 2 blocks: out of memory"},
        ],
    }
    text = io.StringIO()
    doctor.render(report, Console(file=text, width=200))
    assert "132 SMs, 80 GiB, clusters of 2/3/4/6/8/16 blocks: 66/39/30/17/15/7" in text.getvalue()
    assert "132 SMs, 80 GiB; mla_backend: clusters of 2 blocks: out of memory" in text.getvalue()


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["cure"])
    assert "invalid choice: 'cure'" in capsys.readouterr().err
