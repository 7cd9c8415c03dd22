"""Measure many cases one after the other and keep each result at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.moe_table import CALLABLE_RUNNERS, MOE_RUNNERS
from sglang_sm120.backends.record import Backend, HostFacts, Verdict
from sglang_sm120.backends.verdict import judge
from sglang_sm120.errors import ConfigError, bad_value
from sglang_sm120.probing.run import PROBEABLE, WHAT_CAN_BE_PROBED
from sglang_sm120.tuning.cases import Shape
from sglang_sm120.tuning.choice import REPEATS, SECONDS_PER_REPEAT, choose
from sglang_sm120.tuning.expert_cases import ExpertShape
from sglang_sm120.tuning.results import Entry, ExpertEntry

if TYPE_CHECKING:
    import torch

    from sglang_sm120.tuning.timing import CompileBudget


@dataclass(frozen=True)
class Result:
    """One case with its times; ``problems`` says why a backend has none. ``entry`` is ``None`` if none has any."""

    shape: Shape | ExpertShape
    m: int
    entry: Entry | ExpertEntry | None
    problems: dict[str, str] = field(default_factory=dict)


def served_by(
    wanted: Sequence[str], dense: Sequence[Shape], experts: Sequence[ExpertShape]
) -> tuple[list[Shape], list[ExpertShape]]:
    """Return the shapes that one of ``wanted`` may serve; all of them if nothing is wanted in particular.

    Raises:
        ConfigError: a name that cannot be measured, or one that has nothing to serve among the shapes.
    """
    for value in wanted:
        if value not in PROBEABLE and value not in CALLABLE_RUNNERS:
            raise ConfigError(bad_value("--backend", value, WHAT_CAN_BE_PROBED))
    some_dense = [] if wanted and not set(wanted) & set(PROBEABLE) else list(dense)
    some_experts = [] if wanted and not set(wanted) & set(CALLABLE_RUNNERS) else list(experts)
    if wanted and not some_dense and not some_experts:
        remedy = "it serves no layer of these; only the experts are NVFP4" if experts else "it serves none of these"
        raise ConfigError(bad_value("--backend", ", ".join(wanted), f"{remedy}, name another value"))
    return some_dense, some_experts


def candidates(wanted: Sequence[str], facts: HostFacts) -> tuple[list[str], dict[str, str]]:
    """Return the backends to measure on dense layers, and why others are left out. Only what passed its probe is.

    Raises:
        ConfigError: nothing passed.
    """
    names = [value for value in wanted if value in PROBEABLE] if wanted else PROBEABLE
    return _passed(names, lambda value: verdict(value, facts), facts.probed, "backend")


def expert_candidates(wanted: Sequence[str], facts: HostFacts) -> tuple[list[str], dict[str, str]]:
    """:func:`candidates` for experts: MoE runners."""
    names = [value for value in wanted if value in CALLABLE_RUNNERS] if wanted else CALLABLE_RUNNERS
    return _passed(names, lambda value: judge(MOE_RUNNERS[value], facts), facts.probed_experts, "runner of experts")


def _passed(
    names: Sequence[str], judged_as: Callable[[str], Verdict], probed: Mapping[str, str], what: str
) -> tuple[list[str], dict[str, str]]:
    taken, left_out = [], {}
    for value in dict.fromkeys(names):
        judged, found = judged_as(value), probed.get(value)
        if judged.status != "ok":
            left_out[value] = judged.reason
        elif found != "ok":
            left_out[value] = f"probe says {found}" if found else "not probed on this card and these versions"
        else:
            taken.append(value)
    if not taken:
        reasons = "; ".join(f"{value}: {reason}" for value, reason in left_out.items())
        raise ConfigError(f"No {what} can be measured here ({reasons}). Run sglang-sm120 probe first.")
    return taken, left_out


def without_oracle(
    values: Sequence[str], left_out: Mapping[str, str], table: Mapping[str, Backend] = BACKENDS
) -> tuple[list[str], dict[str, str]]:
    """Return ``values`` without those that run on any device, if others remain, and ``left_out`` with them."""
    kernels = [value for value in values if not table[value].any_device]
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
    todo: Sequence[tuple[Shape | ExpertShape, int]],
    values: Sequence[str],
    runners: Sequence[str],
    dtype: str,
    facts: HostFacts,
    budgets: tuple[CompileBudget, CompileBudget],
) -> Iterator[Result]:
    """Measure each case and yield it. The consumer may stop at any time.

    Args:
        todo: shapes of dense layers and of experts, with M.
        values: backends for dense layers.
        runners: for experts.
        dtype: of activations and results.
        facts: of this machine.
        budgets: for the first calls of backends, and of runners.

    Raises:
        RuntimeError: a CUDA error, naming the case; this process cannot measure any more.
    """
    import torch

    device = torch.device("cpu" if facts.capability is None else "cuda")
    for shape, m in todo:
        if isinstance(shape, ExpertShape):
            names, refused = list(runners), {}
        else:
            n, k = shape.key
            names = fitting(values, facts, n, k, dtype)
            refused = {v: verdict(v, facts, n=n, k=k, out_dtype=dtype).reason for v in values if v not in names}
        try:
            entry, problems = _measure(shape, m, names, getattr(torch, dtype), device, budgets)
        except RuntimeError as error:
            raise RuntimeError(f"M={m} {shape.label} with {', '.join(names)}: {error}") from error
        yield Result(shape, m, entry, {**refused, **problems})


def _measure(
    shape: Shape | ExpertShape,
    m: int,
    names: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    budgets: tuple[CompileBudget, CompileBudget],
) -> tuple[Entry | ExpertEntry | None, dict[str, str]]:
    from sglang_sm120.tuning import expert_timing, timing

    name = str(dtype).removeprefix("torch.")
    if isinstance(shape, ExpertShape):
        experts = expert_timing.measure(names, m, shape, dtype, device, budgets[1])
        times, problems = experts.timings, experts.problems
        unnamed = replace(shape, layers=())  # whose layers they are is no part of the measurement
        return ExpertEntry(unnamed, name, m, choose(times), times, experts.launches) if times else None, problems
    dense = timing.measure(names, m, shape.n, shape.k, dtype, device, budgets[0])
    times, problems = dense.timings, dense.problems
    return Entry(shape.n, shape.k, name, m, choose(times), times) if times else None, problems
