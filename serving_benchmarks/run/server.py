"""A server that speaks OpenAI's protocol as vLLM does: start it, wait for it, ask for its metrics, stop it."""

import contextlib
import http.client
import json
import math
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving_benchmarks.run.engine import COUNTERS, Counters
from serving_benchmarks.run.processes import SUPERVISOR_SECONDS, Supervised, why_it_ended
from serving_benchmarks.run.workloads import Workload

POLL_SECONDS = 0.5
READY_SECONDS = 1800.0
"""How long a server may take to start: a large model is loaded, compiled and captured."""
START_TOLD_SECONDS = 60.0
"""How often it is told how far a start is: some compile for minutes."""
ANSWER_SECONDS = 10
WATCH_SECONDS = 10.0
"""How often a server is asked what it has done while a client runs: more often would take its time."""
TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
"""Metrics that grow while a server works."""
MOST_OF_AN_ANSWER = 200
"""Characters shown of why a request was refused, or of what a server that starts printed last."""


class ServerFailed(Exception):
    """A server ended, was not ready in time, or is stuck. The text says why."""


class Server:
    """A server that runs. It is stuck if nothing comes from it for `limit` seconds."""

    def __init__(self, process: Supervised, port: int, start_seconds: float, limit: float):
        self.process, self.port, self.start_seconds, self.limit = process, port, start_seconds, limit

    def metrics(self) -> str:
        """Its metrics as a Prometheus client writes them; empty if it doesn't answer."""
        return _answer(self.port, "metrics") or ""

    def counters(self) -> Counters:
        metrics = parse_metrics(self.metrics())
        return [metrics.get(f"{name}_total") for name in COUNTERS]

    def cache_tokens(self, context_parallel: int) -> int | None:
        """Tokens that fit into its caches, of which so many share each request; None if it doesn't say."""
        found = re.search(r"^vllm:cache_config_info\{(.*)\}", self.metrics(), re.MULTILINE)
        sizes = dict(re.findall(r'(\w+)="(\d+)"', found[1])) if found else {}
        blocks, size = (int(sizes.get(name, 0)) for name in ("num_gpu_blocks", "block_size"))
        return blocks * size * context_parallel or None

    def complete(self, model: str, requests: Workload, rank: int | None = None) -> list[list[int]]:
        """Sends requests all at once and waits for their tokens, which it returns. ServerFailed if one isn't answered.
        `rank`: of data parallelism, that is to answer; by default any."""
        headers = {"Content-Type": "application/json"} | ({} if rank is None else {"X-data-parallel-rank": str(rank)})

        def ask(prompt: Sequence[int], tokens: int) -> list[int]:
            wanted = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
            wanted = json.dumps({**wanted, "return_token_ids": True}).encode()
            request = urllib.request.Request(_url(self.port, "v1/completions"), wanted, headers)
            try:
                with urllib.request.urlopen(request, timeout=self.limit) as answer:
                    return json.load(answer)["choices"][0]["token_ids"]
            except urllib.error.HTTPError as refused:
                self.require_healthy()
                with contextlib.suppress(OSError, http.client.HTTPException):
                    refused.msg += f" {refused.read().decode(errors='replace')[:MOST_OF_AN_ANSWER]}"
                raise ServerFailed(f"a request was refused: {refused}") from None

        pool = ThreadPoolExecutor(len(requests))
        try:
            return list(pool.map(ask, requests.prompts, requests.output_lens))
        except (OSError, http.client.HTTPException, ValueError, LookupError, RuntimeError) as error:  # no more threads
            self.require_healthy()
            raise ServerFailed(f"a request was not answered: {error}") from None
        finally:  # don't wait for answers if this command is stopped: they end with the server
            pool.shutdown(wait=False, cancel_futures=True)

    def wait_for(self, client: Supervised) -> int:
        """Waits until a client has ended, and returns its exit status. ServerFailed if the server ends, is stuck, or
        has nothing to do for so long that the client must be."""
        seen, end = -1.0, math.inf
        while (status := client.status()) is None:
            self.require_running()
            metrics = parse_metrics(self.metrics())
            if (tokens := sum(metrics.get(name, 0.0) for name in TOKENS)) > seen:
                seen, end = tokens, time.monotonic() + self.limit
            elif time.monotonic() > end:
                waiting = sum(metrics.get(f"vllm:num_requests_{state}", 0.0) for state in ("running", "waiting"))
                why = f"it has {waiting:.0f} requests" if waiting else "it has no request, but the client has not ended"
                raise ServerFailed(f"no token for {self.limit:g} s: {why if metrics else 'it does not answer'}")
            with contextlib.suppress(TimeoutError):
                client.wait(min(WATCH_SECONDS, self.limit / 4))
        self.require_healthy()
        return status

    def require_healthy(self) -> None:
        """ServerFailed if it has ended, is about to, or says that it is not well."""
        if _answer(self.port, "health") is None:
            # A server that has ended counts as running until all that it has started has ended, too.
            with contextlib.suppress(TimeoutError):
                self.process.wait(SUPERVISOR_SECONDS)
            self.require_running()
            raise ServerFailed("the server runs, but is not healthy")

    def require_running(self, what: str = "the server ended") -> None:
        """ServerFailed if it has ended, with what has happened and why."""
        if (status := self.process.status()) is not None:
            raise ServerFailed(f"{what}: {why_it_ended(status, self.process.says())}")


def parse_metrics(text: str) -> dict[str, float]:
    """Sums by name of what a Prometheus client writes."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([\w:]+)(?:\{.*\})? ([-+.\deE]+|[+-]?Inf|NaN)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found


@contextlib.contextmanager
def serving(
    command: Callable[[int], Sequence[str]], log: Path, limit: float, say: Callable[[str], None]
) -> Iterator[Server]:
    """A server for as long as the block lasts. ServerFailed if it ends, or takes too long, before it is healthy.

    Args:
        command: the words that start it at a port.
        log: the file for what it prints.
        limit: seconds without an answer after which it is stuck, once it is healthy.
        say: tells the user, while it starts, what it printed last.
    """
    with socket.socket() as some:  # finds a free port
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    begin = told = time.monotonic()
    with Supervised(command(port), log) as process:
        while _answer(port, "health") is None:
            Server(process, port, 0, limit).require_running("the server ended before it was ready")
            if time.monotonic() - begin > READY_SECONDS:
                raise ServerFailed(f"the server was not ready after {READY_SECONDS:g} s")
            if time.monotonic() - told > START_TOLD_SECONDS:
                told = time.monotonic()
                *_, last = ["nothing", *filter(str.strip, process.says().splitlines())]
                say(f"{told - begin:.0f} s; it printed last: {last.strip()[:MOST_OF_AN_ANSWER]}")
            time.sleep(POLL_SECONDS)
        yield Server(process, port, time.monotonic() - begin, limit)


def _answer(port: int, path: str) -> str | None:
    """What it answers; None if it doesn't, or says that it is not well."""
    try:
        with urllib.request.urlopen(_url(port, path), timeout=ANSWER_SECONDS) as answer:
            return answer.read().decode()
    except (OSError, http.client.HTTPException):
        return None


def _url(port: int, path: str) -> str:
    return f"http://127.0.0.1:{port}/{path}"
