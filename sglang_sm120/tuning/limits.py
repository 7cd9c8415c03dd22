"""The shortest time that a card's data sheet allows. No torch."""

from __future__ import annotations

from collections.abc import Mapping


def floor(m: int, n: int, k: int, limits: Mapping[str, float]) -> tuple[float, str] | None:
    """Return the shortest possible time in microseconds and what sets it; ``None`` if nothing is known of the card.

    Args:
        m, n, k: the shape.
        limits: ``bytes_per_second`` of DRAM and, if the card has it, ``fp4_per_second`` operations.
    """
    if "bytes_per_second" not in limits:
        return None
    # Weight and its scales, activations in, result out, each once.
    moved = n * k * (0.5 + 1 / 16) + 2 * m * k + 2 * m * n
    candidates = [(moved / limits["bytes_per_second"] * 1e6, "DRAM")]
    if "fp4_per_second" in limits:
        candidates.append((2.0 * m * n * k / limits["fp4_per_second"] * 1e6, "FP4"))
    return max(candidates)
