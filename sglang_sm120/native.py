"""Our CUDA kernels behind the interface of ``ops.py``: ``gemm`` and ``quantize``.

No backend value reaches this module yet; docs/kernels.md says what is built and what is proven how.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_sm120 import build, layout
from sglang_sm120.errors import FormatError


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    dependent_launch: bool = True,
) -> torch.Tensor:
    """Return ``alpha * a @ b.T + bias``.

    Args:
        a: activations, packed e2m1, uint8 ``[M, K / 2]``.
        b: weight, packed e2m1, uint8 ``[N, K / 2]``. Rows start at multiples of 16 bytes: where K / 2 is none,
            pass a view of a padded buffer.
        a_scale: block scales of ``a`` in the 128x4 swizzle.
        b_scale: block scales of ``b`` likewise.
        alpha: float32, one value or one per output column.
        bias: ``[N]`` of ``out_dtype``, or None.
        out_dtype: bfloat16 or float16.
        dependent_launch: start while the kernel in front still runs and fetch weights meanwhile. The weight, its
            scales and nothing else are read early, so no kernel directly in front may write those two.

    Raises:
        FormatError: an operand breaks these rules.
        UnsupportedError: the kernels cannot be compiled or loaded here.
    """
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    library = _library(a.device)
    try:
        library.nvfp4_gemm_skinny(a, a_scale, b, b_scale, alpha, bias, out, dependent_launch, 0)
    except ValueError as error:
        raise FormatError(str(error)) from error
    return out


def quantize(
    x: torch.Tensor, global_scale: torch.Tensor, swizzled: bool, *, exact: bool = False, dependent_launch: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to NVFP4; every byte of the padded scale buffer is written.

    Args:
        x: bfloat16 or float16 ``[M, K]``.
        global_scale: float32 scalar on the GPU, the encode scale.
        swizzled: scales in the 128x4 swizzle, else linear.
        exact: bit-equal to ``reference.quantize``; slow. The default rounds with approximate reciprocals, which can
            differ by one step within two ulp of a rounding boundary.
        dependent_launch: overlap the launch with the kernel in front.

    Raises:
        FormatError: an operand breaks these rules.
        UnsupportedError: the kernels cannot be compiled or loaded here.
    """
    m, k = x.shape
    shape = layout.padded_scale_shape(m, k // 16) if swizzled else (m, k // 16)
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty(shape, dtype=torch.uint8, device=x.device)
    try:
        _library(x.device).nvfp4_quantize(x, global_scale, codes, scales, swizzled, exact, dependent_launch)
    except ValueError as error:
        raise FormatError(str(error)) from error
    return codes, scales


def _library(device: torch.device) -> Any:
    """The compiled library for the card that holds the operands."""
    if device.type != "cuda":
        raise FormatError(f"a.device={str(device)!r} cannot be used: these kernels need a CUDA device.")
    return build.load(torch.cuda.get_device_capability(device))
