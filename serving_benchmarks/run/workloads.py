"""What is asked of an engine: prompts and how many tokens each is to give, the same ones for everybody."""

import csv
import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

Range = tuple[int, int]
"""Both ends belong to it."""

SHORT = 16
"""Tokens of prompts that are there for what comes beside or after them."""


@dataclass(frozen=True)
class Workload:
    """Requests in the order in which they are made."""

    prompts: list[list[int]]
    output_lens: list[int]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its output included."""
        return max(len(prompt) + new for prompt, new in zip(self.prompts, self.output_lens, strict=True))

    def first(self, count: int, most_output: int | None = None) -> "Workload":
        """The first requests, with shorter outputs if they are to be."""
        outputs = self.output_lens[:count]
        return Workload(self.prompts[:count], [min(new, most_output or new) for new in outputs])

    def as_dict(self) -> dict[str, list]:
        return asdict(self)


def prompts_in_waves(prompts: int, concurrency: int | None, waves: int | None) -> int:
    """How many of the prompts are used, if there are to be at most `waves` for each sequence in flight."""
    return prompts if waves is None or concurrency is None else min(prompts, waves * concurrency)


@dataclass(frozen=True)
class Share:
    """A row of a histogram: requests of these lengths, and how many of them beside those of other rows."""

    inputs: Range
    outputs: Range
    weight: float


def read_histogram(path: Path) -> list[Share]:
    """A CSV file with the columns input_len, output_len and weight. Lengths are a number or a range such as 128-512."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        missing = {"input_len", "output_len", "weight"} - set(rows.fieldnames or ())
        if missing:
            raise ValueError(
                f"{path.name} must have the columns input_len, output_len and weight; it lacks "
                f"{', '.join(sorted(missing))}"
            )
        shares = []
        for row in rows:
            try:
                share = Share(_range(row["input_len"]), _range(row["output_len"]), float(row["weight"]))
                if not 0 < share.weight < float("inf"):
                    raise ValueError(f"weight must be more than 0; got {row['weight']}")
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path.name}, line {rows.line_num}: {error}") from None
            shares.append(share)
    if not shares:
        raise ValueError(f"{path.name} must have a row or more")
    return shares


def _range(text: str) -> Range:
    found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text or "")
    if not found:
        raise ValueError(f"a length is a number or a range such as 128-512; got {text!r}")
    low, high = int(found[1]), int(found[2] or found[1])
    if not 1 <= low <= high:
        raise ValueError(f"a length must be 1 or more, and a range must rise; got {text!r}")
    return low, high


def usable_tokens(config: dict) -> list[int]:
    """The token ids that random prompts are made of: all of the vocabulary that don't begin or end anything."""
    special: set[int] = set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        special |= set(value) if isinstance(value, list) else {value}
    return [token for token in range(config["vocab_size"]) if token not in special]


def fixed(count: int, input_len: int, output_len: int, tokens: Sequence[int], *, shared: int, seed: int) -> Workload:
    """Requests of one length. Of each prompt the first `shared` tokens are the same."""
    return from_histogram(
        [Share((input_len, input_len), (output_len, output_len), 1.0)], count, tokens, shared=shared, seed=seed
    )


def from_histogram(shares: Sequence[Share], count: int, tokens: Sequence[int], *, shared: int, seed: int) -> Workload:
    """Requests of random lengths: of each row as many as its weight says, but for rounding, in random order, and within
    a row's ranges each length is as likely as the next.

    Args:
        shares: the rows.
        count: requests.
        tokens: ids to draw from.
        shared: tokens that all prompts begin with; they count as part of each prompt's length.
        seed: the same one gives the same requests.
    """
    shortest = min(share.inputs[0] for share in shares)
    if shared >= shortest:
        raise ValueError(f"the shared prefix must be shorter than the shortest prompt, {shortest} tokens; got {shared}")
    chance = random.Random(seed)
    prefix = chance.choices(tokens, k=shared)
    rows = [
        share for share, n in zip(shares, apportion([s.weight for s in shares], count), strict=True) for _ in range(n)
    ]
    chance.shuffle(rows)
    prompts, output_lens = [], []
    for row in rows:
        prompts.append(prefix + chance.choices(tokens, k=chance.randint(*row.inputs) - shared))
        output_lens.append(chance.randint(*row.outputs))
    return Workload(prompts, output_lens)


