"""What the native library is made of: sources, flags, targets, versions. Stdlib only; ``setup.py`` reads it too.

The wheel's library and the one compiled on the user's machine differ in their targets and in nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from sglang_sm120.errors import UnsupportedError, bad_value

FLAGS = (
    "-std=c++20", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-shared", "-cudart=static",
    "-Xcompiler=-fPIC", "-Xfatbin=-compress-all",
)  # fmt: skip
#: CUDA 12.9 is the first whose assembler knows sm_120f.
MIN_CUDA = (12, 9)
MIN_CAPABILITY = (8, 0)
#: Range of apache-tvm-ffi under which a library built against its oldest release loads.
TVM_FFI = ">=0.1.9,<0.2"
#: A compiled wheel is built against the oldest: newer releases keep what older ones had, not the other way round.
TVM_FFI_OF_WHEEL = "apache-tvm-ffi==0.1.9"
#: Compiler and headers for a machine without a toolkit. 13.0: its PTX is understood by the oldest CUDA 13 driver.
CUDA_WHEELS = tuple(f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime"))

_UNIT_SUFFIXES = {".cu", ".cc"}
_HEADER_SUFFIXES = {".h", ".cuh"}
#: Compiles for the CPU and belongs to the tests.
_HOST_ONLY = "emulation"


@dataclass(frozen=True)
class Target:
    """One GPU architecture as nvcc writes it: ``80``, ``120f`` (a family), ``121a`` (this one and no other)."""

    name: str
    #: Also keep PTX, which a driver compiles for a later member of the family.
    ptx: bool = False

    @property
    def flag(self) -> str:
        """The nvcc option that builds machine code (and PTX) for it."""
        code = f"[sm_{self.name},compute_{self.name}]" if self.ptx else f"sm_{self.name}"
        return f"-gencode=arch=compute_{self.name},code={code}"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether machine code for it runs on a compute capability: the same major number, no older minor one."""
        major, minor = divmod(int(self.name.rstrip("af")), 10)
        exact = self.name.endswith("a")
        return capability[0] == major and (capability[1] == minor if exact else capability[1] >= minor)


#: What a compiled wheel holds. The decoded way of 8.x and 9.0 is there for tests on other cards.
WHEEL_TARGETS = (Target("80"), Target("90"), Target("120f", ptx=True), Target("121a"))


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
        if (folder / "ptx" / "target.cuh").is_file():
            return folder
    raise UnsupportedError(
        f"The CUDA sources are missing in {package / 'csrc'}: the installation is damaged, install sglang-sm120 again."
    )


def units(root: Path) -> list[Path]:
    """Every translation unit: each ``.cu`` and ``.cc`` below ``csrc``, except the CPU emulation."""
    return _below(root, _UNIT_SUFFIXES)


def files(root: Path) -> list[Path]:
    """Every file that a compilation may read, in a fixed order."""
    return _below(root, _UNIT_SUFFIXES | _HEADER_SUFFIXES)


def digest(root: Path) -> str:
    """Return a hash of the sources and flags: two libraries of the same digest and target do the same."""
    total = hashlib.sha256("\0".join(FLAGS).encode())
    for file in files(root):
        for part in (str(file.relative_to(root)).encode(), file.read_bytes()):
            total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


def _below(root: Path, suffixes: set[str]) -> list[Path]:
    found = (path for path in root.rglob("*") if path.suffix in suffixes)
    return sorted(path for path in found if _HOST_ONLY not in path.relative_to(root).parts)
