"""What comes out of the engine: a piece at a time, or a request as a whole."""

from collections import defaultdict
from dataclasses import dataclass, field

from mla_backend.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class Update:
    """What a step has added to a sample."""

    id: str
    """Of the request."""
    index: int
    """Of the sample, 0 to samples - 1."""
    samples: int
    """That the request has."""
    tokens: tuple[int, ...]
    text: str
    """Whole characters, and nothing that a stop text may begin with; so it lags behind the tokens. Empty without a
    tokenizer."""
    logprobs: tuple[TokenLogprobs, ...]
    """One a token, if they were asked for."""
    finish_reason: str | None
    """stop (the model's end, a stop token or text), length or error, with a sample's last update."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, that were found in the cache."""
    error: str | None = None
    """Why the model had no next token, where that is why it ended."""


@dataclass
class Completion:
    """A finished sample."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


@dataclass
class Result:
    """A finished request."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    completions: list[Completion]

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        """Of the first sample."""
        return self.completions[0].tokens


class Collector:
    """Puts updates together, request by request."""

    def __init__(self):
        self._open: dict[str, dict[int, Completion]] = defaultdict(dict)

    def add(self, update: Update) -> Result | None:
        """The request's result, if this was the last of its updates."""
        completions = self._open[update.id]
        completion = completions.setdefault(update.index, Completion(update.index))
        completion.text += update.text
        completion.tokens += update.tokens
        completion.logprobs += update.logprobs
        completion.finish_reason, completion.error = update.finish_reason, update.error
        finished = sum(c.finish_reason is not None for c in completions.values())
        if finished < update.samples:
            return None
        del self._open[update.id]
        return Result(
            update.id, update.prompt_tokens, update.cached_tokens, [completions[i] for i in range(update.samples)]
        )

    def drop(self, id: str) -> None:
        """Forgets a request that was aborted."""
        self._open.pop(id, None)
