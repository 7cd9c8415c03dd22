"""Our fragment and scale tables are those of CUTLASS's MMA traits, compiled from its own headers.

The headers come with the wheel ``nvidia-cutlass`` (``pip install nvidia-cutlass``) or with FlashInfer's. None is
copied here.
"""

from __future__ import annotations

import os
import subprocess
from importlib import util
from pathlib import Path

import pytest

from tests.support import cuda_tools

ROOT = Path(__file__).resolve().parents[2]
TRAITS = Path("cute", "atom", "mma_traits_sm120.hpp")


def header_folder() -> Path | None:
    """The include folder that holds CUTLASS's traits, if any installed package has it."""
    candidates = [Path(os.environ["CUTLASS_INCLUDE"])] if "CUTLASS_INCLUDE" in os.environ else []
    for package, inside in (("cutlass_library", "source/include"), ("flashinfer", "data/cutlass/include")):
        spec = util.find_spec(package)
        if spec is not None:
            candidates += [Path(folder, inside) for folder in spec.submodule_search_locations or ()]
    return next((folder for folder in candidates if (folder / TRAITS).is_file()), None)


def test_our_register_tables_are_cutlass_ones(tmp_path: Path) -> None:
    include = header_folder()
    if include is None:
        pytest.skip("no CUTLASS headers: install nvidia-cutlass or set CUTLASS_INCLUDE")
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
