"""Kernels compiled on the user's machine: the folder is the user's alone, nothing half done is ever loaded.

The compiler is a script that writes a few bytes; the real one makes the wheel of ``test_kernel_wheel.py``.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_sm120 import env
from sglang_sm120.build import compiler, loader, manifest, spec, store, toolchain
from sglang_sm120.errors import ConfigError, UnsupportedError
from tests.packaging.environments import ROOT

#: Stands in for nvcc: tells its version, notes that it ran, and writes what it was asked for.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; fi
echo "$TMPDIR" >> "{log}"
if [ -f "{log}.fail" ]; then seq 1 100; echo "error: no such instruction" >&2; exit 2; fi
sleep {seconds}
while [ $# -gt 1 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
echo "made by $$" > "$out"
"""
CARD = (12, 0)


class FakeCompiler:
    """A folder with an ``nvcc`` that does as :data:`COMPILER` says."""

    def __init__(self, folder: Path, seconds: float = 0) -> None:
        self.log = folder / "runs.log"
        nvcc = folder / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(COMPILER.format(log=self.log, seconds=seconds), encoding="utf-8")
        nvcc.chmod(0o755)
        self.home = folder

    @property
    def runs(self) -> int:
        return len(self.log.read_text(encoding="utf-8").splitlines()) if self.log.exists() else 0

    def break_it(self) -> None:
        self.log.with_name("runs.log.fail").touch()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv(env.CACHE_DIR, str(path))
    return path


@pytest.fixture
def nvcc(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCompiler]:
    fake = FakeCompiler(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(fake.home))
    toolchain.find_toolchain.cache_clear()
    yield fake
    toolchain.find_toolchain.cache_clear()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "native").iterdir() if path.suffix not in {".so", ".json", ".lock"}]


# --- made once ---------------------------------------------------------------------------------------------


def test_a_library_is_made_once_and_its_folder_is_private(nvcc: FakeCompiler, cache: Path) -> None:
    old = os.umask(0)
    try:
        first = loader.library_path(CARD)
    finally:
        os.umask(old)
    assert first == loader.library_path(CARD) == loader.library_path((12, 1))
    assert nvcc.runs == 1
    assert (mode(cache), mode(first.parent)) == (0o700, 0o700)
    assert leftovers(cache) == []
    assert loader.library_path((9, 0)) != first
    assert nvcc.runs == 2


def test_intermediate_files_are_not_written_where_others_can_guess_them(nvcc: FakeCompiler, cache: Path) -> None:
    loader.library_path(CARD)
    assert Path(nvcc.log.read_text(encoding="utf-8").strip()).is_relative_to(cache / "native")


