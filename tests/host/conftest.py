"""Tests of this folder run the real SGLang in this process; without a GPU it needs the CPU stand-ins."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

from cpu_host import runtime

if not torch.cuda.is_available():
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    runtime.arm()  # the repository's environments did it already; this serves any other

from sglang_sm120 import install
from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.dispatch import Decision
from sglang_sm120.host.state import STATE

install()


class Serving:
    """Puts this process into the state that a server's start would leave."""

    def decide(self, backend: str | None, *, explicit: bool = True, facts: HostFacts | None = None) -> None:
        decision = Decision(backend, "command line" if explicit else "default", explicit, "test")
        record = BACKENDS.get(backend) if backend is not None else None
        STATE.decide(decision, facts or HostFacts(capability=None), record)
        if backend is not None:
            import sglang.srt.layers.quantization.fp4_utils as fp4_utils

            fp4_utils.FP4_GEMM_RUNNER_BACKEND = fp4_utils.Fp4GemmRunnerBackend(backend)


@pytest.fixture
def serving() -> Iterator[Serving]:
    yield Serving()
    STATE.__init__()  # type: ignore[misc]
    fp4_utils = sys.modules.get("sglang.srt.layers.quantization.fp4_utils")
    if fp4_utils is not None:
        fp4_utils.FP4_GEMM_RUNNER_BACKEND = None
