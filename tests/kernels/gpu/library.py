"""The compiled kernels for tests and benchmarks, and problems moved to the GPU."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path
from typing import Any

import torch
from emulated import ROOT
from problem import Problem, swizzle

from sglang_sm120.build.spec import target_for
from sglang_sm120.build.toolchain import find_toolchain


@functools.cache
def load(path: str) -> Any:
    """Load a compiled library by path."""
    import tvm_ffi

    return tvm_ffi.load_module(path)


def native() -> Any:
    """The library under test: ``SM120_TEST_LIBRARY``, or built now from csrc."""
    path = os.environ.get("SM120_TEST_LIBRARY")
    if path is None:
        from sglang_sm120.build import library_path

        path = str(library_path())
    return load(path)


class GpuProblem:
    """Operands of a problem on the GPU."""

    def __init__(self, problem: Problem) -> None:
        m, n, k = problem.shape
        padded = problem.w_packed().cuda()
        self.problem = problem
        self.a = problem.x_packed().cuda()
        self.b = torch.as_strided(padded, (n, k // 2), (problem.weight_stride, 1))
        self.a_scale = swizzle(problem.x_scales).cuda()
        self.b_scale = swizzle(problem.w_scales).cuda()
        self.alpha = problem.alpha.float().cuda()
        self.bias = None if problem.bias is None else problem.bias.cuda()

    def poisoned(self) -> torch.Tensor:
        """An output full of NaN."""
        m, n, _ = self.problem.shape
        return torch.full((m, n), float("nan"), dtype=self.problem.out_type, device="cuda")

    def run(self, out: torch.Tensor | None = None, *, pdl: bool = True, forced: int = 0) -> torch.Tensor:
        """Call the kernel; returns the output. ``forced`` is nvfp4_gemm's: a cluster, a tile, or its own choice."""
        out = self.poisoned() if out is None else out
        native().nvfp4_gemm(self.a, self.a_scale, self.b, self.b_scale, self.alpha, self.bias, out, pdl, forced)
        return out

    def worst(self, out: torch.Tensor) -> float:
        """Largest error as a multiple of the derived bound; inf for NaN."""
        problem = self.problem.to("cuda")
        error = (out.double() - problem.expected()).abs()
        return float((error / problem.tolerance()).nan_to_num(nan=float("inf")).max())


def run_check(name: str, folder: Path, *, root: Path = ROOT, sources: tuple[str, ...] = ()) -> tuple[int, str]:
    """Compile a program beside this file for the card at hand and run it: its exit status and output.

    Args:
        name: file name of the program.
        folder: where to put it.
        root: whose ``csrc`` it includes.
        sources: more files to compile, below ``csrc``.
    """
    toolchain, csrc = find_toolchain(), root / "csrc"
    target = target_for(torch.cuda.get_device_capability()).flag
    options = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{csrc}", *toolchain.folders, target]
    files = [str(Path(__file__).with_name(name)), *(str(csrc / source) for source in sources)]
    program = folder / "check"
    subprocess.run([str(toolchain.nvcc), *options, "-o", str(program), *files], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    return done.returncode, done.stdout
