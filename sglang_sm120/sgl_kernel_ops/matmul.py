"""The multiplications: one weight, and one weight per expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sglang_sm120 import layout, ops
from sglang_sm120.errors import FormatError, bad_value
from sglang_sm120.sgl_kernel_ops.experts import spans


def cutlass_scaled_fp4_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    block_scale_a: torch.Tensor,
    block_scale_b: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    backend: str,
) -> torch.Tensor:
    """Return ``alpha * a @ b.T``.

    Args:
        a: activations, packed e2m1 uint8 ``[M, K / 2]``.
        b: weight, packed e2m1 uint8 ``[N, K / 2]``.
        block_scale_a: block scales of ``a``, swizzled 128x4, float8_e4m3fn or uint8.
        block_scale_b: block scales of ``b`` likewise.
        alpha: float32, one value.
        out_dtype: bfloat16 or float16.
        backend: the backend of ours that multiplies.

    Returns:
        ``[M, N]`` of ``out_dtype``.

    Raises:
        FormatError: an operand breaks these rules.
    """
    return ops.nvfp4_gemm(
        a, layout.align_rows(b), block_scale_a, block_scale_b, alpha.reshape(-1), None, out_dtype, backend
    )


def cutlass_fp4_group_mm(
    a_fp4: torch.Tensor,
    b_fp4: torch.Tensor,
    a_blockscale: torch.Tensor,
    b_blockscale: torch.Tensor,
    alphas: torch.Tensor,
    out_dtype: torch.dtype,
    params: Mapping[str, torch.Tensor],
    *,
    backend: str,
) -> torch.Tensor:
    """Multiply rows that are sorted by expert with the weight of their expert.

    Args:
        a_fp4: activations, packed e2m1 uint8 ``[R, K / 2]``.
        b_fp4: weights, packed e2m1 uint8 ``[E, N, K / 2]``.
        a_blockscale: block scales of the activations, swizzled, each expert's from its ``blockscale_offsets`` on.
        b_blockscale: block scales of the weights, swizzled, ``[E, N to 128, K / 16 to 4]``.
        alphas: float32 ``[E]``.
        out_dtype: bfloat16 or float16.
        params: ``problem_sizes`` int32 ``[E, 3]`` (M, N, K of each expert), ``expert_offsets`` and
            ``blockscale_offsets`` int32 ``[E]``. Strides and pointer tables, which SGLang passes too, are not needed.
        backend: the backend of ours that multiplies.

    Returns:
        ``[R, N]`` of ``out_dtype``; rows of no expert are zero.

    Raises:
        FormatError: an operand breaks these rules.
        UnsupportedError: called while a CUDA graph is captured; see :func:`experts.spans`.
    """
    out = torch.zeros(a_fp4.shape[0], b_fp4.shape[1], dtype=out_dtype, device=a_fp4.device)
    sizes, starts, scale_starts = (params[n] for n in ("problem_sizes", "expert_offsets", "blockscale_offsets"))
    multiply_experts_into(out, a_fp4, b_fp4, a_blockscale, b_blockscale, alphas, sizes, starts, scale_starts, backend)
    return out


def multiply_experts_into(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alphas: torch.Tensor,
    problem_sizes: torch.Tensor,
    expert_offsets: torch.Tensor,
    scale_offsets: torch.Tensor,
    backend: str,
) -> None:
    """Write the rows of ``out`` ``[R, N]`` that belong to an expert; arguments as in :func:`cutlass_fp4_group_mm`."""
    experts = b.shape[0]
    given = (alphas.numel(), problem_sizes.shape[0], expert_offsets.shape[0], scale_offsets.shape[0])
    if any(count != experts for count in given):
        remedy = f"there are {experts} weights; alphas, problem_sizes and both offsets have one entry for each"
        raise FormatError(bad_value("entries per expert", given, remedy))
    for span in spans(expert_offsets, problem_sizes[:, 0], scale_offsets):
        span.require_room(a.shape[0], a_scale.shape[0])
        out[span.rows] = ops.nvfp4_gemm(
            a[span.rows],
            layout.align_rows(b[span.expert]),
            a_scale[span.scale_rows],
            b_scale[span.expert],
            alphas.reshape(-1)[span.expert],
            None,
            out.dtype,
            backend,
        )
