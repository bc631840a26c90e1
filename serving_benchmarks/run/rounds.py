"""Interleaves processes round by round: while one of them works, the others wait.

A worker is a process that writes its events to a file, a line of JSON each. Before each piece of its work it writes the
event `ready` and waits for a line on its standard input. All workers have the same pieces of work.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from serving_benchmarks.run.processes import Supervised

POLL_SECONDS = 0.2  # how often a worker's events are read
WORKER = [sys.executable, "-m", "serving_benchmarks.run.worker"]
"""The command of a worker, before the files of its spec and its events."""


class Worker:
    """A worker, as seen by the process that started it."""

    def __init__(self, name: str, process: Supervised, events: Path):
        self.name, self.process = name, process
        self.asks: dict[str, Any] | None = None
        """Its `ready` event while it waits; None while it works, and after it has ended."""
        self._events, self._offset = events, 0

    def events(self, seconds: float = float("inf")) -> Iterator[dict[str, Any]]:
        """Its events until it waits or has ended. TimeoutError if it does neither for so many seconds."""
        running, end = True, time.monotonic() + seconds
        while running:
            try:
                self.process.wait(POLL_SECONDS)
                running = False  # its last events are still to be read
            except TimeoutError:
                if time.monotonic() > end:
                    raise TimeoutError(f"it took more than {seconds:.0f} s") from None
            with self._events.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]  # a line without its end is left for later
            self._offset += len(whole) + (1 if whole else 0)
            for event in map(json.loads, whole.splitlines()):
                if event["event"] == "ready":
                    self.asks = event if running else None
                else:
                    yield event
            if self.asks is not None:
                return

    def go(self) -> str:
        """Answers a worker that waits, and says what it does next. Read its `events` before another worker goes."""
        stage, self.asks = self.asks["stage"], None
        self.process.tell("go")
        return stage


def stem(name: str) -> str:
    """A name for files: not every file system takes colons."""
    return name.replace(":", "-")


@contextlib.contextmanager
def started(name: str, spec: dict[str, Any], logs: Path) -> Iterator[Worker]:
    """A worker that does what the spec says, for as long as the block lasts. The folder `logs` gets its files."""
    asked, events, log = (logs / f"{stem(name)}.{kind}" for kind in ("spec.json", "events", "log"))
    asked.write_text(json.dumps(spec))
    for file in (events, log):
        file.write_bytes(b"")  # an earlier run may have left one
    with Supervised([*WORKER, asked, events], log) as process:
        yield Worker(name, process, events)


def there_and_back(candidates: Sequence[Any], number: int) -> list[Any]:
    """The order of a round: every other one is in reverse, so that a machine that drifts favours none."""
    return list(candidates[:: -1 if number % 2 else 1])


def interleaved(workers: Sequence[Worker]) -> Iterator[tuple[Worker, str]]:
    """Lets one worker after the other do its next piece of work, until none waits. Yields each that was told to work,
    and what it does. The caller then reads the worker's `events`."""
    while waiting := [worker for worker in workers if worker.asks is not None]:
        for worker in there_and_back(waiting, waiting[0].asks.get("round", 0)):
            yield worker, worker.go()


class Events:
    """The worker's own side: writes events, and waits until it may go on."""

    def __init__(self, file: TextIO, words: TextIO):
        self._file, self._words = file, words

    def send(self, event: str, **more: Any) -> None:
        self._file.write(json.dumps({"event": event, **more}) + "\n")
        self._file.flush()

    def wait(self, stage: str, **more: Any) -> None:
        """Waits until it may do a piece of work."""
        self.send("ready", stage=stage, **more)
        if not self._words.readline():
            raise RuntimeError("the process that started this worker has ended")
