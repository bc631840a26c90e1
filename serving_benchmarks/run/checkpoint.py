"""Whole-model answers: whether vLLM with a backend says what the embedded engine, or another backend, says.

Without --model it asks the tiny recall checkpoint held-out questions: 99 % of the answers must be right, and the same
as those of the first way with FP8, or with BF16 for ways called -bf16. With --model it compares tokens and logprobs of
random prompts, which may differ as much as the first way's do in the opposite order. The exit status is 1 if a way
fails or differs by more.

Ways are ways to run the model, each in a process of its own; vLLM's run with each --backend. Its mtp ways need a model
with an MTP layer; the recall checkpoint gets one.
"""

import argparse
import json
import math
import random
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from serving_benchmarks import options as types
from serving_benchmarks.models import drafts
from serving_benchmarks.models.recall import CHECKPOINT, EOS, IDS, held_out
from serving_benchmarks.run import common, rounds, workloads
from serving_benchmarks.run.common import Stages
from serving_benchmarks.run.processes import why_it_ended

ENOUGH = 0.99  # of the answers that must be right, and of those that must be the same as another way's
CACHE_BYTES = 1 << 28  # for the recall checkpoint: 32 contexts of 2000 tokens, with any cache
LONGER = 100  # tokens that a question may add to its context
SHARED_TOPK = 512  # slots of a query, not 128, where a way is context parallel: vLLM 0.33 takes 512, 1024 or 2048
ROUNDING = 0.01  # of logprobs from bf16 logits, about: some order of prompts happens to make no noise
DRAFT_ROOM = 8  # positions after a request's last token that drafts may take
Answers = list[dict[str, list]]  # of each prompt: tokens and their logprobs


@dataclass(frozen=True)
class Way:
    engine: str = "vllm"
    cache: str = "fp8"
    eager: bool = False
    drafts: int = 0
    gpus: int = 1
    context_parallel: bool = False  # decode context parallelism: each GPU has all heads and a part of the tokens
    backend: str | None = None


WAYS = {"embedded": Way("embedded"), "vllm": Way(), "eager": Way(eager=True)}
WAYS |= {f"mtp-{drafts}": Way(drafts=drafts) for drafts in (1, 2, 3)}
WAYS |= {"tp-2": Way(gpus=2), "dcp-2": Way(gpus=2, context_parallel=True)}
WAYS |= {f"{name}-bf16": replace(WAYS[name], cache="bf16") for name in ("embedded", "vllm", "tp-2", "dcp-2")}
WAYS |= {f"{name}-mtp-1": replace(WAYS[name], drafts=1) for name in ("tp-2", "dcp-2")}


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_list(parser, "--ways", types.one_of(WAYS), f"of {', '.join(WAYS)}", "embedded,vllm,mtp-1")
    common.add_backend(parser)
    parser.add_argument("--model", help="a checkpoint's folder; default: the recall checkpoint and its questions")
    parser.add_argument("--num-prompts", type=types.count, metavar="N", help="default: 200 questions, or 16 prompts")
    parser.add_argument("--input-len", type=types.count, metavar="N", help="tokens of a prompt; default: 1000, or 4096")
    parser.add_argument("--output-len", type=types.count, default=24, metavar="N", help="default: %(default)s")
    parser.add_argument("--limit", type=types.positive, default=600.0, metavar="S", help="for a way; default: 600")
    common.add_engine_args(parser)
    common.add_results(parser)


@dataclass(frozen=True)
class Questions:
    prompts: list[list[int]]
    model: str
    max_model_len: int
    drafting: str  # the model with an MTP layer
    right: list[list[int]] | None = None  # the right answers; None for random prompts
    end: int | None = None  # the token that ends an answer


