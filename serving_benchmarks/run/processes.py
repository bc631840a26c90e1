"""Starts processes, watches them, and leaves none of them behind, whatever happens."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from serving_benchmarks.run import supervisor

GRACE_SECONDS = 20.0  # what a process gets to end by itself, before it is killed with all that it has started
SUPERVISOR_SECONDS = supervisor.KILL_SECONDS + 5  # what a supervisor may take to kill the rest

EXCEPTION = re.compile(
    r"(?:\([^()]+ pid=\d+\) |\[rank\d+\]: |(?:ERROR|CRITICAL|FATAL) [-\d]+ [:.,\d]+ \[[^\]]+\] |[EF]\d{4} [^\]]+\] )*"
    r"(?:((?:\w+\.)*\w*(?:Error|Exception|Interrupt): .+)| +Value error, (.+) \[type=)"
)
"""A line of a log with an exception, or pydantic's reason of one, after prefixes of vLLM, its processes and torch."""


class Supervised:
    """A command that runs for as long as a `with` block lasts, or until it ends by itself. It runs below a supervisor,
    which ends it and all that it has started, also when this process is killed."""

    def __init__(self, command: Sequence[str], log: Path, *, grace: float = GRACE_SECONDS):
        self.log, self.grace = log, grace
        folder, file = os.path.split(supervisor.__file__)
        with log.open("ab") as out:
            # in its folder, so that its command line doesn't name this package, and in a session of its own, as Ctrl-C
            # in a terminal is for this process to pass on
            how = {"cwd": folder, "start_new_session": True, "stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
            self._process = subprocess.Popen([sys.executable, file], stdout=out, **how)
        self.tell(json.dumps({"command": list(map(str, command)), "folder": os.getcwd(), "grace": grace}))

    def __enter__(self) -> "Supervised":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def status(self) -> int | None:
        """The exit status: 128 and the signal's number if a signal ended it; None while it runs."""
        status = self._process.poll()
        return None if status is None else supervisor.exit_status(status)

    def wait(self, seconds: float | None = None) -> int:
        """Waits until it has ended by itself, and returns the exit status. TimeoutError if it takes longer."""
        try:
            return supervisor.exit_status(self._process.wait(seconds))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the process still runs after {seconds} s") from None

    def tell(self, line: str) -> None:
        """Writes a short line to its standard input. The line is lost if it has ended."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), f"{line}\n".encode())

    def stop(self) -> int:
        """Ends it and everything that it has started, and returns the exit status."""
        self._process.stdin.close()
        return supervisor.exit_status(self._process.wait(self.grace + SUPERVISOR_SECONDS))

    def says(self) -> str:
        """All that it has printed."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block by an exception, so that what it has opened is closed."""

    def leave(number: int, _) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def why_it_failed(log: str) -> str:
    """The line of a log that says best why a program ended: the last exception, or else the last line. Exceptions that
    point to another one don't count, nor do those that a warning quotes."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    errors = [found[1] or found[2] for line in lines if (found := EXCEPTION.match(line))]
    telling = [error for error in errors if "root cause" not in error and "scheduler died" not in error]
    return (telling or errors or [line.strip() for line in lines] or ["it said nothing"])[-1]


def why_it_ended(status: int, log: str) -> str:
    """The same with an exit status of `Supervised`, which may say that a signal ended the program."""
    why = why_it_failed(log)
    return f"killed by signal {status - 128}; it said last: {why}" if status > 128 else why
