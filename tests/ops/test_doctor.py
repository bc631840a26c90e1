"""mla-backend doctor: what it says, and that it says it even when the library is broken."""

import functools
import json
import os
import re

import pytest
import torch

from commands import in_python
from mla_backend import cli, doctor, library, tried_versions

run_doctor = functools.partial(in_python, "-m", "mla_backend", "doctor")


def test_json_reports_everything(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    how = dict(supported=True, why=None, cuda=torch.version.cuda, threads=torch.get_num_threads())
    assert report["torch"] == {"version": torch.__version__, **how}
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
    done = in_python("-c", "import mla_backend; mla_backend.sparse_attention", MLA_BACKEND_LIBRARY="/does/not/exist.so")
    assert "ImportError: mla-backend: there is no file /does/not/exist.so (MLA_BACKEND_LIBRARY names it)" in done.stderr


def test_the_environment_selects_a_cpu_kernel():
    report = json.loads(run_doctor("--json", MLA_BACKEND_CPU_KERNEL="portable").stdout)
    assert [k["name"] for k in report["library"]["cpu_kernels"] if k["active"]] == ["portable"]


ENGINES = {doctor.VLLM_BACKENDS: "vllm serve", doctor.SGLANG_BACKEND: "sglang serve"}


@pytest.mark.parametrize("runs", [(), *((name,) for name in ENGINES), tuple(ENGINES)])
def test_it_ends_with_what_to_do_next(monkeypatch, runs):
    monkeypatch.setattr(tried_versions, "installed_vllm", lambda: ("vllm", "0.33.0"))
    report = {**doctor.examine(), "gpus": {"devices": [{}]}}
    report["can_run"] = [{"what": what, "runs": True} for what in ("every op on a GPU", *runs)]
    said = " ".join(doctor._next_steps(report))
    assert [name for name, command in ENGINES.items() if command in said] == list(runs)
    assert runs or "pip install 'vllm" in said
    nothing = {**report, "gpus": {"devices": []}, "can_run": [], "engine": {"lacks": ["jinja2"]}}
    assert "pip install jinja2 && mla-backend generate" in doctor._next_steps(nothing)[0]
    report["can_run"] = []
    assert "MLA_BACKEND_CUDA=1 pip install ." in " ".join(doctor._next_steps(report))


@pytest.mark.parametrize("environment", [{}, {"MLA_BACKEND_LIBRARY": "/does/not/exist.so"}])
def test_the_version_is_printed_even_without_a_library(environment):
    done, version = in_python("-m", "mla_backend", "--version", **environment), library.about()["version"]
    assert done.returncode == 0 and done.stdout.startswith("mla-backend ")
    assert done.stdout.split()[-1] == version or environment


def test_without_torch_it_says_to_install_it():
    code = "import sys; sys.modules['torch'] = None; from mla_backend import cli; sys.exit(cli.main(['doctor']))"
    done = in_python("-c", code)
    assert done.returncode == 1 and "install torch" in done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("engine", "version", "why"),
    [
        *(("vllm", version, None) for version in ("0.23.0", "0.32.1", "0.33.0rc1")),
        *(("vllm", version, "0.23, 0.32, 0.33") for version in ("0.3.0", "0.34.0")),
        *(("sglang", None, "not installed"), ("sglang", "0.5.23.post1", None), ("sglang", "0.6", "0.5.22, 0.5.23")),
    ],
)
def test_untried_versions_are_named_as_such(monkeypatch, engine, version, why):
    found = ("vllm", version) if engine == "vllm" else version
    monkeypatch.setattr(tried_versions, f"installed_{engine}", lambda: found)
    report = doctor.examine()
    assert report[engine]["supported"] is (why is None) and (why or "") in (report[engine]["why"] or "")
    of_sglang = [each["why"] for each in report["can_run"] if each["what"] == doctor.SGLANG_BACKEND]
    assert engine == "vllm" or (version or "not installed") in of_sglang[0]


V32 = dict(architectures=["DeepseekV32ForCausalLM"], num_hidden_layers=61, num_attention_heads=128, index_topk=2048)
V32 |= dict(kv_lora_rank=512, qk_rope_head_dim=64)
V3 = dict(V32, architectures=["DeepseekV3ForCausalLM"], index_topk=None)
NATIVE = """ --additional-config '{"mla_v41_rows": "native"}'"""
ON_16 = ["--gpus=16", "--gpu-memory=79G", "--tensor-parallel=8"]


@pytest.mark.parametrize(
    ("config", "gib", "options", "status", "says"),
    [
        (V32, 642, ["--gpus=8", "--gpu-memory=80G"], 0, "does not fit on 8 x 80 GiB"),
        (V32, 642, ["--gpus=8", "--gpu-memory=139G"], 0, "656 bytes; 48068 bytes per token .* 952256 tokens fit"),
        (V32, 642, ON_16, 0, "656 bytes; 48068 bytes per token .* 1211[0-9]{3} tokens fit"),
        ({"text_config": V3, **V3}, 642, ON_16, 0, "576 bytes; 35136 bytes per token .* 1656[0-9]{3} tokens fit"),
        (V32 | dict(index_topk_pattern="F" + "S" * 60), 0, ON_16, 0, f"no safetensors files .* {61 * 656 + 132} bytes"),
        (V32, 642, [], 0, "642.0 GiB .* no GPU is here"),
        (V32 | dict(architectures=["DeepseekV4ForCausalLM"]), 642, ON_16, 0, "584 bytes. (?!.* 528).* not computed"),
        (V32 | dict(architectures=["DeepseekV41ForCausalLM"]), 642, ON_16, 0, f"584 bytes. .*{NATIVE}: .* 528 bytes. "),
        (V32 | dict(kv_lora_rank=256), 0, [], 1, "a kv_lora_rank and a qk_rope_head_dim of 256 and 64"),
        (V32 | dict(architectures=["Step5ForCausalLM"]), 0, [], 1, "is not multi-head latent attention"),
        (V32 | dict(architectures=["LlamaForCausalLM"]), 0, [], 1, "serves models with sparse multi-head latent"),
        (V32, 0, ["--gpus=8", "--tensor-parallel=3"], 2, "must divide"),
        (V32, 0, ["--gpus=0"], 2, "--gpus must be"),
        ([], 0, [], 2, "must have a num_hidden_layers of 1 or more; got None"),
    ],
)
def test_of_a_model_it_says_whether_it_is_served_and_what_fits(
    tmp_path, capsys, monkeypatch, config, gib, options, status, says
):
    monkeypatch.setattr(doctor, "examine_gpus", lambda: {"devices": []})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if gib:
        index = {"metadata": {"total_size": gib << 30}, "weight_map": {"a": "a.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert cli.main(["doctor", "--model", str(tmp_path), *options]) == status
    assert re.search(says, " ".join("".join(capsys.readouterr()).split()))
    (tmp_path / "a.safetensors").write_bytes(bytes(5000))  # the files count where they are there
    assert cli.main(["doctor", "--model", str(tmp_path), *options, "--json"]) == status
    assert status == 2 or json.loads(capsys.readouterr().out)["weights"] == 5000
