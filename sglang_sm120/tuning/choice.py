"""From repeated times to one choice. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.moe_table import MOE_RUNNERS

#: Values of both tables, the most trusted first: FlashInfer's kernels that SGLang itself takes, code of ours after
#: them, the oracle last. Values that stand in both have the same order in both.
TRUST: tuple[str, ...] = (*BACKENDS, *(value for value in MOE_RUNNERS if value not in BACKENDS))

#: How often each case is timed.
REPEATS = 11
#: A repeat lasts about this long, so that launching and reading the clock do not count.
SECONDS_PER_REPEAT = 4e-3


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the repeats, and their quartiles."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        return self.high - self.low


def summary(times: Sequence[float]) -> Timing:
    """Summarise repeats (at least one), in microseconds."""
    if len(times) == 1:
        return Timing(times[0], times[0], times[0])
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Timing(median, low, high)


def choose(timings: Mapping[str, Timing]) -> str:
    """Return the fastest backend; among those that do not differ by more than the spread, the most trusted.

    Two medians differ if their distance exceeds the sum of the two spreads. Trust is the order of :data:`TRUST`.

    Args:
        timings: by value of the tables, not empty.
    """
    fastest = min(timings, key=lambda value: timings[value].median)
    best = timings[fastest]
    tied = [v for v, t in timings.items() if t.median - best.median <= t.spread + best.spread]
    return min(tied, key=TRUST.index)
