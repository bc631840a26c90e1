"""From tokens to text, piece by piece, without half characters or what may become a stop text."""

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders return for bytes that are no character, such as the first bytes of one."""


class Detokenizer:
    """Turns tokens into pieces of text whose concatenation is the text of all of them.

    Tokens are decoded together with a few before them, as decoders treat the beginning of a text differently. A
    character is held back until all its bytes have come.

    Args:
        decode: returns the text of tokens.
        prompt: tokens before the first; their text is not returned.
    """

    CONTEXT = 4
    """How many tokens of the prompt the first new token is decoded with."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self._decode = decode
        self._window = list(prompt[-self.CONTEXT :])
        self._read = len(self._window)  # tokens of the window whose text has been returned
        # the text of the window that has been returned; not a character of which the prompt has only a part
        self._text = decode(self._window).removesuffix(REPLACEMENT) if self._window else ""

    def push(self, token: int) -> str:
        """Adds a token. Returns the text that is certain now."""
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
        """The rest, once no more tokens come: what was held back."""
        return self._decode(self._window)[len(self._text) :]


class StopTexts:
    """Passes text on up to the first stop text, and holds back what may be the beginning of one.

    The first stop text is the one that ends first, so the result doesn't depend on the pieces that text comes in.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = stop
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Adds text. Returns what may be shown now, and whether a stop text has come."""
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
        """What was held back and is no stop text."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of a sample, token by token."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop: Sequence[str]):
        self._detokenizer, self._stop = Detokenizer(decode, prompt), StopTexts(stop)

    def push(self, token: int) -> tuple[str, bool]:
        """Adds a token. Returns what may be shown now, and whether a stop text has come."""
        return self._stop.push(self._detokenizer.push(token))

    def finish(self) -> tuple[str, bool]:
        """The rest, once no more tokens come, and whether there is a stop text in it."""
        text, stopped = self._stop.push(self._detokenizer.finish())
        return (text, True) if stopped else (text + self._stop.finish(), False)
