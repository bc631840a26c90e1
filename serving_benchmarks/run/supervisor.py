"""Runs a command, and leaves nothing of it behind: not when it ends, not when whoever asked for it is killed.

    python supervisor.py

The first line of its standard input is JSON: the `command`'s words, the `folder` that it runs in, and the `grace` that
it gets, in seconds. What comes after it goes on to the command's standard input. It goes on until the command ends, or
that input does, which happens when the process at the other end stops or dies, of kill -9 too. Then the command gets
SIGINT and its grace to end by itself, and what is left of its descendants is killed, in whatever process groups and
sessions they are. The exit status is the command's.

Either of two processes would do for that, and there are two because one may be killed itself: the supervisor has the
command, and its parent, the watcher, only waits for it. If one of them is killed the other one kills what is below.
They are in sessions of their own, so that no signal to a group reaches both. If both are killed at the same moment, the
command's processes are left.

`processes.py` starts it in this folder, by the file's name: whoever kills all processes whose command lines name this
package, or the command, misses both. Nothing but the standard library is imported. Linux only.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 30
"""How long killed processes may take to be gone: the kernel gives back a GPU's memory first."""
KILL_AGAIN_SECONDS = 0.02
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the command."""


def adopt_orphans() -> None:
    """From now on a descendant whose parent has ended becomes a child of this process, and is not lost from sight."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(root: int) -> list[int]:
    """Process ids below one, zombies included."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
            parent = int(stat.read().rpartition(")")[2].split()[1])  # the name before it may have any characters
            children.setdefault(parent, []).append(int(name))
    found, unseen = [], [root]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def kill_descendants() -> None:
    """Until none is left. New ones that they start meanwhile are found in the next turn."""
    end = time.monotonic() + KILL_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = descendants(os.getpid())
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(KILL_AGAIN_SECONDS)


def wait_for_the_end(command: subprocess.Popen, watcher: int) -> None:
    """Of the command, of the watcher (a pidfd) or of whoever asked for it, or until a signal says so."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in ENDING:
        signal.signal(number, lambda *_: None)  # wakes the select below
    ends = [woken, os.pidfd_open(command.pid), watcher]
    while True:
        ready, _, _ = select.select([0, *ends], [], [])
        if any(end in ready for end in ends):
            return
        said = os.read(0, 1 << 16)
        if not said:
            return
        with contextlib.suppress(BrokenPipeError):  # it doesn't listen
            os.write(command.stdin.fileno(), said)


def exit_status(of_wait: int) -> int:
    """As shells give it, of what `subprocess` and `os.waitstatus_to_exitcode` say."""
    return of_wait if of_wait >= 0 else 128 - of_wait


def supervise(words: Sequence[str], folder: str, grace: float, watcher: int) -> int:
    """Runs the command to its end, and ends what it has started; its exit status."""
    # Below a job in a script's background SIGINT is ignored, and a command would inherit that; a handler it doesn't.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = subprocess.Popen(words, cwd=folder, stdin=subprocess.PIPE)
    try:
        wait_for_the_end(command, watcher)
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(grace)
        status = command.poll()
    finally:
        kill_descendants()
    return exit_status(-signal.SIGKILL if status is None else status)


def watch(supervisor: int) -> int:
    """Waits for the supervisor, and ends what it has left, which is something only if it was killed; its status."""

    def pass_on(number: int, _) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, number)

    for number in ENDING:
        signal.signal(number, pass_on)
    _, status = os.waitpid(supervisor, 0)
    kill_descendants()
    return exit_status(os.waitstatus_to_exitcode(status))


def main() -> int:
    with open(0, "rb", buffering=0, closefd=False) as given:  # the rest of it is for the command
        asked = json.loads(given.readline())
    adopt_orphans()
    watcher = os.pidfd_open(os.getpid())
    supervisor = os.fork()
    if supervisor:
        return watch(supervisor)
    os.setsid()
    adopt_orphans()  # a child doesn't inherit it
    return supervise(asked["command"], asked["folder"], asked["grace"], watcher)


if __name__ == "__main__":
    sys.exit(main())
