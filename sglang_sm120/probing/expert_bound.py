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
    """Quantize and dequantize ``[M, K]``, without the division by the encode scale, one or ``[M, 1]``."""
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
    chosen = ids.long() - first_expert
    token, slot = torch.nonzero((chosen >= 0) & (chosen < w13.packed.shape[0]), as_tuple=True)
    expert, order = chosen[token, slot].sort(stable=True)
    token, slot = token[order], slot[order]
    # Only the products go expert by expert: on a GPU the launches of everything else would be most of the time.
    x = hidden[token].double()
    first = _grouped(quantize(Interval(x, torch.zeros_like(x)), _encode(w13, expert)), w13, expert)
    inner = rounded(activate(rounded(first, between), activation, gate_first), between)
    second = rounded(_grouped(quantize(inner, _encode(w2, expert)), w2, expert), between)
    share = weights[token, slot].double().unsqueeze(-1)
    total = torch.zeros(tokens, width, dtype=torch.float64, device=hidden.device)
    error, magnitude = torch.zeros_like(total), torch.zeros_like(total)
    total.index_add_(0, token, share * second.value)
    error.index_add_(0, token, share.abs() * second.error)
    magnitude.index_add_(0, token, (share * second.value).abs())
    error = error + magnitude * ((ids.shape[1] + 16) * ADDITION + (ids.shape[1] * UNIT[between] if between else 0.0))
    bound = (total.abs() + error) * UNIT[hidden.dtype] * 1.01 + error * 1.01 + SMALLEST[hidden.dtype]
    return total, bound


def _grouped(x: Interval, weights: ExpertWeights, expert: torch.Tensor) -> Interval:
    """:func:`gemm` of every row of ``x`` with its own expert; ``expert`` is in ascending order."""
    numbers, counts = torch.unique_consecutive(expert, return_counts=True)
    rows = counts.tolist()
    parts = zip(torch.split(x.value, rows), torch.split(x.error, rows), numbers.tolist(), strict=True)
    done = [gemm(Interval(value, error), weights, number) for value, error, number in parts]
    if not done:
        return Interval(*(tensor.new_zeros(0, weights.packed.shape[1]) for tensor in (x.value, x.error)))
    return Interval(torch.cat([part.value for part in done]), torch.cat([part.error for part in done]))


def _encode(weights: ExpertWeights, expert: torch.Tensor) -> torch.Tensor:
    """The encode scale of each row: one for all, or ``[rows, 1]`` where every expert has its own."""
    scale = weights.input_global_scale
    return scale if scale.numel() == 1 else scale[expert].unsqueeze(-1)


def _sixth(amax: torch.Tensor) -> torch.Tensor:
    return amax / torch.full_like(amax, E2M1_MAX)


def _dequantized(blocks: torch.Tensor, scale_bytes: torch.Tensor) -> torch.Tensor:
    scale = decode_ue4m3(scale_bytes).unsqueeze(-1)
    codes = nearest_e2m1_code(blocks, scale).masked_fill(scale == 0, 0)
    return decode_e2m1(codes) * scale
