"""Which (layer, M) a server has run, and which of them were checked."""

from __future__ import annotations

from collections import Counter


class Coverage:
    """Counts pairs of a layer and a number of rows, not calls: a pair that was checked once counts as checked."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[str, int], bool] = {}
        self._why_not: Counter[str] = Counter()
        self.products = 0

    def see(self, layer: str, m: int) -> None:
        """Note that ``layer`` ran with ``m`` rows."""
        self._pairs.setdefault((layer, m), False)

    def was_checked(self, layer: str, m: int) -> bool:
        """Whether the pair was checked before."""
        return self._pairs.get((layer, m), False)

    def check(self, layer: str, m: int) -> None:
        """Note that the pair was checked."""
        self._pairs[layer, m] = True
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
        skipped = "".join(f"; not checked: {count} calls ({why})" for why, count in self._why_not.most_common(3))
        return (
            f"{self.checked} of {self.seen} pairs of layer and M checked ({layers} layers, {self.products} calls)"
            f"{skipped}"
        )
