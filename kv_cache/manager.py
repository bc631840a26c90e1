"""The cache manager's interface for schedulers: admit, allocate, commit, fork and release sequences."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from kv_cache.arguments import require_a, require_count
from kv_cache.blocks import BlockPool, OutOfBlocks
from kv_cache.host import HostTier
from kv_cache.sequence import NAME_BYTES, Sequence, root_name
from kv_cache.storage import Storage


@dataclass(frozen=True)
class Statistics:
    """The blocks as they are now, and counts since the manager was made."""

    blocks: int
    free: int
    findable: int
    """Blocks with a prefix that can be found, held or free."""
    sequences: int
    """Sequences that hold blocks."""
    asked_tokens: int
    """Tokens of admitted sequences."""
    hit_tokens: int
    """Those of them that were already in the cache, on the device or in host memory."""
    host_hit_tokens: int
    evictions: int
    """Prefixes that were evicted on the device."""
    copied_blocks: int
    """Shared blocks that were copied before a write."""
    host_blocks: int
    host_used: int

    @property
    def usage(self) -> float:
        """The fraction of the blocks that sequences hold."""
        return 1 - self.free / self.blocks

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0


class CacheManager:
    """Gives blocks to sequences, and finds prefixes that are already in the cache.

    Args:
        blocks, block_size: the number of blocks, and the tokens in each.
        storage: the blocks' contents, of the same sizes. Blocks are copied there, on the current stream. Without it
            only the bookkeeping is done.
        watermark: the fraction of the blocks that `admit` leaves free, so that admitted sequences can grow. It does
            not apply while no other sequence is admitted.
        host_bytes: bytes of host memory for evicted prefixes; 0 for none.

    No method may be called while another one runs.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        *,
        storage: Storage | None = None,
        watermark: float = 0.0,
        host_bytes: int = 0,
    ):
        require_count("blocks", blocks, at_least=1)
        require_count("block_size", block_size, at_least=1)
        require_count("host_bytes", host_bytes)
        if storage is not None:
            require_a(Storage, storage=storage)
        if isinstance(watermark, bool) or not isinstance(watermark, (int, float)):
            raise TypeError(f"watermark must be a number; got {type(watermark).__name__}")
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be at least 0 and less than 1; got {watermark}")
        if storage is not None and (storage.blocks, storage.layout.block_size) != (blocks, block_size):
            raise ValueError(
                f"storage must have {blocks} blocks of {block_size} tokens; "
                f"got {storage.blocks} of {storage.layout.block_size}"
            )
        if host_bytes and storage is None:
            raise ValueError("storage must be given with host_bytes, or there is nothing to keep; got None")
        self.block_size = block_size
        self._storage = storage
        self._host = HostTier(storage, host_bytes) if host_bytes else None
        self._pool = BlockPool(blocks, self._host.save if host_bytes else None)
        self._spare = int(watermark * blocks)
        self._secret = secrets.token_bytes(NAME_BYTES)
        self._sequences = 0
        self._asked_tokens = self._hit_tokens = self._host_hit_tokens = self._copied_blocks = 0

    def sequence(self, tokens: Iterable[int], salt: str | bytes = b"") -> Sequence:
        """A waiting sequence, without blocks. It shares prefixes only with sequences of the same salt."""
        sequence = Sequence(self, tokens, self.block_size, root_name(self._secret, salt))
        if not sequence.tokens:
            raise ValueError("tokens must be 1 or more; got none")
        return sequence

    def cached(self, sequence: Sequence) -> int:
        """How many of a waiting sequence's tokens `admit` would find. Nothing changes."""
        self._require_waiting(sequence)
        return len(self._match(sequence)) * self.block_size

    def admit(self, sequence: Sequence, count: int | None = None) -> int:
        """Takes the blocks of the longest cached prefix, and room for `count` tokens after it.

        The prefix consists of full blocks and leaves at least one token to be computed. By default there will be room
        for all other tokens. A sequence that was preempted is admitted like a new one.

        Returns:
            The number of tokens in the prefix, which need not be computed. `sequence.computed` is set to it.

        Raises:
            OutOfBlocks: there is no room above the watermark. Nothing has changed.
        """
        self._require_waiting(sequence)
        found = self._match(sequence)
        hits = len(found) * self.block_size
        if count is None:
            count = len(sequence) - hits
        require_count("count", count, at_least=1)
        pool = self._pool
        on_device = [block for block in found if block >= 0] if self._host is not None else found
        to_take = -(-(hits + count) // self.block_size) - len(on_device)
        needed = to_take + pool.idle_among(on_device) + (self._spare if self._sequences else 0)
        if needed > pool.free:
            raise OutOfBlocks(needed, pool.free, pool.blocks)
        pool.share(on_device)
        if len(on_device) == len(found):
            found += pool.take(to_take)
        else:
            found = self._fetch(sequence, found, to_take)
        sequence.blocks.extend(found)
        sequence.computed = hits
        self._sequences += 1
        self._asked_tokens += len(sequence)
        self._hit_tokens += hits
        return hits

    def allocate(self, sequence: Sequence, count: int = 1) -> None:
        """Makes room for `count` tokens after the computed ones: for the next part of a prompt, a sampled token, or
        speculative ones that are not known yet. A shared block that would be written is copied first.

        Raises:
            OutOfBlocks: there is no room. Nothing has changed.
        """
        self._require_admitted(sequence, count)
        blocks, size, pool = sequence.blocks, self.block_size, self._pool
        computed = sequence.computed
        to_take = -(-(computed + count) // size) - len(blocks)
        shared = computed % size and not pool.writable(blocks[computed // size])
        if to_take <= 0 and not shared:
            return
        taken = pool.take(max(to_take, 0) + bool(shared))
        if shared:
            last, own = computed // size, taken.pop()
            if self._storage is not None:
                self._storage.copy_blocks([blocks[last]], [own])
            pool.release([blocks[last]])
            blocks[last] = own
            self._copied_blocks += 1
        blocks.extend(taken)

    def commit(self, sequence: Sequence, count: int = 1) -> None:
        """Counts the next `count` tokens as computed: call it when their writes have been launched. Blocks that are
        now full can be found by other sequences."""
        self._require_admitted(sequence, count)
        size, blocks = self.block_size, sequence.blocks
        computed = sequence.computed + count
        if computed > min(len(sequence.tokens), len(blocks) * size):
            left = min(len(sequence.tokens), len(blocks) * size) - sequence.computed
            raise ValueError(f"count must be at most {left}, the tokens that are known and have room; got {count}")
        first, full = sequence.computed // size, computed // size
        if first < full:
            self._pool.name(blocks[first:full], sequence.names(full)[first:full])
        sequence.computed = computed

    def fork(self, sequence: Sequence) -> Sequence:
        """Another sequence with the same tokens. It shares all blocks with computed tokens."""
        self._require_admitted(sequence)
        if not sequence.computed:
            raise ValueError("sequence must have computed tokens to be forked; it has none")
        other = sequence.copy()
        other.blocks = sequence.blocks[: -(-sequence.computed // self.block_size)]
        other.computed = sequence.computed
        self._pool.share(other.blocks)
        self._sequences += 1
        return other

    def release(self, sequence: Sequence) -> None:
        """Gives the blocks back of a sequence that is finished or preempted. It can be admitted again, and finds what
        has not been evicted until then. The last of its blocks is evicted first."""
        self._require_admitted(sequence)
        self._pool.release(sequence.blocks[::-1])
        del sequence.blocks[:]
        sequence.computed = 0
        self._sequences -= 1

    def statistics(self) -> Statistics:
        host, pool = self._host, self._pool
        return Statistics(
            blocks=pool.blocks,
            free=pool.free,
            findable=pool.findable,
            sequences=self._sequences,
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            host_hit_tokens=self._host_hit_tokens,
            evictions=pool.evictions,
            copied_blocks=self._copied_blocks,
            host_blocks=host.blocks if host is not None else 0,
            host_used=len(host) if host is not None else 0,
        )

    def _match(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest cached prefix; -1 for a block in host memory."""
        limit = (len(sequence) - 1) // self.block_size
        names = sequence.names(limit)[:limit]
        found = self._pool.find(names)
        while self._host is not None and len(found) < limit:
            if names[len(found)] in self._host:
                found.append(-1)
            elif not (more := self._pool.find(names[len(found) :])):
                break
            else:
                found += more
        return found

    def _fetch(self, sequence: Sequence, found: list[int], to_take: int) -> list[int]:
        """`found` and new blocks after it. Blocks in host memory are loaded into some of the new ones."""
        on_host = [i for i, block in enumerate(found) if block < 0]
        names = [sequence.names(len(found))[i] for i in on_host]
        host_blocks = self._host.take(names)  # first, as taking blocks may send others to host memory
        taken = self._pool.take(to_take)
        targets, rest = taken[: len(on_host)], taken[len(on_host) :]
        self._host.load(host_blocks, targets)
        self._pool.name(targets, names)
        for i, block in zip(on_host, targets, strict=True):
            found[i] = block
        self._host_hit_tokens += len(on_host) * self.block_size
        return found + rest

    def _require_waiting(self, sequence: Sequence) -> None:
        self._require_mine(sequence)
        if sequence.blocks:
            raise ValueError(f"sequence must hold no blocks; it holds {len(sequence.blocks)}")

    def _require_admitted(self, sequence: Sequence, count: int = 1) -> None:
        if type(sequence) is Sequence and sequence.manager is self and sequence.blocks and type(count) is int:
            if count > 0:  # the fast path: every decoded token takes it twice
                return
        self._require_mine(sequence)
        if not sequence.blocks:
            raise ValueError("sequence must hold blocks; it was released, or never admitted")
        require_count("count", count, at_least=1)

    def _require_mine(self, sequence: Sequence) -> None:
        require_a(Sequence, sequence=sequence)
        if sequence.manager is not self:
            raise ValueError("sequence must be this manager's; it is another one's")
