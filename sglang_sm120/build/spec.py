"""What the native library is made of: sources, flags, targets. Stdlib only; ``setup.py`` may read it too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_sm120.errors import UnsupportedError, bad_value

#: Relative to the folder ``csrc``.
SOURCES = ("gemm_skinny/launch.cu", "quantize/launch.cu", "binding/ffi.cc")
FLAGS = ("-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-shared", "-cudart=static", "-Xcompiler=-fPIC")
#: CUDA 12.9 is the first whose assembler knows sm_120f.
MIN_CUDA = (12, 9)
MIN_CAPABILITY = (8, 0)
_HEADER_SUFFIXES = {".h", ".cuh"}


@dataclass(frozen=True)
class Target:
    """One GPU architecture as nvcc writes it."""

    name: str

    @property
    def flag(self) -> str:
        """The nvcc option that builds machine code for it."""
        return f"-gencode=arch=compute_{self.name},code=sm_{self.name}"


def target_for(capability: tuple[int, int]) -> Target:
    """Return what to build for a compute capability.

    The FP4 instruction exists only in the family target (one binary for 12.0 and 12.1) and in the ``a`` targets;
    every other card runs the decoded multiply, which any target from 8.0 up can hold.

    Raises:
        UnsupportedError: the GPU is older than 8.0.
    """
    if capability < MIN_CAPABILITY:
        text = "{}.{}".format(*capability)
        raise UnsupportedError(bad_value("compute capability", text, "the kernels need a GPU of 8.0 or newer"))
    major, minor = capability
    return Target("120f" if major == 12 else f"{major}{minor}")


def source_root() -> Path:
    """Return the folder ``csrc``: inside the installed package, or beside it in a checkout.

    Raises:
        UnsupportedError: neither exists.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "csrc", package.parent / "csrc"):
        if (folder / SOURCES[0]).is_file():
            return folder
    raise UnsupportedError(
        "The CUDA sources are not part of this installation, so the kernels cannot be compiled: "
        "install a wheel with compiled kernels, or install from the source distribution."
    )


def files(root: Path) -> list[Path]:
    """Every file that a compilation reads, in a fixed order."""
    headers = (p for p in root.rglob("*") if p.suffix in _HEADER_SUFFIXES and "emulation" not in p.parts)
    return sorted({*headers, *(root / source for source in SOURCES)})
