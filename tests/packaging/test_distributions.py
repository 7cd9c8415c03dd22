"""What the wheel and the sdist contain, and that every way of installing them arms the interpreter."""

from __future__ import annotations

import base64
import csv
import hashlib
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sglang_sm120
from tests.packaging.environments import Env

BOOT = "sglang_sm120_boot.pth"
IS_ACTIVE = "from sglang_sm120 import _boot; print(_boot.is_active(), _boot.origin)"


def dist_info(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"sglang_sm120-{sglang_sm120.__version__}.dist-info/{name}").decode()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return Parser().parsestr(dist_info(wheel, "METADATA"))


def test_wheel_runs_everywhere_and_takes_its_version_from_the_package(wheel: Path) -> None:
    assert wheel.name == f"sglang_sm120-{sglang_sm120.__version__}-py3-none-any.whl"


def test_wheel_holds_the_package_and_the_boot_file_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "sglang_sm120",
        BOOT,
        f"sglang_sm120-{sglang_sm120.__version__}.dist-info",
    }
    assert {f"sglang_sm120/{name}" for name in ("py.typed", "cards.json", "models/presets.json")} <= set(names)


def test_wheel_holds_every_module_of_the_package(wheel: Path, source: Path) -> None:
    modules = {str(file.relative_to(source)) for file in source.glob("sglang_sm120/**/*.py")}
    with zipfile.ZipFile(wheel) as archive:
        assert modules == {name for name in archive.namelist() if name.endswith(".py")}


def test_wheel_holds_every_patch_and_what_it_is_for(wheel: Path, source: Path) -> None:
    wanted = {f"sglang_sm120/{file.relative_to(source)}" for file in source.glob("patches/*/*/*.patch")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("sglang_sm120/patches/")}
    assert len(wanted) > 10
    assert held == {*wanted, "sglang_sm120/patches/pristine.json"}


def test_record_lists_the_boot_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(BOOT)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    assert [BOOT, f"sha256={digest}", str(len(content))] in list(csv.reader(dist_info(wheel, "RECORD").splitlines()))


def test_boot_file_is_one_import_line(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(BOOT).decode("ascii").splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import ")


def test_host_is_not_a_dependency(metadata: Message) -> None:
    required = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert {r.name for r in required if r.marker is None} == {"apache-tvm-ffi", "packaging", "rich", "typer"}
    assert not {r.name for r in required} & {"torch", "sglang", "flashinfer-python"}


def test_metadata_names_python_and_licence(metadata: Message) -> None:
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"


def test_entry_points(wheel: Path) -> None:
    lines = set(dist_info(wheel, "entry_points.txt").split("\n"))
    assert {"[sglang.srt.plugins]", "sm120 = sglang_sm120.host.plugin:register"} <= lines
    assert {"[console_scripts]", "sglang-sm120 = sglang_sm120.cli.main:main"} <= lines


def test_sdist_holds_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "LICENSE", BOOT, "sglang_sm120/_boot.py"} <= names
    assert not {name for name in names if name.startswith(("tests/", "tools/", "cpu_host/"))}


def test_wheel_from_the_checkout_equals_the_one_from_the_sdist(
    source: Path, wheel: Path, shared: Env, tmp_path: Path
) -> None:
    shared.pip("wheel", "--no-deps", "--wheel-dir", tmp_path, source)
    with zipfile.ZipFile(tmp_path / wheel.name) as ours, zipfile.ZipFile(wheel) as theirs:
        assert {i.filename: i.CRC for i in ours.infolist()} == {i.filename: i.CRC for i in theirs.infolist()}


def test_sdist_installation_is_active(sdist: Path, tmp_path: Path) -> None:
    env = Env.create(tmp_path / "env")
    env.pip("install", "--no-deps", sdist)
    assert env.output(IS_ACTIVE) == f"True {env.site_packages}/sglang_sm120/_boot.py\n"


def test_editable_installation_is_active_and_can_be_removed(source: Path, fake_sglang: Path, tmp_path: Path) -> None:
    env = Env.create(tmp_path / "env")
    before = env.files()
    env.pip("install", "--no-deps", "--editable", source)
    assert env.output(IS_ACTIVE) == f"True {source}/sglang_sm120/_boot.py\n"
    assert env.output("import sglang", PYTHONPATH=str(fake_sglang)) == "install\nsglang\n"
    env.pip("uninstall", "--yes", "sglang-sm120")
    assert env.files() == before


def test_target_installation_is_inactive_and_says_so(wheel: Path, fake_sglang: Path, tmp_path: Path) -> None:
    env = Env.create(tmp_path / "env")
    target = tmp_path / "target"
    env.pip("install", "--no-deps", "--no-index", "--target", target, wheel)
    assert env.output(IS_ACTIVE, PYTHONPATH=str(target)) == f"False {target}/sglang_sm120/_boot.py\n"
    assert env.output("import sglang", PYTHONPATH=f"{target}:{fake_sglang}") == "sglang\n"


def test_uninstall_leaves_no_trace(interpreter: str, wheel: Path, fake_sglang: Path, tmp_path: Path) -> None:
    env = Env.create(tmp_path / "env", interpreter)
    # pip also removes a site-packages folder that it leaves empty.
    (env.site_packages / "another_package.py").touch()
    state = "import sys; print(sorted(sys.modules), list(map(str, sys.meta_path)), sys.path)"
    before, started = env.files(), env.output(state)
    env.pip("install", "--no-deps", "--no-index", wheel)
    # A use, so that the interpreter has written its bytecode caches too.
    assert env.output("import sglang", PYTHONPATH=str(fake_sglang)) == "install\nsglang\n"
    env.pip("uninstall", "--yes", "sglang-sm120")
    assert env.files() == before
    assert env.output(state) == started
