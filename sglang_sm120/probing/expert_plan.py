"""Which problems a probe of experts tries. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang_sm120.backends.expert_limits import ExpertSizes, beyond_limits
from sglang_sm120.backends.moe_table import KERNEL_RUNNERS
from sglang_sm120.backends.record import HostFacts

#: Experts of all ranks, of this rank, of a token; H; I; activation.
Geometry = tuple[int, int, int, int, int, str]


@dataclass(frozen=True)
class ExpertPlan:
    """The problems of one child process.

    Attributes:
        rows: tokens of every problem, in this order.
        geometries: sizes as they reach the kernels. Where fewer experts are here than there are, the rank is the second
            one, so that ids below and above those of this rank occur.
        dtypes: of activations; the first is used for every problem, the others for the first geometry.
        repeats: how often each problem is computed.
        burst: calls in a row, without a wait in between.
    """

    rows: tuple[int, ...]
    geometries: tuple[Geometry, ...]
    dtypes: tuple[str, ...] = ("bfloat16",)
    repeats: int = 3
    burst: int = 16

    def to_json(self) -> dict[str, Any]:
        """The plan as it is sent to the child."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ExpertPlan:
        """The plan as the child receives it."""
        lists = {name: tuple(value[name]) for name in ("rows", "dtypes")}
        geometries: tuple[Any, ...] = tuple(tuple(geometry) for geometry in value["geometries"])
        return cls(**{**value, **lists, "geometries": geometries})


_GPU_ROWS = (1, 2, 4, 8, 16, 33, 64, 65, 128, 256, 1024)
#: Whole experts, what tensor parallelism leaves of I, the second of four expert-parallel ranks, experts without a gate.
_SERVED: tuple[Geometry, ...] = (
    (64, 64, 8, 2048, 512, "silu"),
    (32, 32, 4, 4096, 128, "silu"),
    (64, 16, 8, 2048, 256, "silu"),
    (16, 16, 4, 1024, 256, "relu2"),
)
#: Multiples of 16 that only our kernels take.
_OURS: tuple[Geometry, ...] = ((24, 24, 4, 2880, 80, "silu"), (16, 8, 2, 2688, 464, "relu2"))
_CPU = ExpertPlan(
    rows=(1, 9),
    geometries=((8, 8, 2, 64, 32, "silu"), (6, 3, 3, 80, 48, "relu2")),
    repeats=2,
    burst=3,
)


def expert_plan_for(facts: HostFacts, runner: str) -> ExpertPlan:
    """Return the problems of a runner on this machine."""
    if facts.capability is None:
        return _CPU
    if runner in KERNEL_RUNNERS:
        return ExpertPlan(_GPU_ROWS, (*_SERVED, *_OURS), ("bfloat16", "float16"))
    taken = (geometry for geometry in _SERVED if not beyond_limits(runner, ExpertSizes(*geometry[:-1])))
    return ExpertPlan(_GPU_ROWS, tuple(taken))
