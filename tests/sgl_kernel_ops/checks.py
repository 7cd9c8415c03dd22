"""What our kernels have to give as the old operators, whether a GPU runs them or the emulation."""

from __future__ import annotations

import torch

from sglang_sm120 import ops, reference
from sglang_sm120.sgl_kernel_ops import matmul, quantizers
from tests.sgl_kernel_ops.cases import Sorted, linear_scales
from tests.support.nvfp4 import assert_matches_oracle, float32_gemm_bound


def check_experts(case: Sorted, backend: str) -> None:
    """Each expert's rows come out as if it were alone, and the product is within the bound of float32 sums."""
    dtype = case.rows.dtype
    codes, scales = quantizers.scaled_fp4_experts_quant(
        case.rows, case.encode, case.expert_offsets, case.scale_offsets, 1, backend=backend
    )
    out = matmul.cutlass_fp4_group_mm(
        codes, case.packed(), scales, case.scales(), case.alphas, dtype, case.params, backend=backend
    )
    bounds = case.expert_offsets.tolist()
    for expert, (weight, found) in enumerate(zip(case.weights, linear_scales(case, scales), strict=True)):
        rows = slice(bounds[expert], bounds[expert + 1])
        if rows.start == rows.stop:
            continue
        alone, alone_scales = ops.nvfp4_quantize(case.rows[rows], case.encode[expert], False, backend)
        assert torch.equal(codes[rows], alone)
        assert torch.equal(found, alone_scales)
        operands = (codes[rows], weight.packed, _padded(scales, case, expert), weight.scales, case.alphas[expert])
        right = reference.gemm(*operands, torch.float64)
        bound = float32_gemm_bound(*operands, dtype)
        assert_matches_oracle(out[rows].cpu(), right.cpu(), bound.cpu())


def _padded(scales: torch.Tensor, case: Sorted, expert: int) -> torch.Tensor:
    start, count = int(case.scale_offsets[expert]), int(case.expert_offsets.diff()[expert])
    return scales[start : start - (-count // 128) * 128]
