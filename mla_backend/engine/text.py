"""From tokens to text, piece by piece: no half characters, and nothing that may turn out to be a stop text."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders put where bytes are no character, such as the first bytes of one."""


class Detokenizer:
    """Turns tokens into pieces of text whose concatenation is the text of all of them.

    Tokens are decoded with a few before them, as decoders treat the beginning of a text in their own way. A character
    whose bytes are not all there yet is waited for.

    Args:
        decode: the text of some tokens.
        prompt: tokens that came before; they give no text.
    """

    CONTEXT = 4
    """Tokens of the prompt that the first new token is decoded with."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._window = list(prompt[-self.CONTEXT :])
        self._read = len(self._window)  # tokens of the window whose text is out
        # theirs, and what is out of the rest; a character that the prompt ends in the middle of belongs to the rest
        self._text = decode(self._window).removesuffix(REPLACEMENT) if self._window else ""

    def push(self, token: int) -> str:
        """The text that is certain now."""
        self._window.append(token)
        text = self._decode(self._window)
        complete = not text.endswith(REPLACEMENT)
        certain = text if complete else text[:-1]
        piece = certain[len(self._text) :]
        if complete:
            del self._window[: self._read]
            self._read = len(self._window)
            self._text = self._decode(self._window)
        elif piece:
            self._text = certain
        return piece

    def finish(self) -> str:
        """What was waited for and will not come."""
        return self._decode(self._window)[len(self._text) :]


class StopTexts:
    """Lets text through up to the first stop text, and holds back what may be the beginning of one.

    The first is the one that ends first; so it doesn't matter in which pieces text comes.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = stop
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """What may be shown now, and whether it ends here."""
        text = self._held + piece
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop if stop in text]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        longest = min(len(text), max(map(len, self._stop), default=1) - 1)
        held = next(
            (n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self._stop)),
            0,
        )
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False

    def finish(self) -> str:
        """What was held back, as it turned out to be nothing."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """A sample's text as it comes."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str]):
        self._detokenizer, self._stop = Detokenizer(decode, prompt), StopTexts(stop)

    def push(self, token: int) -> tuple[str, bool]:
        """What may be shown now, and whether a stop text has come."""
        return self._stop.push(self._detokenizer.push(token))

    def finish(self) -> tuple[str, bool]:
        """The rest, once no more tokens come; and whether a stop text is in it."""
        text, stopped = self._stop.push(self._detokenizer.finish())
        return (text, True) if stopped else (text + self._stop.finish(), False)
