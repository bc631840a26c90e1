"""The engine's results: an update at a time, or a request as a whole."""

from collections import defaultdict
from dataclasses import dataclass, field

from mla_backend.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class Update:
    """What a step has added to a sample."""

    id: str
    """The request's id."""
    index: int
    """The sample's number, 0 to samples - 1."""
    samples: int
    """The number of samples of the request."""
    tokens: tuple[int, ...]
    text: str
    """Whole characters, and nothing that may be the beginning of a stop text; so it lags behind the tokens. Empty
    without a tokenizer."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token, if asked for."""
    finish_reason: str | None
    """In a sample's last update: stop (the model's end token, a stop token or a stop text), length or error."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were in the cache."""
    error: str | None = None
    """Why the model had no next token, if that ended the sample."""


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
        """The first sample's text."""
        return self.completions[0].text

    @property
    def tokens(self) -> list[int]:
        """The first sample's tokens."""
        return self.completions[0].tokens


class Collector:
    """Assembles updates into results, request by request."""

    def __init__(self):
        self._open: dict[str, dict[int, Completion]] = defaultdict(dict)

    def add(self, update: Update) -> Result | None:
        """Adds an update. Returns the request's result if it was the last."""
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
