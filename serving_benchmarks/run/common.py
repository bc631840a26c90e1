"""What `throughput`, `serve` and `checkpoint` have in common: options, settings of engines among them, warm-up sizes,
what is shown, how they end."""

import argparse
import contextlib
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from serving_benchmarks import options as types
from serving_benchmarks.models import models
from serving_benchmarks.results import file as result_file
from serving_benchmarks.results import kernel_times, runs, tables
from serving_benchmarks.run import sglang_engine, workloads
from serving_benchmarks.run.processes import signals_unwind
from serving_benchmarks.run.workloads import Workload

DEFAULT_BACKEND = "SPARSE_MLA"
TABLE_WIDTH = 130
DEFAULT_LENGTHS = "1024+128"
MOST_OF_A_REASON = 300
LOG_LINES = 20
"""Shown of what a backend printed before it failed."""
STEP_TOKENS = 8192
"""Tokens of the largest step in the warm-up, unless --max-num-batched-tokens says it. Larger steps are full ones, which
every round has."""
FULL_DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs of decode steps, without compiling the model first, which takes minutes."""
SAME_NAME = (
    "dtype kv_cache_dtype max_model_len max_num_seqs max_num_batched_tokens kv_cache_memory_bytes "
    "gpu_memory_utilization tensor_parallel_size decode_context_parallel_size"
).split()
"""Settings that vLLM has under the same name."""
OF_CASES = (
    "engine kv_cache_dtype tensor_parallel_size data_parallel_size decode_context_parallel_size "
    "enable_expert_parallel drafts"
).split()
"""Settings that the `case` of an entry has."""
COUNTS = {
    "max-model-len": "tokens of the longest request; default: as needed",
    "max-num-seqs": "requests of a step; default: the largest --concurrency",
    "max-num-batched-tokens": "tokens of a step",
    "kv-cache-memory-bytes": "size of the KV cache",
    "decode-context-parallel-size": "GPUs that share a request's cache",
    "drafts": "tokens that the model's MTP layer drafts a step",
}
"""Settings that are whole numbers without a default of ours."""


class Stages:
    """Says where a command is."""

    def __init__(self):
        self.stage, self._console = "", Console(stderr=True, highlight=False)

    def at(self, stage: str) -> None:
        """The command is at a stage, new or the same as before."""
        if stage != self.stage:
            self.stage = stage
            self.say(stage)

    def say(self, line: str, style: str | None = None) -> None:
        """Prints a line."""
        self._console.print(line, style=style, markup=False, soft_wrap=True)

    def failed(self, name: str, why: str, printed: str) -> None:
        """Says that one of several has failed, why, and what it printed last."""
        self.say(f"{name} failed: {why[:MOST_OF_A_REASON]}", style="red")
        for line in printed.splitlines()[-LOG_LINES:]:
            self.say(f"    {line}")


Measure = Callable[[Path, Stages], Iterator[dict[str, Any]]]
"""Yields the entries of a result file. It gets the folder for logs."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options --model and --backend."""
    parser.add_argument("--model", required=True, help="a checkpoint's folder, or a repository of the Hugging Face hub")
    add_backend(parser)


def add_backend(parser: argparse.ArgumentParser) -> None:
    """The option --backend."""
    told = f"the engine's, such as {DEFAULT_BACKEND},FLASHMLA_SPARSE. One with a cache of another type: NAME:bfloat16"
    parser.add_argument("--backend", type=types.names, default=[DEFAULT_BACKEND], metavar="NAMES", help=told)


def add_loads(parser: argparse.ArgumentParser, *, num_prompts: int) -> None:
    """The options --lengths, --num-prompts, --concurrency, --loads and --waves."""
    told = "tokens of a prompt and after it, such as 4096+64,512+512"
    types.add_list(parser, "--lengths", types.lengths, f"{told}; default: {DEFAULT_LENGTHS}")
    told = "of each load; default: %(default)s"
    parser.add_argument("--num-prompts", type=types.count, default=num_prompts, metavar="N", help=told)
    types.add_list(parser, "--concurrency", types.count, "requests in flight; default: all")
    told = "in place of --lengths and --concurrency: both of each load, such as 4096+64/64,4096+256/1"
    types.add_list(parser, "--loads", types.load, told)
    told = "at most so many prompts per request in flight; default: any"
    parser.add_argument("--waves", type=types.count, metavar="N", help=told)


