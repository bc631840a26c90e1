"""Offline throughput: the same prompts through one engine after the other, all that are allowed in flight at a time.

    python -m serving_benchmarks.run.throughput --model MODEL --backend SPARSE_MLA,FLASHMLA_SPARSE --kv-cache-dtype fp8
    python -m serving_benchmarks.run.throughput --model MODEL --engine embedded --concurrency 1,16,64 --output FILE
    python -m serving_benchmarks.run.throughput --model MODEL --lengths 4096+64,512+512 --concurrency 1,16,64

Each backend runs in a process of its own, one after the other, and goes through all --lengths there, at all values of
--concurrency each, so that the model is loaded once. On a GPU, it first gets requests of many lengths, for steps of all
sizes. For each load it runs all prompts once as a warm-up, then they are timed --rounds times, or for --seconds if that
is longer; before each round the prefix cache is emptied. Generation is greedy and doesn't end before it has its tokens.
A backend that fails is reported, the others go on, and the exit status is 1.

With --interleave all backends are loaded first, and take turns round by round. A machine that slows down then slows
all of them, and what one is over the first is the median of the ratios of rounds of the same number, shown with its
95 % confidence interval; of eight rounds or fewer that is from the lowest to the highest.

The three lines that are printed of each run are those of `vllm bench throughput`, and the JSON has its keys.
"""

import argparse
import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from serving_benchmarks.models import model_config
from serving_benchmarks.results import kernel_times, result_file, runs
from serving_benchmarks.run import compilations, turns, vllm_options, workloads
from serving_benchmarks.run.engines import EMBEDDED_DTYPES
from serving_benchmarks.run.processes import signals_unwind, status_when, why_it_ended
from serving_benchmarks.run.stages import Stages
from serving_benchmarks.run.throughput_worker import WARMUP_OUTPUT, profiled_requests
from serving_benchmarks.run.workloads import Workload

ENGINES = ("vllm", "embedded")
DEFAULT_BACKEND = "SPARSE_MLA"
DEFAULT_INPUT, DEFAULT_OUTPUT, DEFAULT_PROMPTS = 1024, 128, 64
TABLE_WIDTH = 130
MOST_OF_A_REASON = 300
LOG_LINES = 20
"""Of what a backend printed before it failed."""
INTERLEAVED_SHARE = 0.9
"""Of a GPU's memory, for all backends that are there at the same time."""
STEP_TOKENS = 8192
"""Of the largest step in the warm-up of sizes, unless --max-num-batched-tokens says it. Where vLLM's default is more,
larger steps are full ones, which every warm-up has."""


