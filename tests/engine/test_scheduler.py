"""The scheduler: no sample starves, no step exceeds its budget, no block is lost, and age comes first."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_cache import CacheManager, slot_mapping
from mla_backend.engine.params import SamplingParams
from mla_backend.engine.request import Request, Sample
from mla_backend.engine.scheduler import Scheduler, Work

BLOCK_SIZE = 4


def new_sample(manager: CacheManager, tokens: list[int], number: int, n: int = 1) -> Sample:
    request = Request(str(number), SamplingParams(n=n), len(tokens), 10, frozenset(), number)
    sample = Sample(request, 0, manager.sequence(tokens), None, seats=n)
    request.samples.append(sample)
    return sample


class World:
    """Serves requests without a model, the way the engine does, and looks at every step."""

    def __init__(self, blocks: int, tokens_a_step: int, most_running: int, chunk: int | None, watermark: float):
        self.manager = CacheManager(blocks, BLOCK_SIZE, watermark=watermark)
        self.scheduler = Scheduler(self.manager, tokens_a_step=tokens_a_step, most_running=most_running, chunk=chunk)
        self.wanted: dict[str, int] = {}
        self.finished: Counter[str] = Counter()
        self.added = 0

    def add(self, prompt: list[int], new_tokens: int, n: int) -> None:
        self.added += 1
        sample = new_sample(self.manager, prompt, self.added, n)
        self.wanted[sample.request.id] = new_tokens
        self.scheduler.add(sample)

    def abort(self, which: int) -> None:
        everyone = [*self.scheduler.running, *self.scheduler.waiting]
        if everyone:
            self.scheduler.remove(everyone[which % len(everyone)])

    def step(self) -> Work:
        oldest = next(iter([*self.scheduler.running, *self.scheduler.waiting]), None)
        before = oldest and (oldest.sequence.computed, len(oldest.sequence))
        work = self.scheduler.schedule()
        self.check(work)
        if oldest is not None:  # it went on, and so will whoever is the oldest after it
            assert work and work[0][0] is oldest
        slots = slot_mapping([s.sequence for s, _ in work], [count for _, count in work])
        assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
        for sample, count in work:
            self.manager.commit(sample.sequence, count)
        if oldest is not None:
            assert oldest.sequence.computed > before[0] or oldest.sequence.computed == before[1]
        for sample, _ in work:
            if sample.left:
                continue
            family = [sample]
            for index in range(1, sample.seats):
                family.append(Sample(sample.request, index, self.manager.fork(sample.sequence), None))
            if len(family) > 1:
                self.scheduler.fork(sample, family[1:])
            for member in family:
                member.sequence.append(7 * member.index + len(member.sequence) % 5)
                if member.new_tokens == self.wanted[member.request.id]:
                    self.scheduler.remove(member)
                    self.finished[member.request.id] += 1
        return work

    def check(self, work: Work) -> None:
        scheduler = self.scheduler
        assert sum(count for _, count in work) <= scheduler.tokens_a_step
        assert all(1 <= count <= min(s.left, scheduler.chunk) or s.left == count == 1 for s, count in work)
        assert sum(sample.seats for sample in scheduler.running) <= scheduler.most_running
        ages = [(int(s.request.id), s.index) for s in [*scheduler.running, *scheduler.waiting]]
        assert ages == sorted(ages), "a younger sample overtook an older one"
        assert [id(s) for s, _ in work] == [id(s) for s in scheduler.running if s in [w for w, _ in work]]
        # every sample that decodes gets its token
        assert {id(s) for s in scheduler.running if s.left == 1} <= {id(s) for s, _ in work}
        assert all(s.sequence.blocks for s in scheduler.running)
        assert not any(s.sequence.blocks for s in scheduler.waiting)
        statistics = self.manager.statistics()
        held = {block for s in scheduler.running for block in s.sequence.blocks}
        assert statistics.blocks - statistics.free == len(held) and statistics.sequences == len(scheduler.running)


@settings(max_examples=150)
@given(st.data())
def test_everybody_is_served_in_order_within_budget_and_no_block_is_lost(data):
    most_running = data.draw(st.integers(1, 6))
    blocks = data.draw(st.integers(6, 14))
    tokens_a_step, chunk = most_running + data.draw(st.integers(1, 20)), data.draw(st.none() | st.integers(1, 9))
    world = World(blocks, tokens_a_step, most_running, chunk, watermark=data.draw(st.sampled_from([0.0, 0.1])))
    aborted = 0
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["add", "add", "step", "step", "step", "abort"]))
        if what == "add":
            # few different prompts, so that prefixes are found; none longer than the cache, with what follows it
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
            room = blocks * BLOCK_SIZE - len(prompt)
            world.add(prompt, data.draw(st.integers(1, min(room, 10))), data.draw(st.integers(1, most_running)))
        elif what == "step":
            world.step()
        elif world.scheduler.running or world.scheduler.waiting:
            world.abort(data.draw(st.integers(0, 10)))
            aborted += 1
    steps = 0
    while world.scheduler.running or world.scheduler.waiting:
        world.step()
        steps += 1
        assert steps < 5000, "they never finish"
    statistics = world.manager.statistics()
    assert statistics.free == statistics.blocks and statistics.sequences == 0
    assert len(world.finished) >= world.added - aborted


def test_prompts_get_on_while_others_decode():
    world = World(100, tokens_a_step=4, most_running=3, chunk=None, watermark=0.0)
    for _ in range(2):
        world.add([1], 50, 1)
    world.step()
    world.add([2] * 20, 1, 1)
    assert [[count for _, count in world.step()] for _ in range(3)] == [[1, 1, 2]] * 3


def test_the_youngest_makes_room_and_comes_back_first():
    world = World(6, tokens_a_step=50, most_running=3, chunk=None, watermark=0.0)
    for number in range(3):
        world.add([number] * 7, 9, 1)
    world.add([9], 1, 1)
    while not world.scheduler.preemptions:
        world.step()
    assert [s.request.id for s in world.scheduler.running] == ["1", "2"]
    assert [s.request.id for s in world.scheduler.waiting] == ["3", "4"]
    while world.scheduler.waiting:
        world.step()
    while world.scheduler.running:
        world.step()
    assert list(world.finished) == ["1", "2", "3", "4"] or list(world.finished) == ["1", "2", "4", "3"]


@pytest.mark.parametrize(
    "limits, error",
    [
        (dict(tokens_a_step=4, most_running=4), "tokens_a_step must be more than the 4 of most_running"),
        (dict(tokens_a_step=4, most_running=0), "most_running must be 1 or more; got 0"),
        (dict(tokens_a_step=4, most_running=1, chunk=0), "chunk must be 1 or more; got 0"),
    ],
)
def test_wrong_limits_are_named(limits, error):
    with pytest.raises(ValueError, match=error):
        Scheduler(CacheManager(1, 1), **limits)
