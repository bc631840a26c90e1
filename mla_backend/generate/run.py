"""The loop around the engine."""

import argparse
import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mla_backend.arguments import named
from mla_backend.engine.engine import Engine
from mla_backend.engine.results import Collector
from mla_backend.generate import options as command_line
from mla_backend.generate.prompts import Bad, Item, as_chat, read
from mla_backend.generate.results import ResultFile, for_people, record


class WrongCommand(Exception):
    """The command can't be run; the text says why."""


def run(options: argparse.Namespace) -> int:
    """Runs the command, or raises WrongCommand; returns the exit status."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    results = None
    origin = "PROMPT" if options.prompts else "line"  # what a request's number counts
    try:
        try:
            items, bad = _items(options)
            results = _results(options)
            left = _unfinished(items, results)
            for line in bad:
                _report(console, origin, line)
            if len(left) < len(items):
                console.print(f"{len(items) - len(left)} of {len(items)} requests are finished already")
            if not left:
                return 1 if bad else 0
            with named(**command_line.ENGINE), console.status("loading the model"):
                engine = _engine(options)
        except (TypeError, ValueError, OSError, ImportError, torch.OutOfMemoryError) as error:
            raise WrongCommand(str(error)) from error
        as_text = options.output_format == "text" or (options.output_format is None and results.on_terminal)
        return Run(engine, left, results, as_text, console, origin).to_the_end(already_bad=len(bad))
    finally:
        if results is not None:
            results.close()


def _results(options: argparse.Namespace) -> ResultFile:
    if options.resume and options.output is None:
        raise ValueError("--resume needs --output, a file to go on with")
    if options.output_format == "text" and options.output is not None:
        raise ValueError("--output-format must be jsonl with --output; got text")
    return ResultFile(options.output, options.resume, source=options.input)


def _items(options: argparse.Namespace) -> tuple[list[Item], list[Bad]]:
    if not (options.model / "config.json").is_file():
        raise ValueError(f"MODEL must be a folder with a config.json; {options.model} has none")
    defaults = command_line.sampling_params(options)
    if options.prompts:
        if options.input is not None:
            raise ValueError("PROMPT must be left out with --input; got both")
        if not all(options.prompts):
            raise ValueError("PROMPT must not be empty")
        items = [Item(number, str(number), prompt, defaults) for number, prompt in enumerate(options.prompts, start=1)]
        return [as_chat(item) for item in items] if options.chat else items, []
    from_stdin = options.input is None or str(options.input) == "-"
    if from_stdin and (sys.stdin is None or (options.input is None and sys.stdin.isatty())):
        raise ValueError("PROMPT or --input must be given, or prompts come on standard input")
    jsonl = None if options.input_format is None else options.input_format == "jsonl"
    with contextlib.ExitStack() as closing:
        if from_stdin:
            lines = sys.stdin.buffer
        else:
            try:
                lines = closing.enter_context(open(options.input, "rb"))
            except OSError as error:
                raise ValueError(f"--input can't be read: {error}") from None
        items, bad = read(lines, defaults, jsonl=jsonl, chat=options.chat)
    if not items and not bad:
        raise ValueError("--input must have one prompt or more; got none")
    return items, bad


def _unfinished(items: list[Item], results: ResultFile) -> list[Item]:
    changed = [item for item in items if results.finished.get(item.id, item.digest) != item.digest]
    if changed:
        raise ValueError(
            f"--resume needs the prompts and options that --output was begun with; request {changed[0].id!r} "
            "has a result of others"
        )
    return [item for item in items if item.id not in results.finished]


def _engine(options: argparse.Namespace) -> Engine:
    return Engine(
        options.model,
        device=options.device,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype],
        kv_cache=options.kv_cache,
        memory=options.memory,
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        most_running=options.most_running,
        tokens_a_step=options.tokens_a_step,
        chunk=options.chunk,
        batch_invariant=options.batch_invariant,
        host_memory=options.host_memory,
    )


class Run:
    """Requests on their way through the engine."""

    def __init__(
        self, engine: Engine, items: list[Item], results: ResultFile, as_text: bool, console: Console, origin: str
    ):
        self.engine, self.results, self.console, self.origin = engine, results, console, origin
        self.as_text, self.alone = as_text, len(items) == 1 and items[0].params.n == 1
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.left = deque(items)
        self.open: dict[str, Item] = {}
        self.collector = Collector()
        self.finished = self.tokens = self.bad = 0
        self.interrupted = False

    def to_the_end(self, already_bad: int) -> int:
        """Runs until all requests are finished, or Ctrl-C; returns the exit status."""
        total, began = len(self.left), time.monotonic()
        with self._interruptible(), self.progress as progress:
            task = progress.add_task("", total=total)
            while not self.interrupted and self._has_work:
                progress.start()  # again, if results have been shown
                self._feed()
                self._step()
                speed = self.tokens / (time.monotonic() - began)
                usage = self.engine.status.cache.usage
                progress.update(
                    task,
                    completed=self.finished + self.bad,
                    description=f"{speed:.0f} tokens/s, cache {usage:.0%}",
                )
        seconds = time.monotonic() - began
        self.console.print(
            f"{self.finished} of {total + already_bad} requests, {self.tokens} tokens in {seconds:.1f} s "
            f"({self.tokens / seconds:.0f} tokens/s)"
        )
        if self.interrupted:
            self.console.print("interrupted; with --output, --resume goes on from here")
            return command_line.INTERRUPTED
        return 1 if already_bad + self.bad else 0

    @property
    def _has_work(self) -> bool:
        return bool(self.left) or self.engine.has_work

    def _feed(self) -> None:
        """Adds requests until as many wait in the engine as may run. The others are not tokenised yet."""
        while self.left and self.engine.status.waiting < self.engine.scheduler.most_running:
            item = self.left.popleft()
            try:
                self.engine.add(item.prompt, item.params, id=item.id)
            except (TypeError, ValueError) as error:
                self.bad += 1
                _report(self.console, self.origin, Bad(item.number, str(error)))
            else:
                self.open[item.id] = item

    def _step(self) -> None:
        tokenizer = self.engine.tokenizer
        for update in self.engine.step():
            self.tokens += len(update.tokens)
            result = self.collector.add(update)
            if result is not None:
                item = self.open.pop(result.id)
                if self.results.on_terminal or not self._has_work:  # results are not written into the progress bar
                    self.progress.stop()
                if self.as_text:
                    self.results.write_text(for_people(item, result, self.alone))
                else:
                    self.results.write(record(item, result, None if tokenizer is None else tokenizer.decode))
                error = next((one.error for one in result.completions if one.finish_reason == "error"), None)
                if error is None:
                    self.finished += 1
                else:
                    self.bad += 1
                    _report(self.console, self.origin, Bad(item.number, error))

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """On Ctrl-C and SIGTERM the step is finished and its results are written. The second time it ends at once."""

        def interrupt(number: int, frame: object) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True

        before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _report(console: Console, origin: str, bad: Bad) -> None:
    console.print(f"{origin} {bad.number}: {bad.why}", markup=False)
