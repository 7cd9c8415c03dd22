"""Which compiler is taken, what is said when there is none, and what the real one makes of the sources."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from sglang_sm120 import env
from sglang_sm120.backends import table
from sglang_sm120.build import compiler, driver, loader, manifest, spec, toolchain
from sglang_sm120.errors import UnsupportedError
from tests.packaging.environments import ROOT
from tests.support import cuda_tools


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with nothing but a folder on PATH: no toolkit, no wheels, no C++ compiler."""
    for name in ("CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "bin"
    path.mkdir()
    monkeypatch.setenv("PATH", f"{path}")
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "USUAL_PLACE", tmp_path / "nowhere")
    monkeypatch.setattr(toolchain.util, "find_spec", lambda name: None)
    toolchain.find_toolchain.cache_clear()
    return path


@pytest.fixture(autouse=True)
def _nothing_remembered() -> None:
    toolchain.find_toolchain.cache_clear()


def program(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def nvcc(path: Path, version: str) -> Path:
    return program(path, f'echo "Cuda compilation tools, release {version}, V{version}.88"')


# --- finding one -------------------------------------------------------------------------------------------


def test_without_a_compiler_the_error_says_what_to_install(bare: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"No CUDA compiler of 12\.9 or newer\. Install .* 'nvidia-cuda-nvcc==13"
    ):
        loader.library_path((12, 0))


def test_a_library_for_other_cards_is_told_when_kernels_are_loaded_and_not_before(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every server asks which CUDA the kernels have or would have, also where nobody uses them."""
    library = tmp_path / "libsm120_kernels.so"
    library.write_bytes(b"code for another card")
    sources = spec.digest(spec.source_root())
    manifest.write(library, manifest.describe(library, sources, [spec.Target("120f")], (13, 0), "0.1.9"))
    monkeypatch.setattr(loader, "PREBUILT", library)
    nvcc(bare / "nvcc", "13.0")
    program(bare / "g++")
    assert loader.cuda_version((10, 0)) == (13, 0)
    assert caplog.text == ""
    assert not env.cache_path().exists()
    monkeypatch.setenv(env.JIT, "0")
    with pytest.raises(UnsupportedError, match=r"it has code for sm_120f and none for 10\.0"):
        loader.library_path((10, 0))
    assert "came with the package are not usable, it has code for sm_120f and none for 10.0" in caplog.text


def test_an_old_compiler_is_named_with_its_version(bare: Path) -> None:
    old = nvcc(bare / "nvcc", "12.8")
    program(bare / "g++")
    with pytest.raises(UnsupportedError, match=rf"12\.9 or newer \({old} is CUDA 12\.8\)"):
        loader.library_path((12, 0))


def test_a_compiler_that_does_not_run_is_named(bare: Path) -> None:
    broken = program(bare / "nvcc", "exit 1")
    with pytest.raises(UnsupportedError, match=f"{broken} does not run"):
        toolchain.find_toolchain()


def test_without_a_cpp_compiler_the_error_says_so(bare: Path) -> None:
    nvcc(bare / "nvcc", "13.0")
    with pytest.raises(UnsupportedError, match=r"There is no C\+\+ compiler for .*nvcc: install g\+\+"):
        loader.library_path((12, 0))


def test_an_old_compiler_in_front_does_not_hide_a_newer_one(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "g++")
    nvcc(bare / "nvcc", "12.4")
    usual = nvcc(bare.parent / "usual" / "bin" / "nvcc", "12.9")
    monkeypatch.setattr(toolchain, "USUAL_PLACE", usual)
    assert (toolchain.find_toolchain().nvcc, toolchain.find_toolchain().version) == (usual, (12, 9))
    toolchain.find_toolchain.cache_clear()
    named = nvcc(bare.parent / "named" / "bin" / "nvcc", "13.1")
    monkeypatch.setenv("CUDA_HOME", str(bare.parent / "named"))
    assert toolchain.find_toolchain().nvcc == named


def test_missing_or_unfitting_binding_is_named(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_ffi.__version__", "0.2.0")
    with pytest.raises(UnsupportedError, match=r"apache-tvm-ffi 0\.2\.0 does not fit.*>=0\.1\.9,<0\.2"):
        loader.library_path((12, 0))
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(UnsupportedError, match=r"apache-tvm-ffi, which is missing: pip install"):
        loader.library_path((12, 0))


def test_the_range_of_the_binding_is_the_one_that_pip_installs() -> None:
    assert f'"apache-tvm-ffi{spec.TVM_FFI}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert spec.TVM_FFI_OF_WHEEL.removeprefix("apache-tvm-ffi==") == spec.TVM_FFI.partition(",")[0].removeprefix(">=")


# --- the driver --------------------------------------------------------------------------------------------


class FakeDriver:
    """libcuda of a driver."""

    def __init__(self, number: int, status: int = 0) -> None:
        self.number, self.status = number, status

    def __call__(self, name: str) -> FakeDriver:
        assert name == "libcuda.so.1"
        return self

    def cuDriverGetVersion(self, pointer: object) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = self.number  # type: ignore[arg-type]
        return self.status


def test_a_driver_below_the_floor_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", FakeDriver(12080))
    monkeypatch.setattr("sglang_sm120.device.installed_versions", lambda: {"driver": "570.86.10"})
    said = r"compiled with CUDA 13\.0, and the NVIDIA driver 570\.86\.10 offers CUDA 12\.8: install driver 580 or newer"
    with pytest.raises(UnsupportedError, match=said):
        driver.require((13, 0))
    driver.require((12, 9))  # any driver for CUDA 12 runs what CUDA 12.9 made


def test_the_table_and_the_loader_have_one_driver_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", FakeDriver(12080))
    monkeypatch.setattr(table, "DRIVER_FLOOR", {12: 525, 13: 999})
    with pytest.raises(UnsupportedError, match="install driver 999 or newer"):
        driver.require((13, 0))


def test_a_driver_of_the_same_or_a_newer_cuda_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", FakeDriver(13000))
    driver.require((13, 5))
    driver.require((12, 9))


def test_no_driver_is_its_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match=r"need an NVIDIA driver, and libcuda\.so\.1 cannot be loaded"):
        driver.require((13, 0))


# --- the real compiler -------------------------------------------------------------------------------------


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> toolchain.Toolchain:
    """This machine's compiler, or the one in NVIDIA's wheels."""
    monkeypatch.setenv("PATH", cuda_tools.search_path())
    return toolchain.find_toolchain()


def test_plain_sm_120_ends_with_a_readable_refusal(
    real: toolchain.Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "units", lambda root: [root / "quantize" / "launch.cu"])
    with pytest.raises(UnsupportedError, match=r"Plain sm_120/sm_121 has no FP4 tensor instruction: build for sm_120f"):
        compiler.compile_library(ROOT / "csrc", [spec.Target("120")], real, tmp_path / "kernels.so")


def test_every_unit_is_found_by_rule_and_none_of_the_emulation() -> None:
    found = {str(path.relative_to(ROOT / "csrc")) for path in spec.units(ROOT / "csrc")}
    assert {"gemm_skinny/launch.cu", "quantize/launch.cu", "binding/ffi.cc"} <= found
    everything = {path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cu", ".cc"}}
    assert {path for path in everything if path.parent.name != "emulation"} == set(spec.units(ROOT / "csrc"))
    assert os.path.commonpath(spec.files(ROOT / "csrc")) == str(ROOT / "csrc")


@pytest.mark.parametrize(
    ("name", "runs", "fails"),
    [
        ("80", (8, 9), (9, 0)),
        ("90", (9, 0), (10, 0)),
        ("120f", (12, 1), (10, 3)),
        ("121a", (12, 1), (12, 0)),
        ("86", (8, 6), (8, 0)),
        ("100", (10, 3), (12, 0)),
    ],
)
def test_a_target_runs_on_its_own_generation_only(name: str, runs: tuple[int, int], fails: tuple[int, int]) -> None:
    assert spec.Target(name).runs_on(runs)
    assert not spec.Target(name).runs_on(fails)


def test_a_card_without_the_instructions_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"compute capability='7\.5'"):
        spec.target_for((7, 5))
