"""Where a program is that takes long: a bar on a terminal, a line for each stage where there is none."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Stages:
    """Shows one stage after the other, within a `with` block.

    Args:
        console: where.
    """

    def __init__(self, console: Console):
        self._console = console
        columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._stage: str | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "Stages":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def at(self, stage: str, done: int = 0, of: int | None = None) -> None:
        """The program is at a stage, new or the same as before, of which so much is done."""
        if stage != self._stage:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._stage, self._task = stage, self._bar.add_task(stage, total=None)
            if not self._console.is_terminal:
                self.say(stage)
        self._bar.update(self._task, completed=done, total=of)

    def say(self, line: str, style: str | None = None) -> None:
        """A line that stays, in any case."""
        self._console.print(line, style=style, markup=False, soft_wrap=True)
