"""Measures this backend, and makes reports of what was measured."""

import argparse
import importlib
import inspect
import io
import sys
from collections.abc import Sequence

from mla_backend.cli import status_of
from serving_benchmarks.options import Refused

COMMANDS = {
    "kernels": ("ops.kernels", "sparse attention on a GPU, versus FlashMLA, FlashAttention 3 and FlashInfer"),
    "rows": ("ops.rows", "the same on other rows: DeepSeek-V4's, rows without rope, fp16"),
    "dense": ("ops.dense", "dense decode from page tables on a GPU, versus FlashMLA and FlashAttention 3"),
    "backward": ("ops.backward", "the backward of sparse attention on a GPU, versus cuDNN"),
    "ops index": ("ops.index", "the indexer's scores and top-k on a GPU, versus vLLM's DeepGEMM and top-k"),
    "ops sharing": ("ops.sharing", "the indexer's selection shared by several GPUs, versus each selecting for all"),
    "ops tune": ("ops.tune", "times launches of every size on a GPU, and fits the cost model to them"),
    "throughput": ("run.throughput", "whole models offline: all requests are there at the start"),
    "serve": ("run.serve", "whole models behind a server, over request rates or numbers of clients"),
    "checkpoint": ("run.checkpoint", "whether backends and engines give the same answers"),
    "report": ("results.report", "a page with tables of result files"),
    "compare": ("results.compare", "what became faster or slower between two result files"),
    "docs": ("results.docs", "write the numbers of result files into README and docs"),
    "models": ("models.models", "make a model of real width with random weights"),
    "peers": ("ops.peers", "fetch the kernels that `kernels`, `rows` and `dense` compare with"),
}
"""Each command's module, below serving_benchmarks, and what it does. A module has `add_options(parser)` and
`run(options)`, which returns the exit status; the first paragraph of its docstring is the text of --help."""
OVERVIEW = "\n".join(
    ["usage: python -m serving_benchmarks COMMAND [options]", "", __doc__, ""]
    + [f"  {name:15}{told}" for name, (_, told) in COMMANDS.items()]
    + ["", "Each command has --help."]
)


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file's name may be any bytes
    try:
        return status_of(lambda: _run(words), "error")
    except Refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    command = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if command is None:
        asked = words[:1] in (["-h"], ["--help"])
        if words and not asked:
            name = " ".join(words[: 2 if words[0] == "ops" else 1])
            print(f"error: there is no command {name!r}\n", file=sys.stderr)
        print(OVERVIEW, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    try:
        module = importlib.import_module(f"serving_benchmarks.{COMMANDS[command][0]}")
    except ModuleNotFoundError as error:
        raise Refused(f"{error}; pip install '.[report]' has what {command!r} needs") from error
    except ImportError as error:  # such as the library's, which says what to do
        raise Refused(str(error)) from error
    told = inspect.cleandoc(module.__doc__).partition("\n\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m serving_benchmarks {command}", description=told)
    module.add_options(parser)
    return module.run(parser.parse_args(words[len(command.split()) :]))


if __name__ == "__main__":
    sys.exit(main())
