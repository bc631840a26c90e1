"""Text comes in whole characters, adds up to the text of all tokens, and ends before the first stop text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_backend.engine.text import Detokenizer, StopTexts, TextStream


def decode_bytes(tokens) -> str:
    """A tokenizer of bytes."""
    return bytes(tokens).decode("utf-8", errors="replace")


WORDS = ["Hel", "lo", ",", "world", "ß", "日本", "!"]


def decode_words(tokens) -> str:
    """A tokenizer of words, whose first one loses the space before it, as sentencepiece's does."""
    return "".join(" " + WORDS[token] for token in tokens)[1:]


@given(st.lists(st.integers(0, 255)), st.lists(st.integers(0, 255), max_size=6))
def test_pieces_of_any_bytes_add_up(tokens, prompt):
    detokenizer = Detokenizer(decode_bytes, prompt)
    pieces = [detokenizer.push(token) for token in tokens]
    whole = "".join(pieces) + detokenizer.finish()
    # the prompt's last bytes may begin a character that the first tokens end
    before = decode_bytes(prompt[-Detokenizer.CONTEXT :]).removesuffix("\ufffd")
    assert before + whole == decode_bytes([*prompt[-Detokenizer.CONTEXT :], *tokens])


@given(st.text())
def test_no_piece_has_half_a_character(text):
    tokens = list(text.encode("utf-8", errors="replace"))
    detokenizer = Detokenizer(decode_bytes)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == bytes(tokens).decode()
    # a piece comes with the last byte of its character
    size = 0
    for end, piece in enumerate(pieces, start=1):
        size += len(piece.encode())
        assert size <= end and "\ufffd" not in piece.replace("\ufffd", "", text.count("\ufffd"))


@given(st.lists(st.integers(0, len(WORDS) - 1), min_size=1), st.lists(st.integers(0, len(WORDS) - 1), min_size=1))
def test_spaces_between_words_stay_where_they_are(tokens, prompt):
    detokenizer = Detokenizer(decode_words, prompt)
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
    assert decode_words(prompt) + text == decode_words(prompt + tokens)


@given(
    st.text(alphabet="ab", max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=30, max_size=30),
)
def test_stop_texts_are_found_however_text_is_cut(text, stop, sizes):
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    want = text[: min(ends)[1]] if ends else text
    stops, shown, stopped, at = StopTexts(stop), "", False, 0
    for size in sizes:
        piece, stopped = stops.push(text[at : at + size])
        shown += piece
        at += size
        assert want.startswith(shown)  # nothing was shown that had to be taken back
        if stopped or at >= len(text):
            break
    assert stopped == bool(ends)
    assert (shown if stopped else shown + stops.finish()) == want


def test_text_is_held_back_only_as_long_as_it_may_be_a_stop_text():
    stops = StopTexts(["STOP", "\n\n"])
    pieces = [stops.push(piece) for piece in ("a", "S", "T", "x", "\n", "y\n")]
    assert pieces == [(shown, False) for shown in ("a", "", "", "STx", "", "\ny")]
    assert stops.finish() == "\n"


@pytest.mark.parametrize("stop, shown", [(("\ufffd",), "a"), (("€",), "a\ufffd")])
def test_the_rest_of_a_text_is_looked_through_for_stop_texts_too(stop, shown):
    stream = TextStream(decode_bytes, [], stop)
    pieces = [stream.push(token) for token in "a€".encode()[:-1]]
    assert pieces == [("a", False), ("", False), ("", False)]
    rest, stopped = stream.finish()
    assert "a" + rest == shown and stopped == (stop[0] == "\ufffd")
