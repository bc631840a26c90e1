"""How a request wants its tokens sampled, and when it is finished."""

import math
from dataclasses import dataclass

from mla_backend.arguments import require_count

MOST_LOGPROBS = 20
LARGEST_SEED = 2**63 - 1
LARGEST_PENALTY = 1e9
"""Of repetition_penalty; the smallest is 1e-9. Logits stay finite when they are multiplied or divided by it."""


@dataclass(frozen=True)
class SamplingParams:
    """Greedy unless a temperature is given. Wrong values are errors that name them.

    A token has to pass all three filters: top_k, top_p and min_p. They apply to the distribution after the repetition
    penalty and the temperature.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Only tokens with at least this part of the likeliest token's probability."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens that occurred in the prompt or after it."""
    seed: int | None = None
    """A request with a seed gives the same samples every time. Sample i of n is that of a request with seed + i."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample; they are not part of its text."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end a sample, in addition to the model's own."""
    ignore_eos: bool = False
    """The model's own end token does not end a sample."""
    logprobs: int | None = None
    """How many of the likeliest tokens' logprobs to return in addition to the sampled one's. They are the model's own,
    before temperature, penalties and filters."""
    n: int = 1
    """Samples of one prompt, which is computed only once."""

    def __post_init__(self) -> None:
        require_count("max_tokens", self.max_tokens, at_least=1)
        require_count("top_k", self.top_k)
        require_count("n", self.n, at_least=1)
        _require_number("temperature", self.temperature, 0.0, math.inf)
        _require_number("top_p", self.top_p, 0.0, 1.0, excludes_low=True)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        _require_number("repetition_penalty", self.repetition_penalty, 1 / LARGEST_PENALTY, LARGEST_PENALTY)
        if self.logprobs is not None:
            require_count("logprobs", self.logprobs)
            if self.logprobs > MOST_LOGPROBS:
                raise ValueError(f"logprobs must be {MOST_LOGPROBS} or less; got {self.logprobs}")
        if self.seed is not None:
            require_count("seed", self.seed)
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise TypeError(f"stop must be texts that aren't empty, in a tuple; got {self.stop!r}")
        if not isinstance(self.stop_tokens, tuple):
            raise TypeError(f"stop_tokens must be a tuple of ints; got {self.stop_tokens!r}")
        for token in self.stop_tokens:
            require_count("stop_tokens", token)
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be a bool; got {self.ignore_eos!r}")

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _require_number(name: str, value: object, low: float, high: float, excludes_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {value!r}")
    try:
        value = float(value)
    except OverflowError:  # an integer of hundreds of digits
        value = math.inf
    if not low <= value <= high or math.isinf(value) or (excludes_low and value == low):
        lowest = f"more than {low:g}" if excludes_low else f"{low:g} or more"
        raise ValueError(f"{name} must be {lowest}{'' if math.isinf(high) else f' and at most {high:g}'}; got {value}")
