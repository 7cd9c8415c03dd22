"""The Python files of FlashInfer releases, and of the CuTe DSL that its kernels for SM12x are written in.

Both import on a machine without a GPU. They are downloaded once, below the developer cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

_ROOT = Path(__file__).parents[2]
#: What ``import flashinfer`` needs beyond what SGLang brings.
_COMPANIONS = ("nvidia-ml-py==13.615.71", "tabulate==0.9.0")
#: What ``import cutlass`` needs: of its two builds, for CUDA 12 and 13, one.
_CUTE_DSL = (
    *(f"nvidia-cutlass-dsl-libs-{part}==4.8.0" for part in ("core", "base", "cu13")),
    "cuda-bindings==13.5.0",
    "cuda-pathfinder==1.9.1",
)


@cache
def release(version: str) -> Path:
    """Folder with the Python files of one FlashInfer release."""

    def fill(folder: Path) -> None:
        _pip("download", "--only-binary=:all:", f"flashinfer-python=={version}", "--dest", str(folder))
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if n.endswith((".py", "METADATA"))])
        wheel.unlink()

    return _kept(version, fill)


@cache
def companions() -> Path:
    """Folder with the packages that ``import flashinfer`` needs beyond SGLang's."""
    return _kept("companions", lambda folder: _pip("install", "--target", str(folder), *_COMPANIONS))


@cache
def cute_dsl() -> list[Path]:
    """Folders that make ``import cutlass`` work."""
    folder = _kept("cute-dsl-4.8.0", lambda folder: _pip("install", "--target", str(folder), *_CUTE_DSL))
    return [folder, folder / "nvidia_cutlass_dsl" / "dsl_packages"]


def environment(folders: Sequence[Path]) -> dict[str, str]:
    """Variables of a child process that finds FlashInfer in ``folders`` and takes it for what is installed."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
    }


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(command, check=True, capture_output=True)


def _kept(name: str, fill: Callable[[Path], None]) -> Path:
    base = Path(os.environ.get("SM120_DEV_CACHE") or _ROOT / ".cache") / "flashinfer"
    folder = base / name
    if not folder.is_dir():
        unfinished = base / f"{name}.{os.getpid()}"
        unfinished.mkdir(parents=True)
        fill(unfinished)
        unfinished.rename(folder)
    return folder
