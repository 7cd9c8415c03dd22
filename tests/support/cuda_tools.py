"""NVIDIA's compiler, readers of GPU code and CUTLASS's headers: the machine's own, else those in their wheels."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_sm120.build import spec

#: The wheels with each program. The readers exist as wheels from 13.2 on and read what every older compiler made.
WHEELS = {
    "nvcc": spec.CUDA_WHEELS,
    "nvdisasm": ("nvidia-cuda-nvdisasm==13.2.*",),
    "cuobjdump": ("nvidia-cuda-cuobjdump==13.2.*",),
}
CUTLASS = "nvidia-cutlass==4.2.0.0"


@functools.cache
def search_path() -> str:
    """A PATH on which nvcc, nvdisasm and cuobjdump are; what this machine lacks is installed for this process."""
    missing = [wheel for program, wheels in WHEELS.items() if shutil.which(program) is None for wheel in wheels]
    if not missing:
        return os.environ["PATH"]
    programs = next(_installed(*missing).glob("nvidia/*/bin"))
    return f"{os.environ['PATH']}{os.pathsep}{programs}"


def environ() -> dict[str, str]:
    """The environment for a program that calls these tools."""
    return os.environ | {"PATH": search_path()}


def program(name: str) -> str:
    """Where one of :data:`WHEELS` is."""
    found = shutil.which(name, path=search_path())
    assert found is not None, f"{name} is not where its wheel should have put it"
    return found


@functools.cache
def cutlass_headers() -> Path:
    """CUTLASS's include folder: ``CUTLASS_INCLUDE``, or the one in its wheel."""
    named = os.environ.get("CUTLASS_INCLUDE")
    return Path(named) if named else _installed(CUTLASS) / "cutlass_library" / "source" / "include"


def _installed(*wheels: str) -> Path:
    """A folder with these wheels, removed at the end of this process."""
    folder = tempfile.mkdtemp(prefix="cuda_tools")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *wheels]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Path(folder)
