"""A request and its samples, which the scheduler works with."""

from dataclasses import dataclass, field

from kv_cache import Sequence
from mla_backend.engine.params import SamplingParams
from mla_backend.engine.text import TextStream


@dataclass(eq=False)
class Request:
    """A prompt and how to continue it."""

    id: str
    params: SamplingParams
    prompt_tokens: int
    most_tokens: int
    """The most tokens that a sample may get: its max_tokens, or what is left of the model's length."""
    stop_tokens: frozenset[int]
    seed: int
    samples: list["Sample"] = field(default_factory=list)
    """One until the prompt is computed, then params.n."""


@dataclass(eq=False)
class Sample:
    """One continuation of a prompt."""

    request: Request
    index: int
    sequence: Sequence
    """The prompt's tokens and the sampled ones, as the cache manager keeps them."""
    stream: TextStream | None
    """None without a tokenizer."""
    seats: int = 1
    """How many samples this one counts for: before the fork, all those that will be forked from it."""
    cached_tokens: int = 0
    """Tokens of the prompt that were in the cache when the request was first admitted."""
    admitted: bool = False
    seen: set[int] | None = None
    """The sequence's tokens, kept where a repetition penalty needs them."""
    finish_reason: str | None = None
    """stop or length once the sample is finished."""

    @property
    def new_tokens(self) -> int:
        """How many have been sampled."""
        return len(self.sequence) - self.request.prompt_tokens

    @property
    def left(self) -> int:
        """How many of its tokens are not computed yet: 1 in a decode."""
        return len(self.sequence) - self.sequence.computed
