"""Processes that ask before they work, and take turns: while one of them works the others do nothing.

A worker writes lines of JSON, its events, to a file. Before each piece of its work, once it has started, it writes the
event `ready` and waits for a line on its standard input. Its turn lasts until it asks for the next one, or has ended
with all that it had started. All workers have the same pieces of work. Some are optional: a worker is told to leave
those out once all workers have done enough of their kind.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serving_benchmarks.run.processes import Supervised, supervised

POLL_SECONDS = 0.2
"""How often a worker's events are looked at."""
GO, ENOUGH = "go", "enough"
"""What a worker is told: to do what it asks for, or to leave that out."""


class Worker:
    """One that runs.

    Args:
        process: its process.
        events: the file of its events.
    """

    def __init__(self, process: Supervised, events: Path):
        self.process = process
        self.asks: dict[str, Any] | None = None
        """The event with which it has asked for a turn; None while it works, and when it has ended."""
        self._events, self._offset = events, 0

    def events(self) -> Iterator[dict[str, Any]]:
        """What it says, until it asks for its next turn or has ended."""
        running = True
        while running:
            try:
                self.process.wait(POLL_SECONDS)
                running = False  # once more, for what it wrote last
            except TimeoutError:
                pass
            found, self._offset = read_events(self._events, self._offset)
            for event in found:
                if event["event"] == "ready":
                    self.asks = event if running else None
                else:
                    yield event
            if self.asks is not None:
                return

    def give_turn(self, word: str = GO) -> str:
        """Lets it do what it has asked for, or leave it out and go on, and says what it does. Whoever gives a turn goes
        on with `events`, before anyone else gets one."""
        stage, self.asks = self.asks["stage"] if word == GO else "enough rounds", None
        self.process.tell(word)
        return stage


@contextlib.contextmanager
def started(command: Sequence[str], events: Path, log: Path) -> Iterator[Worker]:
    """A worker for as long as the block lasts.

    Args:
        command: its words.
        events: the file that it writes its events to.
        log: the file for what it prints.
    """
    for file in (events, log):
        file.write_bytes(b"")  # they may be an earlier run's
    with supervised(command, log) as process:
        yield Worker(process, events)


def in_turn(workers: Sequence[Worker], seconds: float = 0) -> Iterator[tuple[Worker, str]]:
    """Gives turns until no worker asks for one, and says each time whose it is and for what. The order is that of the
    workers, and the reverse of it in every other round: if the machine drifts, who comes later finds another one.

    Whoever iterates goes through the worker's `events` before the next one gets its turn.

    Args:
        workers: who has asked for turns.
        seconds: optional rounds, `optional` in what a worker asks, are left out once each worker has been timed for so
            long, `timed_s` there. All workers then have the same number of them.
    """
    while waiting := [worker for worker in workers if worker.asks is not None]:
        asks = [worker.asks for worker in waiting]
        enough = all(asked.get("optional") and asked["timed_s"] >= seconds for asked in asks)
        if asks[0].get("round", 0) % 2:
            waiting.reverse()
        for worker in waiting:
            stage = worker.give_turn(ENOUGH if enough else GO)
            yield worker, stage


def read_events(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """The events after an offset, and where the next one will begin. A line that is still being written waits."""
    with path.open("rb") as file:
        file.seek(offset)
        whole = file.read().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.splitlines()], offset + len(whole) + (1 if whole else 0)