def add_warmup(parser: argparse.ArgumentParser, what: str) -> None:
    """The options --warmup and --size-warmup."""
    told = f"{what}, so that kernels are compiled for its shapes; default: --warmup"
    parser.add_argument("--warmup", action=argparse.BooleanOptionalAction, default=True, help=told)
    told = "first run steps of many sizes, as chance decides which come up later; default: with --warmup on a GPU"
    parser.add_argument("--size-warmup", action=argparse.BooleanOptionalAction, help=told)


def add_results(parser: argparse.ArgumentParser, *, requests: bool) -> None:
    """The options --logs and --output, and --requests where there are times of requests."""
    if requests:
        parser.add_argument("--requests", action="store_true", help="write the times of every request, too")
    parser.add_argument("--logs", type=types.new_folder, metavar="FOLDER", help="keep what the processes print")
    types.add_output(parser)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds the options. What is not given is left to the engine, except for --max-model-len and --max-num-seqs."""
    group = parser.add_argument_group("the engine's settings", "under vLLM's names; the default is the engine's own")
    group.add_argument("--dtype", help="of weights and activations: bfloat16, float32, ...")
    group.add_argument("--kv-cache-dtype", default="auto", help="fp8, auto (bf16), ...; default: %(default)s")
    for name, told in COUNTS.items():
        group.add_argument(f"--{name}", type=types.count, metavar="N", help=told)
    share = partial(types.positive, most=1)
    group.add_argument("--gpu-memory-utilization", type=share, metavar="SHARE", help="part of the GPU's memory")
    told = "whether prompts share what they begin with"
    group.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, help=told)
    group.add_argument("--tensor-parallel-size", type=types.count, default=1, metavar="N", help="default: %(default)s")
    told = "CUDA graphs of decode steps without compiling the model"
    group.add_argument("--no-compile", action="store_true", help=told)
    told = 'any others: {"block_size": 64}'
    group.add_argument("--engine-args", type=types.json_object, default={}, metavar="JSON", help=told)


def loads(options: argparse.Namespace) -> list[tuple[tuple[int, int], int | None]]:
    """The lengths of each load, and its requests in flight; None for all of them. Raises Refused for both forms."""
    if options.loads and (options.lengths or options.concurrency):
        raise types.Refused("--loads is in place of --lengths and --concurrency; got both")
    lengths = options.lengths or [types.lengths(DEFAULT_LENGTHS)]
    return options.loads or list(itertools.product(lengths, options.concurrency or [None]))


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options by name, for a result file. A step has room for the most requests in flight."""
    names = ("engine", *SAME_NAME, "prefix_caching", "drafts", "no_compile", "engine_args")
    given = {name: getattr(options, name) for name in names}
    most = max(in_flight or 0 for _, in_flight in loads(options))
    return {**given, "max_num_seqs": given["max_num_seqs"] or most or None}


def engine_arguments(settings: dict[str, Any], backend: str) -> dict[str, Any]:
    """The arguments of `vllm.LLM` or `sglang.Engine`. A backend may be NAME:CACHE, with a kv_cache_dtype of its own."""
    backend, _, cache = backend.partition(":")
    given = {name: value for name, value in settings.items() if value is not None}
    given |= {"kv_cache_dtype": cache} if cache else {}
    made = {"vllm": vllm_arguments, "sglang": sglang_engine.arguments}[settings["engine"]](given)
    return {**made, "attention_backend": backend, **settings["engine_args"]}


