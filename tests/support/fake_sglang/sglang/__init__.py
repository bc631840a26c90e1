"""Takes SGLang's place in a worker: each step gives every request a token. The attention backend says what goes wrong.

As SGLang does, it sends the first token of a request and then every `stream_interval`, and refuses to empty its
prefix cache just after work.
"""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace as Object

STEP_SECONDS = 0.002


class Engine:
    def __init__(self, model_path, **arguments):
        self.arguments, self.loop, self.worked = arguments, asyncio.new_event_loop(), False
        folder = Path(os.environ["FAKE_SGLANG"])
        (folder / f"{arguments['attention_backend']}.json").write_text(json.dumps({"model": model_path, **arguments}))
        self.flushed = folder / "flushed"
        if arguments["attention_backend"] == "refused":
            print("ValueError: no such backend\nRuntimeError: Rank 0 scheduler died during initialization", flush=True)
            raise SystemExit(1)

    def get_server_info(self):
        return {"max_total_num_tokens": 640}

    def flush_cache(self):
        idle, self.worked = not self.worked, False
        with self.flushed.open("a") as file:
            file.write(f"{idle}\n")
        return Object(success=idle)

    async def async_generate(self, input_ids, sampling_params, stream):
        assert stream and sampling_params["ignore_eos"] and sampling_params["temperature"] == 0
        return self._chunks(input_ids, sampling_params["max_new_tokens"])

    async def _chunks(self, prompt, new_tokens):
        backend, sent = self.arguments["attention_backend"], 0
        self.worked = True
        allowed = self.arguments["context_length"] - 2 - len(prompt)
        assert new_tokens <= allowed, "SGLang gives fewer tokens than this"
        for tokens in range(1, new_tokens + 1):
            await asyncio.sleep(STEP_SECONDS)
            if backend == "breaks" and tokens == 2:
                reason = {"type": "abort", "message": "out of everything"}
            elif tokens == new_tokens:
                reason = {"type": "length", "length": tokens}
            else:
                reason = None
            if reason or not sent or tokens - sent >= self.arguments["stream_interval"]:
                sent = tokens
                about = {"finish_reason": reason, "completion_tokens": tokens, "prompt_tokens": len(prompt)}
                yield {"output_ids": [7] * tokens, "meta_info": {**about, "cached_tokens": 5, "num_retractions": 1}}
            if reason and reason["type"] == "abort":
                return
