"""Record types that only the MoE rows need; everything else is in ``record.py``. Needs neither torch nor sglang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_sm120.backends.record import Source, Verdict

#: How the experts of a checkpoint are stored, in SGLang's words where it has one. ``nvfp4_weight_only`` are the
#: W4A16 experts of a mixed ModelOpt checkpoint, ``fp8`` a checkpoint in FP8 whose experts alone are NVFP4.
Quantization = Literal[
    "modelopt_fp4", "modelopt_mixed", "nvfp4_weight_only", "fp8", "compressed-tensors", "unquantized"
]

#: Every kind that has NVFP4 experts.
NVFP4_QUANTIZATIONS: tuple[Quantization, ...] = (
    "modelopt_fp4",
    "modelopt_mixed",
    "nvfp4_weight_only",
    "fp8",
    "compressed-tensors",
)


@dataclass(frozen=True)
class Route:
    """What SGLang really runs for the experts of a layer. The first route that matches counts.

    Attributes:
        quantizations: kinds of experts that it is about.
        values: values of ``--moe-runner-backend``; ``None`` stands for every value that no earlier route names.
        releases: version specifier of SGLang; empty for every release.
        runner: the record whose kernels multiply, ``None`` if nothing does.
        source: the code of SGLang that decides it.
        effect: what happens instead where ``runner`` is ``None``.
        expert_parallel: only where a rank holds a part of the experts (``--ep-size`` above 1).
    """

    quantizations: tuple[Quantization, ...]
    values: tuple[str, ...] | None
    releases: str
    runner: str | None
    source: Source
    effect: str = ""
    expert_parallel: bool = False


@dataclass(frozen=True)
class Recommendation:
    """The runner to start with on SM12x.

    Attributes:
        value: what to write after ``--moe-runner-backend``; ``auto`` where SGLang's own choice is the right one.
        runner: the record whose kernels then multiply.
        reason: why, in one sentence without a full stop.
        source: where the reason comes from.
        verdict: the judgement of ``value``, with its warnings.
    """

    value: str
    runner: str
    reason: str
    source: Source
    verdict: Verdict
