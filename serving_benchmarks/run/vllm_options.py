"""vLLM's settings as options of a command: those that change what is measured."""

import argparse
import json
import math
from typing import Any

from serving_benchmarks import options as types

FULL_DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs of decode steps, without compiling the model first, which takes minutes."""
SAME_NAME = (
    "dtype kv_cache_dtype max_model_len max_num_seqs max_num_batched_tokens kv_cache_memory_bytes "
    "gpu_memory_utilization tensor_parallel_size decode_context_parallel_size"
).split()
"""Settings that vLLM has under the same name."""


def share(text: str) -> float:
    """The type of a part of a whole."""
    value = types.positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1; got {text!r}")
    return value


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the options. What is not given is left to vLLM, except for --max-model-len and --max-num-seqs."""
    group = parser.add_argument_group("vLLM's settings", "under vLLM's names; the default is vLLM's own")
    group.add_argument("--dtype", help="of weights and activations: bfloat16, float32, ...")
    group.add_argument("--kv-cache-dtype", default="auto", help="fp8, auto (bf16), ...; default: %(default)s")
    group.add_argument(
        "--max-model-len", type=types.count, metavar="N", help="tokens of the longest request; default: as needed"
    )
    group.add_argument(
        "--max-num-seqs", type=types.count, metavar="N", help="requests of a step; default: the largest --concurrency"
    )
    group.add_argument("--max-num-batched-tokens", type=types.count, metavar="N", help="tokens of a step")
    group.add_argument("--kv-cache-memory-bytes", type=types.count, metavar="BYTES", help="size of the KV cache")
    group.add_argument("--gpu-memory-utilization", type=share, metavar="SHARE", help="part of the GPU's memory")
    group.add_argument(
        "--prefix-caching", action=argparse.BooleanOptionalAction, help="whether prompts share what they begin with"
    )
    group.add_argument("--tensor-parallel-size", type=types.count, default=1, metavar="N", help="default: %(default)s")
    group.add_argument("--decode-context-parallel-size", type=types.count, metavar="N")
    group.add_argument(
        "--drafts", type=types.count, metavar="N", help="tokens that the model's MTP layer drafts a step"
    )
    group.add_argument(
        "--no-compile", action="store_true", help="CUDA graphs of decode steps without compiling the model"
    )
    group.add_argument(
        "--vllm-args", type=types.json_object, default={}, metavar="JSON", help='any others: {"block_size": 64}'
    )


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """The options by name, for a result file."""
    names = (*SAME_NAME, "prefix_caching", "drafts", "no_compile", "vllm_args")
    return {name: getattr(options, name) for name in names}


def arguments(settings: dict[str, Any], backend: str) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    given = {name: settings[name] for name in SAME_NAME if settings[name] is not None}
    if settings["no_compile"]:
        given["compilation_config"] = FULL_DECODE_GRAPHS
    if settings["prefix_caching"] is not None:
        given["enable_prefix_caching"] = settings["prefix_caching"]
    if settings["drafts"]:
        given["speculative_config"] = speculative(settings["drafts"])
    return {**given, "attention_backend": backend, **settings["vllm_args"]}


def speculative(drafts: int) -> dict[str, Any]:
    """vLLM's speculative_config for a model with an MTP layer."""
    return {"method": "mtp", "num_speculative_tokens": drafts}


def gpus(arguments: dict[str, Any]) -> int:
    """How many GPUs an engine with these arguments uses."""
    kinds = "tensor", "pipeline", "data"
    return math.prod(arguments.get(f"{kind}_parallel_size", 1) for kind in kinds)


def flags(arguments: dict[str, Any]) -> list[str]:
    """The arguments as words of the command line of vLLM's server."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words
