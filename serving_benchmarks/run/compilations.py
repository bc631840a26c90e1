"""Kernels that Triton compiles in this process: one that is compiled while something is measured is measured, too.

Triton compiles a kernel when it is launched with arguments of a new kind; one that is on disk already is only loaded,
within milliseconds, and is not counted. Other compilers (nvcc for DeepGEMM's kernels, say) are not seen.
"""

from typing import Any

Compiled = list[tuple[str, float]]
"""Of each kernel its name and how many seconds it took, in their order."""


class Compilations:
    """All since this was made, until they are taken. Whoever else listens to Triton goes on being told."""

    def __init__(self):
        self._found: Compiled = []
        self._seen = False
        try:
            from triton import knobs  # vLLM's stand-in, where there is no Triton, has none
        except ImportError:
            return
        other = knobs.compilation.listener

        def listener(**named: Any) -> None:
            if not named["cache_hit"]:
                self._found.append((str(named["src"].name), named["times"].total / 1e6))
            if other is not None:
                other(**named)

        knobs.compilation.listener = listener
        self._seen = True

    def take(self) -> Compiled | None:
        """Those since the last call; None if they can't be seen."""
        found, self._found = self._found, []
        return found if self._seen else None


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
    """The same as text, with a line for each round that had something compiled."""
    by_round: dict[int, list[dict[str, Any]]] = {}
    for one in compiled or []:
        by_round.setdefault(one["round"], []).append(one)
    return [
        f"Compiled in round {number + 1}, while the clock ran: "
        + ", ".join(dict.fromkeys(one["kernel"] for one in ones))
        + f" ({len(ones)} in {sum(one['seconds'] for one in ones):.2f} s)"
        for number, ones in sorted(by_round.items())
    ]