def vllm_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `vllm.LLM` for the settings that are given."""
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
        return models.read(models.folder_of(model))
    except (ValueError, OSError) as error:
        raise types.Refused(f"--model: {error}") from None


@dataclass(frozen=True)
class Plan:
    """What `throughput` and `serve` both plan."""

    settings: dict[str, Any]
    """Of the engine."""
    sizes: list[Workload]
    """The warm-up of step sizes."""


def cases_of(
    options: argparse.Namespace, settings: dict[str, Any], rates: Sequence[dict[str, Any]] = ({},)
) -> list[dict[str, Any]]:
    """The `case` of each load: entries with the same one are comparable. `rates`: more of each."""
    given = {**settings, **settings["engine_args"]}
    of_engine = {name: given[name] for name in OF_CASES if given.get(name) is not None}
    found = []
    for (lengths, concurrency), rate in itertools.product(loads(options), rates):
        prompts = min(filter(None, (options.num_prompts, (options.waves or 0) * (concurrency or 0))))
        asked = {"input_len": lengths[0], "output_len": lengths[1], "num_prompts": prompts}
        found.append({**asked, **of_engine, **rate, "concurrency": concurrency})
    return found


def fit_model_len(
    settings: dict[str, Any], config: dict[str, Any], cases: Sequence[dict[str, Any]], wished: int = 0
) -> None:
    """Sets --max-model-len, unless it is given, to the tokens of the longest request, or more if they are wished for
    and the model takes them. Raises Refused for less than these loads need, and for more than the model takes."""
    given, most = settings["max_model_len"], config.get("max_position_embeddings") or math.inf
    needed = max(case["input_len"] + case["output_len"] for case in cases)
    settings["max_model_len"] = length = min(max(needed, wished), most) if given is None else given
    if not needed <= length <= most:
        told = f"{needed} or more for these loads, and at most {most}, what the model takes; got {length}"
        raise types.Refused(f"--max-model-len must be {told}")


def size_warmup(
    options: argparse.Namespace,
    settings: dict[str, Any],
    config: dict[str, Any],
    cases: Sequence[dict[str, Any]],
    most_in_flight: int | None = None,
) -> list[Workload]:
    """The warm-up of step sizes for these loads, as `workloads.of_step_sizes` has it; none without --size-warmup."""
    import torch

    if not (options.warmup and torch.cuda.is_available() if options.size_warmup is None else options.size_warmup):
        return []
    limits = most_in_flight, settings["max_num_seqs"]
    at_once = max(min(filter(None, (case["num_prompts"], case["concurrency"], *limits))) for case in cases)
    longest_prompt = max(case["input_len"] for case in cases)
    most = min(settings["max_num_batched_tokens"] or STEP_TOKENS, at_once * longest_prompt)
    return workloads.of_step_sizes(most, at_once, settings["max_model_len"], workloads.usable_tokens(config))


def collect(measure: Measure, logs: Path | None) -> tuple[list[dict[str, Any]], int]:
    """The entries that `measure` yields until it ends or a signal stops it, and the exit status.

    The status is 1 if an entry failed, and 128 and the signal's number after a signal.
    """
    results: list[dict[str, Any]] = []
    status = 0
    with tempfile.TemporaryDirectory() as folder, signals_unwind():
        try:
            with contextlib.closing(measure(logs or Path(folder), Stages())) as entries:
                for result in entries:
                    results.append(result)
        except (KeyboardInterrupt, SystemExit) as stopped:
            status = 130 if isinstance(stopped, KeyboardInterrupt) else stopped.code
    if any(result["error"] is not None for result in results):
        status = status or 1
    return results, status


def write(options: argparse.Namespace, benchmark: str, results: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """The result file, if one is wanted and there are results."""
    if results:
        more: dict[str, Any] = {"benchmark": benchmark, "settings": {**settings, "cpus": len(os.sched_getaffinity(0))}}
        if options.model:
            load_format = settings.get("engine_args", {}).get("load_format")
            more["model"] = models.describe(options.model, read_config(options.model), load_format)
        if settings.get("engine") == "sglang":
            more["inter_token_latency"] = sglang_engine.GAPS
        result_file.write(options.output, results, Console(stderr=True, highlight=False), **more)


def entry(settings: dict[str, Any], backend: str, case: dict[str, Any], found: dict[str, Any] | str) -> dict[str, Any]:
    """An entry of the result file: what was found, or why the backend failed."""
    known = {"engine": settings["engine"], "backend": backend, "gpus": gpus(engine_arguments(settings, backend))}
    known["case"] = case
    if isinstance(found, str):
        return {**known, "error": found}
    known |= {"error": None, **found}
    return {**known, "tokens_per_gpu": runs.tokens_per_gpu(known), "tokens_per_user": runs.tokens_per_user(known)}


def run(benchmark: str, options: argparse.Namespace, plan: Plan, measure: Measure, interleaved: bool) -> int:
    """Measures, shows and writes the entries backend by backend, and returns the exit status. Each entry gets
    `over_first`, its ratio to the first backend's entry of the same load; None unless they were interleaved."""
    results, status = collect(measure, options.logs)
    results.sort(key=lambda result: options.backend.index(result["backend"]))
    firsts: dict[str, dict[str, Any]] = {}
    for result in results:
        if result["error"] is None:
            first = firsts.setdefault(json.dumps(result["case"]), result)
            result["over_first"] = runs.over_first(first, result) if interleaved else None
        if result.get("profile"):
            print(f"\n{result['backend']}, {runs.lengths(result['case'])} tokens, {runs.load(result['case'])}")
            print(*kernel_times.lines(result["profile"]), sep="\n")
    if results:
        print()
        result_file.show(*tables.on_terminal(results), words=3, width=TABLE_WIDTH)
    how = {name: getattr(options, name) for name in ("rounds", "waves", "warmup")}
    how |= {"size_warmup": bool(plan.sizes), "interleaved": interleaved}
    write(options, benchmark, results, {**plan.settings, **how})
    return status