def of_recall_checkpoint(options: argparse.Namespace, folder: Path) -> Questions:
    """The recall checkpoint's held-out questions."""
    if not CHECKPOINT.is_dir():
        raise types.Refused("the recall checkpoint is in the source tree, not in the installed package")
    input_len, plain, drafting = options.input_len or 1000, CHECKPOINT, folder / "with-mtp-layer"
    longest = common.longest_request(common.read_config(str(CHECKPOINT)), input_len + LONGER + options.output_len)
    try:
        asked = held_out(input_len, options.num_prompts or 200)
    except ValueError as error:
        raise types.Refused(f"--input-len: {error}") from None
    if any(WAYS[name].context_parallel for name in options.ways):
        plain = shutil.copytree(CHECKPOINT, folder / "more-slots")
        (plain / "config.json").write_text(json.dumps({**common.read_config(str(plain)), "index_topk": SHARED_TOPK}))
    if any(WAYS[name].drafts for name in options.ways):
        drafts.add_mtp_layer(plain, drafting)
    prompts, right = [one.context_tokens + one.question_tokens for one in asked], [one.answer_tokens for one in asked]
    return Questions(prompts, str(plain), longest, str(drafting), right, IDS[EOS])


def of_model(options: argparse.Namespace) -> Questions:
    """Random prompts of unequal lengths."""
    config, chance = common.read_config(options.model), random.Random(0)
    input_len, count = options.input_len or 4096, options.num_prompts or 16
    lengths = [input_len] + [max(1, int(input_len * chance.uniform(0.75, 1.0))) for _ in range(count - 1)]
    tokens = workloads.usable_tokens(config)
    needed = input_len + options.output_len
    longest = common.longest_request(config, needed, needed + DRAFT_ROOM)
    return Questions([chance.choices(tokens, k=length) for length in lengths], options.model, longest, options.model)


def arguments_of(way: Way, options: argparse.Namespace, asked: Questions) -> dict[str, Any]:
    """The arguments of the way's engine, for `worker.py`."""
    given: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": asked.max_model_len}
    cache = {} if asked.right is None else {"kv_cache_memory_bytes": CACHE_BYTES}
    if way.engine == "embedded":
        return {**given, "kv_cache": way.cache, **({"memory": CACHE_BYTES} if cache else {})}
    name, own_cache, option = common.parts_of(way.backend)
    given |= {"attention_backend": name, "kv_cache_dtype": {"fp8": "fp8", "bf16": "auto"}[way.cache], **cache}
    given |= {"max_num_seqs": 64, "enforce_eager": way.eager, "tensor_parallel_size": way.gpus}
    given["decode_context_parallel_size"] = way.gpus if way.context_parallel else 1
    given["enable_prefix_caching"] = asked.right is not None  # random prompts come twice, to be computed twice
    drafting = {"speculative_config": common.speculative(way.drafts)} if way.drafts else {}
    return common.with_option({**given, **drafting, **own_cache, **common.engine_args(options)}, option)


def cache_of(way: Way) -> str:
    """The type of the way's cache: what its backend says, as in NAME:CACHE, or else the way's own."""
    said = common.parts_of(way.backend)[1].get("kv_cache_dtype") if way.backend else None
    return {"bfloat16": "bf16", "auto": "bf16"}.get(said, said or way.cache)


def ask(name: str, spec: dict[str, Any], limit: float, logs: Path, stages: Stages) -> dict[str, Any]:
    """What a way's process found; `error` if it failed."""
    with rounds.started(name, {"task": "answers", **spec}, logs) as worker:
        try:
            for event in worker.events(limit):
                if event.pop("event") == "result":
                    return {**event, "error": None}
                stages.at(f"{name}: {event['stage']}")
            why = why_it_ended(worker.process.status(), worker.process.says())
        except TimeoutError as error:
            why = str(error)
        stages.failed(name, why, worker.process.says())
        return {"error": why}


