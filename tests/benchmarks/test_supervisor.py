"""Nothing of a supervised process is left behind, whatever it starts and however it or its owner ends."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from serving_benchmarks.run import supervisor
from serving_benchmarks.run.processes import (
    Supervised,
    signals_unwind,
    supervised,
    wait_until,
    why_it_ended,
    why_it_failed,
)

WAIT_SECONDS = 30
STUBBORN = """
    import os, signal, subprocess, sys, time
    # a child, a grandchild in a session of its own whose parent is gone, all deaf to signals that can be ignored
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    def note():
        with open(sys.argv[1], "a") as file:
            file.write(f"{os.getpid()}\\n")
    note()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        note()
    elif os.fork() == 0:
        note()
    time.sleep(1000)
"""


def stubborn(tmp_path: Path) -> tuple[list[str], Path]:
    """A command that starts three processes in all which don't want to end, and the file where it notes their ids."""
    script, notes = tmp_path / "stubborn.py", tmp_path / "pids"
    script.write_text(textwrap.dedent(STUBBORN))
    notes.touch()
    return [sys.executable, str(script), str(notes)], notes


def pids(notes: Path) -> list[int]:
    return [int(line) for line in notes.read_text().split()]


def alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(notes: Path) -> bool:
    return not any(map(alive, pids(notes)))


def test_a_command_runs_prints_into_the_log_and_gives_its_status(tmp_path):
    with supervised([sys.executable, "-c", "print('hello'); exit(3)"], tmp_path / "log") as process:
        assert process.wait(WAIT_SECONDS) == 3
        assert process.says() == "hello\n" and process.status() == 3


def test_one_that_is_killed_has_the_status_that_shells_give(tmp_path):
    with supervised([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], tmp_path / "log") as process:
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGSEGV


def test_a_command_can_be_told_lines_and_what_it_is_told_later_is_lost(tmp_path):
    code = "print('ready', flush=True); print(input() + input())"
    with supervised([sys.executable, "-c", code], tmp_path / "log") as process:
        process.tell("hel")
        assert wait_until(lambda: process.says() == "ready\n", WAIT_SECONDS)
        process.tell("lo")
        assert process.wait(WAIT_SECONDS) == 0 and process.says() == "ready\nhello\n"
        process.tell("anyone?")


def test_one_that_does_not_listen_may_be_told_things(tmp_path):
    code = "import os, time; os.close(0); print('deaf', flush=True); time.sleep(1); exit(4)"
    with supervised([sys.executable, "-c", code], tmp_path / "log") as process:
        assert wait_until(lambda: "deaf" in process.says(), WAIT_SECONDS)
        process.tell("hello")
        assert process.wait(WAIT_SECONDS) == 4


def test_stopping_ends_all_descendants(tmp_path):
    command, notes = stubborn(tmp_path)
    with supervised(command, tmp_path / "log", grace=0.1):
        assert wait_until(lambda: len(pids(notes)) == 3, WAIT_SECONDS)
        assert all(map(alive, pids(notes)))
    assert gone(notes)


def test_what_ends_by_itself_leaves_no_descendants_either(tmp_path):
    leaves = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    with supervised([sys.executable, "-c", leaves], tmp_path / "log") as process:
        assert process.wait(WAIT_SECONDS) == 0
        assert not alive(int(process.says()))


@pytest.mark.parametrize("ours", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_one_that_listens_to_ctrl_c_is_given_time_to_end(tmp_path, ours, children_hear_ctrl_c):
    code = """
    import time
    try:
        print("ready", flush=True)
        time.sleep(1000)
    except KeyboardInterrupt:
        time.sleep(0.3)
        print("tidied up")
    """
    signal.signal(signal.SIGINT, ours)
    process = Supervised([sys.executable, "-c", textwrap.dedent(code)], tmp_path / "log", grace=WAIT_SECONDS)
    assert wait_until(lambda: "ready" in process.says(), WAIT_SECONDS)
    assert process.stop() == 0 and "tidied up" in process.says()


OWNER = """
import sys, time
from pathlib import Path
from serving_benchmarks.run import supervisor
from serving_benchmarks.run.processes import signals_unwind, supervised
with signals_unwind(), supervised(sys.argv[2:], Path(sys.argv[1]), grace=0.1):
    time.sleep(1000)
"""


@pytest.mark.usefixtures("children_hear_ctrl_c")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_an_owner_that_is_ended(tmp_path, how):
    command, notes = stubborn(tmp_path)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path / "log", *command], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: len(pids(notes)) == 3, WAIT_SECONDS)
        owner.send_signal(how)
        owner.wait(WAIT_SECONDS)
        assert wait_until(lambda: gone(notes), WAIT_SECONDS), "processes are left"
    finally:
        owner.kill()
        for pid in pids(notes):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


