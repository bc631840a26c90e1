"""The recall task: facts about people, then questions about them.

    Anna lives in Lisbon. The code of Omar is 4821. ... What is the code of Omar?   ->   4821

An answer is somewhere in the context and nowhere else. One of eight pairs of a name and a value is held out by a hash
of the two: it never occurs in training, and prompts that measure accuracy ask for held-out pairs alone. So an answer
that is right was read and not remembered.
"""

import json
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path

CHECKPOINT = Path(__file__).parents[2] / "examples" / "recall" / "checkpoint"  # in the source tree alone

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, END_OF_THOUGHT = "<｜User｜>", "<｜Assistant｜>", "</think>"
UNKNOWN = "<｜unknown｜>"
SPECIAL = (BOS, EOS, UNKNOWN, USER, ASSISTANT, "<think>", END_OF_THOUGHT)
"""Those of DeepSeek-V3.2, whose chat format this is: vLLM has it built in, and takes no notice of a template."""

_WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("recall.json").read_text())
NAMES, CITIES, COLOURS, FILLERS = (_WORDS[kind] for kind in ("names", "cities", "colours", "fillers"))
FILLER_SHARE = 0.05
PUNCTUATION = ". , ? ! : ; ' \" ( ) -".split()
DIGITS = [str(digit) for digit in range(10)]
LETTERS = [chr(first + i) for first in (ord("A"), ord("a")) for i in range(26)]


@dataclass(frozen=True)
class Kind:
    """A kind of fact. NAME and VALUE stand for words; a value of digits is spelled, a token each."""

    name: str
    statement: str
    question: str
    values: tuple[str, ...]
    answers_name: bool = False  # the question gives the value and asks for the name
    unique: bool = False  # no two facts of a context have the same value


LIVES = "NAME lives in VALUE ."
KINDS = (
    Kind("code", "The code of NAME is VALUE .", "What is the code of NAME ?", tuple(f"{n:04d}" for n in range(10000))),
    Kind("city", LIVES, "Where does NAME live ?", tuple(CITIES), unique=True),
    Kind("person", LIVES, "Who lives in VALUE ?", tuple(CITIES), answers_name=True, unique=True),
    Kind("colour", "NAME likes VALUE .", "What colour does NAME like ?", tuple(COLOURS)),
)
STATEMENTS = {kind.statement: kind for kind in KINDS}
"""A kind for each way to state a fact; questions of several kinds may ask for facts that are stated alike."""


def _vocabulary() -> list[str]:
    texts = [text for kind in KINDS for text in (kind.statement, kind.question)] + FILLERS
    words = sorted({word for text in texts for word in text.split()} - {"NAME", "VALUE"} - set(PUNCTUATION))
    pieces = [f"##{piece}" for piece in DIGITS + LETTERS]
    tokens = [*SPECIAL, *PUNCTUATION, *DIGITS, *LETTERS, *pieces, *words, *NAMES, *CITIES, *COLOURS]
    tokens = list(dict.fromkeys(tokens))
    return tokens + [f"<｜reserved▁{i}｜>" for i in range(-len(tokens) % 64)]  # vLLM pads to multiples of 64


VOCABULARY = _vocabulary()
IDS = {token: i for i, token in enumerate(VOCABULARY)}


def pieces(word: str) -> list[str]:
    """A word as tokens: digits one by one, all other words of the task as they are."""
    return [word[0], *(f"##{digit}" for digit in word[1:])] if word.isdigit() else [word]


def tokens_of(text: str) -> list[int]:
    """Of words of the task with spaces between all of them."""
    return [IDS[piece] for word in text.split() for piece in pieces(word)]


def text_of(words: str) -> str:
    """As a person writes it: `Who lives in Oslo ?` without the last space."""
    for mark in ".?":
        words = words.replace(f" {mark}", mark)
    return words


