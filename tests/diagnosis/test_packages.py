"""What doctor concludes from versions that do not go together, each with its fix."""

from __future__ import annotations

import base64
import hashlib
from importlib import metadata
from pathlib import Path

import pytest

from sglang_sm120.backends.record import HostFacts
from sglang_sm120.diagnosis import packages as room
from sglang_sm120.diagnosis.finding import Finding
from sglang_sm120.diagnosis.packages import Packages, collect, package_findings
from tests.dispatch.machines import RTX, machine

#: What goes with FlashInfer 0.7.2 on CUDA 13.
SOUND = {
    "flashinfer-cubin": "0.7.2",
    "flashinfer-jit-cache": "0.7.2+cu130",
    "nvidia-cutlass-dsl": "4.8.0",
    "nvidia-cudnn-frontend": "1.32.0",
    "nvidia-cudnn-cu13": "9.20.0.48",
}
ASKED = ("nvidia-cutlass-dsl>=4.7.0a0", "nvidia-cudnn-frontend>=1.31.0")
OTHER = "/usr/lib/x86_64-linux-gnu/libcudnn_engines_tensor_ir.so.9"


def found(facts: HostFacts | None = None, other_cudnn: str = "", **installed: str | None) -> list[Finding]:
    versions = {**SOUND, **{name.replace("_", "-"): version for name, version in installed.items()}}
    present = {name: version for name, version in versions.items() if version is not None}
    return list(package_findings(Packages(present, ASKED, other_cudnn), facts or machine(RTX)))


def test_what_goes_together_is_not_mentioned() -> None:
    assert found() == []
    assert found(flashinfer_cubin=None, flashinfer_jit_cache=None) == []
    assert list(package_findings(Packages(), machine(None))) == []


@pytest.mark.parametrize(
    ("facts", "changes", "code", "message", "fix"),
    [
        (
            {},
            {"flashinfer_cubin": "0.7.1"},
            "flashinfer-companion",
            "is not of FlashInfer 0.7.2",
            "flashinfer-cubin 0.7.2.",
        ),
        ({}, {"flashinfer_jit_cache": "0.7.20+cu130"}, "flashinfer-companion", "0.7.20+cu130", "pip uninstall"),
        (
            {},
            {"nvidia_cutlass_dsl": "4.5.0"},
            "flashinfer-needs",
            "vllm#43738",
            'install "nvidia-cutlass-dsl>=4.7.0a0"',
        ),
        (
            {},
            {"nvidia_cudnn_frontend": None},
            "flashinfer-needs",
            "is not installed",
            '"nvidia-cudnn-frontend>=1.31.0"',
        ),
        ({}, {"nvidia_cudnn_cu12": "9.16.0.29"}, "cudnn-wheels", "torch for CUDA 13", "nvidia-cudnn-cu13==9.20.0.48"),
        (
            {},
            {"nvidia_cudnn_cu12": "9.16.0.29", "nvidia_cudnn_cu13": None},
            "cudnn-wheels",
            "nvidia-cudnn-cu12",
            "cu13.",
        ),
        ({"cuda": "12.9"}, {}, "cudnn-wheels", "nvidia-cudnn-cu13 is installed", "nvidia-cudnn-cu12"),
        ({}, {"other_cudnn": OTHER}, "cudnn-mixed", "pytorch#188892", "LD_LIBRARY_PATH"),
        ({"torch": "2.9.1", "cudnn": "9.10.2"}, {}, "versions-conflict", "Conv3d", "nvidia-cudnn-cu12>=9.15"),
    ],
)
def test_a_conflict_is_named_with_its_source_and_its_fix(
    facts: dict[str, str], changes: dict[str, str | None], code: str, message: str, fix: str
) -> None:
    (finding,) = found(machine(RTX, **facts), **changes)  # type: ignore[arg-type]
    assert finding.code == code
    assert message in finding.message
    assert fix in finding.fix
    assert finding.message.endswith(".")
    assert finding.fix.endswith(".")


@pytest.mark.parametrize("cudnn", ["9.16.0", "9.23.1"])
def test_another_cudnn_matters_to_wheels_that_lack_a_part_only(cudnn: str) -> None:
    assert found(machine(RTX, cudnn=cudnn), other_cudnn=OTHER) == []


def test_another_cudnn_of_the_same_version_is_no_conflict() -> None:
    assert found(machine(RTX, cudnn="9.20.0"), other_cudnn=f"{OTHER}.20.0") == []
    assert [finding.code for finding in found(machine(RTX, cudnn="9.20.0"), other_cudnn=f"{OTHER}.23.1")] == [
        "cudnn-mixed"
    ]


def test_metadata_and_library_folders_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [
        "torch",
        "nvidia-cutlass-dsl>=4.7.0a0",
        'nvidia-cutlass-dsl[cu13]>=4.8; extra == "cu13"',
        "not a requirement!",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: asked)
    monkeypatch.setattr(metadata, "version", lambda name: SOUND[name])
    monkeypatch.setattr(room.metadata, "version", _version)
    place = (tmp_path / f"{room.CUDNN_LOADED_BY_NAME}.23.1").resolve()
    place.write_bytes(b"")
    (tmp_path / room.CUDNN_LOADED_BY_NAME).symlink_to(place.name)
    read = collect({"LD_LIBRARY_PATH": f"relative::{tmp_path}"})
    assert read == Packages(SOUND, ("nvidia-cutlass-dsl>=4.7.0a0",), str(place))


@pytest.mark.parametrize("last", ["base", "cu13"])
def test_a_wheel_of_the_cute_dsl_that_was_overwritten_is_told_by_its_file(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both wheels record the same path with another content; what lies there is of the one installed last."""
    files = {"base": b"for CUDA 12", "cu13": b"for CUDA 13"}
    for part, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        info = tmp_path / f"nvidia_cutlass_dsl_libs_{part}-4.5.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: nvidia-cutlass-dsl-libs-{part}\nVersion: 4.5.0\n")
        (info / "RECORD").write_text(f"dsl/same.py,,\ndsl/ops.so,sha256={digest},11\n")
    (tmp_path / "dsl").mkdir()
    (tmp_path / "dsl" / "ops.so").write_bytes(files[last])
    monkeypatch.syspath_prepend(tmp_path)
    read = collect({})
    findings = {finding.code: finding for finding in package_findings(read, machine(RTX, flashinfer=None))}
    assert ("cutlass-dsl-wheels" in findings) == (last == "base")
    if last == "base":
        finding = findings["cutlass-dsl-wheels"]
        assert "dsl/ops.so is the file of nvidia-cutlass-dsl-libs-base" in finding.message
        assert finding.fix.endswith("nvidia-cutlass-dsl-libs-cu13==4.5.0.")


def _version(name: str) -> str:
    if name not in SOUND:
        raise metadata.PackageNotFoundError(name)
    return SOUND[name]
