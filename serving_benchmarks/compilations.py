"""Kernels that Triton compiles in this process: one that is compiled while something is measured is measured, too.

Triton compiles a kernel when it is launched with arguments of a new kind, or loads it if it is on disk already, which
takes milliseconds. Other compilers (nvcc for DeepGEMM's kernels, say) are not seen.
"""

import time
from collections.abc import Callable
from typing import Any

Compiled = list[tuple[str, float]]
"""Of each kernel its name and how many seconds it took, in their order."""
LOADED_SECONDS = 0.02
"""A kernel that took less was on disk, and is nothing to tell anybody of."""


class Compilations:
    """All since this was made, until they are taken. Hooks that others have set, as vLLM does, go on being called."""

    def __init__(self):
        self._found: Compiled = []
        self._began = 0.0
        self.seen = False
        """Whether there is a Triton here that says what it compiles."""
        try:
            from triton import knobs  # vLLM's own stand-in where there is no Triton has none
        except ImportError:
            return
        self._watch(knobs.runtime, "jit_cache_hook", self._begins)
        self._watch(knobs.runtime, "jit_post_compile_hook", self._ends)
        self.seen = True

    def take(self) -> Compiled | None:
        """Those since the last call; None if they can't be seen."""
        found, self._found = self._found, []
        return found if self.seen else None

    def _watch(self, hooks: Any, name: str, then: Callable[..., None]) -> None:
        others = getattr(hooks, name)

        def hook(*more: Any, **named: Any) -> Any:
            then(**named)
            return others(*more, **named) if others is not None else None

        setattr(hooks, name, hook)

    def _begins(self, **_: Any) -> None:
        self._began = time.perf_counter()

    def _ends(self, fn: Any = None, **_: Any) -> None:
        self._found.append((str(getattr(fn, "name", fn)), time.perf_counter() - self._began))


def of_rounds(found: list[Compiled | None]) -> list[dict[str, Any]] | None:
    """What a result file says of what was compiled in each round; None if it is not known of all of them."""
    if any(kernels is None for kernels in found):
        return None
    return [
        {"round": number, "kernel": kernel, "seconds": round(seconds, 6)}
        for number, kernels in enumerate(found)
        for kernel, seconds in kernels
    ]


def lines(compiled: list[dict[str, Any]] | None) -> list[str]:
    """The same as text, with a line for each round in which something was not only loaded."""
    by_round: dict[int, list[dict[str, Any]]] = {}
    for one in (one for one in compiled or [] if one["seconds"] >= LOADED_SECONDS):
        by_round.setdefault(one["round"], []).append(one)
    return [
        f"Compiled in round {number + 1}, while the clock ran: "
        + ", ".join(dict.fromkeys(one["kernel"] for one in ones))
        + f" ({len(ones)} in {sum(one['seconds'] for one in ones):.2f} s)"
        for number, ones in sorted(by_round.items())
    ]
