"""Finding a CUDA compiler: the machine's toolkit, or the one from the ``nvidia-cuda-*`` wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import util
from pathlib import Path

from sglang_sm120 import programs
from sglang_sm120.build.spec import MIN_CUDA
from sglang_sm120.errors import UnsupportedError

#: Where NVIDIA's installer puts the toolkit.
USUAL_PLACE = Path("/usr/local/cuda/bin/nvcc")
_REMEDY = (
    "Install a CUDA toolkit of 12.9 or newer and put its nvcc on PATH (or set CUDA_HOME), or run: "
    "pip install 'nvidia-cuda-nvcc==13.*' 'nvidia-cuda-crt==13.*' 'nvidia-nvvm==13.*' 'nvidia-cuda-cccl==13.*' "
    "'nvidia-cuda-runtime==13.*'"
)


@dataclass(frozen=True)
class Toolchain:
    """A CUDA compiler with the folders it needs."""

    nvcc: Path
    version: tuple[int, int]
    #: Options for headers and libraries.
    folders: tuple[str, ...]

    @property
    def text(self) -> str:
        """The version as people write it."""
        return "{}.{}".format(*self.version)


@cache
def find_toolchain() -> Toolchain:
    """Return the first usable CUDA compiler, of those in CUDA_HOME, on PATH, in the usual folder, in Python's wheels.

    Raises:
        UnsupportedError: none, too old, or no C++ compiler; the message says what was found and what to install.
    """
    rejected = []
    for nvcc in _candidates():
        version = _version(nvcc)
        if version is None:
            rejected.append(f"{nvcc} does not run")
        elif version < MIN_CUDA:
            rejected.append(f"{nvcc} is CUDA {version[0]}.{version[1]}")
        else:
            _require_host_compiler(nvcc)
            return Toolchain(nvcc, version, tuple(_folders(nvcc)))
    seen = f" ({'; '.join(rejected)})" if rejected else ""
    raise UnsupportedError(f"No CUDA compiler of {MIN_CUDA[0]}.{MIN_CUDA[1]} or newer{seen}. {_REMEDY}")


def _require_host_compiler(nvcc: Path) -> None:
    # NVCC_CCBIN is nvcc's own variable for another compiler; nvcc says what is wrong with that one.
    if shutil.which("g++") is None and not os.environ.get("NVCC_CCBIN"):
        raise UnsupportedError(
            f"There is no C++ compiler for {nvcc}: install g++ (Debian and Ubuntu: apt-get install g++), or name one "
            "in NVCC_CCBIN."
        )


def _candidates() -> Iterator[Path]:
    """nvcc of CUDA_HOME, of PATH, of the usual folder, of the wheels; links resolved, none twice."""
    seen = set()
    for path in _unresolved():
        if path.is_file() and path.resolve() not in seen:
            seen.add(path.resolve())
            yield path.resolve()


def _unresolved() -> Iterator[Path]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "bin" / "nvcc"
    found = shutil.which("nvcc")
    if found is not None:
        yield Path(found)
    yield USUAL_PLACE
    wheels = util.find_spec("nvidia")
    for folder in wheels.submodule_search_locations or () if wheels is not None else ():
        yield from sorted(Path(folder).glob("cu1[3-9]/bin/nvcc"))


def _version(nvcc: Path) -> tuple[int, int] | None:
    try:
        done = programs.run([str(nvcc), "--version"], 60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    match = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None


def _folders(nvcc: Path) -> Iterator[str]:
    """Include and library options; a toolkit finds its own, the wheels' layout needs them spelled out."""
    root = nvcc.parent.parent
    if (root / "include").is_dir():
        yield f"-I{root / 'include'}"
    for name in ("lib64", "lib"):
        if (root / name).is_dir():
            yield f"-L{root / name}"