def counts(text: str) -> list[int]:
    """Whole numbers from 1 up, between commas."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [0]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"must be numbers from 1 up, such as 1,16,64; got {text!r}")
    return values


def pairs_of_lengths(text: str) -> list[tuple[int, int]]:
    """Tokens of prompts and after them: pairs with a plus, between commas."""
    found = [re.fullmatch(r"(\d+)\+(\d+)", part.strip()) for part in text.split(",")]
    pairs = [(int(pair[1]), int(pair[2])) if pair else (0, 0) for pair in found]
    if min(map(min, pairs)) < 1:
        raise argparse.ArgumentTypeError(f"must be tokens from 1 up, such as 4096+64,512+512; got {text!r}")
    if len(set(pairs)) < len(pairs):
        raise argparse.ArgumentTypeError(f"must have each pair once; got {text!r}")
    return pairs


def names(text: str) -> list[str]:
    """Words between commas, each once."""
    return list(dict.fromkeys(part for part in text.split(",") if part))


def engine_names(text: str) -> list[str]:
    """Of ENGINES."""
    found = names(text)
    if not found or set(found) - set(ENGINES):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(ENGINES)}; got {text!r}")
    return found


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serving_benchmarks.run.throughput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model", required=True, help="a checkpoint's folder, or a repository of the Hugging Face hub")
    what.add_argument(
        "--engine", type=engine_names, default=["vllm"], metavar="NAMES", help="of vllm,embedded; default: vllm"
    )
    what.add_argument(
        "--backend",
        type=names,
        default=[DEFAULT_BACKEND],
        metavar="NAMES",
        help="vLLM's attention backends, such as SPARSE_MLA,FLASHMLA_SPARSE; default: %(default)s",
    )
    what.add_argument(
        "--concurrency", type=counts, metavar="N,...", help="sequences in flight at most; default: all of them at once"
    )
    prompts = parser.add_argument_group("prompts", "random ones of one length, unless a file says otherwise")
    prompts.add_argument("--input-len", type=int, metavar="N", help=f"tokens of a prompt; default: {DEFAULT_INPUT}")
    prompts.add_argument("--output-len", type=int, metavar="N", help=f"tokens after it; default: {DEFAULT_OUTPUT}")
    prompts.add_argument(
        "--lengths",
        type=pairs_of_lengths,
        metavar="N+N,...",
        help="both, or several such pairs, one after the other: 4096+64,512+512. Other options are for each of them",
    )
    prompts.add_argument(
        "--num-prompts", type=int, metavar="N", help=f"default: {DEFAULT_PROMPTS}, or all that the file of --jsonl has"
    )
    files = prompts.add_mutually_exclusive_group()
    files.add_argument(
        "--histogram", type=Path, metavar="FILE", help="lengths: CSV with the columns input_len, output_len, weight"
    )
    files.add_argument(
        "--jsonl",
        type=Path,
        metavar="FILE",
        help="prompts, as `mla-backend generate` reads them; a line may have max_tokens",
    )
    prompts.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with; default: %(default)s",
    )
    prompts.add_argument("--seed", type=int, default=0, help="of random prompts; default: %(default)s")
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=int, default=3, help="that are timed, or more; default: %(default)s")
    how.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="rounds of a load go on until every backend has been timed for so long, as it takes more of them to tell "
        "anything where they are short; default: no more than --rounds",
    )
    how.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help=f"requests before them, that get {WARMUP_OUTPUT} tokens at most; 0 for none; default: a whole round, so "
        "that what engines compile for its shapes is compiled before the clock runs",
    )
    how.add_argument(
        "--size-warmup",
        action=argparse.BooleanOptionalAction,
        help="requests that take each engine through steps of many sizes when its model is loaded, as which sizes come "
        "up in a round depends on the moment; default: on a GPU, unless there is --warmup 0",
    )
    how.add_argument(
        "--waves",
        type=int,
        metavar="N",
        help="at most so many prompts for each sequence in flight, so that few in flight don't take all day; "
        "default: all prompts at every --concurrency",
    )
    how.add_argument(
        "--interleave",
        action="store_true",
        help="all backends are there at the same time and take turns: the first round of each, then the second of each "
        "in the reverse order, and so on. For machines whose speed drifts. All must fit: --gpu-memory-utilization and "
        f"--kv-cache-memory-bytes are for each of them; default: each gets its part of {INTERLEAVED_SHARE}",
    )
    how.add_argument(
        "--profile",
        action="store_true",
        help="kernel times of a few decode steps, after the first --concurrency of each of --lengths",
    )
    how.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the engines print")
    vllm_options.add(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--output", type=Path, metavar="FILE", help="write them and their environment as JSON")
    options = parser.parse_args(arguments)

    for name in ("output_len", "num_prompts", "input_len", "waves"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more; got {getattr(options, name)}")
    for name in ("shared_prefix", "warmup"):
        if getattr(options, name) is not None and getattr(options, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must be 0 or more; got {getattr(options, name)}")
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more, or there is no spread")
    if not 0 <= options.seconds < float("inf"):
        parser.error(f"--seconds must be 0 or more; got {options.seconds:g}")
    for name in ("input_len", "output_len", "histogram", "jsonl"):
        if options.lengths and getattr(options, name) is not None:
            parser.error(f"--lengths can't be given with --{name.replace('_', '-')}: it says all lengths")
    if options.input_len is not None and (options.histogram or options.jsonl):
        parser.error("--input-len can't be given with a file, which says how long prompts are")
    if options.shared_prefix and options.jsonl:
        parser.error("--shared-prefix can't be given with --jsonl, whose prompts are what they are")
    if "vllm" in options.engine and not options.backend:
        parser.error("--backend must name one or more")
    vllm_options.check(parser, options)
    if "embedded" in options.engine:
        if options.dtype not in EMBEDDED_DTYPES:
            parser.error(f"--dtype must be bfloat16 or float32 for the embedded engine; got {options.dtype}")
        if options.tensor_parallel_size > 1:
            parser.error("--tensor-parallel-size must be 1 for the embedded engine")
    try:
        options.folder = model_config.folder_of(options.model)
        options.config = model_config.read(options.folder)
    except (ValueError, OSError) as error:
        parser.error(f"--model: {error}")
    try:
        options.workloads = [new_workload(options, *lengths) for lengths in lengths_of(options)]
    except (ValueError, OSError, ImportError) as error:
        parser.error(str(error))
    options.runs = runs_of(options)
    settle_lengths(parser, options)
    settle_memory(parser, options)
    if options.size_warmup is None:  # on a CPU nothing is compiled for them
        options.size_warmup = options.warmup != 0 and torch.cuda.is_available()
    result_file.require_folder(parser, "--logs", options.logs)
    result_file.require_writable(parser, options.output)
    return options


def lengths_of(options: argparse.Namespace) -> list[tuple[int | None, int | None]]:
    """Tokens of a prompt and after it, of each workload; None where a file says them."""
    if options.histogram or options.jsonl:
        return [(None, None)]
    return options.lengths or [(options.input_len or DEFAULT_INPUT, options.output_len or DEFAULT_OUTPUT)]


def new_workload(options: argparse.Namespace, input_len: int | None, output_len: int | None) -> Workload:
    """The prompts that the options describe, with the lengths of one entry of `lengths_of`."""
    if options.jsonl:
        vocabulary, most = options.config["vocab_size"], options.output_len or DEFAULT_OUTPUT
        return workloads.from_jsonl(options.jsonl, options.folder, most, vocabulary, options.num_prompts)
    tokens = workloads.usable_tokens(options.config)
    random = {"shared": options.shared_prefix, "seed": options.seed}
    count = options.num_prompts or DEFAULT_PROMPTS
    if options.histogram:
        return workloads.from_histogram(workloads.read_histogram(options.histogram), count, tokens, **random)
    return workloads.fixed(count, input_len, output_len, tokens, **random)


@dataclass(frozen=True)
class Run:
    """What gives one entry of the result file for each backend."""

    workload: int
    """Which of the options' workloads."""
    concurrency: int | None
    profile: bool
    case: dict[str, Any]
    """The `case` of the entries."""


