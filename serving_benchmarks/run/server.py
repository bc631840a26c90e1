"""A server that speaks OpenAI's protocol as vLLM does: start it, wait for it and its clients, stop it."""

import contextlib
import http.client
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from serving_benchmarks.run.processes import SUPERVISOR_SECONDS, Supervised, why_it_ended

POLL_SECONDS, ANSWER_SECONDS, READY_SECONDS, START_TOLD_SECONDS = 0.5, 10.0, 1800.0, 60.0
"""How often a server is looked at, how long it may take to answer, how long to start (a large model is loaded, compiled
and captured), and how often it is told how far it is."""
MOST_SAID = 200  # characters shown of what it printed last


class ServerFailed(Exception):
    """A server ended, was not ready in time, or is stuck. The text says why."""


class Server:
    """A server that runs."""

    def __init__(self, process: Supervised, port: int):
        self.process, self.port, self.start_seconds = process, port, 0.0

    def wait_for(self, client: Supervised, limit: float) -> int:
        """Waits for a client's exit status. ServerFailed if the server ends, or the client takes longer than that."""
        end = time.monotonic() + limit
        while (status := client.status()) is None:
            self.require_running()
            if time.monotonic() > end:
                raise ServerFailed(f"the load took more than {limit:g} s")
            with contextlib.suppress(TimeoutError):
                client.wait(POLL_SECONDS)
        if not self.is_healthy():
            # A server that has ended counts as running until all that it has started has ended, too.
            with contextlib.suppress(TimeoutError):
                self.process.wait(SUPERVISOR_SECONDS)
            self.require_running()
            raise ServerFailed("the server runs, but is not healthy")
        return status

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=ANSWER_SECONDS):
                return True
        except (OSError, http.client.HTTPException):
            return False

    def require_running(self, what: str = "the server ended") -> None:
        """ServerFailed if it has ended, with what has happened and why."""
        if (status := self.process.status()) is not None:
            raise ServerFailed(f"{what}: {why_it_ended(status, self.process.says())}")


@contextlib.contextmanager
def serving(command: Callable[[int], Sequence[str]], log: Path, say: Callable[[str], None]) -> Iterator[Server]:
    """A server for as long as the block lasts. ServerFailed if it ends, or takes too long, before it is healthy.
    `command` gives the words that start it at a port. `say` tells, while it starts, what it printed last."""
    with socket.socket() as some:  # finds a free port
        some.bind(("127.0.0.1", 0))
        port = some.getsockname()[1]
    begin = told = time.monotonic()
    log.write_bytes(b"")  # an earlier run may have left one
    with Supervised(command(port), log) as process:
        server = Server(process, port)
        while not server.is_healthy():
            server.require_running("the server ended before it was ready")
            if time.monotonic() - begin > READY_SECONDS:
                raise ServerFailed(f"the server was not ready after {READY_SECONDS:g} s")
            if time.monotonic() - told > START_TOLD_SECONDS:
                told = time.monotonic()
                *_, last = ["nothing", *filter(str.strip, process.says().splitlines())]
                say(f"{told - begin:.0f} s; it printed last: {last.strip()[:MOST_SAID]}")
            time.sleep(POLL_SECONDS)
        server.start_seconds = time.monotonic() - begin
        yield server
