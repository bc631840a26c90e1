"""Something heavy in a process of its own: what it prints goes to a file, and what takes too long is ended."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving_benchmarks.run.processes import why_it_failed

STOP_SECONDS = 20
MOST_REASON = 300
"""Characters of the reason for a failure."""


class Failed(RuntimeError):
    """The process ended, took too long, or what it was asked for raised; says why in one line."""


class Isolated:
    """An object that lives in a process of its own, together with all processes that it starts.

    The process sees nothing of this one but the environment, so that a library may set itself up as it wants, and
    leaves nothing behind.

    Args:
        make: makes the object; a class or a function of a module.
        options: what `make` is given.
        log: the file that all it prints is added to.
        environment: variables besides those of this process.
        seconds: that making it may take.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        options: Mapping[str, Any],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        seconds: float = 300,
    ):
        self.log = log
        log.touch()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_live, args=(theirs, make, dict(options), log, dict(environment or {})), daemon=False
        )
        self._process.start()
        theirs.close()
        try:
            self._answer("starting", seconds)
        except BaseException:  # nobody else knows of the process yet
            self._end()
            raise

    def call(self, name: str, *, seconds: float = 300, **arguments: Any) -> Any:
        """What a method of the object returns."""
        self._connection.send((name, arguments))
        return self._answer(name, seconds)

    def close(self) -> None:
        """Ends the process, by itself if it can."""
        try:
            if self._process.is_alive():
                with suppress(OSError):
                    self._connection.send((None, {}))
                self._process.join(STOP_SECONDS)
        finally:
            self._end()

    def __enter__(self) -> "Isolated":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, what: str, seconds: float) -> Any:
        if not self._connection.poll(seconds):
            self._end()
            raise Failed(f"{what} took more than {seconds:.0f} s")
        try:
            fine, answer = self._connection.recv()
        except EOFError:
            self._end()
            raise Failed(f"{what}: the process ended by itself; {self._why()}") from None
        if not fine:
            if "root cause" in answer:  # vLLM's way to say that another of its processes failed
                answer = self._why()
            raise Failed(f"{what}: {answer}")
        return answer

    def _why(self) -> str:
        return why_it_failed(self.log.read_text(errors="replace"))[-MOST_REASON:]

    def _end(self) -> None:
        if self._process.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.join(STOP_SECONDS)
        self._connection.close()


def _live(
    connection: Connection, make: Callable[..., Any], options: dict[str, Any], log: Path, environment: dict[str, str]
) -> None:
    os.setpgrp()  # its children end with it
    os.environ.update(environment)
    with log.open("a") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    try:
        made = make(**options)
    except Exception as error:
        traceback.print_exc()
        connection.send((False, f"{type(error).__name__}: {error}"[:MOST_REASON]))
        return
    connection.send((True, None))
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:  # whoever asked is gone
            name = None
        if name is None:
            break
        try:
            answer = (True, getattr(made, name)(**arguments))
        except Exception as error:
            traceback.print_exc()
            answer = (False, f"{type(error).__name__}: {error}"[:MOST_REASON])
        connection.send(answer)
    if hasattr(made, "close"):
        made.close()
