"""Which (layer, M) a server has run, and which of them were checked."""

from __future__ import annotations

from collections import Counter

from sglang_sm120.verification.judge import ROWS

#: The lowest and the highest M of what counts as one.
Span = tuple[int, int]


class Coverage:
    """Counts pairs of a layer and a number of rows, not calls: a pair that was checked once counts as checked.

    Beyond :data:`ROWS` the pairs of steps are of a layer and a range of M, up to the next power of two: prompts have
    every length, and a server that runs for weeks must not keep them all. Outside of steps each M is one that a CUDA
    graph is captured for, of which there are some dozens.
    """

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, Span], bool] = {}
        self._experts: set[str] = set()
        self._why_not: Counter[str] = Counter()
        self.products = 0

    def see(self, layer: str, m: int, *, in_step: bool = False, experts: bool = False) -> None:
        """Note that ``layer``, of experts or dense, ran with ``m`` rows."""
        if experts:
            self._experts.add(layer)
        self._pairs.setdefault((layer, _span(m, in_step)), False)

    def was_checked(self, layer: str, m: int) -> bool:
        """Whether the pair was checked before, outside of steps or in one."""
        return self._pairs.get((layer, (m, m)), False)

    def check(self, layer: str, m: int, *, in_step: bool = False) -> None:
        """Note that the pair was checked."""
        self._pairs[layer, _span(m, in_step)] = True
        self.products += 1

    def skip(self, why: str) -> None:
        """Note that a call was due and could not be checked."""
        self._why_not[why] += 1

    @property
    def seen(self) -> int:
        """Pairs that ran."""
        return len(self._pairs)

    @property
    def checked(self) -> int:
        """Pairs that were checked."""
        return sum(self._pairs.values())

    @property
    def text(self) -> str:
        """One line for the log."""
        layers = len({layer for layer, _ in self._pairs})
        ranges = len({span for _, span in self._pairs if span[0] != span[1]})
        experts = f", {len(self._experts)} of them experts" if self._experts else ""
        spans = f", M of steps beyond {ROWS} in {ranges} ranges" if ranges else ""
        skipped = "".join(f"; not checked: {count} calls ({why})" for why, count in self._why_not.most_common(3))
        return (
            f"{self.checked} of {self.seen} pairs of layer and M checked "
            f"({layers} layers{experts}, {self.products} calls{spans}){skipped}"
        )


def _span(m: int, in_step: bool) -> Span:
    if not in_step or m <= ROWS:
        return m, m
    high = 1 << (m - 1).bit_length()
    return high // 2 + 1, high
