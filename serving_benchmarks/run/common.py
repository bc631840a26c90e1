"""What `throughput`, `serve` and `checkpoint` share: options, settings of engines, what is shown, how they end."""

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mla_backend.tried_versions import install_command
from serving_benchmarks import options as types
from serving_benchmarks.models import models
from serving_benchmarks.results import file as result_file
from serving_benchmarks.results import kernel_times, runs, tables
from serving_benchmarks.run import sglang_engine
from serving_benchmarks.run.processes import signals_unwind

DEFAULT_BACKEND = "SPARSE_MLA"
TABLE_WIDTH = 130
MOST_OF_A_REASON = 300
LOG_LINES = 20  # shown of what a backend printed before it failed
MOST_CPU_CACHE_BYTES = 4 << 30  # what does not fit waits; unless one request needs more
CPU_BLOCK = 64  # tokens; a request may fill a block of them in part
_NAMED = re.compile(r"[^:]+(:[^:=]+(:\w+=[^:=]+)?)?")
BACKEND = types.checked(str, _NAMED.fullmatch, "NAME, NAME:CACHE or NAME:CACHE:OPTION=VALUE")
HOST_POOL = "host_pool_gib"  # an option of a backend that asks for vLLM's HiSparse
FULL_DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs of decode steps, without compiling the model first, which takes minutes."""
SAME_NAME = "dtype kv_cache_dtype max_model_len max_num_seqs max_num_batched_tokens kv_cache_memory_bytes".split()
SAME_NAME += ["gpu_memory_utilization", "tensor_parallel_size"]
"""Settings that vLLM has under the same name."""
OF_CASES = "engine kv_cache_dtype tensor_parallel_size data_parallel_size decode_context_parallel_size".split()
OF_CASES += ["enable_expert_parallel", "drafts", "overlap"]
"""Settings that the `case` of an entry has."""
COUNTS = {"max-num-batched-tokens": "tokens of a step", "drafts": "tokens that the model's MTP layer drafts per step"}
"""Settings that are whole numbers without a default of ours."""


class Stages:
    """Says where a command is."""

    stage = ""

    def at(self, stage: str) -> None:
        """The command is at a stage, new or the same as before."""
        if stage != self.stage:
            self.stage = stage
            self.say(stage)

    def say(self, line: str, style: str | None = None) -> None:
        Console(stderr=True, highlight=False).print(line, style=style, markup=False, soft_wrap=True)

    def failed(self, name: str, why: str, printed: str) -> None:
        """Says that one of several has failed, why, and what it printed last."""
        self.say(f"{name} failed: {why[:MOST_OF_A_REASON]}", style="red")
        for line in printed.splitlines()[-LOG_LINES:]:
            self.say(f"    {line}")


Measure = Callable[[Path, Stages], Iterator[dict[str, Any]]]
"""Yields the entries of a result file. It gets the folder for logs."""


def add_backend(parser: argparse.ArgumentParser) -> None:
    told = f"the engine's, such as {DEFAULT_BACKEND},FLASHMLA_SPARSE. One with a cache of another type: NAME:bfloat16, "
    told += "with an option of vLLM's --additional-config: NAME:fp8:mla_products=fp8, and with the cache on the host: "
    told += f"NAME:fp8:{HOST_POOL}=8"
    parser.add_argument("--backend", type=types.listed(BACKEND), default=[DEFAULT_BACKEND], metavar="NAMES", help=told)


def add_loads(parser: argparse.ArgumentParser, *, num_prompts: int, warmup: str) -> None:
    """The model, and what is asked of it."""
    parser.add_argument("--model", required=True, help="a checkpoint's folder")
    add_backend(parser)
    told = "tokens of a prompt and after it, and requests in flight (default: all), such as 4096+64/16,4096+64/64"
    types.add_list(parser, "--loads", types.load, told, "1024+128")
    types.add(parser, "--num-prompts", types.count, "of each load", num_prompts)
    types.add(parser, "--waves", types.count, "at most so many prompts per request in flight; default: any")
    told = f"{warmup}, so that kernels are compiled for its shapes"
    parser.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True, help=told)


def add_engine_args(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """`--engine-args`, and `--random-weights`, which adds to them."""
    told = 'any others: {"block_size": 64}'
    parser.add_argument("--engine-args", type=types.json_object, default={}, metavar="JSON", help=told)
    told = "vLLM draws the weights by their names, for folders of `models` without weights"
    parser.add_argument("--random-weights", type=types.whole(0), metavar="SEED", help=told)
    told = "with --random-weights, for DeepSeek-V3.2: a share of what a token selects that the next one selects, too"
    parser.add_argument("--overlap", type=types.share, metavar="SHARE", help=told)


def engine_args(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_engine_args` added."""
    seed = options.random_weights
    if seed is None and options.overlap is not None:
        raise types.Refused("--overlap is for models with --random-weights")
    return {**({} if seed is None else random_weights(seed, options.overlap)), **options.engine_args}


