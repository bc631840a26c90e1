"""Asks the tiny checkpoint held-out questions, through vLLM and through the embedded engine, and compares the tokens.

    python serving_benchmarks/run/recall_answers.py --ways embedded vllm mtp-1 --output recall.json

Each way has a process of its own and a time limit. The first of the ways with the same cache is what others are held
to: the answers must be the same, and 99 % of them right. Beyond an answer, where the checkpoint has not been trained to
go on, tokens may differ where two are about as likely; that is counted and shown with how far apart the two were.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from examples.recall.accuracy import CHECKPOINT, held_out, is_right  # noqa: E402
from examples.recall.task import EOS, IDS, Prompt  # noqa: E402
from serving_benchmarks.results import result_file  # noqa: E402
from serving_benchmarks.run.isolated import Failed, Isolated  # noqa: E402
from serving_benchmarks.run.mtp_checkpoint import add_mtp_layer  # noqa: E402
from serving_benchmarks.run.processes import signals_unwind, status_when  # noqa: E402
from serving_benchmarks.run.sessions import EngineSession, Generated, VllmSession  # noqa: E402

CACHE_BYTES = 1 << 28
"""32 contexts of 2000 tokens, in either format."""
ENOUGH = 0.99
"""Of the answers: that are right, and that are the same as another way's."""


@dataclass(frozen=True)
class Way:
    """How questions are answered."""

    engine: str = "vllm"
    cache: str = "fp8"
    eager: bool = False
    drafts: int = 0
    gpus: int = 1


WAYS = {
    "embedded": Way("embedded"),
    "embedded-bf16": Way("embedded", cache="bf16"),
    "vllm": Way(),
    "vllm-bf16": Way(cache="bf16"),
    "eager": Way(eager=True),
    "mtp-1": Way(drafts=1),
    "mtp-3": Way(drafts=3),
    "tp-2": Way(gpus=2),
    "tp-2-mtp-1": Way(gpus=2, drafts=1),
}


def start(way: Way, folder: Path, given: argparse.Namespace, log: Path) -> Isolated:
    """A process that answers in this way."""
    longest = given.tokens + given.new_tokens + 100
    if way.engine == "embedded":
        options = dict(kv_cache=way.cache, memory=CACHE_BYTES, max_model_len=longest)
        make, environment = EngineSession, {}
    else:
        options = dict(
            attention_backend=given.backend,
            kv_cache_dtype={"fp8": "fp8", "bf16": "auto"}[way.cache],
            tensor_parallel_size=way.gpus,
            eager=way.eager,
            drafts=way.drafts,
            max_model_len=longest,
            max_num_seqs=64,
            kv_cache_memory_bytes=CACHE_BYTES,
        )
        # by itself vLLM wants a NUMA node for each process on a CPU
        make, environment = VllmSession, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if way.gpus > 1 else {}
    options |= dict(folder=str(folder), dtype=given.dtype)
    return Isolated(make, options, log=log, environment=environment, seconds=given.start_seconds)


def answer_of(tokens: list[int]) -> list[int]:
    """Up to the end token."""
    return tokens[: tokens.index(IDS[EOS]) + 1] if IDS[EOS] in tokens else tokens


def compare(one: Generated, other: Generated) -> dict[str, Any]:
    """How far the tokens of one are those of the other."""
    pairs = list(zip(one.tokens, other.tokens, strict=True))
    first = [next((i for i, (a, b) in enumerate(zip(*pair, strict=False)) if a != b), None) for pair in pairs]
    apart = [margins[i] for margins, i in zip(other.margins, first, strict=True) if i is not None]
    return {
        "answers_equal": sum(answer_of(a) == answer_of(b) for a, b in pairs),
        "texts_equal": sum(i is None for i in first),
        "margins_where_they_part": sorted(apart),
    }


