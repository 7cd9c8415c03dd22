"""Mistakes to plant between SGLang and the backend: each one must make the log-probability check fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Mutation = Callable[[Any, Any, Any], tuple[Any, Any, Any]]


def find(name: str) -> Mutation:
    """The mutation of this name; for an empty name, the one that changes nothing."""
    if not name:
        return lambda weight, weight_scale, alpha: (weight, weight_scale, alpha)
    return MUTATIONS[name]


def _swizzle(weight: Any, weight_scale: Any, alpha: Any) -> tuple[Any, Any, Any]:
    """Block scales in row-major order where the 128x4-tiled order is expected."""
    rows, blocks = weight_scale.shape[-2:]
    tiles = weight_scale.view(rows // 128, blocks // 4, 32, 4, 4)
    return weight, tiles.permute(0, 3, 2, 1, 4).reshape(rows, blocks).contiguous(), alpha


def _alpha(weight: Any, weight_scale: Any, alpha: Any) -> tuple[Any, Any, Any]:
    """Column scales a quarter too large."""
    return weight, weight_scale, alpha * 1.25


def _nibbles(weight: Any, weight_scale: Any, alpha: Any) -> tuple[Any, Any, Any]:
    """The two codes of each byte swapped."""
    swapped = weight.new_empty_strided(weight.shape, weight.stride())  # rows stay where kernels can read them
    return swapped.copy_((weight >> 4) | (weight << 4)), weight_scale, alpha


MUTATIONS: dict[str, Mutation] = {"swizzle": _swizzle, "alpha": _alpha, "nibbles": _nibbles}
