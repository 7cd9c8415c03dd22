"""The MoE and dense code of old releases, as published, through our operators."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from packaging.version import Version

from tests.matrix.conftest import ROOT, interpreter_of
from tools.envs import RELEASES

pytestmark = pytest.mark.matrix

#: The wheel's operators, and the first and last form of those that SGLang compiles.
TRIED = ["0.5.9", "0.5.14", "0.5.15"]


@pytest.mark.parametrize("release", TRIED)
def test_a_releases_own_code_runs_through_our_operators(
    release: str, record_sampled: Callable[[str, int, int], None]
) -> None:
    record_sampled("operators", len(TRIED), sum(Version(r) < Version("0.5.16") for r in RELEASES))
    run = subprocess.run(
        [interpreter_of(release), str(ROOT / "tests" / "matrix" / "operators.py"), release],
        capture_output=True,
        text=True,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    assert "scaled_fp4_experts_quant cannot be called" in found["refusal"]
    assert found["operators"] == "torch_reference"
    # The release rounds to bf16 after each GEMM and after the activation, the oracle once at the end.
    experts = found["experts"]
    assert experts["right"] < 0.02 < 0.5 < experts["wrong expert"], experts
    assert found["whole"]["right"] == found["other ranks"]["right"] == 0 < 0.5 < found["whole"]["wrong expert"]
    assert found["dense"] == {"different": 0, "elements": 480}
    for name, (theirs, ours) in found["signatures"].items():
        assert [*theirs, "backend"] == ours, name
    assert len(found["signatures"]) == {"0.5.9": 0, "0.5.14": 6, "0.5.15": 7}[release]
    expected = {"operators (experts)": "live", "operators (dense)": "live", "operators (module)": "live"}
    assert found["states"] == expected | ({"operators (module)": "absent"} if release == "0.5.9" else {})
