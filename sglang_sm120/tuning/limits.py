"""The shortest time that a card's data sheet allows. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from sglang_sm120.tuning.expert_cases import ExpertShape

#: A code and its share of the block scale.
_BYTES_PER_WEIGHT = 0.5 + 1 / 16


def floor(m: int, n: int, k: int, limits: Mapping[str, float]) -> tuple[float, str] | None:
    """Return the shortest possible time in microseconds and what sets it; ``None`` if nothing is known of the card.

    Args:
        m, n, k: the shape.
        limits: ``bytes_per_second`` of DRAM and, if the card has it, ``fp4_per_second`` operations.
    """
    # Weight and its scales, activations in, result out, each once.
    return _longer(n * k * _BYTES_PER_WEIGHT + 2 * m * k + 2 * m * n, 2.0 * m * n * k, limits)


def expert_floor(m: int, shape: ExpertShape, limits: Mapping[str, float]) -> tuple[float, str] | None:
    """:func:`floor` of the experts of a layer for ``m`` tokens: the weights of those that are expected to be active.

    A token that comes to several experts of the rank is read and written once; what lies between the two GEMMs need
    not leave the chip.
    """
    moved = shape.active(m) * shape.weights_per_expert * _BYTES_PER_WEIGHT + 4 * m * shape.hidden
    pairs = m * shape.top_k * shape.local / shape.experts
    return _longer(moved, 2.0 * pairs * shape.weights_per_expert, limits)


def _longer(moved: float, operations: float, limits: Mapping[str, float]) -> tuple[float, str] | None:
    if "bytes_per_second" not in limits:
        return None
    candidates = [(moved / limits["bytes_per_second"] * 1e6, "DRAM")]
    if "fp4_per_second" in limits:
        candidates.append((operations / limits["fp4_per_second"] * 1e6, "FP4"))
    return max(candidates)
