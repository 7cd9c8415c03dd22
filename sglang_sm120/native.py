"""The backend ``sm120``: our CUDA kernels behind the interface of ``ops.py``.

One call of :func:`linear` is two launches, the quantizer and the GEMM, or for few tokens and little weight one that
does both (``csrc/gemm/plan.h`` has the rule); the bits are the same. Nothing waits for the GPU and nothing is allocated
but results (the quantized activations among them), so CUDA graphs can capture it.

**Weights are constant while the model runs.** On cards with programmatic dependent launch (9.0 and newer) the GEMM
starts while the kernels in front still run and fetches the weight and its block scales meanwhile; everything else
is read after they have finished. The quantizer lets the GEMM start before its own wait, so that holds for the kernel in
front of the quantizer too. Who writes weights must therefore wait for the writes to end before the next forward is
launched; ``host/layers.py`` does, and so does the self-test.
"""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any

import torch

from sglang_sm120 import build, layout
from sglang_sm120.errors import ConfigError, FormatError, bad_value

logger = logging.getLogger("sglang_sm120")

#: Below this capability the launch attribute for dependent launches does not exist.
_DEPENDENT_LAUNCH_SINCE = (9, 0)
#: Loading takes some hundredths of a second, compiling tens of seconds.
_NOTICEABLE_SECONDS = 1.0
#: The most tokens that the GEMM quantizes itself; csrc/gemm_skinny/config.h says the same.
_MOST_QUANTIZED_INSIDE = 16
#: Bytes at whose multiples the quantizer reads.
_ROW_ALIGNMENT = 16


def start(device: torch.device) -> None:
    """Load the kernels for ``device``, compiled now if they never were, and log how long that took if it took long.

    Of several processes on one machine one compiles and the others wait for it.

    Raises:
        UnsupportedError: the kernels cannot be compiled or loaded here; the text says what is missing.
        ConfigError: the cache folder is not safe.
    """
    began = time.monotonic()
    _library(device)
    seconds = time.monotonic() - began
    # Every rank comes here. Only one that compiled, or waited for one that does, has something to tell.
    level = logging.INFO if seconds > _NOTICEABLE_SECONDS else logging.DEBUG
    logger.log(level, "The CUDA kernels for %s are ready after %.1f s.", device, seconds)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    activation_scale: torch.Tensor | None,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Quantize ``x``, multiply, scale, add the bias in float32, round once.

    Args:
        x: bf16/fp16 [M, K]; copied first where its rows do not start at multiples of 16 bytes.
        weight: packed e2m1 uint8 [N, K/2], its rows at multiples of 16 bytes (``layout.align_rows``).
        weight_scale: e4m3 bytes, swizzled 128x4.
        activation_scale: float32 encode scale of ``x``, one value.
        alpha: float32, one value or [N].
        bias: [N] in the dtype of ``x``, or ``None``.

    Returns:
        [M, N] in the dtype of ``x``.

    Raises:
        ConfigError: there is no ``activation_scale``: a weight-only layer, which these kernels do not multiply.
        FormatError: an operand breaks these rules.
    """
    if activation_scale is None:
        raise ConfigError(
            bad_value("activation_scale", None, "these kernels multiply quantized activations; use torch_reference")
        )
    m, k = x.shape
    if m <= _MOST_QUANTIZED_INSIDE and _quantizes_inside(x.device, m, weight.shape[0], k):
        return _linear_in_one_launch(x, weight, weight_scale, activation_scale, alpha, bias)
    packed, scales = quantize(x, activation_scale, True)
    return gemm(packed, weight, scales, weight_scale, alpha, bias, x.dtype)


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
            pass a view of a padded buffer (``layout.align_rows``).
        a_scale: block scales of ``a`` in the 128x4 swizzle.
        b_scale: block scales of ``b`` likewise.
        alpha: float32, one value or one per output column.
        bias: ``[N]`` of ``out_dtype``, or None.
        out_dtype: bfloat16 or float16.
        dependent_launch: start while the kernel in front still runs and fetch weights meanwhile, where the card can.
            The weight, its scales and nothing else are read early.

    Raises:
        FormatError: an operand breaks these rules.
        UnsupportedError: the kernels cannot be compiled or loaded here.
    """
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    library, can_depend = _library(a.device)
    try:
        library.nvfp4_gemm(a, a_scale, b, b_scale, alpha, bias, out, dependent_launch and can_depend, 0)
    except ValueError as error:
        raise FormatError(str(error)) from error
    return out


def quantize(
    x: torch.Tensor, global_scale: torch.Tensor, swizzled: bool, *, exact: bool = False, dependent_launch: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to NVFP4; every byte of the padded scale buffer is written.

    Args:
        x: bfloat16 or float16 ``[M, K]``; copied first where its rows do not start at multiples of 16 bytes.
        global_scale: float32 scalar on the GPU, the encode scale.
        swizzled: scales in the 128x4 swizzle, else linear.
        exact: bit-equal to ``reference.quantize``; slow. The default rounds with approximate reciprocals, which can
            differ by one step within two ulp of a rounding boundary.
        dependent_launch: overlap the launch with the kernel in front, where the card can.

    Raises:
        FormatError: an operand breaks these rules.
        UnsupportedError: the kernels cannot be compiled or loaded here.
    """
    m, k = x.shape
    shape = layout.padded_scale_shape(m, k // 16) if swizzled else (m, k // 16)
    codes = torch.empty((m, k // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty(shape, dtype=torch.uint8, device=x.device)
    library, can_depend = _library(x.device)
    try:
        library.nvfp4_quantize(
            _with_aligned_rows(x), global_scale, codes, scales, swizzled, exact, dependent_launch and can_depend
        )
    except ValueError as error:
        raise FormatError(str(error)) from error
    return codes, scales


def _linear_in_one_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    activation_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    library, can_depend = _library(x.device)
    try:
        library.nvfp4_linear(
            _with_aligned_rows(x), activation_scale, weight, weight_scale, alpha, bias, out, can_depend, 0
        )
    except ValueError as error:
        raise FormatError(str(error)) from error
    return out


@cache
def _quantizes_inside(device: torch.device, m: int, n: int, k: int) -> bool:
    """Whether one launch is the choice for these sizes. Bounded: few token counts, and the layers of a model."""
    return bool(_library(device)[0].nvfp4_quantizes_inside(device.index or 0, m, n, k))


def _with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x``, or a copy where it is a view (of a wider tensor, say) whose rows the quantizer cannot read."""
    elements = _ROW_ALIGNMENT // x.element_size()
    rows_fit = x.shape[0] <= 1 or x.stride(0) % elements == 0
    if x.stride(1) == 1 and rows_fit and x.data_ptr() % _ROW_ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@cache
def _library(device: torch.device) -> tuple[Any, bool]:
    """The compiled library for the card that holds the operands, and whether that card has dependent launches."""
    if device.type != "cuda":
        raise FormatError(f"a.device={str(device)!r} cannot be used: these kernels need a CUDA device.")
    capability = torch.cuda.get_device_capability(device)
    return build.load(capability), capability >= _DEPENDENT_LAUNCH_SINCE
