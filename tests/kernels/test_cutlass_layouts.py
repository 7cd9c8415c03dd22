"""Our fragment and scale tables are those of CUTLASS's MMA traits, compiled from its own headers.

The headers come with the wheel ``nvidia-cutlass``. None is copied here.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support import cuda_tools

ROOT = Path(__file__).resolve().parents[2]
TRAITS = Path("cute", "atom", "mma_traits_sm120.hpp")


def test_our_register_tables_are_cutlass_ones(tmp_path: Path) -> None:
    include = cuda_tools.cutlass_headers()
    assert (include / TRAITS).is_file()
    program = tmp_path / "check"
    sources = ["tests/kernels/cutlass_check.cu", "csrc/emulation/mma_model.cc", "csrc/emulation/formats.cc"]
    command = [
        cuda_tools.program("nvcc"),
        "-std=c++20",
        "-arch=sm_120f",
        f"-I{include}",
        f"-I{ROOT / 'csrc'}",
        *(str(ROOT / source) for source in sources),
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