def answer_of(tokens: list[int], end: int | None) -> list[int]:
    """The tokens up to the one that ends the answer."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def compare(one: Answers, other: Answers, end: int | None) -> dict[str, Any]:
    """How far two ways agree. Their logprobs are compared as long as both have seen the same tokens."""
    until, differences = [], []
    for a, b in zip(one, other, strict=True):
        pairs = enumerate(zip(a["tokens"], b["tokens"], strict=True))
        until.append(next((i for i, (x, y) in pairs if x != y), len(a["tokens"])))
        logprobs = zip(a["logprobs"][: until[-1] + 1], b["logprobs"][: until[-1] + 1], strict=True)
        differences += [abs(x - y) for x, y in logprobs]
    pairs = list(zip(one, other, strict=True))
    return {
        "answers_equal": sum(answer_of(a["tokens"], end) == answer_of(b["tokens"], end) for a, b in pairs),
        "texts_equal": sum(a["tokens"] == b["tokens"] for a, b in pairs),
        "tokens_until_first_difference": statistics.mean(until),
        "logprob_difference_mean": statistics.mean(differences),
        "logprob_difference_max": max(differences),
    }


def measure(options: argparse.Namespace, logs: Path, stages: Stages) -> Iterator[dict[str, Any]]:
    """The entry of each way."""
    stages.at("preparing")
    asked = of_model(options) if options.model else of_recall_checkpoint(options, logs)
    references: dict[str, tuple[str, Answers, dict[str, Any] | None]] = {}  # of each cache: way, answers, noise
    ways: dict[str, Way] = {}  # each of vLLM's with each backend
    for name in options.ways:
        backends = [None] if WAYS[name].engine == "embedded" else options.backend
        for backend in backends:
            ways[f"{name} {backend}" if len(backends) > 1 else name] = replace(WAYS[name], backend=backend)
    for name, way in ways.items():
        is_reference = way.cache not in references
        batches = [asked.prompts]
        batches += [asked.prompts[::-1]] if is_reference and asked.right is None else []
        model = asked.drafting if way.drafts else asked.model
        spec = {"engine": way.engine, "model": model, "arguments": arguments_of(way, options, asked)}
        spec |= {"batches": batches, "new_tokens": options.output_len}
        found = ask(name, spec, options.limit, logs, stages)
        entry = {"way": name, **asdict(way), "cache": cache_of(way), "asked": len(asked.prompts), **found}
        if entry["error"] is None:
            first, *more = answers = entry.pop("answers")
            values = [value for batch in answers for one in batch for value in one["logprobs"]]
            given = (answer_of(one["tokens"], asked.end) for one in first)
            right = None if asked.right is None else sum(a == b for a, b in zip(given, asked.right, strict=True))
            entry |= {"right": right, "finite": all(map(math.isfinite, values))}
            if is_reference:
                noise = entry["differs_from_itself"] = compare(first, more[0][::-1], asked.end) if more else None
                references[way.cache] = name, first, noise
            else:
                than, its, noise = references[way.cache]
                entry |= {"than": than, **compare(first, its, asked.end)}
                # two ways may differ by no more than one differs from itself, but for chance
                bounds = {"mean": (2, ROUNDING), "max": (3, 10 * ROUNDING)}
                entry["within_noise"] = noise and all(
                    entry[f"logprob_difference_{of}"] <= times * noise[f"logprob_difference_{of}"] + more
                    for of, (times, more) in bounds.items()
                )
        yield entry


def is_good(entry: dict[str, Any]) -> bool:
    """Whether a way keeps to the bounds."""
    if entry["error"] or not entry["finite"]:
        return False
    if entry["right"] is None:
        return entry.get("within_noise") is not False
    least = ENOUGH * entry["asked"]
    return entry["right"] >= least and entry.get("answers_equal", entry["asked"]) >= least


def run(options: argparse.Namespace) -> int:
    if any(WAYS[name].engine == "vllm" for name in options.ways):
        common.require_engine("vllm")
    results, status = common.collect(lambda logs, stages: measure(options, logs, stages), options.logs)
    for entry in results:
        kept = ("asked", "right", "drafted", "accepted", "within_noise", "answers_equal")
        told = [f"{name} {entry[name]}" for name in entry if name in kept or name.startswith("logprob_difference")]
        print(f"{entry['way']}: {'good' if is_good(entry) else 'NOT GOOD'}: {entry['error'] or ', '.join(told)}")
    settings = {name: getattr(options, name) for name in ("input_len", "output_len", "num_prompts", "backend")}
    common.write(options, "checkpoint", results, settings)
    return status or (0 if all(map(is_good, results)) else 1)
