"""vLLM as the engine that is measured: requests are submitted, and each step says which have ended."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving_benchmarks.results.kernel_times import KernelTimes


@dataclass(frozen=True)
class Ended:
    """A request that has all its tokens."""

    id: str
    ttft: float | None  # seconds from its submission to its first token; None if the engine doesn't say
    output_tokens: int


class MeasuredWorker:
    """What is measured inside of vLLM's workers, maybe in other processes. vLLM mixes it into its worker class
    (`worker_extension_cls`) and calls methods by name. They answer in JSON, which all ways between processes carry."""

    def measured_start(self) -> None:
        """Starts to count kernels and steps. Only workers know their steps, as they run ahead of the engine."""
        run, self._measured_steps = self.execute_model, 0

        def counted(scheduled, *more, **named):
            self._measured_steps += scheduled.total_num_scheduled_tokens > 0
            return run(scheduled, *more, **named)

        self.execute_model = counted  # vLLM refuses extensions that override a method of the worker
        self._measured_kernels = KernelTimes()
        self._measured_kernels.start()

    def measured_stop(self) -> str:
        """Since `measured_start`: the device, steps, kernels (name, calls, microseconds), calls of the CUDA runtime."""
        kernels = self._measured_kernels.stop()
        del self.execute_model
        device, calls = self._measured_kernels.device, self._measured_kernels.runtime_calls
        return json.dumps({"device": device, "steps": self._measured_steps, "kernels": kernels, "calls": calls})

    def measured_host_rows(self) -> str:
        """Since the last call: how many selected rows decode found in the hot buffers of HiSparse (`hot`), and how many
        came from the host. It does not count rows of whole pages on the GPU. None without HiSparse."""
        layers = self.vllm_config.compilation_config.static_forward_context.values()
        caches = filter(None, (getattr(layer, "hisparse_cache", None) for layer in layers))
        groups = [cache.runtime.index_group for cache in caches if cache.runtime.is_group_leader]
        if not groups:
            return "null"
        from vllm.distributed.kv_transfer.kv_connector.v1.hisparse import worker

        worker._METRICS_INTERVAL = 1 << 40  # vLLM empties the counters every so many steps
        hot, misses = map(sum, zip(*(group.swap_stats.tolist() for group in groups), strict=True))
        for group in groups:
            group.swap_stats.zero_()
        return json.dumps({"hot": hot, "from_host": misses, "groups": len(groups)})


MEASURED = {"skip_tokenizer_init": True, "worker_extension_cls": f"{MeasuredWorker.__module__}.MeasuredWorker"}
MEASURED["disable_log_stats"] = False  # without its stats it tells nothing of first tokens and of the cache
"""Arguments of each `vllm.LLM` here, unless others are given."""


class VllmEngine:
    """`vllm.LLM`, step by step."""

    sees_steps = True  # each `step` is one of the model

    def __init__(self, model: str, arguments: dict[str, Any]):
        from vllm import LLM

        self._llm = LLM(model, **{**MEASURED, **arguments})
        self._engine = self._llm.llm_engine
        cache = self._engine.vllm_config.cache_config
        shared = arguments.get("decode_context_parallel_size", 1)
        blocks = None if "kv_transfer_config" in arguments else cache.num_gpu_blocks
        self.cache_tokens = blocks * cache.block_size * shared if blocks else None
        """Tokens that fit into the cache. HiSparse has no such number: requests need more or less of it."""
        self._names: dict[str, str] = {}  # vLLM's own id of each request that has not ended
        self.decoding: set[str] = set()  # streamed requests that have a token and have not ended

    def submit(self, id: str, prompt: Sequence[int], new_tokens: int, *, streamed: bool = False) -> None:
        """Adds a request: greedy, and with exactly so many new tokens. `decoding` counts streamed ones only."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if streamed else RequestOutputKind.FINAL_ONLY
        how = {"ignore_eos": True, "detokenize": False, "output_kind": kind}
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, **how)
        self._names[id] = self._engine.add_request(id, {"prompt_token_ids": list(prompt)}, params)

    def step(self) -> list[Ended]:
        """Waits for one step of the model."""
        ended = []
        for output in self._engine.step():
            if not output.finished:
                self.decoding.add(output.request_id)
                continue
            self._names.pop(output.request_id)
            self.decoding.discard(output.request_id)
            ttft = output.metrics.first_token_latency if output.metrics else None
            ended.append(Ended(output.request_id, ttft, len(output.outputs[0].token_ids)))
        return ended

    def abort_all(self) -> None:
        """Gives up all requests that have not ended."""
        self._engine.abort_request(list(self._names.values()), internal=True)
        self._names.clear()
        self.decoding.clear()

    def forget_prefixes(self) -> None:
        """Empties the prefix cache."""
        self._llm.reset_prefix_cache()

    def host_rows(self) -> dict[str, int] | None:
        """What `measured_host_rows` says of one worker."""
        return json.loads(self._llm.collective_rpc("measured_host_rows")[0])

    def start_profile(self) -> None:
        self._llm.collective_rpc("measured_start")

    def stop_profile(self) -> dict[str, Any]:
        """What `measured_stop` says of one worker."""
        # With tensor parallelism all workers run the same kernels. Those that reach a collective early wait in its
        # kernel. The worker whose kernels took least waited least.
        found = map(json.loads, self._llm.collective_rpc("measured_stop"))
        return min(found, key=lambda profile: sum(time for _, _, time in profile["kernels"]))
