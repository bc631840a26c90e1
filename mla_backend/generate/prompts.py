"""Prompts from arguments, text files and lines of JSON."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Any

from mla_backend.engine.engine import Prompt
from mla_backend.engine.params import SamplingParams


class Shape(Enum):
    """The form of a request and its answer."""

    PLAIN = "plain"
    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"


@dataclass(frozen=True)
class Item:
    """A request that was read."""

    number: int
    """The number of its line or argument, from 1."""
    id: str
    prompt: Prompt
    params: SamplingParams
    shape: Shape = Shape.PLAIN
    model: str | None = None
    """The model that a batch request names, which its answer repeats."""

    @property
    def digest(self) -> str:
        """A hash of everything that decides what is generated."""
        what = json.dumps([self.prompt, asdict(self.params)], sort_keys=True)
        return blake2b(what.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Bad:
    """A line that can't be read, or a request that can't be run, and why."""

    number: int
    why: str


NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "functions": [],
    "logit_bias": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "stream": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
"""Fields of OpenAI's bodies that the engine does not support, and the one value that is accepted."""
IGNORED = {"metadata", "model", "service_tier", "store", "stream_options", "user"}
"""Fields that change nothing about the answer's text."""
OURS = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "seed": "seed",
    "stop": "stop",
    "stop_token_ids": "stop_tokens",
    "ignore_eos": "ignore_eos",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
    "n": "n",
}
"""Fields of a line, and the fields of SamplingParams that they set."""
PROMPTS = ("prompt", "messages", "tokens")


def read(
    lines: Iterable[str | bytes], defaults: SamplingParams, *, jsonl: bool | None = None, chat: bool = False
) -> tuple[list[Item], list[Bad]]:
    """The requests of a file, and the lines that can't be read.

    Args:
        lines: the file's lines, as text or as bytes of UTF-8. Empty ones are skipped.
        defaults: for everything that a line doesn't say.
        jsonl: whether lines are JSON, not prompts; by default if the first one begins with {.
        chat: take a prompt as a user's message, for the chat template.
    """
    items: list[Item] = []
    bad: list[Bad] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        try:
            text = _text(line, first=number == 1)
        except ValueError as error:
            bad.append(Bad(number, str(error)))
            continue
        if not text.strip():
            continue
        if jsonl is None:
            jsonl = text.lstrip().startswith("{")
        try:
            item = _of_json(number, text, defaults) if jsonl else Item(number, str(number), text, defaults)
            if item.id in line_of:
                raise ValueError(f"id {item.id!r} is that of line {line_of[item.id]}, too")
        except (TypeError, ValueError) as error:
            bad.append(Bad(number, str(error)))
            continue
        line_of[item.id] = number
        items.append(as_chat(item) if chat else item)
    return items, bad


def _text(line: str | bytes, first: bool) -> str:
    """A line without its end and, if it is the first one, without a byte order mark."""
    if isinstance(line, bytes):
        try:
            line = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"must be UTF-8: {error}") from None
    return (line.removeprefix("\ufeff") if first else line).rstrip("\r\n")


def _require_text(fields: object) -> None:
    """Half of a surrogate pair is no text: it can be neither tokenised nor written."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"must be text; has half of a surrogate pair, {error.object[error.start]!a}") from None


def as_chat(item: Item) -> Item:
    """A text as a user's message."""
    if not isinstance(item.prompt, str):
        return item
    return replace(item, prompt=[{"role": "user", "content": item.prompt}])


def _of_json(number: int, line: str, defaults: SamplingParams) -> Item:
    try:
        fields = json.loads(line)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"must be an object {{...}}; got {line[:40]}")
    _require_text(fields)
    if "body" in fields or "custom_id" in fields:
        return _of_batch(number, fields, defaults)
    fields = _without_nothing(fields)
    id = fields.pop("id", str(number))
    if not isinstance(id, (str, int)) or isinstance(id, bool):
        raise ValueError(f"id must be a text or a number; got {id!r}")
    prompt = _prompt(fields)
    return Item(number, str(id), prompt, _params(fields, defaults))


def _of_batch(number: int, fields: Mapping[str, Any], defaults: SamplingParams) -> Item:
    """A line of OpenAI's batch files."""
    id, body, url = fields.get("custom_id"), fields.get("body"), fields.get("url")
    if not isinstance(id, str) or not id:
        raise ValueError(f"custom_id must be a text that isn't empty; got {id!r}")
    if not isinstance(body, dict):
        raise ValueError(f"body must be an object {{...}}; got {body!r}")
    if fields.get("method", "POST") != "POST":
        raise ValueError(f"method must be POST; got {fields['method']!r}")
    shapes = {shape.value: shape for shape in (Shape.CHAT, Shape.COMPLETION)}
    if not isinstance(url, str) or url not in shapes:
        raise ValueError(f"url must be one of {', '.join(shapes)}; got {url!r}")
    shape, body = shapes[url], _without_nothing(body)
    model = body.get("model")
    wanted = "messages" if shape is Shape.CHAT else "prompt"
    if wanted not in body:
        raise ValueError(f"body must have {wanted} for {url}; it has {', '.join(body) or 'nothing'}")
    if shape is Shape.CHAT and isinstance(body.get("logprobs"), bool):
        wants = body.pop("logprobs")
        body["top_logprobs"] = body.get("top_logprobs", 0) if wants else None
        body = _without_nothing(body)
    return Item(number, id, _prompt(body), _params(body, defaults), shape, model)


def _without_nothing(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not null: null means absent."""
    return {key: value for key, value in fields.items() if value is not None}


def _prompt(fields: dict[str, Any]) -> Prompt:
    """Removes the prompt from the fields of a line, and returns it."""
    given = [name for name in PROMPTS if name in fields]
    if len(given) != 1:
        raise ValueError(f"must have one of {', '.join(PROMPTS)}; got {' and '.join(given) or 'none'}")
    name = given[0]
    prompt = fields.pop(name)
    if name == "messages":
        if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
            raise ValueError("messages must be one or more objects with a role and a content, both texts")
        return prompt
    if name == "prompt" and isinstance(prompt, str) and prompt:
        return prompt
    tokens = isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)
    if not tokens:
        allowed = "a text that isn't empty, or tokens" if name == "prompt" else "one or more token ids"
        raise ValueError(f"{name} must be {allowed}; got {json.dumps(prompt)[:60]}")
    return prompt


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _params(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if name in IGNORED:
            continue
        if name in NEUTRAL:
            if value != NEUTRAL[name]:
                raise ValueError(f"{name} must be {json.dumps(NEUTRAL[name])} or left out; got {json.dumps(value)}")
            continue
        if name not in OURS:
            raise ValueError(f"{name} is not a known field")
        if name == "stop":
            value = (value,) if isinstance(value, str) else value
        changes[OURS[name]] = tuple(value) if isinstance(value, list) else value
    return replace(defaults, **changes)
