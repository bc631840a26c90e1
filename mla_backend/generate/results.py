"""What is written of each finished request, a line of JSON or a text, and resuming a file of such lines."""

import fcntl
import json
import os
import re
import stat
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mla_backend.engine.results import Completion, Result
from mla_backend.generate.prompts import Item, Shape


class ResultFile:
    """A file of JSON lines. Each is written at once, so that a killed process leaves at most the last one incomplete.

    Args:
        path: standard output if None. A pipe or a device is written and never read.
        resume: keep what is there, except an incomplete last line. Otherwise a file that isn't empty is an error.
        source: the file that requests are read from, which must not be `path`.
    """

    def __init__(self, path: Path | None, resume: bool, source: Path | None = None):
        self.finished: dict[str, str] = {}
        """Digests of the requests that have a result, by id. One that ended with an error has none."""
        self._name = "standard output" if path is None else f"--output {path}"
        if path is None:
            self._file = sys.stdout.fileno()
            return
        try:
            if source is not None and path.exists() and source.exists() and path.samefile(source):
                raise ValueError(f"--output {path} must not be the file that requests come from")
            if not path.parent.is_dir():
                raise ValueError(f"--output can't be written: there is no folder {path.parent}")
            regular = not path.exists() or path.is_file()
            mode = os.O_RDWR | os.O_CREAT if regular else os.O_WRONLY
            self._file = os.open(path, mode | os.O_APPEND, 0o644)
        except OSError as error:
            raise ValueError(f"--output can't be written: {error}") from None
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            if resume:
                os.close(self._file)
                raise ValueError(f"--resume needs a regular file to go on with; --output {path} is none")
            return
        try:
            self._take_over(path, resume)
        except ValueError:
            os.close(self._file)
            raise

    def _take_over(self, path: Path, resume: bool) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"--output {path} is being written by someone else") from None
        if os.fstat(self._file).st_size and not resume:
            raise ValueError(f"--output {path} has something in it; --resume goes on with it")
        self._read(path)

    def _read(self, path: Path) -> None:
        whole = 0
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    if not _is_torn_record(line):
                        raise ValueError(
                            f"--output {path} must have results to go on with; its last line is none, nor part of one"
                        )
                    break
                try:
                    record = json.loads(line)
                    id, digest = record.get("custom_id") or record["id"], record["digest"]
                    if not _ended_with_an_error(record):
                        self.finished[id] = digest
                except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
                    raise ValueError(
                        f"--output {path} must have results to go on with; line {number} is none"
                    ) from None
                whole += len(line)
        os.ftruncate(self._file, whole)

    @property
    def on_terminal(self) -> bool:
        return os.isatty(self._file)

    def write(self, record: dict[str, Any]) -> None:
        self.write_text(json.dumps(record, ensure_ascii=False) + "\n")

    def write_text(self, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, f"{self._name} can't be written: {error.strerror}") from None

    def close(self) -> None:
        if self._file != sys.stdout.fileno():
            os.close(self._file)


def _is_torn_record(line: bytes) -> bool:
    """Whether a line without an end is one that `write` began: only that may be cut off a file."""
    beginning = b'{"id": "'
    return line[: len(beginning)] == beginning[: len(line)]


def _ended_with_an_error(record: dict[str, Any]) -> bool:
    response = record.get("response")
    completions = record.get("completions") if response is None else response["body"]["choices"]
    return any(completion["finish_reason"] == "error" for completion in completions or ())


def record(item: Item, result: Result, text_of: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    """A finished request as a line.

    Args:
        text_of: decodes the tokens of logprobs.
    """
    usage = {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": sum(len(completion.tokens) for completion in result.completions),
    }
    if item.shape is Shape.PLAIN:
        given = "prompt" if isinstance(item.prompt, str) else "messages" if _is_chat(item) else "tokens"
        return {
            "id": item.id,
            given: item.prompt,
            "completions": [_plain(completion, text_of) for completion in result.completions],
            "usage": {**usage, "cached_tokens": result.cached_tokens},
            "digest": item.digest,
        }
    chat = item.shape is Shape.CHAT
    body = {
        "id": item.id,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": item.model,
        "choices": [_choice(completion, chat, text_of) for completion in result.completions],
        "usage": {
            **usage,
            "total_tokens": sum(usage.values()),
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        },
    }
    return {
        "id": item.id,
        "custom_id": item.id,
        "response": {"status_code": 200, "request_id": item.id, "body": body},
        "error": None,
        "digest": item.digest,
    }


def for_people(item: Item, result: Result, alone: bool) -> str:
    """A finished request as text. Each sample has a heading, unless there is one request with one sample."""
    prompt = item.prompt[-1]["content"] if _is_chat(item) else item.prompt
    begins = textwrap.shorten(prompt if isinstance(prompt, str) else f"{len(prompt)} tokens", 80, placeholder=" ...")
    texts = []
    for number, completion in enumerate(result.completions, start=1):
        sample = f", sample {number}" if len(result.completions) > 1 else ""
        text = completion.text or " ".join(map(str, completion.tokens))  # there is no text without a tokenizer
        texts.append(f"{text}\n" if alone else f"[{item.id}{sample}] {begins}\n{text}\n\n")
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], "".join(texts))


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model must not command a terminal


def _is_chat(item: Item) -> bool:
    return isinstance(item.prompt[0], dict)


def _plain(completion: Completion, text_of: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    line: dict[str, Any] = {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "tokens": completion.tokens,
    }
    if completion.error:
        line["error"] = completion.error
    if completion.logprobs:
        line["logprobs"] = _logprobs(completion, text_of)
    return line


def _choice(completion: Completion, chat: bool, text_of: Callable[[Sequence[int]], str] | None) -> dict[str, Any]:
    says = {"message": {"role": "assistant", "content": completion.text}} if chat else {"text": completion.text}
    logprobs = {"content": _logprobs(completion, text_of)} if completion.logprobs else None
    return {"index": completion.index, **says, "finish_reason": completion.finish_reason, "logprobs": logprobs}


def _logprobs(completion: Completion, text_of: Callable[[Sequence[int]], str] | None) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = {} if text_of is None else {"token": text_of([token])}
        return {**text, "token_id": token, "logprob": logprob}

    return [
        {**entry(token, found.logprob), "top_logprobs": [entry(*other) for other in found.top]}
        for token, found in zip(completion.tokens, completion.logprobs, strict=True)
    ]
