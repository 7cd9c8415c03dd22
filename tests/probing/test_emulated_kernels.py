"""Our CUDA kernels, emulated on the CPU, pass the probe in a child as they would on a card."""

from __future__ import annotations

import pytest

from cpu_host.kernels.build import library_path
from cpu_host.runtime import KERNELS_VARIABLE
from sglang_sm120.probing import children
from sglang_sm120.probing.children import Job
from sglang_sm120.probing.plan import Plan


def test_sm120_is_right_by_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, str(library_path()))
    plan = Plan(rows=(1, 9), shapes=((96, 160),), widths=(160,), repeats=1, burst=2)
    outcome = children.run(Job("sm120", plan, "cpu"), 600.0)
    assert outcome.status == "ok", outcome.reason
    # The quantizer for each M; the product and the fused operator for each M and type; launches in a row.
    assert outcome.reason == f"{2 + 2 * 2 * 2 + 1} steps"
