"""The backend ``torch_reference``: the float64 oracle in plain torch, on any device.

For bisection, tests and the demo. It dequantizes the weight on every call and multiplies in float64, so on a
GPU it is slower than a kernel by two to three orders of magnitude; what bounds it is the float64 rate.
"""

from __future__ import annotations

import torch

from sglang_sm120 import reference
from sglang_sm120.errors import UnsupportedError, bad_value
from sglang_sm120.formats import round_float64
from sglang_sm120.layout import ScaleLayout
from sglang_sm120.reference import Activation, ExpertWeights


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    activation_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Quantize ``x``, multiply, scale, add the bias, round once.

    Args:
        x: bf16/fp16 [M, K].
        weight: packed e2m1 uint8 [N, K/2]; rows may be padded.
        weight_scale: e4m3 bytes, swizzled 128x4.
        activation_scale: float32 encode scale of ``x``; ``None`` multiplies ``x`` unquantized (weight-only).
        alpha: float32 [N].
        bias: [N] or ``None``.

    Returns:
        [M, N] in the dtype of ``x``.
    """
    weight = weight.contiguous()
    if activation_scale is not None:
        return reference.linear(x, weight, weight_scale, activation_scale, alpha, bias)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    rows, k = weight.shape[0], x.shape[1]
    dense = reference.dequantize(weight, weight_scale, one, ScaleLayout.SWIZZLE_128X4, rows, k)
    out = (x.to(torch.float64) @ dense.T) * alpha.to(torch.float64)
    if bias is not None:
        out = out + bias.to(torch.float64)
    return round_float64(out, x.dtype)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply two packed operands: a [M, K/2], b [N, K/2] (rows may be padded), both scale tensors swizzled 128x4."""
    return reference.gemm(a, b.contiguous(), a_scale, b_scale, alpha, out_dtype, bias)


def quantize(x: torch.Tensor, global_scale: torch.Tensor, swizzled: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [M, K] to packed e2m1 and its block scales, by the oracle's exact rule."""
    layout = ScaleLayout.SWIZZLE_128X4 if swizzled else ScaleLayout.LINEAR
    return reference.quantize(x, global_scale, layout)


def moe(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    activation: Activation,
    gate_first: bool,
    first_expert: int,
) -> torch.Tensor:
    """Run the experts by :func:`sglang_sm120.reference.moe`. The host waits for the GPU: no CUDA graph can hold this.

    Args:
        hidden: bf16/fp16 [M, H].
        topk_ids: int32 [M, top_k], numbers of all experts, of which this process holds those from ``first_expert``.
        topk_weights: float32 [M, top_k].
        w13: first weights, their scales in ``w13.layout``.
        w2: second weights.
        activation: ``silu`` or ``relu2``.
        gate_first: for ``silu``, whether the gate is the first half of w13's rows.
        first_expert: number of the first expert held here.

    Returns:
        [M, H] in the dtype of ``hidden``.

    Raises:
        UnsupportedError: a CUDA graph is being captured.
    """
    if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
        remedy = (
            "it waits for the GPU in every layer of experts, which no CUDA graph can record; start with "
            "--disable-cuda-graph, or take another runner"
        )
        raise UnsupportedError(bad_value("--moe-runner-backend", "torch_reference", remedy))
    order = gate_first if activation == "silu" else None
    return reference.moe(hidden, topk_ids - first_expert, topk_weights, w13, w2, activation, order)