SHORTER = (0, 1, 4, 12)
"""By how many tokens steps of the warm-up are shorter than round numbers. Kernels are tuned for round numbers, the
nearest one counts. Triton compiles a kernel anew for each combination of which of its whole arguments are multiples of
16. For vLLM's kernel of experts these are K * M, of M tokens with K experts each, and K * M + E * (block - 1), as the
rows of all E experts are padded to blocks; the latter is a multiple of 16 where K * M - E is. With 8 of a real model's
256 experts they are so for the same M. With 2 of 8 there are three kinds of M: multiples of 8, 4 more than those, and
all others. What is 12 less than a round number is of the second kind, with 1 of 4 experts, too; so is what is 4 less,
where to the former another round number is nearer."""


def step_sizes(most: int) -> list[int]:
    """Numbers of tokens that a step may have, up to `most` and with it, ascending: the powers of two and what lies in
    the middle between them, such as 24 and 1536, each also as much shorter as SHORTER says, so that kernels which are
    compiled for kinds of numbers are compiled for all of them."""
    round_ones = {base << power for power in range(most.bit_length() + 1) for base in (1, 3)}
    sizes = {size - less for size in round_ones for less in SHORTER}
    return sorted(size for size in {*sizes, most} if 1 <= size <= most)


def of_step_sizes(
    most: int, in_flight: int, longest_request: int, tokens: Sequence[int], *, seed: int
) -> list[Workload]:
    """Requests that take an engine through the sizes of its steps, those of each element at once: for each of
    `step_sizes(most)` one prompt, or where that would be too long as many as it takes; at last, steps that give one
    token each to as many requests as there may be, and to fewer and fewer.

    Where there are several, a short one comes before them. An engine in a process of its own begins with the first that
    it gets; while it is busy with that one the others come in, and are in one step then. So their steps are not
    surely of these sizes, while those of one prompt are.

    Args:
        most: tokens of a step; `in_flight` prompts must do for it.
        in_flight: requests at a time, but for the short one.
        longest_request: its output included, 2 or more.
        tokens: ids to draw from.
        seed: the same one gives the same requests.
    """
    chance, short = random.Random(seed), min(SHORT, longest_request - 1)

    def requests(lengths: list[int], output_lens: list[int]) -> Workload:
        if len(lengths) > 1:
            lengths, output_lens = [short, *lengths], [1, *output_lens]
        # random from their first tokens on: none finds anything of another one's in the prefix cache
        prompts = [chance.choices(tokens, k=length) for length in lengths]
        most_new = [longest_request - length for length in lengths]
        return Workload(prompts, [min(new, room) for new, room in zip(output_lens, most_new, strict=True)])

    made = []
    for size in step_sizes(most):
        count = -(-size // (longest_request - 1))
        made.append(requests(apportion([1.0] * count, size), [2] * count))
    if in_flight > 1:
        # with each token after the second, as many are left as the next smaller size says
        sizes = step_sizes(in_flight)
        output_lens = [2 + sum(size > place for size in sizes) for place in range(in_flight)]
        made.append(requests([short] * in_flight, output_lens))
    return made


def apportion(weights: Sequence[float], count: int) -> list[int]:
    """Shares of a count, whole numbers that add up to it: each its exact share rounded down or up."""
    exact = [count * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    by_rest = sorted(range(len(whole)), key=lambda i: whole[i] - exact[i])
    for i in by_rest[: count - sum(whole)]:
        whole[i] += 1
    return whole


def from_jsonl(path: Path, model: Path, output_len: int, vocabulary: int, count: int | None) -> Workload:
    """The prompts of a file as `mla-backend generate` reads them: texts, conversations or tokens.

    Args:
        path: of the file.
        model: folder of the checkpoint, whose tokenizer is used where there are texts.
        output_len: for lines without max_tokens.
        vocabulary: tokens that the model has.
        count: only so many from the beginning.
    """
    from mla_backend.engine.params import SamplingParams
    from mla_backend.engine.tokenizer import Tokenizer
    from mla_backend.generate.prompts import read

    with path.open(encoding="utf-8") as lines:
        items, bad = read(lines, SamplingParams(max_tokens=output_len), jsonl=True)
    if bad:
        raise ValueError(f"{path.name}, line {bad[0].number}: {bad[0].why}")
    items = items[:count]
    if not items:
        raise ValueError(f"{path.name} must have a prompt or more")
    tokenizer = None
    prompts = []
    for item in items:
        prompt = item.prompt
        if not all(isinstance(part, int) for part in prompt):
            tokenizer = tokenizer or Tokenizer(model)
            prompt = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong:
            raise ValueError(f"{path.name}, line {item.number}: tokens must be 0 to {vocabulary - 1}; got {wrong[0]}")
        prompts.append(list(prompt))
    return Workload(prompts, [item.params.max_tokens for item in items])
