"""Global scales: what checkpoints store, and the alpha that a GEMM needs.

Two words are used everywhere in this package. A *decode scale* multiplies a stored number to give the real
one. An *encode scale* is its reciprocal: it multiplies real numbers before they are quantized, and is ``448 *
6 / amax`` so that the largest element becomes the largest product of a block scale (448) and an e2m1 code
(6).

- ModelOpt stores decode scales: ``input_scale`` and ``weight_scale_2``. Alpha is their product.
- compressed-tensors stores encode scales: ``input_global_scale`` and ``weight_global_scale``. Alpha is the
  reciprocal of their product.

A fused projection (q, k, v; gate, up) has one weight scale per shard, so its alpha is a vector: one entry per
output column. Taking the largest scale for all shards, as hosts do when they hold only one number, is wrong
for the others.

The values are read here, so on a GPU these functions wait for it. They run when weights load.

Sources: the NVFP4 exporters of NVIDIA ModelOpt and of compressed-tensors (names and meaning of the tensors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_sm120.errors import FormatError, bad_value
from sglang_sm120.formats import E2M1_MAX, E4M3_MAX, require_tensor

#: Global scales outside this range are refused. Inside, the product of any two and its reciprocal are normal
#: float32 numbers. As an encode scale the range means tensors whose largest element is between 3e-16 and
#: 2e22.
MIN_GLOBAL_SCALE = 2.0**-63
MAX_GLOBAL_SCALE = 2.0**63


class ActivationScales(NamedTuple):
    """How to quantize the input of a projection.

    Attributes:
        encode: float32 ``[shards]``, one encode scale per shard.
        all_equal: one quantized input serves all shards. If not, the caller quantizes once per shard.
    """

    encode: torch.Tensor
    all_equal: bool


def encode_scale_from_amax(amax: torch.Tensor) -> torch.Tensor:
    """Return the encode scale ``448 * 6 / amax`` for a tensor whose largest magnitude is ``amax``.

    A tensor of zeros gets 1.0: any finite scale represents it. An amax below 3e-16 gets
    :data:`MAX_GLOBAL_SCALE`, because its own scale might not be a float32 number.

    Args:
        amax: bfloat16, float16 or float32, any shape; for example ``x.abs().amax()``.

    Returns:
        float32, same shape and device.

    Raises:
        FormatError: an amax that is NaN, infinite or negative.
    """
    require_tensor("amax", amax, (torch.bfloat16, torch.float16, torch.float32))
    for index, value in enumerate(amax.flatten().tolist()):
        if not math.isfinite(value) or value < 0:
            remedy = "find the NaN or infinity in the tensor it was taken from; reference.find_nonfinite does"
            raise FormatError(bad_value(f"amax[{index}]", value, remedy))
    value64 = amax.to(torch.float64)
    largest_code = torch.full_like(value64, E4M3_MAX * E2M1_MAX)
    encode = (largest_code / value64).clamp(max=MAX_GLOBAL_SCALE)
    return encode.masked_fill(value64 == 0, 1.0).to(torch.float32)


def column_alpha_modelopt(
    widths: Sequence[int], input_scale: torch.Tensor, weight_scale_2: torch.Tensor
) -> torch.Tensor:
    """Return the GEMM's alpha for every output column of a ModelOpt layer: ``input_scale * weight_scale_2``.

    Args:
        widths: output columns of each shard, in order; they sum to N.
        input_scale: float32 decode scale of the activation, one number or one per shard.
        weight_scale_2: float32 decode scale of the weight, one number or one per shard.

    Returns:
        float32 ``[N]`` on the device of ``weight_scale_2``; the product is exact before its one rounding.

    Raises:
        FormatError: a width below 1, a count of scales that is neither 1 nor the count of shards, or a scale
            that is zero, negative, infinite, NaN or out of range.
    """
    activation = _read_scales("input_scale", input_scale, len(widths))
    weight = _read_scales("weight_scale_2", weight_scale_2, len(widths))
    alphas = [a * w for a, w in zip(activation, weight, strict=True)]
    return _spread(widths, alphas, weight_scale_2.device)


def column_alpha_compressed_tensors(
    widths: Sequence[int], input_global_scale: torch.Tensor, weight_global_scale: torch.Tensor
) -> torch.Tensor:
    """Return the GEMM's alpha for every output column of a compressed-tensors layer.

    ``1 / (input_global_scale * weight_global_scale)``: the stored numbers are encode scales.

    Args:
        widths: output columns of each shard, in order; they sum to N.
        input_global_scale: float32 encode scale of the activation, one number or one per shard.
        weight_global_scale: float32 encode scale of the weight, one number or one per shard.

    Returns:
        float32 ``[N]`` on the device of ``weight_global_scale``, computed in float64 and rounded once.

    Raises:
        FormatError: as :func:`column_alpha_modelopt`.
    """
    activation = _read_scales("input_global_scale", input_global_scale, len(widths))
    weight = _read_scales("weight_global_scale", weight_global_scale, len(widths))
    alphas = [1.0 / (a * w) for a, w in zip(activation, weight, strict=True)]
    return _spread(widths, alphas, weight_global_scale.device)


def activation_scales_modelopt(shards: int, input_scale: torch.Tensor) -> ActivationScales:
    """Return the encode scales for the input of a ModelOpt layer: ``1 / input_scale``.

    Args:
        shards: number of shards of the projection.
        input_scale: float32 decode scale, one number or one per shard.

    Raises:
        FormatError: as :func:`column_alpha_modelopt`.
    """
    encode = [1.0 / scale for scale in _read_scales("input_scale", input_scale, shards)]
    return _activation_scales(encode, input_scale.device)


def activation_scales_compressed_tensors(shards: int, input_global_scale: torch.Tensor) -> ActivationScales:
    """Return the encode scales for the input of a compressed-tensors layer, which stores them as such.

    Args:
        shards: number of shards of the projection.
        input_global_scale: float32 encode scale, one number or one per shard.

    Raises:
        FormatError: as :func:`column_alpha_modelopt`.
    """
    encode = _read_scales("input_global_scale", input_global_scale, shards)
    return _activation_scales(encode, input_global_scale.device)


def _activation_scales(encode: list[float], device: torch.device) -> ActivationScales:
    return ActivationScales(
        encode=torch.tensor(encode, dtype=torch.float64).to(device, torch.float32),
        all_equal=len(set(encode)) == 1,
    )


def _read_scales(name: str, scales: torch.Tensor, shards: int) -> list[float]:
    """Return one legal scale per shard as exact Python floats."""
    if shards < 1:
        raise FormatError(bad_value("shards", shards, "name the width of at least one shard"))
    require_tensor(name, scales, (torch.float32,))
    if scales.numel() not in (1, shards):
        remedy = f"pass one number, or one for each of the {shards} shards"
        raise FormatError(bad_value(f"{name}.shape", tuple(scales.shape), remedy))
    values: list[float] = scales.flatten().tolist()
    for index, value in enumerate(values):
        if not MIN_GLOBAL_SCALE <= value <= MAX_GLOBAL_SCALE:
            remedy = (
                f"a global scale must lie between {MIN_GLOBAL_SCALE:.1e} and {MAX_GLOBAL_SCALE:.1e}; "
                "calibrate or export the checkpoint again"
            )
            raise FormatError(bad_value(f"{name}[{index}]", value, remedy))
    return values if len(values) == shards else values * shards


def _spread(widths: Sequence[int], alphas: list[float], device: torch.device) -> torch.Tensor:
    """Repeat each shard's alpha for its columns and round to float32."""
    for index, width in enumerate(widths):
        if width < 1:
            raise FormatError(bad_value(f"widths[{index}]", width, "use the shard's count of output columns"))
    columns = torch.tensor(alphas, dtype=torch.float64).repeat_interleave(torch.tensor(list(widths)))
    return columns.to(torch.float32).to(device)
