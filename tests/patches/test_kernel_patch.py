"""The patch that brings our kernels into SGLang: always what ``csrc/`` holds, and code that passes the gate there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120.host.source_probe import package_root
from sglang_sm120.upstream.catalog import Catalog
from tests.matrix.conftest import ROOT
from tests.patches import releases
from tests.patches.releases import Release, patched
from tests.support import cuda_tools
from tools import kernel_gate, kernel_patch

SCRIPT = Path(__file__).with_name("jit_unit.py")


def test_it_is_generated_from_the_kernels_as_they_are() -> None:
    assert kernel_patch.main(["--check"]) == 0, "run python tools/kernel_patch.py"


def test_a_changed_kernel_makes_it_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stale = tmp_path / kernel_patch.PATCH.name
    stale.write_text(kernel_patch.patch_text().replace("kRingStages = 2;", "kRingStages = 3;"))
    monkeypatch.setattr(kernel_patch, "PATCH", stale)
    monkeypatch.setattr(kernel_patch, "ROOT", tmp_path)
    assert kernel_patch.main(["--check"]) == 1
    assert kernel_patch.main([]) == 0
    assert kernel_patch.main(["--check"]) == 0


def test_it_is_small_enough_to_be_reviewed_and_holds_no_other_card_s_code() -> None:
    text = kernel_patch.patch_text()
    assert len(text.splitlines()) < 3000
    for word in ("emu::", "emulation/", "decoded::", "_decoded.cuh", "LOAD_PATH_ONLY"):
        assert word not in text, word


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        (["#if defined(SM120_EMULATED)", "a", "#elif X", "b", "#else", "c", "#endif"], "#if X|b|#else|c|#endif"),
        (["#if defined(SM120_EMULATED)", "a", "#else", "b", "#endif"], "b"),
        (["#if defined(__CUDACC__)", "a", "#if Y", "b", "#endif", "#else", "c", "#endif"], "a|#if Y|b|#endif"),
        (["#if X", "a", "#elif defined(__CUDACC__)", "b", "#else", "c", "#endif"], "#if X|a|#else|b|#endif"),
        (["#if defined(SM120_DECODED)", "#if X", "a", "#else", "b", "#endif", "#endif", "c"], "c"),
        (["#if X", "a", "#elif defined(SM120_DECODED)  // why", "b", "#endif"], "#if X|a|#endif"),
    ],
)
def test_only_branches_that_cannot_be_taken_there_are_left_out(lines: list[str], left: str) -> None:
    assert "|".join(kernel_patch._resolved(lines)) == left


@pytest.mark.slow
def test_what_sglang_would_compile_passes_the_gate(
    real: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = package_root()
    assert package is not None
    target, change = patched(Release("0.5.23", sys.executable, package), real, tmp_path, tree=False)
    wrapper = "sglang.kernels.ops.gemm.sm120_nvfp4_skinny"
    run = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={
            **os.environ,
            "PYTHONPATH": f"{target.package.parent}:{ROOT}",
            "SGLANG_USE_CPU_ENGINE": "1",
            **releases.witnessing(change, tmp_path / "witness", wrapper),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    answer = json.loads(run.stdout.splitlines()[-1])
    releases.check(answer["patched"], target, change, wrapper)
    unit, cubin = tmp_path / "cuda.cu", tmp_path / "cuda.cubin"
    unit.write_text(answer["unit"])
    architecture = "-gencode=arch=compute_120f,code=sm_120f"
    nvcc = [cuda_tools.program("nvcc"), *answer["flags"], architecture, "-cubin", "-Xptxas=-v", "-o", cubin, unit]
    done = subprocess.run(nvcc, capture_output=True, text=True, env=cuda_tools.environ())
    assert done.returncode == 0, done.stderr[-4000:]
    monkeypatch.setenv("PATH", cuda_tools.search_path())
    facts = kernel_gate.resources(done.stderr)
    entries = [
        kernel_gate.inspect("120f", name, code, facts.get(name, {}))
        for name, code in kernel_gate.listing(cubin).items()
    ]
    assert {entry.kernel: entry.failures for entry in entries if entry.failures} == {}
    assert {"skinny, token tiles 1", "quantize bf16 fast, 1 rows"} <= {entry.kernel for entry in entries}
