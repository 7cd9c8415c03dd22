"""NVFP4 arithmetic of the checks, in float64, written from the format's definition.

It shares no line with ``sglang_sm120``: the checkpoints and the reference model made with it judge the package.

A block of 16 values shares one e4m3 scale ``s``; with the global encode scale ``g`` a value is
``code * s / g``. ``s = e4m3(g * amax / 6)`` and ``code = e2m1(x * g / s)``, both to the nearest, ties to the
even code, saturating; a block whose scale is zero is all zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0

#: The magnitudes of e2m1 in the order of their codes 0..7.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def _e4m3_magnitudes() -> Tensor:
    """The magnitudes of e4m3 in the order of their codes 0..126 (127 is NaN)."""
    values = []
    for code in range(127):
        exponent, mantissa = code >> 3, code & 7
        values.append(mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))
    return torch.tensor(values, dtype=torch.float64)


_E4M3 = _e4m3_magnitudes()


def nearest_code(magnitude: Tensor, grid: Tensor) -> Tensor:
    """Index of the nearest entry of an ascending grid, ties to the even index, beyond the end the last."""
    upper = torch.searchsorted(grid, magnitude).clamp(1, len(grid) - 1)
    below, above = magnitude - grid[upper - 1], grid[upper] - magnitude
    takes_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return torch.where(takes_upper, upper, upper - 1)


def quantize(values: Tensor, encode_scale: float) -> tuple[Tensor, Tensor]:
    """Return sign-magnitude codes 0..15 ``[R, K]`` and scale codes 0..126 ``[R, K / 16]``."""
    rows, k = values.shape
    scaled = (values.to(torch.float64) * encode_scale).reshape(rows, k // BLOCK, BLOCK)
    scale_codes = nearest_code(scaled.abs().amax(-1) / E2M1_MAX, _E4M3)
    scale = _E4M3[scale_codes].unsqueeze(-1)
    ratio = torch.where(scale > 0, scaled / scale.clamp_min(2.0**-9), torch.zeros_like(scaled))
    codes = nearest_code(ratio.abs(), _E2M1) + 8 * (ratio < 0)
    return codes.reshape(rows, k), scale_codes


def dequantize(codes: Tensor, scale_codes: Tensor, encode_scale: float) -> Tensor:
    """The real values of codes, float64 ``[R, K]``."""
    magnitude = _E2M1[codes & 7]
    signed = torch.where(codes >= 8, -magnitude, magnitude)
    return signed * _E4M3[scale_codes].repeat_interleave(BLOCK, dim=1) / encode_scale


def pack(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low half."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Undo :func:`pack`."""
    wide = packed.to(torch.int64)
    return torch.stack([wide & 15, wide >> 4], dim=-1).flatten(-2)
