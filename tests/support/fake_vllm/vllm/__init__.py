"""Takes vLLM's place in a worker: each step gives every request a token. The attention backend says what goes wrong."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace as Object


class SamplingParams:
    def __init__(self, **given):
        self.__dict__ |= given


class LLM:
    def __init__(self, model, **arguments):
        self.backend = arguments["attention_backend"]
        if self.backend == "REFUSED":
            raise ValueError("no such backend")
        self.llm_engine, self.arguments = Engine(self.backend), arguments

    def reset_prefix_cache(self):
        pass

    def get_metrics(self):
        names = "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_draft_tokens"
        return [Object(name=f"vllm:{name}", value=0) for name in names]

    def collective_rpc(self, method):
        profile = {"device": "cuda", "steps": 8, "kernels": [["attention_kernel", 16, 100.0], ["gemm", 8, 300.0]]}
        profile["calls"] = {"cudaGraphLaunch": 8}
        return [json.dumps(profile if method == "measured_stop" else None)] * self.arguments["tensor_parallel_size"]

    def generate(self, prompts, params, use_tqdm):
        """Each token is the last one and 1; a backend that is called NOISY is less sure of it."""
        logprob = -0.9 if self.backend == "NOISY" else -0.1
        found = []
        for prompt in prompts:
            first = prompt["prompt_token_ids"][-1] + 1
            tokens = list(range(first, first + params.max_tokens))
            steps = [{token: Object(logprob=logprob), token + 1: Object(logprob=-2.0)} for token in tokens]
            found.append(Object(outputs=[Object(token_ids=tokens, logprobs=steps)]))
        return found


class Engine:
    vllm_config = Object(cache_config=Object(num_gpu_blocks=10, block_size=64))

    def __init__(self, backend):
        self.backend, self.left, self.given, self.steps = backend, {}, {}, 0

    def add_request(self, id, prompt, params):
        self.left[id] = [0, params, time.perf_counter(), None]
        return f"{id}-internal"

    def abort_request(self, ids, internal):
        self.left.clear()

    def step(self):
        busy = Path(os.environ["FAKE_VLLM"]) / "busy"
        with busy.open("x"):  # fails if another backend works at the same time
            time.sleep(0.002)
        busy.unlink()
        self.steps += 1
        if self.backend == "BREAKS" and self.steps > 20:
            raise MemoryError("out of everything")
        outputs = []
        for id, request in list(self.left.items()):
            request[0] += 1
            request[3] = request[3] or time.perf_counter() - request[2]
            done = request[0] == request[1].max_tokens
            if done:
                del self.left[id]
            if done or request[1].output_kind == "delta":
                found = {"metrics": Object(first_token_latency=request[3]), "num_cached_tokens": 0}
                found["outputs"] = [Object(token_ids=[1] * request[0])]
                outputs.append(Object(request_id=id, finished=done, **found))
        return outputs
