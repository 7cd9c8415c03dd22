"""What the real argument parser of every supported SGLang release makes of our values, and without us."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.matrix.conftest import ROOT, interpreter_of
from tests.matrix.values import DEADLINE, NATIVE_SINCE, OURS
from tests.support.moe_configs import QUANTIZATION_CONFIGS, write_moe_config
from tools.envs import RELEASES

pytestmark = pytest.mark.matrix

#: Two releases without plugins, the first and the last with them, and two between.
SWITCHED_OFF = ["0.5.9", "0.5.10", "0.5.11", "0.5.16", "0.5.20", "0.5.23"]


def test_the_real_parser_accepts_our_values_and_still_refuses_others(
    release: str, checkpoint: Path, tmp_path: Path
) -> None:
    kinds = {write_moe_config(tmp_path, kind).name: kind for kind in moe_runners_under_auto(release)}
    run = _arguments(
        release, checkpoint, ["auto", "flashinfer_cutlass", *OURS, "bogus"], SM120_MATRIX_MOE=str(tmp_path)
    )
    found = {kinds[name]: runners for name, runners in run["moe"].items()}
    assert found == {kind: [runner, runner] for kind, runner in moe_runners_under_auto(release).items()}
    for name, runners in run["own moe"].items():
        stand_in = "auto" if kinds[name] == "compressed-tensors" else "flashinfer_cutlass"
        assert runners == [stand_in, stand_in, "torch_reference", "torch_reference"], kinds[name]
    assert run["accepted"] == {v: v for v in ["auto", "flashinfer_cutlass", *OURS]}
    code, text = run["refused"]["bogus"]
    assert code == 2
    assert all(value in text for value in OURS)
    assert set(run["help"]) >= set(OURS)
    assert "broken" not in run["states"].values()
    assert run["states"]["choices"] == "live"


@pytest.mark.parametrize("switch", ["SGLANG_PLUGINS=other", "SGLANG_SM120_DISABLE=1"])
@pytest.mark.parametrize("release", SWITCHED_OFF)
def test_switched_off_the_release_is_as_published(
    switch: str, release: str, checkpoint: Path, record_sampled: Callable[[str, int, int], None]
) -> None:
    record_sampled("switched off", len(SWITCHED_OFF), len(RELEASES))
    run = _arguments(release, checkpoint, ["flashinfer_cutlass", *OURS], **dict([switch.split("=")]))
    version = Version(release)
    native = [value for value, since in NATIVE_SINCE.items() if version >= since]
    assert sorted(run["accepted"]) == sorted(["flashinfer_cutlass", *native])
    assert set(run["refused"]) == set(OURS) - set(native)


def moe_runners_under_auto(release: str) -> dict[str, str]:
    """What auto becomes on an RTX card, by kind of checkpoint that the release can read.

    Up to 0.5.15 it ends in CUTLASS kernels of SGLang by itself, but those cannot serve weight-only experts.
    """
    becomes = {"nvfp4_weight_only": "marlin"} if Version(release) >= Version("0.5.15") else {}
    if Version(release) >= Version("0.5.16"):
        becomes |= {"modelopt_fp4": "flashinfer_cutlass", "modelopt_mixed": "flashinfer_cutlass"}
    since = {"modelopt_fp4": "0.5.9", "compressed-tensors": "0.5.9"}  # all others are mixed ModelOpt checkpoints
    known = [kind for kind in QUANTIZATION_CONFIGS if Version(release) >= Version(since.get(kind, "0.5.10"))]
    return {kind: becomes.get(kind, "auto") for kind in known}


def _arguments(release: str, checkpoint: Path, values: list[str], **env: str) -> dict[str, Any]:
    run = subprocess.run(
        [interpreter_of(release), str(ROOT / "tests" / "matrix" / "arguments.py"), str(checkpoint), *values],
        capture_output=True,
        text=True,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", **env},
        timeout=DEADLINE,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return result
