"""Serves a few layers of DeepSeek-V3.2's width with two or more of vLLM's attention backends, and compares them.

    python serving_benchmarks/run/compare_backends.py --heads 16 --output heads_16.json
    python serving_benchmarks/run/compare_backends.py --heads 64 --workloads 16x4096+192 2x65536+64/1 4x1000+4000/1
    python serving_benchmarks/run/compare_backends.py --candidates SPARSE_MLA SPARSE_MLA@2 SPARSE_MLA+1   # TP 2, MTP

Each candidate runs in a process of its own, all at the same time, and they take turns: a round is a turn of each. Their
first turns give the tokens that are compared, and aren't timed where there are more. The first candidate runs once more
with the prompts in the opposite order: what differs then is noise, and others may differ by as much. Weights are random
and of the magnitude of trained ones, so that attention matters.
"""

import argparse
import math
import random
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from serving_benchmarks.models import models  # noqa: E402
from serving_benchmarks.ops.timing import Timing  # noqa: E402
from serving_benchmarks.results import result_file  # noqa: E402
from serving_benchmarks.run.isolated import Failed, Isolated  # noqa: E402
from serving_benchmarks.run.processes import signals_unwind, status_when  # noqa: E402
from serving_benchmarks.run.sessions import Generated, VllmSession  # noqa: E402

LAYERS = 4
VOCABULARY = 32768
BLOCK_SIZE = 64
TOKEN_BYTES = 1536
"""Of a token's entries in the caches of a layer, and some to spare: 1152 + 132 in bf16."""
ROUNDING = 0.01
"""Of logprobs, about, that come from logits in bf16: where the order of prompts happens to make no noise."""
MOST_DRAFTS = 8
"""Positions past a request's last that drafts may take."""
PROFILED_STEPS = 16
KERNELS_KEPT = 40
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMalloc")
"""Calls of the CUDA runtime that wait for the device. vLLM itself waits for the tokens of a step."""


