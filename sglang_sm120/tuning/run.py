"""Measure many cases one after the other and keep each result at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.probing.run import PROBEABLE, WHAT_CAN_BE_PROBED
from sglang_sm120.tuning.cases import Shape
from sglang_sm120.tuning.choice import REPEATS, SECONDS_PER_REPEAT, choose
from sglang_sm120.tuning.results import Entry

if TYPE_CHECKING:
    from sglang_sm120.tuning.timing import CompileBudget


@dataclass(frozen=True)
class Result:
    """One case with its times; ``problems`` says why a backend has none. ``entry`` is ``None`` if none has any."""

    shape: Shape
    m: int
    entry: Entry | None
    problems: dict[str, str] = field(default_factory=dict)


def candidates(wanted: Sequence[str], facts: HostFacts) -> tuple[list[str], dict[str, str]]:
    """Return the backends to measure, and why others are left out. Only what passed its probe here is measured.

    Raises:
        ConfigError: a name that cannot be measured, or nothing passed.
    """
    for value in wanted:
        if value not in PROBEABLE:
            raise ConfigError(bad_value("--backend", value, WHAT_CAN_BE_PROBED))
    taken, left_out = [], {}
    for value in dict.fromkeys(wanted) or PROBEABLE:
        judged = verdict(value, facts)
        if judged.status != "ok":
            left_out[value] = judged.reason
        elif not facts.passed_probe(value):
            found = facts.probed.get(value)
            left_out[value] = f"probe says {found}" if found else "not probed on this card and these versions"
        else:
            taken.append(value)
    if not taken:
        reasons = "; ".join(f"{value}: {reason}" for value, reason in left_out.items())
        raise ConfigError(f"No backend can be measured here ({reasons}). Run sglang-sm120 probe first.")
    return taken, left_out


def without_oracle(values: Sequence[str], left_out: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return ``values`` without those that run on any device, if others remain, and ``left_out`` with them."""
    kernels = [value for value in values if not BACKENDS[value].any_device]
    if not kernels:
        return list(values), dict(left_out)
    return kernels, {**left_out, **{v: "runs anywhere and wins nowhere" for v in values if v not in kernels}}


def estimate(cases: int, backends: int) -> float:
    """Predict the seconds that so many cases take on a GPU once everything is compiled.

    Each backend is timed in :data:`REPEATS` repeats of some milliseconds. Before that it is tuned, called, captured and
    replayed, and its share of the operands is written: as long as the repeats, by a rough count that no card confirmed.
    """
    return cases * backends * 2 * REPEATS * SECONDS_PER_REPEAT


def fitting(values: Sequence[str], facts: HostFacts, n: int, k: int, dtype: str) -> list[str]:
    """Return those of ``values`` that the table does not refuse for this shape and output type."""
    return [v for v in values if verdict(v, facts, n=n, k=k, out_dtype=dtype).status == "ok"]


def run(
    todo: Sequence[tuple[Shape, int]], values: Sequence[str], dtype: str, facts: HostFacts, budget: CompileBudget
) -> Iterator[Result]:
    """Measure each case and yield it. The consumer may stop at any time.

    Raises:
        RuntimeError: a CUDA error, naming the case; this process cannot measure any more.
    """
    import torch

    from sglang_sm120.tuning.timing import measure

    device = torch.device("cpu" if facts.capability is None else "cuda")
    for shape, m in todo:
        fits = fitting(values, facts, shape.n, shape.k, dtype)
        refused = {v: verdict(v, facts, n=shape.n, k=shape.k, out_dtype=dtype).reason for v in values if v not in fits}
        try:
            found = measure(fits, m, shape.n, shape.k, getattr(torch, dtype), device, budget)
        except RuntimeError as error:
            raise RuntimeError(f"M={m} N={shape.n} K={shape.k} with {', '.join(fits)}: {error}") from error
        entry = None
        if found.timings:
            entry = Entry(shape.n, shape.k, dtype, m, choose(found.timings), found.timings)
        yield Result(shape, m, entry, {**refused, **found.problems})
