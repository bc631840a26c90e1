"""What the tiny checkpoint is trained on: dialogues of the recall task, without the pairs that are held out."""

from random import Random

from serving_benchmarks.models.recall import (
    ASSISTANT,
    BOS,
    END_OF_THOUGHT,
    EOS,
    FILLER_SHARE,
    FILLERS,
    IDS,
    USER,
    Fact,
    Facts,
    tokens_of,
)

IGNORED = -100
"""Label of tokens that nothing is learned from."""


def dialogue(random: Random, length: int) -> tuple[list[int], list[int]]:
    """A sequence to train on, token ids and labels of this length: facts, and a question about each of most of them.

    Three of four are chats of several turns, the others plain text, in which facts are repeated too. The first question
    comes early or late. The labels are the answers and what ends them, shifted by one: a token
    is to be predicted by the one before it.
    """
    facts, plain = Facts(random), random.random() < 0.25
    unasked: list[Fact] = []
    ids, answers = [IDS[BOS]], [False]

    def say(tokens: list[int], is_answer: bool = False) -> None:
        ids.extend(tokens)
        answers.extend([is_answer] * len(tokens))

    def state() -> None:
        if random.random() < FILLER_SHARE:
            say(tokens_of(random.choice(FILLERS)))
        fact = facts.draw()
        if fact is not None:
            say(tokens_of(fact.words(fact.kind.statement)))
            unasked.append(fact)

    first = random.random() ** 2 * 0.9 * length
    new_facts = random.choice([0.3, 0.5, 0.7])  # from the first question on, of what is said
    if not plain:
        say([IDS[USER]])
    while len(ids) < first:
        state()
    while len(ids) < length:
        if not unasked or random.random() < new_facts:
            state()
            continue
        fact = unasked.pop(random.randrange(len(unasked)))
        _, question, answer = facts.question(fact)
        if not plain:
            say(tokens_of(question) + [IDS[ASSISTANT], IDS[END_OF_THOUGHT]])
            say(tokens_of(answer) + [IDS[EOS]], True)
            say([IDS[USER]])
        elif random.random() < 0.5:
            say(tokens_of(question))
            say(tokens_of(answer) + [IDS["."]], True)
        else:
            start, _, end = fact.kind.statement.partition("VALUE")
            say(tokens_of(fact.words(start)))
            say(tokens_of(fact.value), True)
            say(tokens_of(end))
    labels = [token if is_answer else IGNORED for token, is_answer in zip(ids, answers, strict=True)]
    return ids[:length], labels[1 : length + 1] + [IGNORED] * (length + 1 - len(labels))
