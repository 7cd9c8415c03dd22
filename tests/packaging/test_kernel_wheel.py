"""The wheel with compiled kernels: what it holds, what it asks of a machine, and that it is used where it fits."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import platform
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

import sglang_sm120
from sglang_sm120.build import portability, spec
from tests.packaging.environments import Env
from tests.support import cuda_tools

pytestmark = pytest.mark.long

MAX_WHEEL_BYTES = 5_000_000
LIBRARY = "sglang_sm120/prebuilt/libsm120_kernels.so"
MANIFEST = "sglang_sm120/prebuilt/libsm120_kernels.json"

#: Loads the library the way ``build.load`` does, but without asking for a driver, and calls into it.
CALL = """
import sys, tvm_ffi
from sglang_sm120 import build
path = build.library_path((12, 1))
print(path)
try:
    tvm_ffi.load_module(str(path)).nvfp4_gemm_plan(8, "not a number", 7168)
except TypeError as error:
    print("TypeError")
"""


@pytest.fixture(scope="module")
def library(kernel_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with zipfile.ZipFile(kernel_wheel) as archive:
        return Path(archive.extract(LIBRARY, tmp_path_factory.mktemp("library")))


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Env]:
    """An environment with the oldest and one with the newest apache-tvm-ffi that the package admits."""
    found = {}
    for release in ("==0.1.9", "<0.2"):
        found[release] = Env.create(tmp_path_factory.mktemp("binding") / "env")
        found[release].pip("install", f"apache-tvm-ffi{release}", "packaging")
    return found


def settings(target: Path, tmp_path: Path) -> dict[str, str]:
    """Use the package below ``target``, and no compiler."""
    cache = str(tmp_path / "cache")
    return {"PYTHONPATH": str(target), "SGLANG_SM120_JIT": "0", "SGLANG_SM120_CACHE_DIR": cache}


def dynamic(library: Path, *options: str) -> str:
    command = ["nm", "--dynamic", *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(params=["wheel", "kernel_wheel"])
def any_wheel(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


# --- both wheels -------------------------------------------------------------------------------------------


def test_record_lists_every_file_with_its_hash(any_wheel: Path) -> None:
    with zipfile.ZipFile(any_wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    record = next(name for name in contents if name.endswith(".dist-info/RECORD"))
    rows = {row[0]: row[1:] for row in csv.reader(contents[record].decode().splitlines())}
    digests = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for name, data in contents.items()}
    expected = {name: [f"sha256={d.rstrip(b'=').decode()}", str(len(contents[name]))] for name, d in digests.items()}
    assert rows == expected | {record: ["", ""]}


def test_both_hold_the_boot_file_and_every_cuda_source(any_wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(any_wheel) as archive:
        names = set(archive.namelist())
    cuda = {f"sglang_sm120/{file.relative_to(source)}" for file in spec.files(source / "csrc")}
    assert len(cuda) > 20
    assert {name for name in names if "/csrc/" in name} == cuda
    assert "sglang_sm120_boot.pth" in names


def test_sources_in_the_package_have_the_digest_of_the_checkout(any_wheel: Path, source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(any_wheel) as archive:
        archive.extractall(tmp_path)
    assert spec.digest(tmp_path / "sglang_sm120" / "csrc") == spec.digest(source / "csrc")


# --- the compiled one --------------------------------------------------------------------------------------


def test_tag_is_for_one_platform_and_every_python(kernel_wheel: Path) -> None:
    tag = f"py3-none-manylinux_2_34_{platform.machine()}"
    assert kernel_wheel.name == f"sglang_sm120-{sglang_sm120.__version__}-{tag}.whl"
    with zipfile.ZipFile(kernel_wheel) as archive:
        text = archive.read(f"sglang_sm120-{sglang_sm120.__version__}.dist-info/WHEEL").decode()
    assert f"Tag: {tag}" in text.splitlines()
    assert "Root-Is-Purelib: false" in text.splitlines()


def test_it_is_small_and_holds_nothing_more_than_the_other(kernel_wheel: Path, wheel: Path) -> None:
    assert kernel_wheel.stat().st_size < MAX_WHEEL_BYTES
    with zipfile.ZipFile(kernel_wheel) as ours, zipfile.ZipFile(wheel) as pure:
        assert set(ours.namelist()) - set(pure.namelist()) == {LIBRARY, MANIFEST}


def test_every_unit_with_gpu_code_has_it_for_every_target(library: Path, source: Path) -> None:
    command = [cuda_tools.program("cuobjdump"), "--list-elf", "--list-ptx", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    binaries = re.findall(r": \w+\.sm_(\w+)\.cubin", listing)
    kernels = sum(unit.suffix == ".cu" for unit in spec.units(source / "csrc"))
    # The container does not keep the f of a family target. Plain sm_120, which it could also be, does not compile.
    assert sorted(binaries) == sorted(["80", "90", "120", "121a"] * kernels)
    assert re.findall(r": \w+\.sm_(\w+)\.ptx", listing) == ["120f"] * kernels


def test_it_asks_for_nothing_that_the_tag_does_not_promise(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    portability.require_portable(library)
    needed = dynamic(library, "--undefined-only", "--demangle")
    assert "TVMFFI" in needed
    assert not re.search(r"\b(c10|at|torch|caffe2)::|\bcudart|\bcuda[A-Z]|\bPy[A-Z_]", needed)
    # The check itself: a system with an older glibc.
    monkeypatch.setitem(portability.NEWEST_SYMBOLS, "GLIBC", (2, 28))
    with pytest.raises(Exception, match=r"libsm120_kernels\.so needs GLIBC_2\.34"):
        portability.require_portable(library)


def test_no_path_of_the_building_machine_is_in_it(library: Path) -> None:
    assert not re.search(rb"/(?:tmp|home|root|work|build)/[\w.-]+", library.read_bytes())


@pytest.mark.parametrize("release", ["==0.1.9", "<0.2"])
def test_it_loads_without_a_compiler_under_the_oldest_and_the_newest_binding(
    kernel_wheel: Path, bindings: dict[str, Env], tmp_path: Path, release: str
) -> None:
    target = tmp_path / "target"
    bindings[release].pip("install", "--no-deps", "--no-index", "--target", target, kernel_wheel)
    printed = bindings[release].output(CALL, **settings(target, tmp_path))
    assert printed.split() == [str(target / LIBRARY), "TypeError"]
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("bytes", "its bytes are not the ones that were compiled"),
        ("manifest", "it cannot be read"),
        ("sources", "it was compiled from other sources"),
        ("machine", "it is for s390x processors"),
        ("card", "none for 10.0"),
    ],
)
def test_a_library_that_does_not_fit_is_not_loaded_and_the_error_says_why(
    kernel_wheel: Path, bindings: dict[str, Env], tmp_path: Path, damage: str, said: str
) -> None:
    target = tmp_path / "target"
    with zipfile.ZipFile(kernel_wheel) as archive:
        archive.extractall(target)
    if damage == "bytes":
        with (target / LIBRARY).open("ab") as file:
            file.write(b"\0")
    elif damage == "manifest":
        (target / MANIFEST).write_text("{", encoding="utf-8")
    elif damage == "sources":
        with (target / "sglang_sm120/csrc/quantize/launch.cu").open("a") as file:
            file.write("// edited\n")
    elif damage == "machine":
        facts = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        (target / MANIFEST).write_text(json.dumps(facts | {"machine": "s390x"}), encoding="utf-8")
    capability = (10, 0) if damage == "card" else (12, 0)
    code = f"from sglang_sm120 import build\nbuild.library_path({capability})"
    result = bindings["==0.1.9"].run("-c", code, **settings(target, tmp_path))
    last = result.stderr.strip().splitlines()[-1]
    assert said in last
    assert "UnsupportedError" in last
    assert "SGLANG_SM120_JIT=0" in last
