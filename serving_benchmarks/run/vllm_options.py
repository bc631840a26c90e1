"""vLLM's settings as options of a benchmark: the ones that change what is measured."""

import argparse
import json
from typing import Any

FULL_DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs of decode steps, without compiling the model first, which takes minutes."""


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be an object {{...}}; got {text}")
    return value


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options. Those that are not given are left to vLLM, but for max-model-len."""
    group = parser.add_argument_group(
        "vLLM's settings", "as vLLM has them; what is not given is its default. * : the embedded engine takes them too"
    )
    group.add_argument("--dtype", help="* of weights and activations: bfloat16, float32, ...")
    group.add_argument("--kv-cache-dtype", default="auto", help="* fp8, auto (bf16), ...; default: %(default)s")
    group.add_argument(
        "--max-model-len", type=int, metavar="N", help="* tokens of the longest request; default: what the prompts need"
    )
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="* sequences of a step; default: the largest --concurrency"
    )
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="* tokens of a step")
    group.add_argument("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="* for the cache")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of the GPU's memory")
    group.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="default: %(default)s")
    group.add_argument("--enable-expert-parallel", action="store_true")
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    group.add_argument(
        "--no-compile", action="store_true", help="CUDA graphs of decode without compiling the model: starts faster"
    )
    group.add_argument("--compilation-config", type=_json_object, metavar="JSON")
    group.add_argument(
        "--load-format", help="dummy needs no weights, but makes a model that attention means nothing to"
    )
    group.add_argument(
        "--prefix-caching", action=argparse.BooleanOptionalAction, help="* whether prompts share what they begin with"
    )
    group.add_argument(
        "--vllm-args", type=_json_object, default={}, metavar="JSON", help='any others: {"seed": 1, "block_size": 64}'
    )


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Errors that name the option."""
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(options, name)}")
    if options.tensor_parallel_size < 1:
        parser.error(f"--tensor-parallel-size must be 1 or more; got {options.tensor_parallel_size}")
    share = options.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        parser.error(f"--gpu-memory-utilization must be more than 0 and at most 1; got {share}")
    if sum([options.enforce_eager, options.no_compile, options.compilation_config is not None]) > 1:
        parser.error("of --enforce-eager, --no-compile and --compilation-config only one can be given")


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, for a result file."""
    names = (
        "dtype kv_cache_dtype max_model_len max_num_seqs max_num_batched_tokens kv_cache_memory_bytes "
        "gpu_memory_utilization tensor_parallel_size enable_expert_parallel enforce_eager no_compile "
        "compilation_config load_format prefix_caching vllm_args"
    ).split()
    return {name: getattr(options, name) for name in names}


def arguments(settings: dict[str, Any], backend: str | None) -> dict[str, Any]:
    """What `vllm.LLM` takes, from what `settings` gave."""
    given = {
        name: settings[name]
        for name in (
            "dtype max_model_len max_num_seqs max_num_batched_tokens kv_cache_memory_bytes gpu_memory_utilization "
            "compilation_config load_format"
        ).split()
        if settings[name] is not None
    }
    given |= {name: settings[name] for name in ("kv_cache_dtype", "tensor_parallel_size")}
    given |= {name: True for name in ("enable_expert_parallel", "enforce_eager") if settings[name]}
    if settings["no_compile"]:
        given["compilation_config"] = FULL_DECODE_GRAPHS
    if settings["prefix_caching"] is not None:
        given["enable_prefix_caching"] = settings["prefix_caching"]
    if backend is not None:
        given["attention_backend"] = backend
    return {**given, **settings["vllm_args"]}


def flags(arguments: dict[str, Any]) -> list[str]:
    """The same for the command line of vLLM's server."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words
