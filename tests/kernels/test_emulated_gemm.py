"""The skinny GEMM kernel source, run on the CPU with its barriers, copies and launches modelled, is right.

The same files are compiled for the GPU; csrc/emulation/machine.h lists what the model checks besides the numbers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated import run_gemm
from problem import Problem, one_hot_problem, random_problem, swizzle

from sglang_sm120 import reference

# M, N, K, cluster, stages: every odd edge. K = 16 is one block; 272 = 2 units + 1 block; N = 8 is one eighth of a tile
# row group; 136 is a second 128-row block with 8 rows; 464, 1856 are what tensor parallelism leaves of real layers.
EDGES = [
    (1, 8, 16, 1, 2),
    (1, 128, 128, 1, 4),
    (2, 40, 48, 1, 2),
    (7, 136, 272, 2, 2),
    (8, 128, 1024, 1, 2),
    (9, 64, 464, 4, 4),
    (8, 32, 3696, 8, 4),
    (16, 120, 1856, 2, 2),
    (17, 264, 144, 1, 2),
    (31, 16, 2080, 8, 2),
    (33, 32, 400, 2, 4),
    (64, 72, 1168, 4, 2),
    (65, 16, 144, 1, 2),
    (201, 8, 80, 2, 2),
]


def require_right(out: object, problem: Problem) -> None:
    """Every element written and inside the derived bound."""
    assert isinstance(out, torch.Tensor), f"exit {out.returncode}: {out.stderr[-3000:]}"  # type: ignore[attr-defined]
    error = (out.double() - problem.expected()).abs()
    worst = (error / problem.tolerance()).nan_to_num(nan=float("inf")).max()
    assert worst <= 1, f"worst error is {worst:.3g} times the bound"


@pytest.mark.parametrize(("m", "n", "k", "cluster", "stages"), EDGES)
@pytest.mark.parametrize("out_type", [torch.bfloat16, torch.float16])
def test_random_data_is_within_the_derived_bound(
    emulated_gemm: Path, tmp_path: Path, m: int, n: int, k: int, cluster: int, stages: int, out_type: torch.dtype
) -> None:
    scalar = m % 2 == 0
    problem = random_problem(m, n, k, per_column=not scalar, bias=m != 1, out_type=out_type)
    require_right(run_gemm(emulated_gemm, problem, tmp_path, cluster=cluster, stages=stages, seed=m), problem)


@pytest.mark.parametrize(("n", "k", "cluster"), [(128, 272, 1), (40, 1040, 2), (136, 144, 1), (8, 2064, 8)])
def test_one_hot_is_exact_for_every_column_and_block(
    emulated_gemm: Path, tmp_path: Path, n: int, k: int, cluster: int
) -> None:
    blocks = list(range(k // 16))
    for start in range(0, len(blocks), 64):
        problem = one_hot_problem(n, k, blocks[start : start + 64])
        out = run_gemm(emulated_gemm, problem, tmp_path, cluster=cluster)
        assert isinstance(out, torch.Tensor), out.stderr[-3000:]
        assert torch.equal(out.double(), problem.expected())


def test_every_interleaving_gives_the_same_bits(emulated_gemm: Path, tmp_path: Path) -> None:
    problem = random_problem(3, 40, 2320)
    runs = [run_gemm(emulated_gemm, problem, tmp_path, cluster=2, seed=seed) for seed in range(6)]
    assert all(isinstance(run, torch.Tensor) and torch.equal(run, runs[0]) for run in runs)


def test_a_row_does_not_depend_on_the_rest_of_the_batch(emulated_gemm: Path, tmp_path: Path) -> None:
    full = random_problem(64, 40, 1296)
    whole = run_gemm(emulated_gemm, full, tmp_path, cluster=2, stages=2)
    assert isinstance(whole, torch.Tensor)
    for m in (1, 9, 25):
        part = Problem(full.x_codes[:m], full.x_scales[:m], full.w_codes, full.w_scales, full.alpha, full.bias)
        out = run_gemm(emulated_gemm, part, tmp_path, cluster=2, stages=4)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out, whole[:m])


def test_a_nan_scale_spoils_its_row_or_column_and_no_other(emulated_gemm: Path, tmp_path: Path) -> None:
    problem = random_problem(4, 40, 272)
    problem.x_scales[2, 5] = 0x7F
    problem.w_scales[33, 16] = 0x7F
    out = run_gemm(emulated_gemm, problem, tmp_path)
    assert isinstance(out, torch.Tensor)
    spoilt = torch.zeros(4, 40, dtype=torch.bool)
    spoilt[2] = True
    spoilt[:, 33] = True
    assert torch.equal(out.isnan(), spoilt)


def test_this_file_and_the_package_reference_agree() -> None:
    problem = random_problem(9, 40, 272)
    m, n, k = problem.shape
    shape = (-(-m // 128) * 128, -(-(k // 16) // 4) * 4)
    out = reference.gemm(
        problem.x_packed(),
        problem.w_packed()[:, : k // 2].contiguous(),
        swizzle(problem.x_scales).view(shape),
        swizzle(problem.w_scales).view(-(-n // 128) * 128, shape[1]),
        problem.alpha,
        torch.float64,
        problem.bias,
    )
    assert torch.allclose(out, problem.expected(), rtol=1e-12, atol=1e-12)