def runs_of(options: argparse.Namespace) -> list[Run]:
    """All that each backend has to do, in this order: each workload at each --concurrency."""
    return [
        Run(number, concurrency, options.profile and place == 0, case_of(options, number, concurrency))
        for number in range(len(options.workloads))
        for place, concurrency in enumerate(options.concurrency or [None])
    ]


def settle_lengths(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """--max-model-len and --max-num-seqs, from the workloads if they aren't given."""
    longest = max(workload.longest for workload in options.workloads)
    most = options.config.get("max_position_embeddings")
    if options.max_num_seqs is None and options.concurrency is not None:
        options.max_num_seqs = max(options.concurrency)
    if options.max_model_len is None:
        wanted = longest
        for run in (run for run in options.runs if run.profile):
            all_prompts = options.workloads[run.workload].prompts
            prompts, room = profiled_requests(all_prompts, run.concurrency, options.max_num_seqs)
            wanted = max(wanted, max(map(len, prompts)) + room)
        options.max_model_len = min(wanted, max(longest, most or wanted))
    if longest > options.max_model_len:
        parser.error(f"--max-model-len must be {longest} or more for these prompts; got {options.max_model_len}")
    if most is not None and options.max_model_len > most:
        parser.error(f"requests of {options.max_model_len} tokens are too long for the model, which takes {most}")


def sizes_of(options: argparse.Namespace) -> list[Workload]:
    """The warm-up of step sizes: no larger ones than the workloads need."""
    limits = [(run.case["num_prompts"], run.concurrency) for run in options.runs]
    longest_prompt = max(len(prompt) for workload in options.workloads for prompt in workload.prompts)
    return sizes_for(options, limits, longest_prompt)


def sizes_for(
    options: argparse.Namespace, limits: Sequence[tuple[int | None, ...]], longest_prompt: int
) -> list[Workload]:
    """The warm-up of step sizes, as `workloads.of_step_sizes` has it; none without --size-warmup.

    Args:
        options: of a program that runs vLLM.
        limits: to the requests in flight, besides --max-num-seqs, of each load. None is no limit.
        longest_prompt: of all loads.
    """
    if not options.size_warmup:
        return []
    in_flight = max(min(filter(None, (*of_a_load, options.max_num_seqs))) for of_a_load in limits)
    most = min(options.max_num_batched_tokens or STEP_TOKENS, in_flight * longest_prompt)
    tokens = workloads.usable_tokens(options.config)
    return workloads.of_step_sizes(most, in_flight, options.max_model_len, tokens, seed=options.seed)


def backends_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The engine and the name of each, in the order in which they come."""
    found = [("vllm", backend) for backend in options.backend] if "vllm" in options.engine else []
    return [*found, ("embedded", "embedded")] if "embedded" in options.engine else found


def settle_memory(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """--gpu-memory-utilization, where several backends are on a GPU at the same time."""
    backends = backends_of(options)
    if not options.interleave or len(backends) == 1:
        return
    share = options.gpu_memory_utilization
    of_vllm = sum(engine == "vllm" for engine, _ in backends)
    if share is None:  # vLLM wants so much to be free when it starts, even if it is told how large its cache is
        options.gpu_memory_utilization = round(INTERLEAVED_SHARE / len(backends), 3)
    elif share * of_vllm > 1 and options.kv_cache_memory_bytes is None:
        parser.error(
            f"--gpu-memory-utilization is for each backend with --interleave: {of_vllm} can't have {share} each"
        )


def case_of(options: argparse.Namespace, workload: int, concurrency: int | None) -> dict[str, Any]:
    """The `case` of an entry of a result file, of one of the options' workloads."""
    input_len, output_len = lengths_of(options)[workload]
    source = options.histogram or options.jsonl
    kind = "histogram" if options.histogram else "jsonl" if options.jsonl else "fixed"
    return {
        "workload": kind,
        "source": source.name if source else None,
        "input_len": input_len,
        "output_len": output_len,
        "num_prompts": workloads.prompts_in_waves(len(options.workloads[workload]), concurrency, options.waves),
        "shared_prefix": options.shared_prefix,
        "concurrency": concurrency,
        "seed": options.seed,
        "kv_cache_dtype": options.kv_cache_dtype,
        "tensor_parallel_size": options.tensor_parallel_size,
    }


def worker_command(spec: Path, events: Path) -> list[str]:
    """What measures a backend."""
    return [sys.executable, "-m", "serving_benchmarks.run.throughput_worker", str(spec), str(events)]


@dataclass
class Backend:
    """One that is measured."""

    engine: str
    name: str
    worker: turns.Worker
    left: list[int]
    """The numbers of the runs whose results have not come yet."""


@contextlib.contextmanager
def started(engine: str, name: str, options: argparse.Namespace, logs: Path) -> Iterator[Backend]:
    """A backend that loads its model, for as long as the block lasts."""
    spec, events, log = (logs / f"{engine}-{name}.{kind}" for kind in ("spec.json", "events", "log"))
    spec.write_text(
        json.dumps(
            {
                "engine": engine,
                "backend": name,
                "model": options.model,
                "settings": vllm_options.settings(options),
                "workloads": [workload.as_dict() for workload in options.workloads],
                "sizes": [requests.as_dict() for requests in sizes_of(options)],
                "runs": [
                    {
                        "workload": run.workload,
                        "prompts": run.case["num_prompts"],
                        "concurrency": run.concurrency,
                        "profile": run.profile,
                    }
                    for run in options.runs
                ],
                "rounds": options.rounds,
                "more_rounds": options.seconds > 0,
                "warmup": options.warmup,
            }
        )
    )
    with turns.started(worker_command(spec, events), events, log) as worker:
        yield Backend(engine, name, worker, list(range(len(options.runs))))


def heard(backend: Backend, options: argparse.Namespace, stages: Stages) -> Iterator[dict[str, Any]]:
    """The entries of one backend that come until it asks for its next turn; where it fails, one with an error in place
    of each that is missing."""
    head = {"engine": backend.engine, "backend": backend.name}
    for event in backend.worker.events():
        if event["event"] == "result":
            backend.left.remove(event["run"])
            yield {**head, "case": options.runs[event["run"]].case, "error": None, **event["result"]}
        else:
            stages.at(f"{backend.name}: {event['stage']}", event.get("done", 0), event.get("of"))
    if backend.worker.asks is not None:
        return
    status, said = backend.worker.process.status(), backend.worker.process.says()
    if status == 0 and not backend.left:
        return
    why = why_it_ended(status, said) if status else "it ended without all of its results"
    stages.say(f"{backend.name} failed: {why[:MOST_OF_A_REASON]}", style="red")
    for line in said.splitlines()[-LOG_LINES:]:
        stages.say(f"    {line}")
    for run in [options.runs[number] for number in backend.left] or options.runs[-1:]:
        yield {**head, "case": run.case, "error": why}


def headline(result: dict[str, Any]) -> list[str]:
    """The lines that `vllm bench throughput` prints."""
    return [
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {result['total_input_tokens']}",
        f"Total num output tokens:  {result['total_output_tokens']}",
    ]


def in_flight(case: dict[str, Any]) -> str:
    return "all at once" if case["concurrency"] is None else f"{case['concurrency']} in flight"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def table(results: list[dict[str, Any]], title: str | None) -> Table:
    """All backends beside each other with one workload, at each concurrency."""
    headings = "backend", "in flight", "output tokens/s", "(quartiles)", "requests/s"
    latencies = "TTFT p50, ms", "p99", "TPOT p50, ms", "p99"
    shown = Table(*headings, *latencies, "over the first", title=title, title_justify="left", box=None, padding=(0, 1))
    for column in (shown.columns[0], shown.columns[3], shown.columns[-1]):
        column.no_wrap = True  # rather the headings of the others
    firsts: dict[int | None, dict[str, Any]] = {}
    for result in results:
        concurrency = result["case"]["concurrency"]
        if result["error"] is not None:
            shown.add_row(result["backend"], str(concurrency or "all"), "failed")
            continue
        speed, seconds, latency = result["output_tokens_per_second"], result["seconds"], result["latency"]
        tokens = result["total_output_tokens"]
        ttft, tpot = latency["ttft_s"], latency["tpot_s"]
        first = firsts.setdefault(concurrency, result)
        shown.add_row(
            result["backend"],
            str(concurrency or "all"),
            f"{speed:.1f}",
            f"{tokens / seconds['upper_quartile']:.1f} to {tokens / seconds['lower_quartile']:.1f}",
            f"{result['requests_per_second']:.2f}",
            *(_milliseconds(value) for value in (ttft["p50"], ttft["p99"], tpot["p50"], tpot["p99"])),
            runs.ratio(first, result, None if result is first else result["over_first"]),
        )
    return shown


def tables(results: list[dict[str, Any]], several: bool) -> Iterator[Table]:
    """One for each workload; if there are several its lengths are told above it, where they take no width from it."""
    by_lengths: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        by_lengths.setdefault(runs.lengths(result["case"]), []).append(result)
    for lengths, its_results in by_lengths.items():
        yield table(its_results, f" {lengths} tokens" if several else None)


def measure(options: argparse.Namespace, logs: Path, console: Console) -> Iterator[dict[str, Any]]:
    """Every entry of the result file, when it is there."""
    names = backends_of(options)
    for together in [names] if options.interleave else [[name] for name in names]:
        with Stages(console) as stages, contextlib.ExitStack() as running:
            backends: dict[turns.Worker, Backend] = {}
            for engine, name in together:  # engines look at how much memory is free when they start: one at a time
                stages.at(f"{name}: starting")
                backend = running.enter_context(started(engine, name, options, logs))
                backends[backend.worker] = backend
                yield from heard(backend, options, stages)
            for worker, stage in turns.in_turn(list(backends), options.seconds):
                stages.at(f"{backends[worker].name}: {stage}")
                yield from heard(backends[worker], options, stages)


def show(result: dict[str, Any], several: bool, out: Console) -> None:
    """Prints what there is to say of an entry at once; its lengths, if there are several workloads."""
    lengths = f"{runs.lengths(result['case'])} tokens, " if several else ""
    out.print(f"\n{result['backend']}, {lengths}{in_flight(result['case'])}")
    out.print("\n".join([*headline(result), *compilations.lines(result["compiled"])]), soft_wrap=True, markup=False)
    if result["profile"]:
        out.print("\n".join(kernel_times.lines(result["profile"])), soft_wrap=True, markup=False)


def in_order(results: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """The entries of each backend after those of the one before it, each with what it is over the first backend that
    did the same."""
    places = {name: place for place, (_, name) in enumerate(backends_of(options))}
    results = sorted(results, key=lambda result: places[result["backend"]])
    firsts: dict[str, dict[str, Any]] = {}
    for result in results:
        if result["error"] is None:
            first = firsts.setdefault(runs.asked(result["case"]), result)
            result["over_first"] = runs.over_first(first, result) if options.interleave else None
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    console, out = Console(stderr=True, highlight=False), Console(highlight=False)
    results: list[dict[str, Any]] = []
    status, several = 0, len(options.workloads) > 1
    with tempfile.TemporaryDirectory() as folder, signals_unwind():
        logs = options.logs or Path(folder)
        try:
            for result in measure(options, logs, console):
                results.append(result)
                if result["error"] is None:
                    show(result, several, out)
        except (KeyboardInterrupt, SystemExit) as stopped:  # what there is gets written
            status = status_when(stopped)
    if any(result["error"] is not None for result in results):
        status = status or 1
    results = in_order(results, options)
    if results:
        wide = Console(width=TABLE_WIDTH, highlight=False)
        for shown in tables(results, several):
            wide.print("", shown, sep="\n")
        more = {
            "benchmark": "throughput",
            "model": model_config.describe(options.model, options.config, options.load_format),
            "settings": {
                **vllm_options.settings(options),
                "rounds": options.rounds,
                "seconds": options.seconds,
                "waves": options.waves,
                "warmup": options.warmup,
                "size_warmup": options.size_warmup,
                "interleaved": options.interleave,
                "cpus": len(os.sched_getaffinity(0)),
            },
        }
        result_file.write(options.output, results, console, **more)
    return status


if __name__ == "__main__":
    sys.exit(main())
