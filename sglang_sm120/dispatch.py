"""Which backend serves: pure functions from facts to a decision. No torch, no sglang, no look-ups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["command line", "environment", "deprecated variable", "tuning table", "default"]


@dataclass(frozen=True)
class Request:
    """What the user asked for, before any decision.

    Attributes:
        server_value: the value in SGLang's server arguments (its default if the flag was not given).
        env_value: ``SGLANG_SM120_FP4_GEMM_BACKEND`` or ``None``.
        deprecated_value: ``SGLANG_FLASHINFER_FP4_GEMM_BACKEND`` or ``None``.
        take_auto: ``False`` when ``SGLANG_SM120_AUTO=0`` leaves ``auto`` to SGLang.
        allow_unsafe: ``SGLANG_SM120_ALLOW_UNSAFE=1``.
    """

    server_value: str
    env_value: str | None = None
    deprecated_value: str | None = None
    take_auto: bool = True
    allow_unsafe: bool = False


@dataclass(frozen=True)
class Decision:
    """The backend that serves the dense FP4 layers of this process.

    ``explicit`` is true when the user named a backend: then no layer may fall back to another one.
    ``backend`` is ``None`` when the choice is left to SGLang (another card, or ``SGLANG_SM120_AUTO=0``).
    """

    backend: str | None
    origin: Origin
    explicit: bool
    reason: str
    warnings: tuple[str, ...] = ()
