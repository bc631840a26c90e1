"""Which blocks are free, held and findable. Blocks are numbers here, without contents.

A block is held by one or more sequences (its reference count), or free. A full block may have a name, a hash of all
tokens up to its end. It can be found by its name while it is held, and afterwards until it is needed for other tokens.
Free blocks are handed out in this order: blank ones (without a name) first, then named ones, the least recently used
first. The time of an operation on a block does not grow with the number of blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kv_cache.arguments import require_count

Evicted = list[tuple[bytes, int]]
"""Names that can no longer be found, and the blocks that had them."""


class OutOfBlocks(RuntimeError):
    """There are too few free blocks. Nothing was changed."""

    def __init__(self, needed: int, free: int, blocks: int):
        super().__init__(f"{needed} more blocks are needed; {free} of {blocks} are free")
        self.needed, self.free = needed, free


class BlockPool:
    """Blocks 0 to blocks - 1, all of them free at first.

    Args:
        blocks: how many there are.
        on_evict: is called with the named blocks that are handed out again, before they can be written.
    """

    def __init__(self, blocks: int, on_evict: Callable[[Evicted], None] | None = None):
        require_count("blocks", blocks, at_least=1)
        self.blocks = blocks
        self.evictions = 0
        self._on_evict = on_evict
        self._holders = [0] * blocks
        self._names: list[bytes | None] = [None] * blocks
        self._found: dict[bytes, int] = {}
        self._twins: dict[bytes, list[int]] = {}  # more blocks of the same name, oldest first
        self._blank = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, but findable; least recently used first

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def findable(self) -> int:
        """Blocks with a name, held or free."""
        return len(self._found) + sum(map(len, self._twins.values()))

    def holders(self, block: int) -> int:
        """How many sequences hold a block; 0 if it is free."""
        return self._holders[block]

    def find(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of these names, up to the first that can't be found. They may be free: `share` them before taking
        others."""
        found = list(map(self._found.get, names))
        return found[: found.index(None)] if None in found else found

    def writable(self, block: int) -> bool:
        """Whether its holder may write to it: it has no other holder and can't be found."""
        return self._holders[block] == 1 and self._names[block] is None

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free."""
        holders = self._holders
        return [holders[block] for block in blocks].count(0)

    def take(self, count: int) -> list[int]:
        """`count` blocks with one holder each and no name. Raises OutOfBlocks, and takes none, if there are too few."""
        require_count("count", count)
        if count > self.free:
            raise OutOfBlocks(count, self.free, self.blocks)
        blank, holders = self._blank, self._holders
        taken = [blank.pop() for _ in range(min(count, len(blank)))]
        if len(taken) < count:
            taken += self._evict(count - len(taken))
        for block in taken:
            holders[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a holder to each of these blocks, which are held or findable."""
        self._require_known(blocks)
        holders, idle = self._holders, self._idle
        if blank := [block for block in blocks if not holders[block] and block not in idle]:
            raise ValueError(f"blocks must be held or findable; {blank[0]} is blank")
        for block in blocks:
            if not holders[block]:
                del idle[block]
            holders[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Removes a holder from each of these blocks. Of those that become free, the first is evicted first."""
        self._require_known(blocks)
        holders, names = self._holders, self._names
        if free := [block for block in blocks if not holders[block]]:
            raise ValueError(f"blocks must be held to be released; {free[0]} is free")
        for block in blocks:
            holders[block] -= 1
            if not holders[block]:
                if names[block] is None:
                    self._blank.append(block)
                else:
                    self._idle[block] = None

    def name(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Makes held blocks findable; they may not be written any more. Of several blocks with one name the first is
        found, and when it is evicted, the next."""
        self._require_known(blocks)
        if free := [block for block in blocks if not self._holders[block]]:
            raise ValueError(f"blocks must be held to be named; {free[0]} is free")
        if known := [block for block in blocks if self._names[block] is not None]:
            raise ValueError(f"blocks must not have a name yet; {known[0]} has one")
        for block, name in zip(blocks, names, strict=True):
            self._names[block] = name
            if self._found.setdefault(name, block) != block:
                self._twins.setdefault(name, []).append(block)

    def _evict(self, count: int) -> list[int]:
        names, found, twins, oldest = self._names, self._found, self._twins, self._idle.popitem
        taken, lost = [], []
        for _ in range(count):
            block, _ = oldest(last=False)
            name = names[block]
            names[block] = None
            taken.append(block)
            if name in twins:
                self._lose_twin(name, block)
            else:
                del found[name]
                lost.append((name, block))
        self.evictions += count
        if self._on_evict is not None:
            self._on_evict(lost)
        return taken

    def _lose_twin(self, name: bytes, block: int) -> None:
        """Takes away a block's name that other blocks have too."""
        twins = self._twins[name]
        if self._found[name] == block:
            self._found[name] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[name]

    def _require_known(self, blocks: Sequence[int]) -> None:
        if blocks and not 0 <= min(blocks) <= max(blocks) < self.blocks:
            wrong = next(block for block in blocks if not 0 <= block < self.blocks)
            raise ValueError(f"blocks must be 0 to {self.blocks - 1}; got {wrong}")
        if len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks must be different ones; got {list(blocks)}")
