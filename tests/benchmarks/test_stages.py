"""Whoever waits is told where a program is, with a terminal and without one."""

import io

from rich.console import Console
from serving_benchmarks.run.stages import Stages


def shown(terminal: bool) -> str:
    out = io.StringIO()
    with Stages(Console(file=out, force_terminal=terminal, width=60, highlight=False)) as stages:
        stages.at("[one]: starting")
        stages.at("one: round 1 of 2", 0, 5)
        stages.at("one: round 1 of 2", 5, 5)
        stages.say("one has a result, and [this] line is longer than the screen is wide")
        stages.at("two: starting")
        stages.at("one: round 1 of 2")
    return out.getvalue()


def test_without_a_terminal_each_stage_is_a_line_as_it_begins():
    assert shown(terminal=False).splitlines() == [
        "[one]: starting",
        "one: round 1 of 2",
        "one has a result, and [this] line is longer than the screen is wide",
        "two: starting",
        "one: round 1 of 2",
    ]


def test_on_a_terminal_the_last_stage_has_a_bar_and_what_is_said_stays():
    text = shown(terminal=True)
    assert "one has a result, and [this] line is longer than" in text and "\x1b[2K" in text, "a bar is taken back"
