"""Nothing of a supervised process is left behind, whatever it starts and however it or its owner ends."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from commands import alive, wait_until
from serving_benchmarks.run import supervisor
from serving_benchmarks.run.processes import Supervised, why_it_ended, why_it_failed

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


def test_a_command_is_told_lines_prints_into_the_log_and_has_the_status_that_shells_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "import os; print(os.getcwd(), flush=True); print(input() + input()); exit(3)"
    with Supervised([sys.executable, "-c", code], Path("log")) as process:
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        assert process.status() is None
        process.tell("hel")
        assert wait_until(lambda: process.says() == f"{tmp_path}\n")
        process.tell("lo")
        assert process.wait(60) == process.status() == 3 and process.says() == f"{tmp_path}\nhello\n"
        process.tell("lost")
    with Supervised([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], tmp_path / "log") as process:
        assert process.wait(60) == 128 + signal.SIGSEGV


def test_stopping_ends_all_descendants_and_so_does_ending(tmp_path):
    command, notes = stubborn(tmp_path)
    with Supervised(command, tmp_path / "log", grace=0.1):
        assert wait_until(lambda: len(pids(notes)) == 3)
        assert all(map(alive, pids(notes)))
    assert not any(map(alive, pids(notes)))
    leaves = "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid)"
    with Supervised([sys.executable, "-c", leaves], tmp_path / "child") as process:
        assert process.wait(60) == 0 and not alive(int(process.says()))


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
    process = Supervised([sys.executable, "-c", textwrap.dedent(code)], tmp_path / "log", grace=60)
    assert wait_until(lambda: "ready" in process.says())
    assert process.stop() == 0 and "tidied up" in process.says()


OWNER = """
import sys, time
from pathlib import Path
from serving_benchmarks.run.processes import Supervised, signals_unwind
with signals_unwind(), Supervised(sys.argv[2:], Path(sys.argv[1]), grace=0.1):
    time.sleep(1000)
"""


@pytest.mark.usefixtures("children_hear_ctrl_c")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_when_the_owner_is_killed(tmp_path, how):
    command, notes = stubborn(tmp_path)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, tmp_path / "log", *command], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: len(pids(notes)) == 3)
        guard = supervisor.descendants(owner.pid)[0]
        told = Path(f"/proc/{guard}/cmdline").read_text()
        assert "serving_benchmarks" not in told and str(tmp_path) not in told, "pkill -f would find it"
        owner.send_signal(how)
        assert wait_until(lambda: not any(map(alive, pids(notes)))), "processes are left"
        assert wait_until(lambda: not alive(guard)), "its guard is left"
    finally:
        owner.kill()
        owner.wait(60)
        for pid in pids(notes):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


ENGINE = "(Engine pid=3) torch.OutOfMemoryError: out of memory"
LOGS = {
    "Traceback\n  File\nValueError: no such thing\n": "ValueError: no such thing",
    f"{ENGINE}\nRuntimeError: See root cause above.\n": "torch.OutOfMemoryError: out of memory",
    "(Core pid=3) ERROR 11-23 12:00:00 [core.py:12] ValueError: no\nINFO 11-23 down\n": "ValueError: no",
    "[rank1]: torch.OutOfMemoryError: out of memory\nend\n": "torch.OutOfMemoryError: out of memory",
    "E1123 12:00:00.500000 31 torch/a.py:12] KeyError: 'x'\nend\n": "KeyError: 'x'",
    "W1123 12:00:00.500000 31 torch/a.py:12] KeyError: 'x'\nend\n": "end",
    "(S pid=2) WARNING 11-23 12:00:00 [a.py:1] errors like `OSError: too many`\n  an OSError: no\nend": "end",
    "(A pid=4) a.ValidationError: 1\n(A pid=4)   Value error, no [x]. [type=value_error, in=A[1]]\nsee\n": "no [x].",
    "": "it said nothing",
}


@pytest.mark.parametrize(("log", "why"), LOGS.items())
def test_the_telling_line_of_a_log_is_found(log, why):
    assert why_it_failed(log) == why_it_ended(1, log) == why
    assert why_it_ended(128 + signal.SIGKILL, log) == f"killed by signal 9; it said last: {why}"
