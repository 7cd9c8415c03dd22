"""Every kernel once or twice on the smallest problems with all of its parts, for compute-sanitizer.

``make test-gpu-sanitize`` runs them under memcheck and racecheck. Answers are computed on the CPU, so that next to
nothing but the kernels under test runs on the GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from library import GpuProblem, native  # noqa: E402
from problem import random_problem  # noqa: E402
from test_emulated_quantize import nasty  # noqa: E402

from sglang_sm120 import native as backend  # noqa: E402
from sglang_sm120 import native_moe, reference  # noqa: E402
from sglang_sm120.layout import ScaleLayout, padded_scale_shape  # noqa: E402
from tests.support.moe_problem import random_moe  # noqa: E402
from tests.support.nvfp4 import assert_matches_oracle  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]

# M, N, K, forced: the kernel for few tokens alone and in clusters, with one tile of tokens to eight, beyond 64 tokens,
# a ring that goes round (2,320: three units a warp) and slices of different length; both tiles with a ring that goes
# round (400: four units; 1,680: four turns of a warp), rows past the last of either operand and tails of K.
PROBLEMS = [
    (3, 40, 2320, 1), (7, 136, 1296, 4), (12, 8, 2064, 8), (30, 40, 272, 2), (66, 8, 144, 1),
    (130, 64, 400, 128), (66, 8, 1680, 64),
]  # fmt: skip


@pytest.mark.parametrize(("m", "n", "k", "forced"), PROBLEMS)
def test_gemm(m: int, n: int, k: int, forced: int) -> None:
    problem = random_problem(m, n, k)
    out = GpuProblem(problem).run(forced=forced).cpu().double()
    assert bool(((out - problem.expected()).abs() <= problem.tolerance()).all())


@pytest.mark.parametrize(("m", "n", "k", "cluster"), [(3, 40, 2320, 1), (12, 8, 1040, 4)])
def test_gemm_that_quantizes(m: int, n: int, k: int, cluster: int) -> None:
    gpu = GpuProblem(random_problem(m, n, k))
    x = torch.ones(m, k, dtype=torch.bfloat16)  # 6 and a scale of 1: exact, and the same whatever the rule
    problem = gpu.problem
    problem.x_codes = torch.full_like(problem.x_codes, 7)
    problem.x_scales = torch.full_like(problem.x_scales, 0x38)
    out = torch.full((m, n), float("nan"), dtype=torch.bfloat16, device="cuda")
    native().nvfp4_linear(
        x.cuda(), torch.tensor(6.0, device="cuda"), gpu.b, gpu.b_scale, gpu.alpha, gpu.bias, out, True, cluster
    )
    assert bool(((out.cpu().double() - problem.expected()).abs() <= problem.tolerance()).all())


@pytest.mark.parametrize(("m", "k"), [(5, 1040), (65537, 16)])
@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_quantizer(m: int, k: int, layout: ScaleLayout) -> None:
    """From 65,536 rows on a thread takes four."""
    x = nasty(m, k, torch.bfloat16)
    swizzled = layout is ScaleLayout.SWIZZLE_128X4
    codes = torch.empty(m, k // 2, dtype=torch.uint8, device="cuda")
    shape = padded_scale_shape(m, k // 16) if swizzled else (m, k // 16)
    scales = torch.empty(shape, dtype=torch.uint8, device="cuda")
    native().nvfp4_quantize(x.cuda(), torch.tensor(1.0, device="cuda"), codes, scales, swizzled, True, True)
    expected_codes, expected_scales = reference.quantize(x, torch.tensor(1.0), layout)
    assert torch.equal(codes.cpu(), expected_codes)
    assert torch.equal(scales.cpu(), expected_scales.view(torch.uint8))


def test_mixture_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_library", lambda device: (native(), torch.cuda.get_device_capability() >= (9, 0)))
    sizes = (5, 8, 2, 304, 80)
    out = native_moe.moe(*random_moe(*sizes, device="cuda").arguments())  # type: ignore[arg-type]
    assert_matches_oracle(out.cpu(), *random_moe(*sizes).expected())
