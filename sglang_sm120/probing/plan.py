"""Which problems a probe tries. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang_sm120.backends.record import Backend, HostFacts
from sglang_sm120.backends.verdict import verdict


@dataclass(frozen=True)
class Plan:
    """The problems of one child process.

    Attributes:
        rows: M of every product, in this order.
        shapes: (N, K) as they reach the kernel, that is after SGLang's padding to multiples of 32.
        widths: K of the quantizer's inputs.
        dtypes: output types; the first is used for every problem, the others for the first shape.
        repeats: how often each product is computed.
        burst: launches in a row, each after the quantizer and without a wait in between.
    """

    rows: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    widths: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    repeats: int = 3
    burst: int = 32

    def to_json(self) -> dict[str, Any]:
        """The plan as it is sent to the child."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Plan:
        """The plan as the child receives it."""
        return cls(
            rows=tuple(value["rows"]),
            shapes=tuple((n, k) for n, k in value["shapes"]),
            widths=tuple(value["widths"]),
            dtypes=tuple(value["dtypes"]),
            repeats=value["repeats"],
            burst=value["burst"],
        )


#: Decode, speculative verification and prefill, and the edges of tiles of 32 and 128 rows. FlashInfer's quantizer
#: wrote zero scales for M = 384, 512 and 1024 (flashinfer#3398).
_GPU = Plan(
    rows=(1, 2, 4, 8, 16, 31, 32, 33, 64, 127, 128, 129, 256, 384, 512, 1024),
    # Two aligned ones; then what tensor parallelism leaves: N and K that are multiples of 32 only.
    shapes=((4096, 4096), (1024, 7168), (480, 2688), (2688, 480), (1376, 352)),
    widths=(2048, 4096, 480, 352),
)
#: Small enough for code that is emulated or runs in float64 on a CPU.
_CPU = Plan(
    rows=(1, 8, 33, 129),
    shapes=((128, 256), (96, 160), (288, 96)),
    widths=(256, 160),
    repeats=2,
    burst=4,
)


def plan_for(facts: HostFacts, record: Backend | None = None) -> Plan:
    """Return the problems for this machine, without those that the table says ``record`` cannot take."""
    plan = _CPU if facts.capability is None else _GPU
    if record is None:
        return plan
    shapes = tuple((n, k) for n, k in plan.shapes if verdict(record.value, facts, n=n, k=k).status == "ok")
    dtypes = tuple(name for name in plan.dtypes if verdict(record.value, facts, out_dtype=name).status == "ok")
    return Plan(plan.rows, shapes, plan.widths, dtypes, plan.repeats, plan.burst)
