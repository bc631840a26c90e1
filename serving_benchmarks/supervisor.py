"""Runs a command, and leaves nothing of it behind: not when it ends, not when whoever asked for it is killed.

    python supervisor.py GRACE_SECONDS COMMAND...

What comes on its standard input goes on to the command's. It goes on until the command ends, or that input does, which
happens when the process at the other end stops or dies, of kill -9 too. Then the command gets SIGINT and GRACE_SECONDS
to end by itself, and what is left of its descendants is killed, in whatever process groups and sessions they are. The
exit status is the command's.

`processes.py` starts it, by its path, so that nothing but the standard library is imported. Linux only.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
KILL_SECONDS = 30
"""How long killed processes may take to be gone: the kernel gives back a GPU's memory first."""
KILL_AGAIN_SECONDS = 0.02


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


def wait_for_the_end(command: subprocess.Popen) -> None:
    """Of the command, or of whoever asked for it, or until a signal says so."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # wakes the select below
    ended = os.pidfd_open(command.pid)
    while True:
        ready, _, _ = select.select([0, woken, ended], [], [])
        if ended in ready or woken in ready:
            return
        said = os.read(0, 1 << 16)
        if not said:
            return
        with contextlib.suppress(BrokenPipeError):  # it doesn't listen
            os.write(command.stdin.fileno(), said)


def main() -> int:
    grace, *words = sys.argv[1:]
    adopt_orphans()
    # Below a job in a script's background SIGINT is ignored, and a command would inherit that; a handler it doesn't.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        wait_for_the_end(command)
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(float(grace))
        status = command.poll()
    finally:
        kill_descendants()
    return 128 + signal.SIGKILL if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
