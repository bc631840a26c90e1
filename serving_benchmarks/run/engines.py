"""The engines that are measured, all with one face: requests are submitted, and each step says which have ended."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch

from serving_benchmarks.results.kernel_times import KernelTimes
from serving_benchmarks.run import vllm_options
from serving_benchmarks.run.compilations import Compilations, Compiled
from serving_benchmarks.run.counters import Counters

EMBEDDED_DTYPES = {None: torch.bfloat16, "auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
"""What --dtype may be for the embedded engine."""

Kernels = tuple[str, int, list[tuple[str, int, float]]]
"""The device, how many steps were seen there, and what KernelTimes found."""


@dataclass(frozen=True)
class Ended:
    """A request that has got all its tokens."""

    id: str
    ttft: float | None
    """Seconds from when it was submitted to its first token; None if the engine doesn't say."""
    output_tokens: int
    cached_tokens: int | None
    """Of the prompt, that were found in the cache."""


class MeasuredEngine(Protocol):
    """What a benchmark asks of an engine."""

    cache_tokens: int | None
    """That fit into the cache."""

    def submit(self, id: str, prompt: Sequence[int], new_tokens: int, *, streamed: bool = False) -> None:
        """Takes up a request. Greedy, and it doesn't end early. If it is streamed, `decoding` counts it."""

    def step(self) -> list[Ended]:
        """Goes on a little."""

    def decoding(self) -> int:
        """Streamed requests that have a token and have not ended."""

    def abort_all(self) -> None:
        """Gives up what has not ended."""

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""

    def usage(self) -> float | None:
        """The part of the cache that is held now."""

    def counters(self) -> Counters: ...

    def compiled(self) -> Compiled | None:
        """Kernels that Triton has compiled since the last call; None if that is not known. Where several processes
        share the work, those of the one that it took longest."""

    def start_profile(self) -> None: ...

    def stop_profile(self) -> Kernels: ...

    def torch_peak_bytes(self) -> int | None:
        """The most memory that torch has held on a GPU."""


def start(engine: str, backend: str, model: str, settings: dict[str, Any]) -> MeasuredEngine:
    """Loads a model.

    Args:
        engine: vllm or embedded.
        backend: vLLM's name of an attention backend.
        model: a folder, or a name that vLLM finds.
        settings: as `vllm_options.settings` has them.
    """
    if engine == "embedded":
        return EmbeddedEngine(model, settings)
    return VllmEngine(model, backend, settings)


class EmbeddedEngine:
    """`mla_backend.engine`."""

    def __init__(self, model: str, settings: dict[str, Any]):
        from mla_backend.engine import Engine

        given = {"max_model_len": settings["max_model_len"], "memory": settings["kv_cache_memory_bytes"]}
        if settings["max_num_seqs"] is not None:
            given["most_running"] = settings["max_num_seqs"]
            given["tokens_a_step"] = max(2048, 2 * settings["max_num_seqs"])
        if settings["max_num_batched_tokens"] is not None:
            given["tokens_a_step"] = settings["max_num_batched_tokens"]
        self._engine = Engine(
            model,
            dtype=EMBEDDED_DTYPES[settings["dtype"]],
            kv_cache="fp8" if settings["kv_cache_dtype"].startswith("fp8") else "bf16",
            **given,
        )
        self._engine.tokenizer = None  # nobody reads the text, from vLLM as little
        manager = self._engine.manager
        self.cache_tokens = manager.statistics().blocks * manager.block_size
        # Prefixes are found under a salt only, so that another one makes the cache forget them.
        self._salts = count()
        self._salt = str(next(self._salts))
        self._shares = settings["prefix_caching"] is not False
        new_sequence = manager.sequence

        def salted(tokens):
            if not self._shares:
                self.forget_prefixes()
            return new_sequence(tokens, salt=self._salt)

        manager.sequence = salted
        self._times: dict[str, tuple[float, float | None]] = {}
        """When an unended request was submitted, and got its first token."""
        self._tokens: dict[str, int] = {}
        self._steps = 0
        self._compilations = Compilations()

    def submit(self, id: str, prompt: Sequence[int], new_tokens: int, *, streamed: bool = False) -> None:
        from mla_backend.engine import SamplingParams

        self._times[id], self._tokens[id] = (time.perf_counter(), None), 0
        self._engine.add(list(prompt), SamplingParams(max_tokens=new_tokens, ignore_eos=True), id=id)

    def step(self) -> list[Ended]:
        ended = []
        self._steps += 1
        for update in self._engine.step():
            submitted, first = self._times[update.id]
            if first is None:
                first = time.perf_counter()
                self._times[update.id] = submitted, first
            self._tokens[update.id] += len(update.tokens)
            if update.finish_reason is not None:
                del self._times[update.id]
                ended.append(Ended(update.id, first - submitted, self._tokens.pop(update.id), update.cached_tokens))
        return ended

    def decoding(self) -> int:
        return sum(first is not None for _, first in self._times.values())

    def abort_all(self) -> None:
        for id in list(self._times):
            self._engine.abort(id)
        self._times.clear()
        self._tokens.clear()

    def forget_prefixes(self) -> None:
        self._salt = str(next(self._salts))

    def usage(self) -> float | None:
        return self._engine.status.cache.usage

    def counters(self) -> Counters:
        status = self._engine.status
        return Counters(status.preemptions, status.cache.asked_tokens, status.cache.hit_tokens)

    def compiled(self) -> Compiled | None:
        return self._compilations.take()

    def start_profile(self) -> None:
        self._steps, self._kernels = 0, KernelTimes()
        self._kernels.start()

    def stop_profile(self) -> Kernels:
        return self._kernels.device, self._steps, self._kernels.stop()

    def torch_peak_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


