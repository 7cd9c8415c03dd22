"""What doctor concludes from compiled code, for libraries and caches given as data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_sm120.backends.record import HostFacts
from sglang_sm120.diagnosis import jit_cache
from sglang_sm120.diagnosis.checks import GIB, compiled_findings
from sglang_sm120.diagnosis.compiled import Compiled, Library
from sglang_sm120.diagnosis.fatbin import Target
from sglang_sm120.diagnosis.finding import Finding
from tests.dispatch.machines import RTX, SPARK, machine

#: What ninja gets from FlashInfer for a module: long lines are continued with a dollar sign.
RULES = """ninja_required_version = 1.3
common_cflags = -DTORCH_API_INCLUDE_EXTENSION_H
cuda_cflags = $common_cflags {define} $
    {codes} -O3
rule cuda_compile
  command = $nvcc $cuda_cflags -c $in -o $out
"""
GDC = jit_cache.PDL_DEFINE


def module(root: Path, name: str, target: str, define: str = GDC, release: str = "0.7.2") -> None:
    folder = root / release / "120" / "cached_ops" / name
    folder.mkdir(parents=True)
    codes = f"-gencode=arch=compute_{target},code=sm_{target}"
    (folder / "build.ninja").write_text(RULES.format(define=define, codes=codes))


def found(compiled: Compiled, facts: HostFacts | None = None) -> dict[str, Finding]:
    return {finding.code: finding for finding in compiled_findings(compiled, facts or machine(RTX))}


@pytest.mark.parametrize(("facts", "runs"), [(machine(RTX), True), (machine(SPARK), False)])
def test_a_library_for_another_card_stops_before_the_first_token(facts: HostFacts, runs: bool) -> None:
    only_rtx = Library("sgl_kernel", (frozenset({Target("sm", 120, "a")}), frozenset({Target("sm", 90, "a")})))
    findings = found(Compiled(libraries=(only_rtx,)), facts)
    assert ("no-kernel-image" in findings) != runs
    if not runs:
        assert findings["no-kernel-image"].severity == "stop"
        assert "12.1, only for sm_90a, sm_120a" in findings["no-kernel-image"].message
        assert findings["no-kernel-image"].fix == "Install a build of sgl_kernel with sm_121 or sm_120f."


def test_the_family_of_sm12x_is_no_remedy_for_another_card() -> None:
    only_rtx = Library("sgl_kernel", (frozenset({Target("sm", 120, "f")}),))
    hopper = found(Compiled(libraries=(only_rtx,)), machine((9, 0)))
    assert hopper["no-kernel-image"].fix == "Install a build of sgl_kernel with sm_90."


def test_without_a_gpu_no_library_is_for_the_wrong_card() -> None:
    hopper = Library("sgl_kernel", (frozenset({Target("sm", 90, "a")}),))
    assert found(Compiled(libraries=(hopper,)), replace(machine(RTX), capability=None)) == {}


@pytest.mark.parametrize(
    ("name", "target", "define", "codes"),
    [
        ("fp4_gemm_cutlass_sm120", "120f", GDC, set()),
        ("fp4_gemm_cutlass_sm120", "120f", "", {"jit-pdl-define"}),
        # Hopper's define is another one, and of no use here.
        ("fused_moe_120", "120a", "-DCUTLASS_ENABLE_GDC_FOR_SM90=1", {"jit-pdl-define"}),
        ("fused_moe_120", "120", GDC, {"jit-plain-target"}),
        ("fused_moe_100", "100a", "", set()),
        ("norm", "120f", "", set()),
    ],
)
def test_flags_of_flashinfers_cache_are_judged(
    name: str, target: str, define: str, codes: set[str], tmp_path: Path
) -> None:
    module(tmp_path, name, target, define)
    findings = found(Compiled(jit_modules=jit_cache.modules(tmp_path, "0.7.2")))
    assert set(findings) == codes
    for finding in findings.values():
        assert str(tmp_path) in finding.fix


def test_modules_of_another_release_are_not_loaded_and_do_not_count(tmp_path: Path) -> None:
    module(tmp_path, "fused_moe_120", "120f", "", release="0.6.6")
    assert jit_cache.modules(tmp_path, "0.7.2") == ()


@pytest.mark.parametrize(
    ("versions", "code"),
    [
        ({"driver": "570.10"}, "driver-old"),
        ({"cuda_toolkit": "12.9"}, "toolkit-differs"),
        ({"cuda_toolkit": "13.1"}, None),
        ({"cuda": None, "driver": "570.10"}, None),
        ({"driver": "not a number"}, None),
    ],
)
def test_versions_of_cuda_that_do_not_go_together(versions: dict[str, str | None], code: str | None) -> None:
    assert set(found(Compiled(), machine(RTX, **versions))) == ({code} if code else set())


def test_room_for_compilers_is_checked_where_flashinfer_would_start_them() -> None:
    tight = Compiled(memory_available=30 * GIB, jobs=16, disk_free=GIB)
    assert set(found(tight)) == {"jit-memory", "jit-disk"}
    assert found(replace(tight, memory_available=144 * GIB, disk_free=100 * GIB)) == {}
    assert found(tight, machine(RTX, flashinfer=None)) == {}
    assert found(tight, replace(machine(RTX), capability=(9, 0))) == {}


@pytest.mark.parametrize(("memory", "cores", "jobs"), [(8, 4, 1), (30, 16, 1), (61, 16, 5), (121, 20, 13)])
def test_compilers_leave_memory_to_the_server_that_starts_them(memory: int, cores: int, jobs: int) -> None:
    crowded = Compiled(memory_available=memory * GIB, jobs=cores, disk_free=100 * GIB)
    assert f"MAX_JOBS={jobs} " in found(crowded)["jit-memory"].fix
