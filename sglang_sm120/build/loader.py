"""Compile once per machine and version, and load only what is exactly what was compiled.

A library lies in ``<cache>/native`` under a name that hashes everything it was made from. Beside it stands the hash
of its own bytes, checked before it is loaded. One process compiles while the others wait for its lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_sm120 import env
from sglang_sm120.build import spec
from sglang_sm120.build.toolchain import Toolchain, find_toolchain
from sglang_sm120.errors import UnsupportedError

#: Compiling takes under a minute; a process that holds the lock longer than this hangs.
COMPILE_SECONDS = 900


@cache
def load(capability: tuple[int, int] | None = None) -> Any:
    """Return the loaded native library for a GPU, compiled now if it never was.

    Args:
        capability: compute capability; ``None`` for the current CUDA device.

    Raises:
        UnsupportedError: no compiler, no sources, no ``apache-tvm-ffi``, or the compiler failed.
        ConfigError: the cache folder is not safe.
    """
    return _tvm_ffi().load_module(str(library_path(capability)))


def library_path(capability: tuple[int, int] | None = None) -> Path:
    """Return the path of the compiled library, compiled now if it never was. Raises what :func:`load` raises."""
    target = spec.target_for(capability or _current_capability())
    root = spec.source_root()
    toolchain = find_toolchain()
    library = _folder() / f"sm{target.name}-{_key(root, target, toolchain)}.so"
    if not _is_intact(library):
        with _lock(library.with_suffix(".lock")):
            if not _is_intact(library):  # another process may have been faster
                _compile(root, target, toolchain, library)
    return library


def _current_capability() -> tuple[int, int]:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("There is no CUDA device to compile the kernels for.")
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def _tvm_ffi() -> ModuleType:
    try:
        return import_module("tvm_ffi")
    except ImportError as error:
        raise UnsupportedError(
            "The compiled kernels are called through apache-tvm-ffi, which is not installed: "
            "pip install 'apache-tvm-ffi>=0.1.9,<0.2'."
        ) from error


def _folder() -> Path:
    folder = env.cache_dir() / "native"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _key(root: Path, target: spec.Target, toolchain: Toolchain) -> str:
    """Hash of everything that decides what the compiler produces."""
    digest = hashlib.sha256()
    facts = (
        *spec.FLAGS, target.flag, str(toolchain.version), str(toolchain.nvcc), platform.machine(),
        _tvm_ffi().__version__,
    )  # fmt: skip
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    for file in spec.files(root):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _hash_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_intact(library: Path) -> bool:
    """Whether the library is there and holds the bytes that were compiled. The folder belongs to us alone."""
    try:
        expected = _hash_file(library).read_text().strip()
        return hashlib.sha256(library.read_bytes()).hexdigest() == expected
    except OSError:
        return False


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the kernel releases it should this process die."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def _compile(root: Path, target: spec.Target, toolchain: Toolchain, library: Path) -> None:
    libinfo = import_module("tvm_ffi.libinfo")
    ffi_library = Path(libinfo.find_libtvm_ffi())
    includes = [f"-I{libinfo.find_include_path()}", f"-I{libinfo.find_dlpack_include_path()}"]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch) / library.name
        command = [
            str(toolchain.nvcc), *spec.FLAGS, target.flag, *includes, *toolchain.folders, f"-L{ffi_library.parent}",
            *(str(root / source) for source in spec.SOURCES), "-ltvm_ffi", "-o", str(built),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UnsupportedError(f"Compiling the kernels failed: {error}") from error
        if done.returncode != 0:
            tail = "\n".join((done.stderr or done.stdout).splitlines()[-20:])
            raise UnsupportedError(f"Compiling the kernels for sm_{target.name} failed:\n{tail}")
        built.chmod(0o700)
        # The hash first: a library without one counts as missing, one with a stale hash as broken.
        _hash_file(library).write_text(hashlib.sha256(built.read_bytes()).hexdigest() + "\n")
        os.replace(built, library)