def is_held_out(name: str, value: str) -> bool:
    """Whether a pair is kept from training."""
    return zlib.crc32(f"{name} {value}".encode()) % 8 == 0


@dataclass(frozen=True)
class Fact:
    """What one statement says."""

    kind: Kind
    name: str
    value: str

    def words(self, template: str) -> str:
        """A template of its kind, filled in."""
        return template.replace("NAME", self.name).replace("VALUE", self.value)


@dataclass
class Facts:
    """Facts of one context, drawn at random: no two contradict each other."""

    random: random.Random
    held_out: bool = False  # whether pairs that are held out may be drawn
    drawn: list[Fact] = field(default_factory=list)
    _known: set[tuple[str, str]] = field(default_factory=set)

    def draw(self, held_out: bool = False) -> Fact | None:
        """A new fact, or None when names or values have run out; held_out: of a pair that is."""
        for _ in range(200):
            kind = self.random.choice(list(STATEMENTS.values()))
            name, value = self.random.choice(NAMES), self.random.choice(kind.values)
            about, says = (kind.statement, name), (kind.statement, value)
            if about in self._known or (kind.unique and says in self._known):
                continue
            if is_held_out(name, value) and not self.held_out or held_out and not is_held_out(name, value):
                continue
            self._known |= {about, says}
            self.drawn.append(Fact(kind, name, value))
            return self.drawn[-1]
        return None

    def question(self, fact: Fact) -> tuple[Kind, str, str]:
        """A question about a fact: its kind, its words, and those of the answer."""
        kind = self.random.choice([kind for kind in KINDS if kind.statement == fact.kind.statement])
        return kind, fact.words(kind.question), fact.name if kind.answers_name else fact.value


@dataclass(frozen=True)
class Prompt:
    """A context and a question at its end."""

    kind: str
    context: str
    question: str
    answer: str

    @property
    def text(self) -> str:
        """What a person would write."""
        return text_of(f"{self.context} {self.question}")

    @property
    def context_tokens(self) -> list[int]:
        """Of the chat, up to the question."""
        return [IDS[BOS], IDS[USER], *tokens_of(self.context)]

    @property
    def question_tokens(self) -> list[int]:
        """Of the chat, from the question to where the answer begins."""
        return [*tokens_of(self.question), IDS[ASSISTANT], IDS[END_OF_THOUGHT]]

    @property
    def answer_tokens(self) -> list[int]:
        """With what ends it."""
        return [*tokens_of(self.answer), IDS[EOS]]


def prompts(seed: int, length: int, questions: int) -> list[Prompt]:
    """Prompts of this many tokens or a few more, that ask for held-out facts anywhere in one context. ValueError if the
    context has fewer of them than there are questions."""
    chance = random.Random(f"held out {seed} {length}")
    facts = Facts(chance, held_out=True)
    statements, asked = [], []
    missing = length - len(tokens_of("Who lives in Oslo ?")) - 4  # and what the chat format adds
    while missing > 0:
        words = chance.choice(FILLERS)
        if chance.random() >= FILLER_SHARE and (fact := facts.draw(held_out=len(asked) < questions)):
            words = fact.words(fact.kind.statement)
            if is_held_out(fact.name, fact.value):
                asked.append(fact)
        statements.append(words)
        missing -= len(tokens_of(words))
    chance.shuffle(statements)
    context = " ".join(statements)
    if len(asked) < questions:
        raise ValueError(f"length must be enough for {questions} held-out facts; {length} tokens have {len(asked)}")
    drawn = map(facts.question, chance.sample(asked, questions))
    return [Prompt(kind.name, context, question, answer) for kind, question, answer in drawn]


def held_out(length: int, questions: int, per_context: int = 20) -> list[Prompt]:
    """Prompts of this many tokens or a few more, so many questions about each context."""
    contexts = -(-questions // per_context)
    return [prompt for seed in range(contexts) for prompt in prompts(seed, length, per_context)][:questions]
