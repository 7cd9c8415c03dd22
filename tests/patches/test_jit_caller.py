"""The patched SGLang's own calls reach the kernels that the patches bring, where asked for and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cpu_host.kernels import build
from sglang_sm120.host.source_probe import package_root
from sglang_sm120.upstream.catalog import Catalog
from tests.matrix.conftest import ROOT
from tests.patches import releases
from tests.patches.releases import Release, patched

SCRIPT = Path(__file__).with_name("jit_caller.py")
BENCHMARK = "test/registered/kernels/benchmark/gemm/bench_sm120_nvfp4_skinny.py"


def test_calls_with_few_tokens_reach_the_kernels_when_asked(real: Catalog, tmp_path: Path) -> None:
    package = package_root()
    assert package is not None
    target, change = patched(Release("0.5.23", sys.executable, package), real, tmp_path / "patched", tree=True)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(build.library_path()), str(target.locate(BENCHMARK))],
        env={
            **os.environ,
            "PYTHONPATH": f"{target.package.parent}:{ROOT}",
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_SM120_DISABLE": "1",
            **releases.witnessing(change, tmp_path / "witness"),
        },
        cwd=target.package.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    releases.check(answer["patched"], target, change)
    flashinfer, kernels = ({f"{who} quantize": 1, f"{who} gemm": 1} for who in ("flashinfer", "kernel"))
    assert answer["calls"] == {"off": flashinfer, "few": kernels, "half": kernels, "many": flashinfer}
    measured = answer["benchmark"]
    assert measured["skipped"] == ["b12x"]
    assert set(measured["distance"]) == {"skinny", "cutlass", "cudnn"}
    assert max(measured["distance"].values()) < 0.01
    assert measured["different codes"] <= 1
