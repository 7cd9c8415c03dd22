"""The table against the real FlashInfer: releases on both sides of every bound are downloaded, asked and read.

Only the Python files of the wheels are kept, below the developer cache. FlashInfer imports on a machine without a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache

import pytest
from packaging.version import Version

from sglang_sm120.backends import BACKENDS, verdict
from sglang_sm120.backends.record import CAPABILITIES, Capability, HostFacts
from sglang_sm120.backends.table import FLASHINFER_NAMES, NEWEST_FLASHINFER_READ
from tests.dispatch.machines import NEWEST, RTX
from tests.support import flashinfer_releases

pytestmark = pytest.mark.matrix

RELEASES = ("0.6.3", "0.6.6", "0.6.7", "0.6.8", "0.6.9", "0.6.11", "0.6.12", "0.6.18", "0.7.0", "0.7.1")
RELEASES += (NEWEST_FLASHINFER_READ,)
ASK = """
import json, sys
import flashinfer
names, capabilities = json.loads(sys.argv[1])
asked = flashinfer.mm_fp4.is_backend_supported
print("ANSWER" + json.dumps([[bool(asked(n, 10 * major + minor)) for major, minor in capabilities] for n in names]))
"""

every_release = pytest.mark.parametrize("release", RELEASES)


@cache
def _answers(version: str) -> dict[tuple[str, Capability], bool]:
    files = [flashinfer_releases.release(version), flashinfer_releases.companions()]
    # The developer environments put a stand-in where a package of the host is missing; FlashInfer alone needs none.
    environment = {**flashinfer_releases.environment(files), "SM120_CPU_HOST_STANDINS": "0"}
    command = [sys.executable, "-c", ASK, json.dumps([FLASHINFER_NAMES, CAPABILITIES])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout.rpartition("ANSWER")[2])
    return {
        (name, capability): answer
        for name, row in zip(FLASHINFER_NAMES, table, strict=True)
        for capability, answer in zip(CAPABILITIES, row, strict=True)
    }


def _source(release: str, file: str, function: str | None = None) -> str:
    text = (flashinfer_releases.release(release) / "flashinfer" / file).read_text(encoding="utf-8")
    if function is None:
        return text
    match = re.search(rf"^def {function}\(.*?(?=^(?:def|class|@))", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"{function} is gone from {file} in {release}"
    return match[0]


@every_release
def test_the_recorded_bounds_are_what_flashinfer_answers(release: str) -> None:
    """Without FlashInfer's answer, the table alone must come to the same result on a machine that has all the rest."""
    rest = {**NEWEST, "flashinfer": release, "cuda": "13.0"}
    for (name, capability), answer in _answers(release).items():
        record = next(r for r in BACKENDS.values() if r.flashinfer_name == name)
        judged = verdict(record.value, HostFacts(capability, rest))
        # A fault is about what happens when it runs, which FlashInfer does not answer.
        assert (judged.status in ("ok", "refused")) == answer, (record.value, capability, judged.reason)


@every_release
def test_the_pdl_race_ends_where_the_define_is(release: str) -> None:
    fixed = "CUTLASS_ENABLE_GDC_FOR_SM100=1" in _source(
        release, "jit/gemm/core.py", "gen_gemm_sm120_module_cutlass_fp4"
    )
    judged = verdict("flashinfer_cutlass", HostFacts(RTX, {**NEWEST, "flashinfer": release}))
    assert (judged.status == "ok") == fixed


@every_release
def test_the_workspace_warning_ends_where_nothing_is_resized(release: str) -> None:
    resizes = ".resize_(" in _source(release, "gemm/gemm_base.py", "execute_cudnn_gemm_fp4_graph")
    judged = verdict("flashinfer_cudnn", HostFacts(RTX, {**NEWEST, "flashinfer": release}))
    assert bool(judged.warnings) == resizes


@every_release
def test_the_cuda_bounds_of_b12x(release: str) -> None:
    if ("b12x", RTX) not in _answers(release) or not _answers(release)["b12x", RTX]:
        return
    from_12_9 = '_MIN_B12X_CUDA_VERSION = Version("12.9")' in _source(release, "gemm/gemm_base.py")
    facts = HostFacts(RTX, {**NEWEST, "flashinfer": release, "cuda": "12.9"})
    assert (verdict("flashinfer_b12x", facts).status == "ok") == from_12_9


@every_release
def test_the_cuda_bounds_of_the_compiler(release: str) -> None:
    source = _source(release, "compilation_context.py")
    refuses_12_8 = "SM 12.x requires CUDA >= 12.9" in source
    facts = HostFacts(RTX, {**NEWEST, "flashinfer": release, "cuda": "12.8"})
    assert (verdict("flashinfer_cudnn", facts).status == "ok") == (not refuses_12_8)


def test_the_shape_rules_are_what_flashinfer_checks() -> None:
    base = "gemm/gemm_base.py"
    assert "real_k % 32 != 0" in _source(NEWEST_FLASHINFER_READ, base, "_b12x_gemm_fp4_requirement")
    policy = _source(NEWEST_FLASHINFER_READ, "gemm/kernels/sm12x_cute/policy.py", "check_shape")
    assert "% 64" in policy
    assert "BF16 output only" in _source(NEWEST_FLASHINFER_READ, "gemm/kernels/sm12x_cute/runner.py")
    floor = _source(NEWEST_FLASHINFER_READ, base, "_check_cudnn_fp4_availability")
    assert "91002" in floor


def test_the_releases_are_on_both_sides_of_every_bound() -> None:
    read = [Version(release) for release in RELEASES]
    for record in BACKENDS.values():
        bounds = [b for row in record.rows for b in row.requires] + [b for f in record.faults for b in f.when]
        for bound in bounds:
            if bound.package != "flashinfer":
                continue
            for edge in re.findall(r"[\d.]+", bound.specifier):
                assert Version(edge) in read or edge == "0.6.5", bound
