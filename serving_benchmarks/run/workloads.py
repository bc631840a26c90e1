"""Requests for an engine: random prompts, and how many tokens each is to give. A seed gives the same ones each time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

SHORT = 16
"""Tokens of prompts whose length doesn't matter."""
SHORTER = (0, 1, 4, 12)
"""How many tokens the steps of the warm-up are shorter than round numbers.

vLLM tunes its kernels for round numbers of tokens, and takes what is tuned for the nearest one. Triton compiles a
kernel again for each combination of which integer arguments are multiples of 16. Of vLLM's expert kernel, with M tokens
and K of E experts for each, these are K * M and, where K * M - E is a multiple, another. With K = 2 and E = 8 there are
three kinds of M: multiples of 8, those plus 4, and all others. Round numbers less 12 or 4 are of the second kind."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are sent."""

    prompts: list[list[int]]
    output_lens: list[int]

    def __len__(self) -> int:
        return len(self.prompts)


def usable_tokens(config: dict) -> list[int]:
    """The token ids that random prompts are made of: all of the vocabulary that don't begin or end a text."""
    special: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        special |= set(value) if isinstance(value, list) else {value}
    return [token for token in range(config["vocab_size"]) if token not in special]


def fixed(count: int, input_len: int, output_len: int, tokens: Sequence[int], *, seed: int = 0) -> Workload:
    """Requests of one length, whose prompts have no beginning in common."""
    chance = random.Random(seed)
    return Workload([chance.choices(tokens, k=input_len) for _ in range(count)], [output_len] * count)


def step_sizes(most: int) -> list[int]:
    """The step sizes of the warm-up in tokens, ascending up to `most`.

    They are the powers of two, the numbers halfway between them such as 24 and 1536, and all of these less SHORTER.
    """
    round_ones = {base << power for power in range(most.bit_length() + 1) for base in (1, 3)}
    sizes = {size - less for size in round_ones for less in SHORTER}
    return sorted(size for size in {*sizes, most} if 1 <= size <= most)


def of_step_sizes(
    most: int, in_flight: int, longest_request: int, tokens: Sequence[int], *, seed: int = 0
) -> list[Workload]:
    """Requests that take an engine through steps of all sizes, so that it compiles its kernels before the clock runs.

    Each element is sent at once, when the one before has ended. Its prompts make one step of one of `step_sizes`. The
    last element decodes in batches of all of the sizes up to `in_flight`. Where an element has several prompts, a short
    one comes first: the others arrive while it runs, and so share the next step.

    Args:
        most: tokens of the largest step.
        in_flight: requests of the largest batch.
        longest_request: tokens of a request, its output included; 2 or more.
        tokens: ids to draw from.
    """
    chance, short = random.Random(seed), min(SHORT, longest_request - 1)

    def requests(lengths: list[int], output_lens: list[int]) -> Workload:
        if len(lengths) > 1:
            lengths, output_lens = [short, *lengths], [1, *output_lens]
        # random from the first token on, so that no prompt is found in the prefix cache
        prompts = [chance.choices(tokens, k=length) for length in lengths]
        most_new = [longest_request - length for length in lengths]
        return Workload(prompts, [min(new, room) for new, room in zip(output_lens, most_new, strict=True)])

    made = []
    for size in step_sizes(most):
        count = -(-size // (longest_request - 1))
        made.append(requests([(size + i) // count for i in range(count)], [2] * count))
    if in_flight > 1:
        # after each token from the second on, the batch shrinks to the next smaller size
        sizes = step_sizes(in_flight)
        output_lens = [2 + sum(size > i for size in sizes) for i in range(in_flight)]
        made.append(requests([short] * in_flight, output_lens))
    return made
