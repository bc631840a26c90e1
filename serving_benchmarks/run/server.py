"""A server that speaks OpenAI's protocol as vLLM does: start it, wait for it, ask for its metrics, stop it."""

import contextlib
import http.client
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from serving_benchmarks.run.engine import Counters
from serving_benchmarks.run.processes import GRACE_SECONDS, SUPERVISOR_SECONDS, Supervised, why_it_ended
from serving_benchmarks.run.workloads import Workload

POLL_SECONDS = 0.5
READY_SECONDS = 1800.0
"""How long a server may take to start: a large model is loaded, compiled and captured."""
ANSWER_SECONDS = 10
COMPLETION_SECONDS = 600
"""For all tokens of a request: its first step may have to compile kernels."""
MOST_OF_AN_ANSWER = 200
"""Characters shown of why a request was refused."""


class ServerFailed(Exception):
    """A server ended, was not ready in time, or did not answer. The text says why."""


class Server:
    """A server that runs."""

    def __init__(self, process: Supervised, port: int, start_seconds: float):
        self.process, self.port, self.start_seconds = process, port, start_seconds

    def metrics(self) -> dict[str, float]:
        """Its metrics by name, summed over their labels; empty if it doesn't answer."""
        try:
            with urllib.request.urlopen(_url(self.port, "metrics"), timeout=ANSWER_SECONDS) as answer:
                return parse_metrics(answer.read().decode())
        except OSError:
            return {}

    def counters(self) -> Counters:
        metrics = self.metrics()
        return Counters.of(lambda name: metrics.get(f"{name}_total"))

    def complete(self, model: str, requests: Workload) -> None:
        """Sends requests all at once and waits for their tokens. ServerFailed if one isn't answered."""

        def ask(prompt: Sequence[int], tokens: int) -> None:
            wanted = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
            request = urllib.request.Request(
                _url(self.port, "v1/completions"), json.dumps(wanted).encode(), {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=COMPLETION_SECONDS) as answer:
                    answer.read()
            except urllib.error.HTTPError as refused:
                why = ""
                with contextlib.suppress(OSError, http.client.HTTPException):
                    why = refused.read().decode(errors="replace")[:MOST_OF_AN_ANSWER]
                raise ServerFailed(f"a request was refused: {refused} {why}".rstrip()) from None

        pool = ThreadPoolExecutor(len(requests))
        try:
            asked = [pool.submit(ask, *one) for one in zip(requests.prompts, requests.output_lens, strict=True)]
            for answer in as_completed(asked):
                answer.result()
        except (OSError, http.client.HTTPException, RuntimeError) as error:  # RuntimeError: no more threads
            # A server that has ended counts as running until all that it has started has ended, too.
            with contextlib.suppress(TimeoutError):
                self.process.wait(SUPERVISOR_SECONDS)
            self.require_running()
            raise ServerFailed(f"a request was not answered: {error}") from None
        finally:  # don't wait for answers if this command is stopped: they end with the server
            pool.shutdown(wait=False, cancel_futures=True)

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
def serving(command: Callable[[int], Sequence[str]], log: Path, *, grace: float = GRACE_SECONDS) -> Iterator[Server]:
    """A server for as long as the block lasts. ServerFailed if it ends, or takes too long, before it is healthy.

    Args:
        command: the words that start it at a port.
        log: the file for what it prints.
        grace: seconds that it gets to end by itself.
    """
    port = _free_port()
    begin = time.monotonic()
    with Supervised(command(port), log, grace=grace) as process:
        while not _is_healthy(port):
            Server(process, port, 0).require_running("the server ended before it was ready")
            if time.monotonic() - begin > READY_SECONDS:
                raise ServerFailed(f"the server was not ready after {READY_SECONDS:g} s")
            time.sleep(POLL_SECONDS)
        yield Server(process, port, time.monotonic() - begin)


def _free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(_url(port, "health"), timeout=ANSWER_SECONDS) as answer:
            return answer.status == 200
    except OSError:
        return False


def _url(port: int, path: str) -> str:
    return f"http://127.0.0.1:{port}/{path}"
