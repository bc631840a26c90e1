"""Random prompts. A seed gives the same ones each time."""

import random
from collections.abc import Sequence


def usable_tokens(config: dict) -> list[int]:
    """The token ids that random prompts are made of: all of the vocabulary that don't begin or end a text."""
    special: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        special |= set(value) if isinstance(value, list) else {value}
    return [token for token in range(config["vocab_size"]) if token not in special]


def random_prompts(count: int, length: int, tokens: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Prompts of one length that have no beginning in common."""
    chance = random.Random(seed)
    return [chance.choices(tokens, k=length) for _ in range(count)]
