"""Decides how many tokens each sample computes in the next step.

Everything is in order of arrival. Running samples are older than all waiting ones, and the first to arrive is the first
to be admitted. When blocks run out, the youngest running sample gives its blocks back and waits again, first in line.
So the oldest sample always makes progress, and none starves.

A step has a budget of tokens. Each decoding sample takes one, and the rest goes to prompts, a chunk of each. As the
budget exceeds the number of samples that may run, the oldest prompt always gets something.
"""

from collections import deque

from kv_cache import CacheManager, OutOfBlocks
from mla_backend.arguments import require_count
from mla_backend.engine.request import Sample

Work = list[tuple[Sample, int]]
"""Samples in the order of their arrival, and how many of its next tokens each computes."""


def require_limits(tokens_a_step: int, most_running: int, chunk: int | None) -> None:
    """Checks the limits of a scheduler."""
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
    """Makes the decisions, and asks the cache manager for room. Knows nothing of models.

    Args:
        manager: the cache manager.
        tokens_a_step: the budget of a step.
        most_running: the most samples that run at once; less than the budget.
        chunk: the most tokens of one prompt in a step; the budget if left out.
    """

    def __init__(self, manager: CacheManager, *, tokens_a_step: int, most_running: int, chunk: int | None = None):
        require_limits(tokens_a_step, most_running, chunk)
        self.manager, self.tokens_a_step, self.most_running = manager, tokens_a_step, most_running
        self.chunk = tokens_a_step if chunk is None else chunk
        self.waiting: deque[Sample] = deque()
        self.running: list[Sample] = []
        self.preemptions = 0

    def add(self, sample: Sample) -> None:
        """Adds the youngest sample. Alone in the cache, it has to fit with all tokens that it may get."""
        if sample.seats > self.most_running:
            raise ValueError(f"n must be at most {self.most_running}, the samples that may run; got {sample.seats}")
        self.waiting.append(sample)

    def remove(self, sample: Sample) -> None:
        """Removes a sample that is finished or no longer wanted."""
        if sample.sequence.blocks:
            self.running.remove(sample)
            self.manager.release(sample.sequence)
        else:
            self.waiting.remove(sample)

    def fork(self, sample: Sample, siblings: list[Sample]) -> None:
        """Adds samples of the same request, forked from a running one that counted for them so far."""
        sample.seats = 1
        after = self.running.index(sample) + 1
        self.running[after:after] = siblings

    def schedule(self) -> Work:
        """The next step, with room in the cache for all its tokens. Empty if there is nothing to do."""
        decodes = sum(sample.left == 1 for sample in self.running)
        for_prompts = self.tokens_a_step - decodes
        work: Work = []
        row = 0
        while row < len(self.running):  # making room shortens the list
            sample = self.running[row]
            count = min(sample.left, self.chunk, for_prompts) if sample.left > 1 else 1
            if count and self._make_room(sample, count):
                for_prompts -= count if sample.left > 1 else 0
                work.append((sample, count))
            row += 1
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
        """Admits waiting samples in order, as long as there are seats, budget, and room for a whole prompt."""
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
