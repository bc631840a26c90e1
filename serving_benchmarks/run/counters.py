"""What an engine counts while it runs, and what of it falls into a stretch of time."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Counters:
    """What an engine has counted since it was started; None if it doesn't."""

    preemptions: int | None
    looked_up_tokens: int | None
    """In the prefix cache."""
    hit_tokens: int | None


def since(before: Counters, after: Counters) -> dict[str, Any]:
    """What was counted in between, as result files have it."""

    def more(name: str) -> int | None:
        values = getattr(before, name), getattr(after, name)
        return None if None in values else values[1] - values[0]

    looked_up, hits = more("looked_up_tokens"), more("hit_tokens")
    return {
        "preemptions": more("preemptions"),
        "prefix_hit_share": hits / looked_up if looked_up and hits is not None else None,
    }