def test_once_made_it_needs_neither_compiler_nor_permission(
    nvcc: FakeCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = loader.library_path(CARD)
    monkeypatch.setenv(env.JIT, "0")
    shutil.rmtree(nvcc.home / "bin")
    toolchain.find_toolchain.cache_clear()
    assert loader.library_path(CARD) == made
    assert loader.cuda_version(CARD) == (13, 0)
    with pytest.raises(UnsupportedError, match=f"compute capability 9.0.*{env.JIT}=0"):
        loader.library_path((9, 0))


@pytest.mark.parametrize("change", ["source", "flag", "binding"])
def test_a_change_of_what_it_is_made_from_makes_another(
    nvcc: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    root = tmp_path / "csrc"
    shutil.copytree(ROOT / "csrc", root)
    monkeypatch.setattr(spec, "source_root", lambda: root)
    first = loader.library_path(CARD)
    if change == "source":
        with (root / "ptx" / "target.cuh").open("a") as file:
            file.write("\n")
    elif change == "flag":
        monkeypatch.setattr(spec, "FLAGS", (*spec.FLAGS, "-G"))
    else:
        monkeypatch.setattr("tvm_ffi.__version__", "0.1.999")
    assert loader.library_path(CARD) != first
    assert nvcc.runs == 2


def test_processes_that_start_together_compile_once(tmp_path: Path, cache: Path) -> None:
    library = store.folder() / "x.so"
    log = tmp_path / "log"
    code = (
        "import pathlib, time\nfrom sglang_sm120.build import manifest, spec, store\n"
        f"def make(path):\n    pathlib.Path({str(log)!r}).open('a').write('.')\n    time.sleep(1)\n"
        "    path.write_bytes(b'whole')\n"
        "    manifest.write(path, manifest.describe(path, '', [spec.Target('120f')], (13, 0), '0.1.9'))\n"
        f"print(store.get_or_make(pathlib.Path({str(library)!r}), make).cuda)\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) for _ in "abc"
    ]
    assert [process.communicate(timeout=300)[0] for process in started] == ["(13, 0)\n"] * 3
    assert log.read_text(encoding="utf-8") == "."


def test_a_killed_process_leaves_no_lock_and_no_rubbish(nvcc: FakeCompiler, cache: Path) -> None:
    native = store.folder()
    library = native / "sm120f.so"
    code = (
        "import os, pathlib, signal\nfrom sglang_sm120.build import store\n"
        "def make(path):\n    path.write_bytes(b'half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"store.get_or_make(pathlib.Path({str(library)!r}), make)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert not library.exists()
    assert len(leftovers(cache)) == 1
    store.get_or_make(library, whole)
    assert library.read_bytes() == b"whole"
    assert leftovers(cache) == []


def whole(path: Path) -> None:
    """Make a library as the compiler does."""
    path.write_bytes(b"whole")
    manifest.write(path, manifest.describe(path, "sources", [spec.Target("120f")], (13, 0), "0.1.9"))


def test_waiting_for_another_process_is_said(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = store.folder() / "x.so"
    with library.with_suffix(".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        code = (
            "import logging, pathlib\nfrom sglang_sm120.build import store\n"
            "logging.basicConfig(level='INFO')\n"
            f"store.get_or_make(pathlib.Path({str(library)!r}), None)\n"
        )
        environ = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        assert "Another process compiles the kernels" in process.stderr.readline()
        whole(library)
    assert process.wait(timeout=60) == 0
    process.stderr.close()


# --- damage ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "one bit", "no manifest", "half a manifest", "empty", "a folder"])
def test_what_is_not_whole_is_made_again(nvcc: FakeCompiler, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    library = loader.library_path(CARD)
    note = manifest.path_of(library)
    content = library.read_bytes()
    if damage == "truncated":
        library.write_bytes(content[:-1])
    elif damage == "one bit":
        library.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif damage == "no manifest":
        note.unlink()
    elif damage == "half a manifest":
        note.write_text(note.read_text(encoding="utf-8")[:40], encoding="utf-8")
    elif damage == "empty":
        library.write_bytes(b"")
    else:
        note.unlink()
        note.mkdir()
        with pytest.raises(ConfigError, match=env.CACHE_DIR):
            loader.library_path(CARD)
        return
    with caplog.at_level(logging.WARNING):
        assert loader.library_path(CARD) == library
    assert nvcc.runs == 2
    assert "is made again" in caplog.text
    assert manifest.read(library)[0] is not None


def test_a_failed_compilation_shows_the_last_lines_and_leaves_nothing(nvcc: FakeCompiler, cache: Path) -> None:
    nvcc.break_it()
    with pytest.raises(UnsupportedError) as caught:
        loader.library_path(CARD)
    text = str(caught.value)
    assert "No compiled kernels for compute capability 12.0" in text
    assert "sm_120f" in text
    assert "CUDA 13.0" in text
    assert text.endswith("100\nerror: no such instruction")
    assert len(text.splitlines()) <= 22
    assert [path.suffix for path in (cache / "native").iterdir()] == [".lock"]


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCompiler(tmp_path / "hangs", seconds=60)
    monkeypatch.setattr(compiler, "TIME_LIMIT_SECONDS", 0.5)
    chosen = toolchain.Toolchain(fake.home / "bin" / "nvcc", (13, 0), ())
    with pytest.raises(UnsupportedError, match=r"took more than 0\.5 s"):
        compiler.compile_library(ROOT / "csrc", [spec.Target("120f")], chosen, store.folder() / "x.so")


def test_what_a_hanging_compiler_started_is_ended_too(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {tmp_path}/pid\nwait\n", encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setattr(compiler, "TIME_LIMIT_SECONDS", 3)
    chosen = toolchain.Toolchain(nvcc, (13, 0), ())
    with pytest.raises(UnsupportedError, match="took more than 3 s"):
        compiler.compile_library(ROOT / "csrc", [spec.Target("120f")], chosen, store.folder() / "x.so")
    process = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    for _ in range(200):  # its death takes a moment to be seen, and nobody may have collected it
        if not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("it still runs")


def test_options_from_the_environment_do_not_reach_the_compiler(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text('#!/bin/sh\necho "flags: $NVCC_APPEND_FLAGS$NVCC_PREPEND_FLAGS."\nexit 1\n', encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-O0")
    chosen = toolchain.Toolchain(nvcc, (13, 0), ())
    with pytest.raises(UnsupportedError, match=r"flags: \."):
        compiler.compile_library(ROOT / "csrc", [spec.Target("120f")], chosen, store.folder() / "x.so")


# --- a folder that is not safe or not usable ---------------------------------------------------------------


@pytest.mark.parametrize("permission", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(nvcc: FakeCompiler, permission: int) -> None:
    store.folder().chmod(permission)
    with pytest.raises(ConfigError, match="other users may write to it"):
        loader.library_path(CARD)
    assert nvcc.runs == 0


def test_a_link_instead_of_the_folder_is_refused(nvcc: FakeCompiler, cache: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    cache.mkdir(mode=0o700)
    (cache / "native").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="it is a link"):
        loader.library_path(CARD)
    assert list(elsewhere.iterdir()) == []


def test_a_folder_of_somebody_else_is_refused(nvcc: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    store.folder()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="it belongs to another user"):
        loader.library_path(CARD)
    assert nvcc.runs == 0


def test_a_link_instead_of_the_lock_is_not_followed(nvcc: FakeCompiler, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    library = loader.library_path(CARD)
    library.unlink()
    library.with_suffix(".lock").unlink()
    library.with_suffix(".lock").symlink_to(victim)
    with pytest.raises(ConfigError, match=env.CACHE_DIR):
        loader.library_path(CARD)
    assert not victim.exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_full_or_read_only_disk_is_one_error_with_a_remedy(cache: Path, number: int) -> None:
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(number, os.strerror(number))

    with pytest.raises(ConfigError, match=f"{env.CACHE_DIR}=.*{os.strerror(number)}.*free some space"):
        store.get_or_make(store.folder() / "x.so", make)
    assert leftovers(cache) == []


def test_a_home_that_cannot_be_written_to_is_one_error(nvcc: FakeCompiler, cache: Path) -> None:
    cache.write_text("a file where the folder would be", encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{env.CACHE_DIR}=.*name a folder that you can write to"):
        loader.library_path(CARD)


def test_a_file_system_without_locks_is_one_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match="No locks available.*local disk"):
        store.get_or_make(store.folder() / "x.so", whole)
