"""Facts are collected without importing what is not needed, and a broken package never stops the collection."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from sglang_sm120 import build, device
from sglang_sm120.backends import verdict
from sglang_sm120.backends.table import FLASHINFER_NAMES
from sglang_sm120.errors import ConfigError, UnsupportedError

ROOT = Path(__file__).parents[2]


def test_versions_are_read_without_importing_anything_heavy() -> None:
    code = (
        "import sys; from sglang_sm120.device import installed_versions; found = installed_versions();"
        "bad = {'torch', 'sglang', 'flashinfer', 'cudnn'} & set(sys.modules);"
        "assert not bad, bad; assert 'torch' in found, found"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("number", "text"), [(91002, "9.10.2"), (92000, "9.20.0"), (90701, "9.7.1"), (8905, "8.9.5"), (8907, "8.9.7")]
)
def test_cudnn_numbers(number: int, text: str) -> None:
    assert device.normalise_cudnn(number) == text


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("__version__ = '2.14.1'\ncuda: Optional[str] = '13.0'\n", "13.0"),
        ("cuda = '12.8'\n", "12.8"),
        ("cuda: Optional[str] = None\n", None),
        ("debug = False\n", None),
        ("cuda = (\n", None),
    ],
)
def test_cuda_is_read_from_torchs_source(
    source: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(source, encoding="utf-8")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(device.util, "find_spec", lambda _: spec)
    assert device.installed_versions().get("cuda") == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Thu Sep 18 10:00:00 UTC 2026\n", "580.95.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  595.10  Release Build\n", "595.10"),
        ("something else\n", None),
    ],
)
def test_driver_version(text: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(text, encoding="utf-8")
    monkeypatch.setattr(device, "_DRIVER_FILE", tmp_path / "version")
    assert device.installed_versions().get("driver") == found


class Machine:
    """Puts a torch and a FlashInfer of our making in place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.versions = {"torch": "2.14.1", "flashinfer": "0.7.2"}
        self.asked: list[tuple[str, int]] = []
        monkeypatch.setattr(device, "installed_versions", lambda: dict(self.versions))
        self.torch = SimpleNamespace(
            version=SimpleNamespace(cuda="13.0"),
            backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 92000)),
            cuda=SimpleNamespace(
                is_available=lambda: True,
                get_device_capability=lambda _: (12, 0),
                get_device_name=lambda _: "NVIDIA RTX PRO 6000",
            ),
        )
        self.put("torch", self.torch)

        def supported(name: str, capability: int) -> bool:
            self.asked.append((name, capability))
            return name != "trtllm"

        self.put("flashinfer", SimpleNamespace(mm_fp4=SimpleNamespace(is_backend_supported=supported)))
        self.put("flashinfer.jit.cpp_ext", SimpleNamespace(get_cuda_version=lambda: "12.9"))
        self.compile_with((13, 0))

    def compile_with(self, version: tuple[int, int] | Exception) -> None:
        def cuda_version(capability: tuple[int, int]) -> tuple[int, int]:
            if isinstance(version, Exception):
                raise version
            return version

        self.monkeypatch.setattr(build, "cuda_version", cuda_version)

    def put(self, name: str, module: object) -> None:
        self.monkeypatch.setitem(sys.modules, name, module)

    def break_import(self, name: str, error: Exception, tmp_path: Path) -> None:
        (tmp_path / f"{name}.py").write_text(f"raise {type(error).__name__}({str(error)!r})\n", encoding="utf-8")
        self.monkeypatch.delitem(sys.modules, name)
        self.monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_sound_machine(machine: Machine) -> None:
    facts = device.collect_facts()
    assert facts.capability == (12, 0)
    assert facts.device_name == "NVIDIA RTX PRO 6000"
    assert facts.versions == {
        "torch": "2.14.1",
        "flashinfer": "0.7.2",
        "cuda": "13.0",
        "cudnn": "9.20.0",
        "cuda_toolkit": "12.9",
        "kernels_cuda": "13.0",
    }
    assert machine.asked == [(name, 120) for name in FLASHINFER_NAMES]
    assert facts.flashinfer_support == {name: name != "trtllm" for name in FLASHINFER_NAMES}
    assert facts.problems == {}


def test_without_a_gpu_flashinfer_is_not_even_imported(machine: Machine) -> None:
    machine.torch.cuda.is_available = lambda: False
    facts = device.collect_facts()
    assert facts.capability is None
    assert machine.asked == []
    assert facts.versions["flashinfer"] == "0.7.2"


@pytest.mark.parametrize("error", [UnsupportedError("No CUDA compiler."), ConfigError("The cache is not safe.")])
def test_kernels_that_cannot_be_had_count_as_missing_and_the_reason_is_kept(error: Exception, machine: Machine) -> None:
    machine.versions["tvm_ffi"] = "0.1.9"
    machine.compile_with(error)
    facts = device.collect_facts()
    assert "kernels_cuda" not in facts.versions
    assert facts.problems["kernels_cuda"] == str(error)
    assert str(error) in verdict("sm120", facts).reason


@pytest.mark.parametrize("error", [ImportError("no libcudart.so.13"), OSError("bad ELF"), RuntimeError("no nvcc")])
def test_a_flashinfer_that_cannot_be_imported_counts_as_missing(
    error: Exception, machine: Machine, tmp_path: Path
) -> None:
    machine.break_import("flashinfer", error, tmp_path)
    facts = device.collect_facts()
    assert "flashinfer" not in facts.versions
    assert str(error) in facts.problems["flashinfer"]
    assert "0.7.2" in facts.problems["flashinfer"]
    assert facts.flashinfer_support == {}


def test_a_flashinfer_that_cannot_be_asked_is_judged_by_its_version(machine: Machine) -> None:
    machine.put("flashinfer", SimpleNamespace())
    facts = device.collect_facts()
    assert facts.versions["flashinfer"] == "0.7.2"
    assert facts.flashinfer_support == {}
    assert "AttributeError" in facts.problems["flashinfer"]


def test_an_unknown_toolkit_is_taken_to_be_torchs(machine: Machine) -> None:
    machine.put("flashinfer.jit.cpp_ext", ModuleType("flashinfer.jit.cpp_ext"))
    facts = device.collect_facts()
    assert facts.versions["cuda_toolkit"] == "13.0"
    assert "cuda_toolkit" in facts.problems


def test_a_torch_that_cannot_be_imported(machine: Machine, tmp_path: Path) -> None:
    machine.break_import("torch", ImportError("undefined symbol"), tmp_path)
    facts = device.collect_facts()
    assert facts.capability is None
    assert "torch" not in facts.versions
    assert "undefined symbol" in facts.problems["torch"]


def test_a_driver_that_does_not_fit(machine: Machine) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the driver on your system is too old\nmore lines")

    machine.torch.cuda.get_device_capability = fail
    facts = device.collect_facts()
    assert facts.capability is None
    assert facts.problems["torch"].endswith("RuntimeError: the driver on your system is too old")
