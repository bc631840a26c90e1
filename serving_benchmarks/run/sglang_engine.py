"""SGLang as the engine that is measured, with the methods of vLLM's in engine.py that rounds need."""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from serving_benchmarks.options import Refused
from serving_benchmarks.run.engine import Ended

NAMES = {"dtype": "dtype", "kv_cache_dtype": "kv_cache_dtype", "tensor_parallel_size": "tp_size"}
NAMES |= {"max_num_seqs": "max_running_requests", "max_num_batched_tokens": "chunked_prefill_size"}
NAMES |= {"gpu_memory_utilization": "mem_fraction_static"}
"""SGLang's names of settings. `arguments` makes others from several."""
LACKS = ("kv_cache_memory_bytes", "profile")  # options that are for vLLM alone
ROOM = 3  # tokens that SGLang keeps free after a request's last
NEVER = 1 << 30  # tokens between messages after the first: a message for every token would slow SGLang down
DEFAULTS = {"skip_tokenizer_init": True, "stream_interval": NEVER, "grammar_backend": "none"}
GAPS = "percentiles over requests of each request's mean"
"""What stands for the seconds between tokens, as SGLang doesn't tell of every token."""


def refuse(options: argparse.Namespace) -> None:
    """Raises Refused for options that are for vLLM alone, and for names of its backends."""
    if lacking := [name.replace("_", "-") for name in LACKS if getattr(options, name)]:
        raise Refused(f"--{lacking[0]} is for vLLM alone; --engine-args passes any setting of SGLang's")
    if wrong := [name for name in options.backend if not name.islower()]:
        raise Refused(f"--backend must have SGLang's names, such as sparse_mla,dsa; got {wrong[0]}")


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `sglang.Engine` for the settings that are given."""
    made = {theirs: given[ours] for ours, theirs in NAMES.items() if ours in given}
    drafts = given.get("drafts", 0)
    made["context_length"] = given["max_model_len"] + ROOM + drafts
    if given["no_compile"]:
        made["cuda_graph_backend_prefill"] = "disabled"
    if "prefix_caching" in given:
        made["disable_radix_cache"] = not given["prefix_caching"]
    if drafts:
        made |= {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1, "speculative_num_steps": drafts}
        made["speculative_num_draft_tokens"] = drafts + 1
    return made


class SglangEngine:
    """`sglang.Engine`. It tells when requests have their first token and when they end, and nothing of its steps."""

    sees_steps = False

    def __init__(self, model: str, arguments: dict[str, Any]):
        import sglang

        self._engine = sglang.Engine(model_path=model, **{**DEFAULTS, **arguments})
        self.cache_tokens = self._engine.get_server_info()["max_total_num_tokens"]
        self._keeps_prefixes = not arguments.get("disable_radix_cache")
        self._running: set[asyncio.Task[Ended]] = set()

    def submit(self, id: str, prompt: Sequence[int], new_tokens: int) -> None:
        """Adds a request: greedy, and with exactly so many new tokens."""
        request = self._ended(id, list(prompt), new_tokens, time.perf_counter())
        self._running.add(self._engine.loop.create_task(request))

    async def _ended(self, id: str, prompt: list[int], new_tokens: int, begin: float) -> Ended:
        """A request, once it has ended."""
        params, ttft = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}, None
        async for chunk in await self._engine.async_generate(input_ids=prompt, sampling_params=params, stream=True):
            ttft, about = ttft or time.perf_counter() - begin, chunk["meta_info"]
        if about["finish_reason"]["type"] == "abort":
            raise RuntimeError(f"SGLang gave request {id} up: {about['finish_reason'].get('message')}")
        return Ended(id, ttft, about["completion_tokens"])

    def step(self) -> list[Ended]:
        """Waits until a request ends."""
        first = asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        done, self._running = self._engine.loop.run_until_complete(first)
        return [request.result() for request in done]

    def host_rows(self) -> None:
        """Not known."""

    def forget_prefixes(self) -> None:
        """Empties the prefix cache. SGLang refuses as long as its last step ends."""
        while self._keeps_prefixes and not self._engine.flush_cache().success:
            time.sleep(0.01)
