"""The patch of sgl-kernel's build: CMake evaluates the lines that it changes, as they were and as they are."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_sm120.upstream.catalog import Catalog

FLAGS = "SGL_KERNEL_CUDA_FLAGS"


@pytest.mark.parametrize(
    ("cuda", "before", "after"),
    [
        ("12.8", ["100a", "120a"], ["100a", "120a"]),
        ("12.9", ["100a", "120a"], ["100a", "120f"]),
        ("13.0", ["100a", "120a"], ["100a", "120f"]),
    ],
)
def test_the_family_target_is_built_where_the_compiler_has_it(
    cuda: str, before: list[str], after: list[str], real: Catalog, tmp_path: Path
) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake missing: it is not on PATH")
    (patch,) = (patch for patch in real.patches if patch.project == "sgl-kernel")
    (change,) = patch.changes
    (hunk,) = change.hunks
    assert change.path == "sgl-kernel/CMakeLists.txt"
    for lines, targets in ((hunk.old, before), (hunk.new, after)):
        # The line above the hunk opens the list that the hunk's first line is in.
        text = [f'set(CUDA_VERSION "{cuda}")', f"list(APPEND {FLAGS}", *lines, f'message("${{{FLAGS}}}")']
        script = tmp_path / "flags.cmake"
        script.write_text("\n".join(text))
        run = subprocess.run([cmake, "-P", script], capture_output=True, text=True, check=True)
        wanted = [f"-gencode=arch=compute_{target},code=sm_{target}" for target in targets]
        assert run.stderr.strip().split(";") == wanted
