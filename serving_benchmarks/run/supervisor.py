"""Runs a command and leaves none of its processes behind, also if the process that wanted it is killed.

The first line of standard input is JSON: `command` (its words), `folder` (where it runs) and `grace` (seconds). The
rest is the command's. When the input ends, as it does when its owner stops or dies, even by kill -9, the command gets
SIGINT and its grace. Then all descendants are killed, whatever their groups and sessions. The status is the command's.

`processes.py` starts this file by its name, in this folder, so that `pkill -f` with a name of the package or command
doesn't find it, in a session of its own, so that no signal to a group reaches it. Linux only.
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

KILL_SECONDS = 30  # how long killed processes may take to end: the kernel frees a GPU's memory first


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
    """Kills until none is left. Those that are started meanwhile are found by the next look."""
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
        time.sleep(0.02)


def wait_for_the_end(command: subprocess.Popen) -> None:
    """Waits until the command or the standard input ends, or a signal comes."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # wakes the select below
    ends = [woken, os.pidfd_open(command.pid)]
    while True:
        ready, _, _ = select.select([0, *ends], [], [])
        if any(end in ready for end in ends):
            return
        said = os.read(0, 1 << 16)
        if not said:
            return
        with contextlib.suppress(BrokenPipeError):  # the command has closed its input
            os.write(command.stdin.fileno(), said)


def exit_status(of_wait: int) -> int:
    """The status as shells give it, from that of `subprocess` and `os.waitstatus_to_exitcode`."""
    return of_wait if of_wait >= 0 else 128 - of_wait


def main() -> int:
    with open(0, "rb", buffering=0, closefd=False) as given:  # the rest is for the command
        asked = json.loads(given.readline())
    # PR_SET_CHILD_SUBREAPER: descendants whose parents end become children of this process, so it still finds them
    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    # A script's background job ignores SIGINT, and its children inherit that. They don't inherit a handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = subprocess.Popen(asked["command"], cwd=asked["folder"], stdin=subprocess.PIPE)
    try:
        wait_for_the_end(command)
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(asked["grace"])
        status = command.poll()
    finally:
        kill_descendants()
    return exit_status(-signal.SIGKILL if status is None else status)


if __name__ == "__main__":
    sys.exit(main())
