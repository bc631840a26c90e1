"""vLLM and the embedded engine, generating greedily: the same questions to both, and the same answers back."""

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SETTLED = 8
"""Tokens that all requests of a batch must have before the time of a step counts."""
ON_A_GPU = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs without compiling the model first, which takes minutes and is no matter of attention."""


@dataclass
class Generated:
    """What came of a batch of prompts. A list has an entry for each prompt, unless it says otherwise."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    """Of those tokens, where they were asked for."""
    margins: list[list[float]] = field(default_factory=list)
    """How much less likely the second likeliest token was: differences of logprobs, where they were asked for."""
    prefill_s: float = 0.0
    """Until every prompt had a token."""
    step_s: list[float] = field(default_factory=list)
    """Seconds from step to step, once all requests decode and until the first is done."""
    drafted: int = 0
    accepted: int = 0
    """Tokens that a draft proposed, and those of them that were right."""


class VllmSession:
    """A vllm.LLM.

    Args:
        folder: a checkpoint.
        eager: without CUDA graphs.
        drafts: tokens that the checkpoint's MTP layer proposes in a step.
        options: more, as for vllm.LLM.
    """

    def __init__(self, folder: str, *, eager: bool = False, drafts: int = 0, **options: Any):
        if options.get("tensor_parallel_size", 1) == 1:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that the profiler sees the kernels
        from vllm import LLM
        from vllm.platforms import current_platform

        # counting takes time in every step, and drafts alone are counted
        given: dict[str, Any] = dict(skip_tokenizer_init=True, disable_log_stats=not drafts, enforce_eager=eager)
        if current_platform.is_cuda():
            given |= dict(gpu_memory_utilization=0.3, compilation_config={"mode": 0} if eager else ON_A_GPU)
        if drafts:
            given["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
        self.llm = LLM(folder, **{**given, **options})
        self.engine, self.batches, self.drafts = self.llm.llm_engine, 0, drafts

    def generate(
        self, prompts: list[list[int]], new_tokens: int, *, logprobs: int | None = None, ignore_eos: bool = True
    ) -> Generated:
        """All prompts at once. logprobs: 0 for those of the tokens, 2 for their margins besides."""
        before = self._drafted()
        found = self._run(prompts, new_tokens, logprobs, ignore_eos)
        found.drafted, found.accepted = (now - was for now, was in zip(self._drafted(), before, strict=True))
        return found

    def profile(self, prompts: list[list[int]], steps: int) -> dict[str, Any]:
        """Kernels and calls of the CUDA runtime in decode steps: {"kernels": [[name, calls a step, us a step]], longest
        first, "calls": {name: calls a step}}."""
        import torch

        activity = torch.profiler.ProfilerActivity
        profile = torch.profiler.profile(activities=[activity.CPU, activity.CUDA])
        seen = 0

        def at_step(number: int) -> None:
            nonlocal seen
            if number == 0:
                torch.cuda.synchronize()
                profile.start()
            elif number <= steps:
                seen = number
                if number == steps:
                    torch.cuda.synchronize()
                    profile.stop()

        # drafts that are right bring more than a token a step
        self._run(prompts, SETTLED + (steps + 4) * (1 + self.drafts), None, True, at_step)
        if seen < steps:
            raise RuntimeError(f"prompts must be few enough to decode together for {steps} steps; {seen} were seen")
        kernels, times, calls = Counter(), Counter(), Counter()
        for event in profile.key_averages():
            if str(event.device_type).endswith("CUDA"):
                kernels[event.key] += event.count
                times[event.key] += event.self_device_time_total
            elif event.key.startswith(("cuda", "cuLaunch")):
                calls[event.key] += event.count
        return {
            "kernels": [[name, kernels[name] / steps, time_us / steps] for name, time_us in times.most_common()],
            "calls": {name: count / steps for name, count in calls.most_common()},
        }

    def close(self) -> None:
        self.engine.engine_core.shutdown()

    def _run(
        self,
        prompts: list[list[int]],
        new_tokens: int,
        logprobs: int | None,
        ignore_eos: bool,
        at_step: Callable[[int], None] = lambda number: None,
    ) -> Generated:
        """at_step: called with 0, 1, ... when all requests decode and a step is over."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=new_tokens,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        count = len(prompts)
        found = Generated(*([[] for _ in range(count)] for _ in range(3)))
        self.batches += 1
        begin = time.perf_counter()
        for i, prompt in enumerate(prompts):
            self.engine.add_request(f"{self.batches}-{i}", {"prompt_token_ids": prompt}, sampling)
        settled, ended, last, number = False, False, 0.0, 0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                row, new = int(output.request_id.split("-")[1]), output.outputs[0]
                found.tokens[row] += new.token_ids
                ended |= output.finished
                for token, step in zip(new.token_ids, new.logprobs or (), strict=False):
                    found.logprobs[row].append(step[token].logprob)
                    if logprobs and logprobs > 1:
                        best = sorted((one.logprob for one in step.values()), reverse=True)
                        found.margins[row].append(best[0] - best[1])
            if not found.prefill_s and all(found.tokens):
                found.prefill_s = now - begin
            if settled and not ended and outputs:
                found.step_s.append(now - last)
            if not settled and min(map(len, found.tokens)) >= SETTLED:
                settled = True
            if settled and outputs:
                at_step(number)
                number, last = number + 1, now
        return found

    def _drafted(self) -> tuple[int, int]:
        """Tokens that were drafted and accepted so far."""
        if not self.drafts:
            return 0, 0
        totals = {metric.name: getattr(metric, "value", 0) for metric in self.llm.get_metrics()}
        names = ("num_draft_tokens", "num_accepted_tokens")
        return tuple(int(totals.get(f"vllm:spec_decode_{name}", 0)) for name in names)


class EngineSession:
    """The embedded engine.

    Args:
        folder: a checkpoint.
        options: as for mla_backend.engine.Engine; dtype by its name.
    """

    def __init__(self, folder: str, *, dtype: str = "bfloat16", **options: Any):
        import torch

        from mla_backend.engine import Engine

        self.engine = Engine(folder, dtype=getattr(torch, dtype), **options)

    def generate(
        self, prompts: list[list[int]], new_tokens: int, *, logprobs: int | None = None, ignore_eos: bool = True
    ) -> Generated:
        """As that of vLLM; nothing is timed."""
        from mla_backend.engine import SamplingParams

        params = SamplingParams(max_tokens=new_tokens, ignore_eos=ignore_eos, logprobs=logprobs)
        found = Generated([], [], [])
        for result in self.engine.generate(prompts, params):
            steps = result.completions[0].logprobs
            found.tokens.append(list(result.tokens))
            found.logprobs.append([step.logprob for step in steps])
            if logprobs and logprobs > 1:
                found.margins.append([step.top[0][1] - step.top[1][1] for step in steps])
        return found