KILLED = {
    "the watcher": lambda owner, watcher, guarded: [watcher],
    "the supervisor": lambda owner, watcher, guarded: [guarded],
    "the owner and the watcher": lambda owner, watcher, guarded: [owner, watcher],
    "the owner and the supervisor": lambda owner, watcher, guarded: [owner, guarded],
    "the group of the watcher": lambda owner, watcher, guarded: [-watcher],
    "the group of the supervisor": lambda owner, watcher, guarded: [-guarded],
}


@pytest.mark.parametrize("killed", KILLED.values(), ids=KILLED)
def test_nothing_is_left_when_one_of_the_two_that_guard_it_is_killed(tmp_path, killed):
    command, notes = stubborn(tmp_path)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path / "log", *command], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: len(pids(notes)) == 3, WAIT_SECONDS)
        watcher, guarded, *_ = supervisor.descendants(owner.pid)
        for pid in (watcher, guarded):
            told = command_line(pid)
            assert "serving_benchmarks" not in told and str(tmp_path) not in told, "pkill -f would find it"
        for pid in killed(owner.pid, watcher, guarded):
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: gone(notes), WAIT_SECONDS), "processes are left"
        assert wait_until(lambda: not any(map(alive, (watcher, guarded))), WAIT_SECONDS), "its guards are left"
    finally:
        owner.kill()
        owner.wait(WAIT_SECONDS)
        for pid in pids(notes):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("place", [0, 1], ids=["watcher", "supervisor"])
def test_one_whose_guard_is_killed_has_the_status_that_shells_give(tmp_path, place):
    others = supervisor.descendants(os.getpid())
    started = lambda: [pid for pid in supervisor.descendants(os.getpid()) if pid not in others]  # noqa: E731
    with supervised(["sleep", "1000"], tmp_path / "log", grace=0.1) as process:
        assert wait_until(lambda: len(started()) == 3, WAIT_SECONDS)
        os.kill(started()[place], signal.SIGKILL)
        assert process.wait(WAIT_SECONDS) == process.status() == 128 + signal.SIGKILL


def test_a_command_runs_in_the_folder_of_its_owner(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with supervised([sys.executable, "-c", "import os; print(os.getcwd())"], Path("log")) as process:
        assert process.wait(WAIT_SECONDS) == 0 and process.says() == f"{tmp_path}\n"


def test_waiting_has_an_end(tmp_path):
    with supervised(["sleep", "1000"], tmp_path / "log", grace=0.1) as process:
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        assert process.status() is None


def test_signals_end_the_block_and_are_as_before_after_it():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped, signals_unwind():
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("Traceback\n  File\nValueError: no such thing\n", "ValueError: no such thing"),
        (
            "(Engine pid=3) torch.OutOfMemoryError: CUDA out of memory\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (
            "(EngineCore pid=3) ERROR 11-23 12:00:00 [core.py:12] Traceback\n"
            "(EngineCore pid=3) ERROR 11-23 12:00:00 [core.py:12] ValueError: no such thing\n"
            "(APIServer pid=2) INFO 11-23 12:00:01 [launcher.py:3] Shutting down\n",
            "ValueError: no such thing",
        ),
        ("[rank1]: torch.OutOfMemoryError: CUDA out of memory\nend\n", "torch.OutOfMemoryError: CUDA out of memory"),
        ("ERROR 11-23 12:00:00.5 [worker/a b.py:12] KeyError: 'x'\nend\n", "KeyError: 'x'"),
        ("E1123 12:00:00.500000 31 torch/a.py:12] KeyError: 'x'\nend\n", "KeyError: 'x'"),
        ("W1123 12:00:00.500000 31 torch/a.py:12] KeyError: 'x'\nend\n", "end"),
        (
            "(APIServer pid=2) WARNING 11-23 12:00:00 [system_utils.py:255] Found ulimit of 20000. This can cause "
            "errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n\n"
            "(APIServer pid=2) WARNING 11-23 12:00:00 [a.py:1] OSError: [Errno 24] Too many open files\n"
            "(APIServer pid=2) INFO 11-23 12:00:00 [a.py:1] ValueError: is what it would be\n"
            "said before: TypeError: no\n"
            "    it is an indented TypeError: no\n"
            "last\n",
            "last",
        ),
        ("one\ntwo\n\n", "two"),
        ("", "it said nothing"),
    ],
)
def test_the_telling_line_of_a_log_is_found(log, why):
    assert why_it_failed(log) == why_it_ended(1, log) == why
    assert why_it_ended(128 + signal.SIGKILL, log) == f"killed by signal 9; it said last: {why}"
