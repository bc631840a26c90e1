"""Who computes how many tokens in the next step.

Everything goes by the order of arrival. Samples that run are older than all that wait; who comes first is admitted
first; when blocks run out, the youngest sample that runs gives its own back and waits again, first in line. So the
oldest sample always goes on, and nobody starves.

A step has a budget of tokens. Each sample that decodes takes one of it, and what is left goes to prompts, a chunk of
each. As the budget exceeds the number of samples that may run, the oldest prompt always gets something.
"""

from collections import deque

from kv_cache import CacheManager, OutOfBlocks
from mla_backend.arguments import require_count
from mla_backend.engine.request import Sample

Work = list[tuple[Sample, int]]
"""Samples in the order of their arrival, and how many of its next tokens each computes."""


def require_limits(tokens_a_step: int, most_running: int, chunk: int | None) -> None:
    """That a scheduler can work with these."""
    require_count("most_running", most_running, at_least=1)
    require_count("tokens_a_step", tokens_a_step, at_least=1)
    if tokens_a_step <= most_running:
        raise ValueError(
            f"tokens_a_step must be more than the {most_running} of most_running, so that prompts get on while all "
            f"others decode; got {tokens_a_step}"
        )
    if chunk is not None:
        require_count("chunk", chunk, at_least=1)


class Scheduler:
    """Decides, and asks the cache manager for room. Knows nothing of models.

    Args:
        manager: of the cache.
        tokens_a_step: the budget.
        most_running: samples that run at a time; less than the budget.
        chunk: tokens of one prompt that are computed in a step, at most; only the budget limits it if left out.
    """

    def __init__(self, manager: CacheManager, *, tokens_a_step: int, most_running: int, chunk: int | None = None):
        require_limits(tokens_a_step, most_running, chunk)
        self.manager, self.tokens_a_step, self.most_running = manager, tokens_a_step, most_running
        self.chunk = tokens_a_step if chunk is None else chunk
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.preemptions = 0

    def add(self, sample: Sample) -> None:
        """The youngest of all. It has to fit into the cache when it is alone there, with all tokens it may get."""
        if sample.seats > self.most_running:
            raise ValueError(f"n must be at most {self.most_running}, the samples that may run; got {sample.seats}")
        self.waiting.append(sample)

    def remove(self, sample: Sample) -> None:
        """It is finished, or not wanted any more."""
        if sample.sequence.blocks:
            self.running.remove(sample)
            self.manager.release(sample.sequence)
        else:
            self.waiting.remove(sample)

    def fork(self, sample: Sample, siblings: list[Sample]) -> None:
        """Samples of the same request, forked from one that runs, which stood for them so far."""
        sample.seats = 1
        place = self.running.index(sample) + 1
        self.running[place:place] = siblings

    def schedule(self) -> Work:
        """The next step, with room for all its tokens. Empty if there is nothing to do."""
        decodes = sum(sample.left == 1 for sample in self.running)
        for_prompts = self.tokens_a_step - decodes
        work: Work = []
        place = 0
        while place < len(self.running):
            sample = self.running[place]
            count = min(sample.left, self.chunk, for_prompts) if sample.left > 1 else 1
            if count and self._make_room(sample, count):
                for_prompts -= count if sample.left > 1 else 0
                work.append((sample, count))
            place += 1
        return work + self._admit(for_prompts)

    def _make_room(self, sample: Sample, count: int) -> bool:
        """Takes blocks from the youngest until this one has enough; False if it was the youngest itself."""
        while True:
            try:
                self.manager.allocate(sample.sequence, count)
                return True
            except OutOfBlocks:
                youngest = self.running.pop()
                self.manager.release(youngest.sequence)
                self.waiting.appendleft(youngest)
                self.preemptions += 1
                if youngest is sample:
                    return False

    def _admit(self, budget: int) -> Work:
        """Those who wait, in their order, as long as there are seats, budget, and room for a whole prompt."""
        work: Work = []
        seats = sum(sample.seats for sample in self.running)
        while self.waiting and budget and seats + self.waiting[0].seats <= self.most_running:
            sample = self.waiting[0]
            try:
                hits = self.manager.admit(sample.sequence)
            except OutOfBlocks:
                break
            if not sample.admitted:
                sample.admitted, sample.cached_tokens = True, hits
            self.running.append(self.waiting.popleft())
            seats += sample.seats
            count = min(sample.left, self.chunk, budget)
            budget -= count
            work.append((sample, count))
        return work
