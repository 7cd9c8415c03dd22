"""The distributions, built for real once a session, and environments with them installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, Env, clean_environ
from tests.support import pythons

#: Left behind when the sources are copied: caches, and what earlier builds wrote.
NOT_SOURCE = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
BUILD_OUTPUTS = {"build", "dist"}

#: Stands for the part of the package that needs SGLang; tells when ``install()`` was called.
STUB_INSTALLER = """
import sys, types

def install():
    print("install", flush=True)

host = types.ModuleType("sglang_sm120.host")
host.__path__ = []
installer = types.ModuleType("sglang_sm120.host.installer")
installer.install = install
sys.modules.update({host.__name__: host, installer.__name__: installer})
"""


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository as a fresh checkout has it, so that builds leave nothing in the real one."""
    path = tmp_path_factory.mktemp("source") / "sglang-sm120"

    def ignored(folder: str, names: list[str]) -> set[str]:
        return NOT_SOURCE(folder, names) | (BUILD_OUTPUTS if Path(folder) == ROOT else set())

    shutil.copytree(ROOT, path, ignore=ignored, symlinks=True)
    return path


@pytest.fixture(scope="session")
def dist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from that sdist."""
    path = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(path), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, env=clean_environ(), check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return path


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="session")
def kernel_wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with compiled kernels, built from the sdist as ``make wheel-cuda`` does."""
    path = tmp_path_factory.mktemp("kernel_wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(path), str(sdist)]
    environ = clean_environ(SM120_WHEEL="cuda")
    result = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(path.glob("*.whl"))


@pytest.fixture(scope="session")
def sdist(dist: Path) -> Path:
    return next(dist.glob("*.tar.gz"))


@pytest.fixture(scope="session", params=pythons.SUPPORTED, ids=lambda minor: f"3.{minor}")
def interpreter(request: pytest.FixtureRequest) -> str:
    """Each supported Python that this machine has."""
    found = pythons.interpreter(request.param)
    if found is None:
        # A class of its own for each version, so that a version that is there cannot hide in the allowance.
        pytest.skip(f"python3.{request.param} missing")
    return found


@pytest.fixture(scope="session")
def plain(interpreter: str, tmp_path_factory: pytest.TempPathFactory) -> Env:
    """An environment with nothing but a ``.pth`` file that does nothing, as most have one. Must not be changed."""
    env = Env.create(tmp_path_factory.mktemp("plain") / "env", interpreter)
    (env.site_packages / "nothing.pth").write_text("# Python >= 3.13 loads a codec to read this.\n", encoding="utf-8")
    return env


@pytest.fixture(scope="session")
def installed(interpreter: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Env:
    """An environment of each Python with the wheel and nothing else. Must not be changed."""
    env = Env.create(tmp_path_factory.mktemp("installed") / "env", interpreter)
    env.pip("install", "--no-deps", "--no-index", wheel)
    return env


@pytest.fixture(scope="session")
def shared(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Env:
    """The wheel under the running Python only, for what does not depend on the version. Must not be changed."""
    env = Env.create(tmp_path_factory.mktemp("shared") / "env")
    env.pip("install", "--no-deps", "--no-index", wheel)
    return env


@pytest.fixture
def own(wheel: Path, tmp_path: Path) -> Iterator[Env]:
    """An environment with the wheel that the test may damage."""
    env = Env.create(tmp_path / "env")
    env.pip("install", "--no-deps", "--no-index", wheel)
    yield env
    # A test may have taken away the permissions that removing the folder needs.
    for folder in (folder for folder in tmp_path.rglob("*") if folder.is_dir() and not folder.is_symlink()):
        folder.chmod(0o755)


@pytest.fixture(scope="session")
def fake_sglang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with a package called sglang that says when its code runs.

    Only the order of two events is checked with it; the real releases are tested elsewhere. The installer is
    replaced from ``sitecustomize``, which every interpreter imports after the ``.pth`` files.
    """
    path = tmp_path_factory.mktemp("fake")
    (path / "sitecustomize.py").write_text(STUB_INSTALLER, encoding="utf-8")
    package = path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("print('sglang', flush=True)\n", encoding="utf-8")
    (package / "launch_server.py").write_text("print('server', flush=True)\n", encoding="utf-8")
    return path
