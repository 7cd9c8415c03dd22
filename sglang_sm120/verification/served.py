"""What served what: calls by layer class, geometry, range of M and backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang_sm120.records import Identity

SCHEMA = 1

#: Geometry of a layer, by the names that messages use: N and K, or the sizes of experts.
Sizes = tuple[tuple[str, int], ...]


def spelled(sizes: Sizes) -> str:
    """Return sizes as messages show them: ``N=5120 K=3200``."""
    return " ".join(f"{name}={value}" for name, value in sizes)


@dataclass
class _Entry:
    """One row. ``calls`` ran at once, ``captured`` were recorded into a CUDA graph."""

    layers: set[str] = field(default_factory=set)
    calls: int = 0
    captured: int = 0


class Served:
    """Counts calls that pass through Python. What a CUDA graph replays does not, so it counts when it is captured."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, Sizes, int, str], _Entry] = {}

    def count(self, kind: str, layer: str, sizes: Sizes, m: int, backend: str, *, captured: bool) -> None:
        """Note one call of ``layer``, which is of class ``kind``."""
        entry = self._rows.setdefault((kind, sizes, bucket(m), backend), _Entry())
        entry.layers.add(layer)
        entry.captured += captured
        entry.calls += not captured

    def to_json(self, identity: Identity, steps: int) -> dict[str, Any]:
        """The counts as they stand in the file."""
        rows = [
            {
                "class": kind,
                **{name.lower(): value for name, value in sizes},
                "m": [m // 2 + 1, m],
                "backend": backend,
                "layers": len(entry.layers),
                "calls": entry.calls,
                "captured": entry.captured,
            }
            for (kind, sizes, m, backend), entry in sorted(self._rows.items())
        ]
        return {
            "schema": SCHEMA,
            "kind": "served layers",
            "identity": identity.to_json(),
            "steps": steps,
            "rows": rows,
        }

    def lines(self) -> Iterator[str]:
        """The counts as lines of a log."""
        if not self._rows:
            yield "no FP4 layer was called"
        for (kind, sizes, m, backend), entry in sorted(self._rows.items()):
            span = f"M={m}" if m <= 2 else f"M={m // 2 + 1} to {m}"
            yield (
                f"{kind} {spelled(sizes)} {span}: {backend}, {len(entry.layers)} layers, {entry.calls} calls, "
                f"{entry.captured} captured"
            )


def bucket(m: int) -> int:
    """Return the upper end of the range of M that ``m`` is counted in: 1, 2, 3 to 4, 5 to 8 and so on."""
    return 1 << (m - 1).bit_length()