def random_weights(seed: int, overlap: float | None) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for `random_weights.py`."""
    own = {"load_format": "mla_random", "model_loader_extra_config": {"seed": seed, "overlap": overlap}}
    return {**own, "worker_extension_cls": "serving_benchmarks.run.random_weights.RandomWeightsWorker"}


def add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--logs", type=types.new_folder, metavar="FOLDER", help="keep what the processes print")
    types.add_output(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds the options. What is not given is left to the engine, except for the cache of vLLM on a CPU."""
    group = parser.add_argument_group("the engine's settings", "under vLLM's names; the default is the engine's own")
    group.add_argument("--dtype", help="of weights and activations: bfloat16, float32, ...")
    group.add_argument("--kv-cache-dtype", default="auto", help="fp8, auto (bf16), ...; default: %(default)s")
    for name, told in COUNTS.items():
        types.add(group, f"--{name}", types.count, told)
    told = "of the KV cache, such as 4G or 512M; default: the engine's; on a CPU what the loads need"
    group.add_argument("--kv-cache-memory-bytes", type=types.size, metavar="SIZE", help=told)
    group.add_argument("--gpu-memory-utilization", type=types.share, metavar="SHARE", help="part of the GPU's memory")
    told = "whether prompts share what they begin with"
    group.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, help=told)
    group.add_argument("--tensor-parallel-size", type=types.count, default=1, metavar="N", help="default: %(default)s")
    told = "CUDA graphs of decode steps without compiling the model"
    group.add_argument("--no-compile", action="store_true", help=told)
    add_engine_args(group)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options by name, for a result file. A step has room for the most requests in flight."""
    names = ("engine", *SAME_NAME, "prefix_caching", "drafts", "no_compile", "overlap")
    given = {name: getattr(options, name, None) for name in names}
    given["engine_args"] = engine_args(options)
    return {**given, "max_num_seqs": max(in_flight or 0 for _, in_flight in options.loads) or None}


def size_cpu_cache(
    config: dict[str, Any], settings: dict[str, Any], cases: Sequence[dict[str, Any]], memory: float | None
) -> None:
    """On a CPU, gives vLLM a cache with room for the loads, unless its memory is said (`memory`: as a share). By itself
    it takes 92 % of the machine's. Needs `max_model_len`."""
    import torch

    if settings["engine"] != "vllm" or settings["kv_cache_memory_bytes"] or memory or torch.cuda.is_available():
        return
    latent, rope, key = (config.get(name) or 0 for name in ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim"))
    layers = (config.get("num_hidden_layers") or 0) + (config.get("num_nextn_predict_layers") or 0)
    # Rows are fp32 at most. vLLM may pad indexer keys to the size of a row.
    token = 4 * layers * (latent + rope) * (2 if key else 1)
    if not latent or not token:  # a model without MLA
        settings["kv_cache_memory_bytes"] = MOST_CPU_CACHE_BYTES
        return
    longest = {**settings, **settings["engine_args"]}["max_model_len"]
    request = token * (longest + 2 * CPU_BLOCK)
    requests = 1 + max(min(case["num_prompts"], case["concurrency"] or math.inf) for case in cases)
    settings["kv_cache_memory_bytes"] = max(2 * request, min(requests * request, MOST_CPU_CACHE_BYTES))


def engine_arguments(settings: dict[str, Any], backend: str) -> dict[str, Any]:
    """The arguments of `vllm.LLM` or `sglang.Engine`. A backend may be NAME:CACHE, with a kv_cache_dtype of its own, or
    NAME:CACHE:OPTION=VALUE, with an option of vLLM's --additional-config, too."""
    name, cache, option = parts_of(backend)
    given = {name: value for name, value in settings.items() if value is not None} | cache
    made = {"vllm": vllm_arguments, "sglang": sglang_engine.arguments}[settings["engine"]](given)
    return with_option({**made, "attention_backend": name, **settings["engine_args"]}, option)


def parts_of(backend: str) -> tuple[str, dict[str, str], dict[str, Any]]:
    """A backend's name, its `kv_cache_dtype` and its option, where it says them."""
    name, cache, option = [*backend.split(":"), "", ""][:3]
    key, _, value = option.partition("=")
    own = {key: {"true": True, "false": False}.get(value, value)} if option else {}
    return name, {"kv_cache_dtype": cache} if cache else {}, own


def with_option(made: dict[str, Any], option: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `vllm.LLM`, with an option of a backend."""
    if HOST_POOL in option:
        how = {"kv_connector": "HiSparseConnector", "kv_role": "kv_both", "kv_connector_extra_config": option}
        return {**made, "kv_transfer_config": how}
    return {**made, "additional_config": {**made.get("additional_config", {}), **option}} if option else made


def vllm_arguments(given: dict[str, Any]) -> dict[str, Any]:
    made = {name: given[name] for name in SAME_NAME if name in given}
    if given["no_compile"]:
        made["compilation_config"] = FULL_DECODE_GRAPHS
    made |= {"enable_prefix_caching": given["prefix_caching"]} if "prefix_caching" in given else {}
    return made | ({"speculative_config": speculative(given["drafts"])} if "drafts" in given else {})


def speculative(drafts: int) -> dict[str, Any]:
    """vLLM's speculative_config for a model with an MTP layer."""
    return {"method": "mtp", "num_speculative_tokens": drafts}


def gpus(arguments: dict[str, Any]) -> int:
    """How many GPUs an engine with these arguments uses."""
    sizes = "tensor_parallel_size pipeline_parallel_size data_parallel_size tp_size pp_size".split()
    sizes += [] if arguments.get("enable_dp_attention") else ["dp_size"]
    return math.prod(arguments.get(name, 1) for name in sizes)


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


def read_config(model: str) -> dict[str, Any]:
    """A model's config.json."""
    try:
        return models.read(Path(model))
    except (ValueError, OSError) as error:
        raise types.Refused(f"--model: {error}") from None


def cases_of(
    options: argparse.Namespace, settings: dict[str, Any], rates: Sequence[dict[str, Any]] = ({},)
) -> list[dict[str, Any]]:
    """The `case` of each load: entries with the same one are comparable. `rates`: more of each."""
    given = {**settings, **settings["engine_args"]}
    of_engine = {name: given[name] for name in OF_CASES if given.get(name) is not None}
    if any(":" in backend for backend in options.backend):  # caches differ, and each entry says which it had
        of_engine.pop("kv_cache_dtype", None)
    found = []
    for (lengths, concurrency), rate in itertools.product(options.loads, rates):
        prompts = min(filter(None, (options.num_prompts, (options.waves or 0) * (concurrency or 0))))
        asked = {"input_len": lengths[0], "output_len": lengths[1], "num_prompts": prompts}
        found.append({**asked, **of_engine, **rate, "concurrency": concurrency})
    return found


def require_engine(module: str) -> None:
    """Refuses where vllm or sglang is not installed."""
    import torch

    if importlib.util.find_spec(module) is None:
        name = {"vllm": "vLLM", "sglang": "SGLang"}[module]
        raise types.Refused(f"{name} is not installed here: {install_command(module, torch.cuda.is_available())}")


def longest_request(config: dict[str, Any], needed: int, wished: int = 0) -> int:
    """Tokens of the longest request: what is needed, or wished for if the model takes it. Raises Refused."""
    most = config.get("max_position_embeddings") or math.inf
    if needed > most:
        raise types.Refused(f"requests of {needed} tokens are too long: the model takes {most}")
    return min(max(needed, wished), most)


def collect(measure: Measure, logs: Path | None) -> tuple[list[dict[str, Any]], int]:
    """The entries until `measure` ends or a signal comes, and the exit status: 1 after a failure, 128 + the signal."""
    results: list[dict[str, Any]] = []
    status = 0
    with tempfile.TemporaryDirectory() as folder, signals_unwind():
        try:
            with contextlib.closing(measure(logs or Path(folder), Stages())) as entries:
                for result in entries:  # one by one: those before a signal are kept
                    results.append(result)
        except (KeyboardInterrupt, SystemExit) as stopped:
            status = 130 if isinstance(stopped, KeyboardInterrupt) else stopped.code
    return results, status or int(any(result["error"] is not None for result in results))


def write(options: argparse.Namespace, benchmark: str, results: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """The result file, if one is wanted and there are results."""
    if results:
        more: dict[str, Any] = {"benchmark": benchmark, "settings": {**settings, "cpus": len(os.sched_getaffinity(0))}}
        if options.model:
            config, load_format = read_config(options.model), settings.get("engine_args", {}).get("load_format")
            shape = {ours: config.get(theirs) for ours, theirs in models.KEYS.items()}
            more["model"] = {"name": Path(options.model).resolve().name, **shape, "load_format": load_format}
        if settings.get("engine") == "sglang":
            more["inter_token_latency"] = sglang_engine.GAPS
        result_file.write(options.output, results, Console(stderr=True, highlight=False), **more)


def entry(settings: dict[str, Any], backend: str, case: dict[str, Any], found: dict[str, Any] | str) -> dict[str, Any]:
    """An entry of the result file: what was found, or why the backend failed."""
    arguments = engine_arguments(settings, backend)
    known = {"engine": settings["engine"], "backend": backend, "gpus": gpus(arguments)}
    known["kv_cache_dtype"] = arguments.get("kv_cache_dtype")
    failed = isinstance(found, str)
    return {**known, "case": case, "error": found if failed else None, **({} if failed else found)}


def run(benchmark: str, options: argparse.Namespace, settings: dict[str, Any], measure: Measure, paired: bool) -> int:
    """Measures, shows and writes the entries backend by backend, and returns the exit status. Each entry gets
    `over_first`, its ratio to the first backend's entry of the same load; None unless they were interleaved."""
    results, status = collect(measure, options.logs)
    results.sort(key=lambda result: options.backend.index(result["backend"]))
    ran = [result for result in results if result["error"] is None]
    firsts = {json.dumps(one["case"]): one for one in ran if one["backend"] == options.backend[0]}
    for result in ran:
        first = firsts.get(json.dumps(result["case"]))
        result["over_first"] = runs.over_first(first, result) if paired and first else None
        if profile := result.get("profile"):
            told = (f"{name} {time:.0f} us" for name, time in kernel_times.by_group(profile).items())
            wall = f"{profile['wall_s'] / profile['steps'] * 1e6:.0f} us"
            print(f"{runs.name_of(result)}, per decode step: {wall}, of them {', '.join(told)}")
    if results:
        print()
        about = {"gpus": [{"name": name} for name in result_file.nvidia_smi("name")]}
        result_file.show(*tables.of_models([(about, result) for result in results]), words=3, width=TABLE_WIDTH)
    how = {name: getattr(options, name) for name in ("rounds", "waves", "warmup")}
    write(options, benchmark, results, {**settings, **how, "interleaved": paired})
    return status