class VllmEngine:
    """`vllm.LLM`, step by step."""

    def __init__(self, model: str, backend: str, settings: dict[str, Any]):
        from vllm import LLM

        self._llm = LLM(
            model,
            **{
                "skip_tokenizer_init": True,
                "disable_log_stats": False,  # or it says nothing of first tokens and of the cache
                "worker_extension_cls": "serving_benchmarks.run.worker_extension.MeasuredWorker",
                **vllm_options.arguments(settings, backend),
            },
        )
        self._engine = self._llm.llm_engine
        cache = self._engine.vllm_config.cache_config
        self.cache_tokens = cache.num_gpu_blocks * cache.block_size if cache.num_gpu_blocks else None
        self._names: dict[str, str] = {}
        """vLLM's own id of each request that has not ended."""
        self._begun: set[str] = set()

    def submit(self, id: str, prompt: Sequence[int], new_tokens: int, *, streamed: bool = False) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY,
        )
        self._names[id] = self._engine.add_request(id, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> list[Ended]:
        ended = []
        for output in self._engine.step():
            if not output.finished:
                self._begun.add(output.request_id)
                continue
            self._names.pop(output.request_id)
            self._begun.discard(output.request_id)
            ttft = output.metrics.first_token_latency if output.metrics else None
            tokens = len(output.outputs[0].token_ids)
            ended.append(Ended(output.request_id, ttft, tokens, output.num_cached_tokens))
        return ended

    def decoding(self) -> int:
        return len(self._begun)

    def abort_all(self) -> None:
        self._engine.abort_request(list(self._names.values()), internal=True)
        self._names.clear()
        self._begun.clear()

    def forget_prefixes(self) -> None:
        self._llm.reset_prefix_cache()

    def usage(self) -> float | None:
        return self._metric("vllm:kv_cache_usage_perc")

    def counters(self) -> Counters:
        names = "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"
        return Counters(*(None if (value := self._metric(name)) is None else int(value) for name in names))

    def compiled(self) -> Compiled | None:
        known = [kernels for kernels in self._of_workers("measured_compiled") if kernels is not None]
        return max(known, key=lambda kernels: sum(seconds for _, seconds in kernels), default=None)

    def start_profile(self) -> None:
        self._llm.collective_rpc("measured_start")

    def stop_profile(self) -> Kernels:
        # With tensor parallelism workers run the same kernels. Those that come first to where they meet wait there, in
        # kernels of theirs: what the last one's took is least, and has the least waiting in it.
        found = self._of_workers("measured_stop")
        device, steps, kernels = min(found, key=lambda worker: sum(time for _, _, time in worker[2]))
        return device, steps, [tuple(kernel) for kernel in kernels]

    def torch_peak_bytes(self) -> int | None:
        return max((bytes for bytes in self._of_workers("measured_memory") if bytes is not None), default=None)

    def _of_workers(self, method: str) -> list[Any]:
        """What a method of `MeasuredWorker` answers in each of vLLM's workers."""
        return [json.loads(answer) for answer in self._llm.collective_rpc(method)]

    def _metric(self, name: str) -> float | None:
        values = [metric.value for metric in self._llm.get_metrics() if metric.name == name]
        return sum(values) if values else None
