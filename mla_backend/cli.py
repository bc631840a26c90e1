"""The command `mla-backend`."""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import mla_backend
from mla_backend import terminal
from mla_backend.generate import options as generate_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # no other file may be taken for a closed standard stream
        pass
    os.close(number)
    parser = argparse.ArgumentParser(
        prog="mla-backend",
        description="Attention for sparse-MLA models: what runs on this machine, and text from a checkpoint.",
    )
    parser.add_argument("--version", action="version", version=f"mla-backend {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine can run, and why not the rest",
        description="Says what this machine can run, and why not the rest. Exits with 1 if the library does not load.",
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument("--brief", action="store_true", help="print only what runs here")
    model = doctor.add_argument_group("about a model")
    model.add_argument(
        "--model", type=Path, metavar="FOLDER", help="say whether vLLM serves it, and how many tokens fit"
    )
    model.add_argument("--gpus", type=terminal.whole, metavar="N", help="how many (default: those here)")
    model.add_argument(
        "--gpu-memory", type=terminal.byte_size, metavar="SIZE", help="of each (default: as here, or 80G)"
    )
    model.add_argument(
        "--tensor-parallel", type=terminal.whole, metavar="N", help="GPUs that share a layer (default: all)"
    )
    doctor.set_defaults(run=_doctor)
    generate_options.add(commands).set_defaults(run=_generate)
    options, rest = parser.parse_known_args(arguments)
    if options.command == "generate" and not any(text.startswith("-") for text in rest):
        options.prompts = [*options.prompts, *rest]  # argparse doesn't assign prompts that follow an option
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if sys.stdout is None:
        if getattr(options, "output", None) is None:
            parser.error("standard output is closed, so there is nowhere to write to")
        sys.stdout = open(os.devnull, "w")
    try:
        return status_of(lambda: options.run(options), f"mla-backend {options.command}: error")
    except KeyboardInterrupt:
        return generate_options.INTERRUPTED


def status_of(run: Callable[[], int], told: str) -> int:
    """What a command returns, or 1 if it can't write: with a sentence that begins as `told`, unless nobody reads."""
    try:
        status = run()
        sys.stdout.flush()
        return status
    except OSError as error:  # such as a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python must not try to write the rest
        if not isinstance(error, BrokenPipeError):
            print(f"{told}: {error}", file=sys.stderr)
        return 1


def _version() -> str:
    try:
        return importlib.metadata.version("mla-backend")
    except importlib.metadata.PackageNotFoundError:  # a source tree that is on Python's path, and no more
        return getattr(mla_backend, "__version__", "of unknown version, as its library does not load")


def _doctor(options: argparse.Namespace) -> int:
    from mla_backend.doctor import examine, examine_gpus, render, render_verdicts
    from mla_backend.vllm_plugin import replacements

    if options.model is not None:
        return _check_model(options, examine_gpus()["devices"])
    if (options.gpus, options.gpu_memory, options.tensor_parallel) != (None, None, None):
        print("mla-backend doctor: error: --gpus, --gpu-memory and --tensor-parallel need --model", file=sys.stderr)
        return 2
    report = examine(replacements.report)
    _show(report, render_verdicts if options.brief else render, options.json)
    return 0 if report["library"]["loads"] else 1


def _check_model(options: argparse.Namespace, devices: list[dict]) -> int:
    from mla_backend.vllm_plugin import model_check

    number = options.gpus if options.gpus is not None else len(devices) or None
    memory = options.gpu_memory or min((device["memory_bytes"] for device in devices), default=80 << 30)
    try:
        gpus = None if number is None else model_check.gpus(number, memory, options.tensor_parallel or number)
        report = model_check.examine(options.model, gpus)
    except (OSError, ValueError, ImportError) as error:
        print(f"mla-backend doctor: error: {error}", file=sys.stderr)
        return 2
    _show(report, model_check.render, options.json)
    return 0 if report["backend"] else 1


def _show(report: dict[str, Any], render: Callable[[dict[str, Any], Console], None], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        render(report, terminal.console(None if sys.stdout.isatty() else 120))


def _generate(options: argparse.Namespace) -> int:
    try:
        from mla_backend.generate.run import WrongCommand, run
    except ImportError as error:
        print(f"mla-backend generate: error: {error}", file=sys.stderr)
        return 2
    try:
        return run(options)
    except WrongCommand as error:
        print(f"mla-backend generate: error: {error}", file=sys.stderr)
        return 2
