"""What a right implementation of ``nvfp4_moe`` may return: the float64 answer and how far from it one may be.

Between the two GEMMs of an expert stands a quantization. Where a value lies next to a rounding boundary, an
implementation whose float32 sums err by a part in a million may take the neighbouring code, or block scale. So the
bound is interval arithmetic: every rounding is done at both ends of the interval that the errors before it allow.
Nearly all intervals hold no boundary and collapse to one code, which keeps the bound tight. Grouped GEMMs that hand
16-bit numbers from kernel to kernel cross many more boundaries; their bound is wider (``between``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_sm120 import layout
from sglang_sm120.formats import (
    BLOCK_SIZE,
    E2M1_MAX,
    decode_e2m1,
    decode_ue4m3,
    encode_ue4m3,
    nearest_e2m1_code,
    unpack_e2m1,
)
from sglang_sm120.reference import Activation, ExpertWeights

#: Reciprocals, exp and division of the hardware are right to about 2**-22; a quantizer uses two of them.
APPROXIMATE = 2.0**-20
#: A tensor core may truncate: 2**-22 of the sum of magnitudes for each float32 addition.
ADDITION = 2.0**-22
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-25}


@dataclass
class Interval:
    """A value and the most that another implementation's may differ from it; float64."""

    value: torch.Tensor
    error: torch.Tensor


def quantize(x: Interval, encode: torch.Tensor) -> Interval:
    """Quantize and dequantize ``[M, K]``, without the division by the encode scale."""
    rows, k = x.value.shape
    blocks = (x.value * encode.double()).view(rows, k // BLOCK_SIZE, BLOCK_SIZE)
    error = (x.error * encode.double()).view_as(blocks) + blocks.abs() * APPROXIMATE
    value = _dequantized(blocks, encode_ue4m3(_sixth(blocks.abs().amax(-1))))
    low, high = value, value
    ends = ((blocks.abs() - error).clamp(min=0).amax(-1), (blocks.abs() + error).amax(-1))
    for largest, slack in zip(ends, (1 - APPROXIMATE, 1 + APPROXIMATE), strict=True):
        scale = encode_ue4m3(_sixth(largest * slack))
        low = torch.minimum(low, _dequantized(blocks - error, scale))
        high = torch.maximum(high, _dequantized(blocks + error, scale))
    width = torch.maximum(high - value, value - low)
    return Interval(value.reshape(rows, k), width.reshape(rows, k))


def gemm(x: Interval, weights: ExpertWeights, expert: int) -> Interval:
    """``alpha * x @ W.T`` of one expert with float32 sums."""
    rows, k = weights.packed.shape[1], x.value.shape[1]
    linear = weights.layout is layout.ScaleLayout.LINEAR
    stored = weights.scales[expert]
    scales = stored if linear else layout.unswizzle_128x4(stored.view(torch.uint8), rows, k // BLOCK_SIZE)
    codes = decode_e2m1(unpack_e2m1(weights.packed[expert])).view(rows, k // BLOCK_SIZE, BLOCK_SIZE)
    matrix = (codes * decode_ue4m3(scales).unsqueeze(-1)).view(rows, k).T
    alpha = weights.alpha[expert].double()
    value = x.value @ matrix * alpha
    magnitude = (x.value.abs() + x.error) @ matrix.abs() * alpha.abs()
    error = x.error @ matrix.abs() * alpha.abs() + magnitude * (k / 64 + 16) * ADDITION
    return Interval(value, error + value.abs() * ADDITION)


def activate(x: Interval, activation: Activation, gate_first: bool) -> Interval:
    """The activation in float32. The slope of silu is at most 1.1."""
    if activation == "relu2":
        positive = torch.relu(x.value)
        value, error = positive.square(), 2 * positive * x.error + x.error.square()
    else:
        halves = list(zip(x.value.chunk(2, 1), x.error.chunk(2, 1), strict=True))
        (gate, gate_error), (up, up_error) = halves if gate_first else halves[::-1]
        silu = gate * torch.sigmoid(gate)
        value = silu * up
        error = 1.1 * gate_error * (up.abs() + up_error) + silu.abs() * up_error
    return Interval(value.float().double(), error + value.abs() * APPROXIMATE)


def rounded(x: Interval, dtype: torch.dtype | None) -> Interval:
    """The same after a rounding to ``dtype``."""
    if dtype is None:
        return x
    return Interval(x.value, x.error + (x.value.abs() + x.error) * UNIT[dtype] + SMALLEST[dtype])


def expected(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    activation: Activation,
    gate_first: bool,
    first_expert: int = 0,
    *,
    between: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the answer before its last rounding and the bound on the error after it, float64 ``[M, H]``.

    Takes the arguments of ``ops.nvfp4_moe``; everything on one device.

    Args:
        between: the type to which an implementation rounds what it hands from kernel to kernel: the results of either
            GEMM, of the activation, and every sum over experts. ``None`` keeps float32.
    """
    tokens, width = hidden.shape
    total = torch.zeros(tokens, width, dtype=torch.float64, device=hidden.device)
    error, magnitude = torch.zeros_like(total), torch.zeros_like(total)
    for expert in torch.unique(ids).tolist():
        local = expert - first_expert
        if not 0 <= local < w13.packed.shape[0]:
            continue
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        x = hidden[token].double()
        first = gemm(quantize(Interval(x, torch.zeros_like(x)), _of(w13, local)), w13, local)
        inner = rounded(activate(rounded(first, between), activation, gate_first), between)
        second = rounded(gemm(quantize(inner, _of(w2, local)), w2, local), between)
        share = weights[token, slot].double().unsqueeze(-1)
        total.index_add_(0, token, share * second.value)
        error.index_add_(0, token, share.abs() * second.error)
        magnitude.index_add_(0, token, (share * second.value).abs())
    error = error + magnitude * ((ids.shape[1] + 16) * ADDITION + (ids.shape[1] * UNIT[between] if between else 0.0))
    bound = (total.abs() + error) * UNIT[hidden.dtype] * 1.01 + error * 1.01 + SMALLEST[hidden.dtype]
    return total, bound


def _of(weights: ExpertWeights, expert: int) -> torch.Tensor:
    scale = weights.input_global_scale
    return scale if scale.dim() == 0 or scale.numel() == 1 else scale[expert]


def _sixth(amax: torch.Tensor) -> torch.Tensor:
    return amax / torch.full_like(amax, E2M1_MAX)


def _dequantized(blocks: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    scale = decode_ue4m3(scale_bytes).unsqueeze(-1)
    codes = nearest_e2m1_code(blocks, scale).masked_fill(scale == 0, 0)
    return decode_e2m1(codes) * scale
