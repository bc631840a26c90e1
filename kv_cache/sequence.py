"""A sequence: its tokens, the blocks that hold them, and the names of its prefixes.

The name of a full block stands for all tokens up to the block's end. It is a 128-bit BLAKE2b hash of the name before it
and the block's tokens; the name before the first one is made from a salt and a random secret of the manager. Prefixes
with the same name share contents, so different prefixes must not share a name. By chance they do with a probability of
10^-15 among 10^12 blocks, and without the secret nobody can search for such prefixes.
"""

import struct
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

NAME_BYTES = 16
TOKEN_BYTES = 4


class Sequence:
    """Made by `CacheManager.sequence` and `fork`. Only the manager changes its blocks.

    Attributes:
        tokens: array of int32; `append` adds more.
        computed: how many of the tokens are in the cache.
        blocks: array of int32; the first one has positions 0 to block_size - 1, and so on. Empty while it waits.
    """

    __slots__ = ("tokens", "computed", "blocks", "block_size", "manager", "_names", "_root")

    def __init__(self, manager: Any, tokens: Iterable[int], block_size: int, root: bytes):
        packed = _packed(tokens)
        self.tokens = array("i")
        self.tokens.frombytes(packed)
        self.computed = 0
        self.blocks = array("i")
        self.block_size = block_size
        self.manager = manager
        self._names: list[bytes] = []
        self._root = root
        self._name(packed)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, *tokens: int) -> None:
        """Adds tokens at the end, for example sampled ones."""
        self.tokens.frombytes(_packed(tokens))

    def names(self, count: int) -> list[bytes]:
        """The names of the first blocks, at least `count`, which have to be full of tokens."""
        if len(self._names) < count:
            self._name(self.tokens[len(self._names) * self.block_size : count * self.block_size].tobytes())
        return self._names

    def copy(self) -> "Sequence":
        """The same tokens, without blocks."""
        other = Sequence(self.manager, (), self.block_size, self._root)
        other.tokens, other._names = self.tokens[:], self._names.copy()
        return other

    def _name(self, data: bytes) -> None:
        """Names the full blocks of these tokens, which follow the named ones."""
        names, step = self._names, self.block_size * TOKEN_BYTES
        name = names[-1] if names else self._root
        for end in range(step, len(data) + 1, step):
            name = blake2b(name + data[end - step : end], digest_size=NAME_BYTES).digest()
            names.append(name)


def _packed(tokens: Iterable[int]) -> bytes:
    """Tokens as int32 bytes. struct reads a list several times faster than array does."""
    try:
        tokens = tokens if isinstance(tokens, (list, tuple)) else list(tokens)
        return struct.pack(f"{len(tokens)}i", *tokens)
    except (TypeError, struct.error):
        listed = tokens if isinstance(tokens, (list, tuple)) else ()
        wrong = (token for token in listed if not (isinstance(token, int) and -(2**31) <= token < 2**31))
        raise TypeError(f"tokens must be ints of 32 bits; got {next(wrong, tokens)!r}") from None


def root_name(secret: bytes, salt: str | bytes) -> bytes:
    """The name before the first block's. Sequences with different salts share nothing."""
    if not isinstance(salt, (str, bytes)):
        raise TypeError(f"salt must be a str or bytes; got {type(salt).__name__}")
    return blake2b(salt.encode() if isinstance(salt, str) else salt, key=secret, digest_size=NAME_BYTES).digest()
