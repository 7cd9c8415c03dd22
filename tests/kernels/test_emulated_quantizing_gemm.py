"""The skinny GEMM that quantizes its activations itself, run on the CPU, has the bits of quantizer and GEMM.

Which of the two ways a layer takes must not show in its results. Rows of activations are apart, with NaN between them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated import run_gemm, run_quantizing
from problem import Problem, random_problem
from test_emulated_gemm import require_right
from test_emulated_quantize import RECIPROCAL, nasty, padded_rows, reciprocal_model, run

from sglang_sm120.formats import unpack_e2m1
from sglang_sm120.layout import ScaleLayout

# M, N, K, cluster, dtype: one block; rows without and with a second tile of tokens; tails of a k64 step and of a unit;
# several units a warp (2,320); a second block of 128 columns; slices of K of which one has no unit.
BF16, FP16 = torch.bfloat16, torch.float16
EDGES = [
    (1, 8, 16, 1, BF16), (3, 40, 2320, 1, FP16), (8, 136, 464, 2, BF16), (9, 8, 272, 4, FP16), (16, 8, 1184, 2, BF16),
]  # fmt: skip


def quantized_problem(weights: Problem, codes: torch.Tensor, scales: torch.Tensor) -> Problem:
    """The same weights for activations that are quantized already: packed codes and linear scales."""
    m, _, k = weights.shape
    return Problem(
        unpack_e2m1(codes).view(m, k), scales.view(torch.uint8).view(m, k // 16), weights.w_codes, weights.w_scales,
        weights.alpha, weights.bias, weights.out_type,
    )  # fmt: skip


def make(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Problem, torch.Tensor]:
    """Weights, and activations with every special block in them."""
    weights = random_problem(m, n, k, out_type=dtype, per_column=m % 2 == 1, bias=m != 5)
    weights.alpha *= 1e-4  # the largest scale times the largest number stays in fp16
    return weights, padded_rows(nasty(m, k, dtype), 24)


@pytest.mark.parametrize(("m", "n", "k", "cluster", "dtype"), EDGES)
def test_the_bits_are_those_of_quantizer_and_gemm(
    emulated_quantizing: Path, emulated_quantizer: Path, emulated_gemm: Path, tmp_path: Path,
    m: int, n: int, k: int, cluster: int, dtype: torch.dtype,
) -> None:  # fmt: skip
    weights, x = make(m, n, k, dtype)
    encode_scale = 37.3 if m % 2 else 1.0
    out = run_quantizing(emulated_quantizing, weights, x, encode_scale, tmp_path, cluster=cluster, seed=m)
    assert isinstance(out, torch.Tensor), out.stderr[-3000:]
    codes, scales = run(emulated_quantizer, tmp_path, x, encode_scale, ScaleLayout.LINEAR, RECIPROCAL)
    two_launches = run_gemm(emulated_gemm, quantized_problem(weights, codes, scales), tmp_path, cluster=cluster)
    assert isinstance(two_launches, torch.Tensor)
    assert torch.equal(out.view(torch.int16), two_launches.view(torch.int16))


@pytest.mark.parametrize("m", [7, 13])
def test_numbers_are_within_the_derived_bound(emulated_quantizing: Path, tmp_path: Path, m: int) -> None:
    """Against the float64 product of what the rule's steps in float32 give; a block of NaN spoils its row alone."""
    weights, x = make(m, 40, 592, torch.bfloat16)
    out = run_quantizing(emulated_quantizing, weights, x, 3.7, tmp_path, cluster=2)
    problem = quantized_problem(weights, *reciprocal_model(x.contiguous(), 3.7))
    spoilt = problem.x_scales.eq(0x7F).any(1)
    assert isinstance(out, torch.Tensor)
    assert spoilt.tolist() == [True] + [False] * (m - 1)
    assert out[0].isnan().all()
    finite = Problem(
        problem.x_codes[1:], problem.x_scales[1:], problem.w_codes, problem.w_scales, problem.alpha, problem.bias
    )
    require_right(out[1:], finite)


def test_every_interleaving_gives_the_same_bits(emulated_quantizing: Path, tmp_path: Path) -> None:
    weights, x = make(3, 8, 1232, torch.bfloat16)
    runs = [run_quantizing(emulated_quantizing, weights, x, 1.0, tmp_path, cluster=2, seed=seed) for seed in range(3)]
    assert all(isinstance(out, torch.Tensor) for out in runs)
    assert all(torch.equal(out.view(torch.int16), runs[0].view(torch.int16)) for out in runs)
