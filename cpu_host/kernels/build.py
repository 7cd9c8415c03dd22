"""Compile kernels, launchers and the emulated machine into one shared library, once for each state of the sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FLAGS = ("-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas")


def compiler() -> str | None:
    """The C++ compiler to use, or ``None``."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def library_path() -> Path:
    """Path of the library, compiled now if these sources never were.

    Raises:
        RuntimeError: no compiler, or it failed.
    """
    found = compiler()
    if found is None:
        raise RuntimeError("no C++ compiler: install g++ to run the kernels on the CPU")
    here, csrc = ROOT / "cpu_host" / "kernels", ROOT / "csrc"
    units = (p for p in sorted(csrc.rglob("*")) if p.suffix in {".cu", ".cc"} and p.parent.name != "binding")
    sources = [here / "library.cc", *units]
    headers = [p for folder in (here, csrc) for p in sorted(folder.rglob("*")) if p.suffix in {".h", ".cuh"}]
    digest = hashlib.sha256(" ".join((found, *_FLAGS)).encode())
    for file in (*sources, *headers):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    folder = Path(tempfile.gettempdir()) / f"sglang-sm120-emulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    library = folder / f"kernels-{digest.hexdigest()[:24]}.so"
    with (folder / "lock").open("w") as lock:  # released when the file closes, or with the process
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            scratch = library.with_suffix(".tmp")
            command = [found, *_FLAGS, f"-I{csrc}", f"-I{here / 'cuda'}", "-x", "c++", *map(str, sources)]
            command += ["-o", str(scratch)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(f"compiling the kernels for the CPU failed:\n{done.stderr[-4000:]}")
            os.replace(scratch, library)
    return library