def ask(
    name: str, asked: list[Prompt], folder: Path, given: argparse.Namespace, logs: Path
) -> tuple[dict[str, Any], Generated | None]:
    """One way's entry of the result file and what it generated; `error` and nothing, if it failed."""
    way = WAYS[name]
    entry: dict[str, Any] = {"way": name, **asdict(way), "asked": len(asked)}
    texts = [prompt.context_tokens + prompt.question_tokens for prompt in asked]
    begin = time.perf_counter()
    try:
        with start(way, folder, given, logs / f"{name}.log") as process:
            entry["start_s"] = time.perf_counter() - begin
            generated = process.call(
                "generate", prompts=texts, new_tokens=given.new_tokens, logprobs=2, seconds=given.run_seconds
            )
    except Failed as failure:
        return {**entry, "error": str(failure)}, None
    right = sum(is_right(*pair) for pair in zip(asked, map(answer_of, generated.tokens), strict=True))
    entry |= {"error": None, "right": right, "tokens": generated.tokens}
    return {**entry, "drafted": generated.drafted, "accepted": generated.accepted}, generated


def line(entry: dict[str, Any]) -> str:
    """What there is to say about a way."""
    if entry["error"]:
        return f"{entry['way']}: FAILED: {entry['error']}"
    said = [f"{entry['right']} of {entry['asked']} right"]
    if "than" in entry:
        said.append(f"{entry['answers_equal']} answers the same as {entry['than']}'s")
        said.append(f"{entry['texts_equal']} the same in all {len(entry['tokens'][0])} tokens")
        if apart := entry["margins_where_they_part"]:
            said[-1] += f", others part where {statistics.median(apart):.3f} (median) to {max(apart):.3f} apart"
    if entry["drafted"]:
        said.append(f"{entry['accepted']} of {entry['drafted']} drafts accepted")
    return f"{entry['way']}: {'; '.join(said)}"


def is_good(entry: dict[str, Any]) -> bool:
    if entry["error"]:
        return False
    least = ENOUGH * entry["asked"]
    return entry["right"] >= least and entry.get("answers_equal", entry["asked"]) >= least


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each way; 1 if one failed or answered too few questions or others than the first. Whoever stops
    it gets the results of the ways before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=["embedded", "vllm", "mtp-1"], help="%(choices)s", metavar="WAY"
    )
    parser.add_argument("--backend", default="SPARSE_MLA", help="vLLM's attention backend")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="what models compute in")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the contexts, about")
    parser.add_argument("--questions", type=int, default=200, help="in all, 20 about each context")
    parser.add_argument("--new-tokens", type=int, default=24, help="that are generated for each question")
    parser.add_argument("--start-seconds", type=float, default=240, help="time limit for a start of vLLM")
    parser.add_argument("--run-seconds", type=float, default=240, help="time limit for the answers")
    parser.add_argument("--logs", type=Path, help="a folder for what the processes print")
    result_file.add_output(parser)
    given = parser.parse_args(arguments)
    result_file.require_writable(parser, given.output)
    console = Console(stderr=True)
    asked, entries = held_out(given.tokens, given.questions), []
    first: dict[str, tuple[str, Generated]] = {}
    status = 0
    with signals_unwind(), tempfile.TemporaryDirectory() as temporary:
        logs = given.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        drafting = Path(temporary) / "with-mtp-layer"
        if any(WAYS[name].drafts for name in given.ways):
            add_mtp_layer(CHECKPOINT, drafting)
        try:
            for name in track(given.ways, "asking", console=console, transient=True):
                entry, generated = ask(name, asked, drafting if WAYS[name].drafts else CHECKPOINT, given, logs)
                if generated is not None:
                    reference, its = first.setdefault(entry["cache"], (name, generated))
                    if reference != name:
                        entry |= {"than": reference, **compare(generated, its)}
                entries.append(entry)
                print(line(entry), flush=True)
        except (KeyboardInterrupt, SystemExit) as stopped:
            status = status_when(stopped)
    settings = {name: value for name, value in vars(given).items() if name not in ("output", "logs")}
    if entries:
        result_file.write(given.output, entries, console, benchmark="recall", settings=settings, cpus=os.cpu_count())
    return status or (0 if all(map(is_good, entries)) else 1)


if __name__ == "__main__":
    raise SystemExit(main())
