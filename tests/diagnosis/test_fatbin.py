"""Targets of compiled code, read from libraries that nvcc made for known ones."""

from __future__ import annotations

import importlib
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120 import device
from sglang_sm120.diagnosis.compiled import read_library
from sglang_sm120.diagnosis.fatbin import Target, containers
from tests.support import cuda_tools

#: Two source files of one library, with the targets of each. nvcc takes no plain and family target of one number.
UNITS = (
    (("compute_90a", "sm_90a"), ("compute_120f", "sm_120f"), ("compute_120f", "compute_120f")),
    (("compute_121a", "sm_121a"), ("compute_100", "sm_100"), ("compute_100", "compute_100")),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fatbin")
    common = [cuda_tools.program("nvcc"), "-Xcompiler", "-fPIC", "-cudart", "none"]
    objects = []
    for number, targets in enumerate(UNITS):
        source = folder / f"unit{number}.cu"
        source.write_text(f"__global__ void kernel{number}(int* p) {{ *p = {number}; }}\n")
        codes = [f"-gencode=arch={arch},code={code}" for arch, code in targets]
        objects.append(str(source.with_suffix(".o")))
        subprocess.run([*common, *codes, "-c", str(source), "-o", objects[-1]], check=True, env=cuda_tools.environ())
    made = folder / "units.so"
    subprocess.run([*common, "-shared", *objects, "-o", str(made)], check=True, env=cuda_tools.environ())
    return made


def test_every_target_of_every_source_file_is_found(library: Path) -> None:
    found = {frozenset(map(str, unit)) for unit in containers(library)}
    assert found == {frozenset(code for _, code in targets) for targets in UNITS}


@pytest.mark.parametrize(
    ("capability", "running"), [((9, 0), 1), ((8, 9), 0), ((10, 0), 1), ((12, 0), 2), ((12, 1), 2), ((10, 3), 1)]
)
def test_a_card_runs_the_units_that_have_code_for_it(library: Path, capability: tuple[int, int], running: int) -> None:
    found = read_library("test", iter([library]))
    assert found is not None
    assert found.running(capability) == running


def test_the_operators_are_chosen_by_the_library_of_the_wheel_that_is_installed(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the library that a card loads counts, and only for the SGLang that calls it."""
    ours = tmp_path / "sgl_kernel"
    for folder in ("sm90", "sm100"):
        (ours / folder).mkdir(parents=True)
    (ours / "__init__.py").write_text("raise ImportError('the wheel of another torch')")
    wheel = ours / "sm100" / "common_ops.abi3.so"
    wheel.write_bytes(_elf(_container(16, _image())))  # for sm_120f
    (ours / "flash_ops.so").write_bytes(library.read_bytes())
    (ours / "sm90" / "common_ops.abi3.so").write_bytes(library.read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sgl_kernel", raising=False)  # a stand-in, in a process that imported SGLang
    importlib.invalidate_caches()

    def read(card: tuple[int, int], release: str = "0.5.9") -> tuple[bool | None, dict[str, str]]:
        problems: dict[str, str] = {}
        return device._read_sgl_kernel(card, {"sglang": release}, problems), problems

    assert [read(card)[0] for card in ((12, 0), (12, 1), (10, 0), (9, 0))] == [True, True, False, True]
    assert read((12, 0), "0.5.10") == (None, {})
    wheel.write_bytes(library.read_bytes())  # what nvcc made
    assert read((10, 0)) == (True, {})
    wheel.write_bytes(library.read_bytes()[:3000])
    answer, problems = read((12, 0))
    assert answer is None
    assert "common_ops.abi3.so" in problems["sgl_kernel"]


@pytest.mark.parametrize(
    ("target", "runs", "refused"),
    [
        (Target("sm", 120, "a"), [(12, 0)], [(12, 1), (10, 0)]),
        (Target("sm", 120, "f"), [(12, 0), (12, 1)], [(10, 0), (13, 0)]),
        (Target("sm", 121), [(12, 1)], [(12, 0)]),
        (Target("sm", 120), [(12, 0), (12, 1)], [(9, 0)]),
        (Target("compute", 90), [(9, 0), (12, 0)], [(8, 9)]),
        (Target("compute", 90, "a"), [(9, 0)], [(12, 0)]),
        (Target("compute", 120, "f"), [(12, 1)], [(13, 0)]),
    ],
)
def test_compatibility_is_cudas(target: Target, runs: list[tuple[int, int]], refused: list[tuple[int, int]]) -> None:
    assert all(target.runs_on(card) for card in runs)
    assert not any(target.runs_on(card) for card in refused)


def test_files_that_are_no_whole_library_are_named_and_do_not_end_the_report(library: Path, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("INPUT(-lfoo)")
    (tmp_path / "empty.so").write_bytes(b"")
    (tmp_path / "cut.so").write_bytes(library.read_bytes()[:3000])
    found = read_library("test", iter([*sorted(tmp_path.glob("*.so")), library]))
    assert found is not None
    assert [problem.partition(":")[0] for problem in found.problems] == ["cut.so", "empty.so", "text.so"]
    assert len(found.units) == 2


def _elf(code: bytes, *, table: int | None = None, names: int = 1, size: int | None = None) -> bytes:
    """A library that holds nothing but GPU code; what its headers claim of it can be wrong."""
    text = b"\0.nv_fatbin\0"
    sections = [(1, 64, len(code) if size is None else size), (0, 64 + len(code), len(text))]
    at = 64 + len(code) + len(text) if table is None else table
    head = bytearray(64)
    head[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", head, 0x28, at)
    struct.pack_into("<HHH", head, 0x3A, 64, len(sections), names)
    entries = b"".join(struct.pack("<IIQQQQ24x", name, 1, 0, 0, start, length) for name, start, length in sections)
    return bytes(head) + code + text + entries


def _container(header: int, images: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, header, len(images)) + images


def _image(header: int = 64) -> bytes:
    return struct.pack("<HHIQ12xI8xQ16x", 2, 0x101, header, 0, 120, 1 << 21)


@pytest.mark.parametrize(
    "damaged",
    [
        _elf(_container(0, b"")),  # would be found again and again
        _elf(_container(16, _image(header=0))),
        _elf(_container(16, _image(header=1))),
        _elf(_container(16, _image())[:-8]),
        _elf(_container(16, _image()), size=2**62),
        _elf(_container(16, _image()), size=2**64 - 1),
        _elf(_container(16, _image()), table=2**64 - 1),
        _elf(_container(16, _image()), table=2**40),
        _elf(_container(16, _image()), names=65535),
    ],
)
def test_a_damaged_library_is_named_and_ends_nothing(damaged: bytes, tmp_path: Path) -> None:
    whole, spoilt = tmp_path / "whole.so", tmp_path / "damaged.so"
    whole.write_bytes(_elf(bytes(8) + _container(16, _image()) + bytes(16) + _container(16, _image()) + bytes(3)))
    spoilt.write_bytes(damaged)
    found = read_library("test", iter([spoilt, whole]))
    assert found is not None
    assert [problem.partition(":")[0] for problem in found.problems] == ["damaged.so"]
    assert found.units == (frozenset({Target("sm", 120, "f")}),) * 2


def test_a_library_without_gpu_code_has_no_units() -> None:
    import _ctypes

    assert containers(Path(_ctypes.__file__)) == ()
