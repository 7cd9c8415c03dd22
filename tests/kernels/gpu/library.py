"""The compiled kernels for tests and benchmarks, and problems moved to the GPU."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from problem import Problem, swizzle


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