@dataclass(frozen=True)
class Workload:
    """Prompts of unequal lengths, up to `context`, and as many new tokens for each. `turns` of every candidate."""

    prompts: int
    context: int
    new_tokens: int
    turns: int = 4

    @classmethod
    def parse(cls, text: str) -> "Workload":
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)(?:/(\d+))?", text)
        if not found or "0" in found.groups():
            raise argparse.ArgumentTypeError(f"must be PROMPTSxCONTEXT+NEW or PROMPTSxCONTEXT+NEW/TURNS; got {text!r}")
        return cls(*(int(part) for part in found.groups() if part is not None))

    def __str__(self) -> str:
        return f"{self.prompts}x{self.context}+{self.new_tokens}"

    @property
    def longest(self) -> int:
        return self.context + self.new_tokens

    @property
    def cache_bytes(self) -> int:
        """That all prompts take at a time, with blocks to spare for drafts and for what vLLM keeps."""
        blocks = self.prompts * (-(-self.longest // BLOCK_SIZE) + 2) + 4
        return blocks * BLOCK_SIZE * TOKEN_BYTES * (LAYERS + 1)  # one may draft

    def texts(self) -> list[list[int]]:
        """Tokens of the prompts."""
        chance = random.Random(0)
        lengths = [max(1, int(self.context * chance.uniform(0.75, 1.0))) for _ in range(self.prompts)]
        lengths[0] = self.context
        return [[chance.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


def checkpoint_config(heads: int, max_positions: int, hidden_size: int, drafts: bool) -> dict[str, Any]:
    """`config.json` of a few layers of DeepSeek-V3.2 without experts, one of them to draft if wanted."""
    return models.config(
        "deepseek-v3.2",
        layers=LAYERS,
        heads=heads,
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=4096,
        first_k_dense_replace=LAYERS + drafts,
        max_position_embeddings=max_positions,
        num_nextn_predict_layers=int(drafts),
    )


@dataclass(frozen=True)
class Candidate:
    """A backend of vLLM, on this many GPUs with tensor parallelism, verifying so many drafted tokens in a step."""

    backend: str
    gpus: int = 1
    drafts: int = 0

    @classmethod
    def parse(cls, text: str) -> "Candidate":
        found = re.fullmatch(r"(\w+)(?:@([1-9]\d*))?(?:\+([1-9]\d*))?", text)
        if not found:
            raise argparse.ArgumentTypeError(f"must be BACKEND, with @GPUS and +DRAFTS if wanted; got {text!r}")
        return cls(found[1], int(found[2] or 1), int(found[3] or 0))

    def __str__(self) -> str:
        gpus, drafts = f"@{self.gpus}" * (self.gpus > 1), f"+{self.drafts}" * (self.drafts > 0)
        return f"{self.backend}{gpus}{drafts}"


def compare(one: Generated, other: Generated) -> dict[str, float]:
    """How far two runs agree. Up to the first token that differs, and for its probability, they saw the same."""
    same, differences, first = 0, [], []
    for a, b, logprobs_a, logprobs_b in zip(one.tokens, other.tokens, one.logprobs, other.logprobs, strict=True):
        until = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        same += until == len(a)
        pairs = zip(logprobs_a[: until + 1], logprobs_b[: until + 1], strict=True)
        differences += [abs(x - y) for x, y in pairs]
        first.append(until)
    return {
        "prompts_equal": same / len(one.tokens),
        "tokens_until_first_difference": statistics.mean(first),
        "logprob_difference_mean": statistics.mean(differences),
        "logprob_difference_max": max(differences),
    }


def is_within_noise(difference: dict[str, float], noise: dict[str, float]) -> bool:
    """Whether two candidates differ by no more than one does from itself, but for chance. Where tokens differ, the
    likeliest ones must have been about as likely."""
    return (
        difference["logprob_difference_mean"] <= 2 * noise["logprob_difference_mean"] + ROUNDING
        and difference["logprob_difference_max"] <= 3 * noise["logprob_difference_max"] + 10 * ROUNDING
    )


def summary(turns: list[Generated]) -> dict[str, Any]:
    """Tokens of the first turn, times of the others."""
    timed = turns[1:] or turns
    steps = [seconds * 1e3 for turn in timed for seconds in turn.step_s]
    prefill = [turn.prefill_s for turn in timed]
    return {
        "turns": len(timed),
        "prefill_s": statistics.median(prefill),
        "prefills_s": prefill,
        "decode_ms_a_step": Timing.of(steps).as_dict() if len(steps) > 1 else None,
        "decode_ms_a_step_by_turn": [statistics.median(turn.step_s) * 1e3 for turn in timed if turn.step_s],
        "finite": all(math.isfinite(value) for turn in turns for row in turn.logprobs for value in row),
        "logprobs_looked_at": sum(len(row) for turn in turns for row in turn.logprobs),
        "drafted": sum(turn.drafted for turn in turns),
        "accepted": sum(turn.accepted for turn in turns),
        "tokens": turns[0].tokens,
        "logprobs": turns[0].logprobs,
    }


class Comparison:
    """The candidates that could be started, and what they were found to do."""

    def __init__(self, given: argparse.Namespace, folder: Path, logs: Path, stack: ExitStack):
        self.given, self.folder, self.logs, self.stack = given, folder, logs, stack
        self.running: dict[Candidate, Isolated] = {}
        self.entries: list[dict[str, Any]] = []

    def start(self, candidate: Candidate) -> None:
        given, begin = self.given, time.perf_counter()
        options = dict(
            folder=str(self.folder),
            eager=given.eager,
            attention_backend=candidate.backend,
            kv_cache_dtype=given.kv_cache_dtype,
            tensor_parallel_size=candidate.gpus,
            drafts=candidate.drafts,
            max_model_len=max(workload.longest for workload in given.workloads) + MOST_DRAFTS,
            max_num_seqs=max(workload.prompts for workload in given.workloads),
            max_num_batched_tokens=given.batched_tokens,
            kv_cache_memory_bytes=max(workload.cache_bytes for workload in given.workloads),
            enable_prefix_caching=False,
        )
        entry: dict[str, Any] = {"candidate": str(candidate), **asdict(candidate), "workload": None}
        try:
            process = Isolated(
                VllmSession,
                options,
                log=self.logs / f"{candidate}.log",
                environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if candidate.gpus > 1 else {},
                seconds=given.start_seconds,
            )
        except Failed as failure:
            self._fail(entry, failure)
            return
        self.running[candidate] = self.stack.enter_context(process)
        print(f"{candidate}: started in {time.perf_counter() - begin:.0f} s", flush=True)

    def measure(self, workload: Workload, progress: Progress) -> None:
        """All turns of all candidates; adds an entry for each."""
        texts = workload.texts()
        turns: dict[Candidate, list[Generated]] = {candidate: [] for candidate in self.running}
        task = progress.add_task(str(workload), total=workload.turns * len(turns))
        for _ in range(workload.turns):
            for candidate in list(turns):
                try:
                    turns[candidate].append(self._generate(candidate, workload, texts))
                except Failed as failure:
                    self._fail({"candidate": str(candidate), **asdict(candidate), "workload": str(workload)}, failure)
                    del turns[candidate]
                progress.advance(task)
        progress.remove_task(task)
        reference = self.given.candidates[0]
        noise = None
        if reference in turns:
            try:
                back = self._generate(reference, workload, texts[::-1])
                back = Generated(tokens=back.tokens[::-1], logprobs=back.logprobs[::-1])
                noise = compare(turns[reference][0], back)
            except Failed as failure:
                self._fail({"candidate": f"{reference}, in another order", "workload": str(workload)}, failure)
        for candidate, found in turns.items():
            entry = {"candidate": str(candidate), **asdict(candidate), "workload": str(workload), **asdict(workload)}
            entry |= {**summary(found), "error": None}
            if candidate == reference:
                entry["differs_from_itself"] = noise
            elif noise is not None:
                entry["differs_from_first"] = compare(turns[reference][0], found[0])
                entry["within_noise"] = is_within_noise(entry["differs_from_first"], noise)
            self.entries.append(entry)
            print(line(entry), flush=True)

    def profile(self, workload: Workload) -> None:
        """Kernels of decode steps, added to the entries of a workload."""
        texts = workload.texts()
        for entry in self.entries:
            candidate = next((one for one in self.running if str(one) == entry["candidate"]), None)
            if candidate is None or candidate.gpus > 1 or entry["workload"] != str(workload):
                continue
            try:
                found = self.running[candidate].call(
                    "profile", prompts=texts, steps=PROFILED_STEPS, seconds=self.given.run_seconds
                )
            except Failed as failure:
                self._fail({"candidate": str(candidate), "workload": "profile"}, failure)
                continue
            waits = {name: found["calls"][name] for name in WAITS if name in found["calls"]}
            entry["profile"] = {**found, "kernels": found["kernels"][:KERNELS_KEPT], "waits": waits}
            launches = sum(count for name, count in found["calls"].items() if "Launch" in name)
            busy = sum(time_us for _, _, time_us in found["kernels"])
            said = ", ".join(f"{count:g} {name}" for name, count in waits.items()) or "no waits"
            print(
                f"{candidate} a decode step: {launches:g} launches, {busy / 1e3:.3f} ms of kernels, {said}", flush=True
            )

    def _generate(self, candidate: Candidate, workload: Workload, texts: list[list[int]]) -> Generated:
        return self.running[candidate].call(
            "generate", prompts=texts, new_tokens=workload.new_tokens, logprobs=0, seconds=self.given.run_seconds
        )

    def _fail(self, entry: dict[str, Any], failure: Failed) -> None:
        self.entries.append({**entry, "error": str(failure)})
        print(line(self.entries[-1]), flush=True)


def line(entry: dict[str, Any]) -> str:
    """What there is to say about a candidate and a workload."""
    name = f"{entry['candidate']} {entry['workload'] or ''}".strip()
    if entry["error"]:
        return f"{name}: FAILED: {entry['error']}"
    said = [f"prefill {entry['prefill_s']:.3f} s"]
    if step := entry["decode_ms_a_step"]:
        said.append(
            f"decode {step['median']:.3f} ({step['lower_quartile']:.3f} to {step['upper_quartile']:.3f}) ms a step"
        )
    said.append(f"{entry['logprobs_looked_at']} logprobs {'finite' if entry['finite'] else 'NOT ALL FINITE'}")
    difference = entry.get("differs_from_first") or entry.get("differs_from_itself")
    if difference:
        said.append(
            f"first difference from {'the first' if 'differs_from_first' in entry else 'itself'} after "
            f"{difference['tokens_until_first_difference']:.1f} tokens, logprobs until then "
            f"{difference['logprob_difference_mean']:.4f} apart, {difference['logprob_difference_max']:.4f} at most"
        )
    if entry["drafted"]:
        said.append(f"{entry['accepted']} of {entry['drafted']} drafts accepted")
    if not entry.get("within_noise", True):
        said.append("MORE THAN NOISE")
    return f"{name}: {'; '.join(said)}"


def main(arguments: list[str] | None = None) -> int:
    """Prints a line for each candidate and workload; 1 if anything failed, wasn't finite or differs by too much.
    Whoever stops it gets the results of the workloads before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--candidates",
        nargs="+",
        type=Candidate.parse,
        default=[Candidate("FLASHMLA_SPARSE"), Candidate("SPARSE_MLA")],
        metavar="BACKEND[@GPUS][+DRAFTS]",
        help="the first is what others are held to (default: FLASHMLA_SPARSE SPARSE_MLA)",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        type=Workload.parse,
        default=[Workload(16, 4096, 192)],
        metavar="PROMPTSxCONTEXT+NEW[/TURNS]",
        help="one after the other, 4 turns unless said otherwise (default: 16x4096+192)",
    )
    parser.add_argument("--heads", type=int, default=128, help="attention heads of the whole model")
    parser.add_argument("--hidden-size", type=int, default=7168, help="width of the model; less for a try on a CPU")
    parser.add_argument("--kv-cache-dtype", default="fp8", help="fp8 or auto, which is bf16")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="tokens in a step at most")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--profile", action="store_true", help="count kernels and waits of steps of the first workload")
    parser.add_argument("--start-seconds", type=float, default=300, help="time limit for a start of vLLM")
    parser.add_argument("--run-seconds", type=float, default=240, help="time limit for a turn")
    parser.add_argument("--checkpoint", type=Path, help="a folder; made where it has none (default: a temporary one)")
    parser.add_argument("--logs", type=Path, help="a folder for what the processes print")
    result_file.add_output(parser)
    given = parser.parse_args(arguments)
    result_file.require_writable(parser, given.output)
    longest = max(workload.longest for workload in given.workloads)
    console = Console(stderr=True)
    settings = {
        **{name: value for name, value in vars(given).items() if name not in ("output", "logs", "checkpoint")},
        "candidates": [str(candidate) for candidate in given.candidates],
        "workloads": [str(workload) for workload in given.workloads],
    }
    status = 0
    with (
        signals_unwind(),
        tempfile.TemporaryDirectory() as temporary,
        ExitStack() as stack,
        Progress(console=console, transient=True) as progress,
    ):
        logs, folder = given.logs or Path(temporary), given.checkpoint or Path(temporary) / "checkpoint"
        logs.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").is_file():
            drafts = any(candidate.drafts for candidate in given.candidates)
            models.write(
                folder,
                checkpoint_config(given.heads, longest + MOST_DRAFTS, given.hidden_size, drafts),
                tokenizer=False,
            )
        comparison = Comparison(given, folder, logs, stack)
        try:
            for candidate in given.candidates:
                comparison.start(candidate)
            for workload in given.workloads:
                comparison.measure(workload, progress)
            if given.profile:
                comparison.profile(given.workloads[0])
        except (KeyboardInterrupt, SystemExit) as stopped:
            status = status_when(stopped)
        entries = comparison.entries
        if entries:  # before the candidates are ended, which takes some seconds each
            result_file.write(given.output, entries, console, benchmark="vllm_backends", settings=settings)
    good = all(not e["error"] and e["finite"] and e.get("within_noise", True) for e in entries)
    return status or (0 if good else 1)


if __name__ == "__main__":
    raise SystemExit(main())
