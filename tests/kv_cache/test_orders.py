"""Whatever is done in whatever order: no block is lost, shared wrongly or freed twice, and every sequence reads back
what was written for it, through forks, copies, evictions and host memory."""

import functools
import hashlib
from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kv_cache
from kv_cache import CacheManager, OutOfBlocks
from mla_backend import FORMATS, KEY_FORMATS, cache_write, write_keys

BLOCKS, SIZE, LAYERS = 10, 3, 2
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # few different ones, so that much is shared
SALTS = st.sampled_from(["", "salt"])
PICK = st.integers(0, 2**16)


def contents(salt: str, tokens: list[int], positions: range) -> torch.Tensor:
    """What the cache holds for tokens, [LAYERS, len(positions), 8]: like the real thing each depends on all before."""
    return torch.stack([content(salt, tuple(tokens[: position + 1])) for position in positions], dim=1)


@functools.cache
def content(salt: str, tokens: tuple[int, ...]) -> torch.Tensor:
    digest = hashlib.sha256(repr((salt, tokens)).encode()).digest()
    return torch.tensor(list(digest[: 8 * LAYERS])).view(LAYERS, 8)


class Orders(RuleBasedStateMachine):
    """A model next to the manager: the sequences, what has ever been committed, and the storage itself."""

    host_blocks = 0
    device = "cpu"

    @initialize()
    def begin(self):
        layout = kv_cache.Layout(LAYERS, SIZE, FORMATS["bf16"], KEY_FORMATS["bf16"])
        self.storage = kv_cache.Storage(layout, BLOCKS, self.device)
        host_bytes = self.host_blocks * layout.block_bytes
        self.manager = CacheManager(BLOCKS, SIZE, storage=self.storage, host_bytes=host_bytes)
        self.live: list[kv_cache.Sequence] = []
        self.waiting: list[kv_cache.Sequence] = []
        self.salts: dict[int, str] = {}  # of each sequence, by its id
        self.committed: set[tuple[str, tuple[int, ...]]] = set()  # prefixes of whole blocks
        self.room: dict[int, int] = {}  # tokens that have room, of sequences by their ids
        self.keep: list[kv_cache.Sequence] = []  # so that no id is used again

    def known(self, sequence: kv_cache.Sequence, salt: str) -> kv_cache.Sequence:
        self.salts[id(sequence)] = salt
        self.keep.append(sequence)
        return sequence

    def write(self, sequence: kv_cache.Sequence, count: int) -> None:
        """Computes the next tokens and commits them."""
        slots = kv_cache.slot_mapping([sequence], [count]).to(self.device)
        salt, begin, tokens = self.salts[id(sequence)], sequence.computed, sequence.tokens.tolist()
        rows = contents(salt, tokens, range(begin, begin + count)).to(self.device)
        for layer in range(LAYERS):
            latent = rows[layer].repeat(1, 72).bfloat16()
            cache_write(latent[:, :512], latent[:, 512:], self.storage.latent[layer], slots)
            write_keys(rows[layer].repeat(1, 16).bfloat16(), self.storage.keys[layer], slots)
        self.manager.commit(sequence, count)
        for end in range(SIZE, sequence.computed + 1, SIZE):
            self.committed.add((salt, tuple(sequence.tokens[:end])))

    def try_admit(self, sequence: kv_cache.Sequence, count: int | None) -> None:
        manager, salt = self.manager, self.salts[id(sequence)]
        before, cached = manager.statistics(), manager.cached(sequence)
        ever = [end for end in range(0, len(sequence), SIZE) if (salt, tuple(sequence.tokens[:end])) in self.committed]
        now = max((common(sequence, other) for other in self.live if self.salts[id(other)] == salt), default=0)
        assert min(now, len(sequence) - 1) // SIZE * SIZE <= cached <= max(ever, default=0)
        if not before.evictions:
            assert cached == max(ever, default=0)
        try:
            hits = manager.admit(sequence, count)
        except OutOfBlocks as error:
            assert error.needed > error.free == before.free
            assert manager.statistics() == before and not sequence.blocks
            if sequence not in self.waiting:
                self.waiting.append(sequence)
            return
        assert hits == cached == sequence.computed
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self.live.append(sequence)
        self.write(sequence, min(count or len(sequence), len(sequence) - hits))

    @rule(tokens=TOKENS, salt=SALTS, count=st.one_of(st.none(), st.integers(1, 5)))
    def admit_new(self, tokens, salt, count):
        self.try_admit(self.known(self.manager.sequence(tokens, salt), salt), count)

    @precondition(lambda self: self.waiting)
    @rule(pick=PICK)
    def admit_again(self, pick):
        self.try_admit(self.waiting[pick % len(self.waiting)], None)

    @precondition(lambda self: self.live)
    @rule(pick=PICK, tokens=st.lists(st.integers(0, 1), max_size=4), guessed=st.integers(0, 4), later=st.booleans())
    def grow(self, pick, tokens, guessed, later):
        sequence = self.live[pick % len(self.live)]
        sequence.append(*tokens)
        missing = len(sequence) - sequence.computed
        before, blocks = self.manager.statistics(), sequence.blocks[:]
        try:
            self.manager.allocate(sequence, max(missing + guessed, 1))
        except OutOfBlocks:
            assert self.manager.statistics() == before and sequence.blocks == blocks
            return
        self.room[id(sequence)] = sequence.computed + max(missing + guessed, 1)
        if missing and not later:
            self.write(sequence, missing)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def write_later(self, pick):
        """Room that was given before, as for guessed tokens, stays the sequence's own."""
        sequence = self.live[pick % len(self.live)]
        count = min(len(sequence), self.room.get(id(sequence), 0)) - sequence.computed
        if count > 0:
            self.write(sequence, count)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def fork(self, pick):
        sequence = self.live[pick % len(self.live)]
        if len(self.live) < 8:
            self.live.append(self.known(self.manager.fork(sequence), self.salts[id(sequence)]))

    @precondition(lambda self: self.live)
    @rule(pick=PICK, again=st.booleans())
    def release(self, pick, again):
        sequence = self.live.pop(pick % len(self.live))
        self.manager.release(sequence)
        self.room.pop(id(sequence), None)
        with pytest.raises(ValueError, match="it was released"):
            self.manager.release(sequence)
        if again:
            self.waiting.append(sequence)

    @invariant()
    def every_block_is_accounted_for(self):
        if not hasattr(self, "manager"):
            return
        pool = self.manager._pool
        holders = Counter(block for sequence in self.live for block in sequence.blocks)
        assert [pool.holders(block) for block in range(BLOCKS)] == [holders[block] for block in range(BLOCKS)]
        now = self.manager.statistics()
        assert now.free == BLOCKS - len(holders) and now.sequences == len(self.live)
        assert now.host_used <= self.host_blocks
        findable = {block for block in range(BLOCKS) if pool._names[block] is not None}
        assert now.findable == len(findable)
        blank = [block for block in range(BLOCKS) if block not in findable and not holders[block]]
        assert sorted(blank) == sorted(pool._blank)
        for part in self.storage.parts:  # the contents of a blank block may never be seen
            part[:, blank] = -1

    @invariant()
    def every_token_reads_back(self):
        for sequence in getattr(self, "live", ()):
            salt, positions = self.salts[id(sequence)], range(sequence.computed)
            tokens = sequence.tokens.tolist()
            slots = torch.tensor([sequence.blocks[i // SIZE] * SIZE + i % SIZE for i in positions], device=self.device)
            want = contents(salt, tokens, positions).to(self.device)
            for layer in range(LAYERS):
                latent, keys = (part[layer].flatten(0, 1)[slots] for part in (self.storage.latent, self.storage.keys))
                assert torch.equal(latent.float(), want[layer].repeat(1, 72).float())
                assert torch.equal(keys.float(), want[layer].repeat(1, 16).float())

    def teardown(self):
        for sequence in getattr(self, "live", ()):
            self.manager.release(sequence)
        if hasattr(self, "manager"):
            assert self.manager.statistics().free == BLOCKS
            assert len(set(self.manager._pool.take(BLOCKS))) == BLOCKS


def common(one: kv_cache.Sequence, other: kv_cache.Sequence) -> int:
    """Computed tokens of `other` that `one` begins with."""
    pairs = zip(one.tokens, other.tokens[: other.computed], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), other.computed))


OrdersWithLittleHostMemory = type("OrdersWithLittleHostMemory", (Orders,), {"host_blocks": 2})
OrdersWithMuchHostMemory = type("OrdersWithMuchHostMemory", (Orders,), {"host_blocks": 40})
OrdersOnGpu = type("OrdersOnGpu", (Orders,), {"host_blocks": 5, "device": "cuda"})
for machine in (Orders, OrdersWithLittleHostMemory, OrdersWithMuchHostMemory, OrdersOnGpu):
    machine.TestCase.settings = settings(settings.get_profile("quick"), stateful_step_count=30)
    if settings.default is not settings.get_profile("quick"):
        machine.TestCase.settings = settings(settings.default, stateful_step_count=80)

TestOrders = Orders.TestCase
TestOrdersWithLittleHostMemory = OrdersWithLittleHostMemory.TestCase
TestOrdersWithMuchHostMemory = OrdersWithMuchHostMemory.TestCase
TestOrdersOnGpu = pytest.mark.gpu(OrdersOnGpu.TestCase)
