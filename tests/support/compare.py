"""Comparison of long lists.

``assert a == b`` on lists makes pytest write the difference of the two as text when it runs in CI. For 65,536 numbers
with every tenth one wrong that takes hours, so what should be a failure becomes a time-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def first_difference(actual: Sequence[Any], expected: Sequence[Any]) -> str | None:
    """Say where two sequences differ first and how often, or None if they are equal."""
    if len(actual) != len(expected):
        return f"{len(actual)} elements instead of {len(expected)}"
    wrong = [index for index, pair in enumerate(zip(actual, expected, strict=True)) if pair[0] != pair[1]]
    if not wrong:
        return None
    index = wrong[0]
    return f"{len(wrong)} of {len(actual)} differ; first at {index}: {actual[index]!r} instead of {expected[index]!r}"
