"""The number formats of NVFP4 and the one rounding step of the oracle.

An NVFP4 tensor is a matrix of *e2m1* codes (1 sign, 2 exponent, 1 mantissa bit) in blocks of 16 along K, one
*ue4m3* scale byte per block and one float32 scale for the whole tensor. The real value of an element is
``e2m1 * ue4m3 * global decode scale``.

Sources: e2m1 is FP4 of the OCP Microscaling Formats (MX) Specification 1.0; e4m3 is the OCP 8-bit Floating
Point Specification (OFP8) 1.0; *ue4m3* is e4m3 with the sign bit zero, as PTX ISA defines it for
``mma...kind::mxf4nvf4``; the rounding of e2m1 follows ``cvt.rn.satfinite.e2m1x2.f32`` of PTX ISA.

Every function is total over the values of its input and looks at shapes and dtypes only, so none of them
makes the host wait for the GPU. Integer arithmetic decodes, not a table: a table on the GPU would be a copy
from the host, which CUDA graph capture does not allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_sm120.errors import FormatError, bad_value

BLOCK_SIZE = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
#: Magnitude of the e2m1 codes 0..7; bit 3 of a code is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The byte of a ue4m3 scale that means NaN.
UE4M3_NAN = 0x7F

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

#: Midpoint between the magnitudes of code i and code i + 1, and whether a value on it goes up. Nearest even
#: means the even *code*, which is up exactly where i is odd.
_E2M1_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


@dataclass(frozen=True)
class _Grid:
    """A binary floating-point format, seen as its non-negative codes in ascending order of value.

    Attributes:
        mantissa_bits: stored bits of the mantissa.
        min_exponent: exponent of the smallest normal number; subnormals share its spacing.
        max_code: where codes end: the largest finite number if the format saturates, else infinity.
    """

    mantissa_bits: int
    min_exponent: int
    max_code: int

    @property
    def ceiling(self) -> float:
        """A power of two that is certain to end at ``max_code``."""
        return 2.0 ** ((self.max_code >> self.mantissa_bits) + self.min_exponent)


_UE4M3 = _Grid(mantissa_bits=3, min_exponent=-6, max_code=0x7E)
_WIDE_GRIDS = {
    torch.bfloat16: _Grid(mantissa_bits=7, min_exponent=-126, max_code=0x7F80),
    torch.float16: _Grid(mantissa_bits=10, min_exponent=-14, max_code=0x7C00),
}


def require_tensor(
    name: str,
    tensor: torch.Tensor,
    dtypes: Sequence[torch.dtype],
    rank: int | None = None,
    device: torch.device | None = None,
) -> None:
    """Check what a kernel would have to assume about ``tensor``; its values are not read.

    Args:
        name: the argument's name in the caller's signature.
        tensor: the tensor to check.
        dtypes: the dtypes that are allowed.
        rank: the number of dimensions; ``None`` allows any.
        device: the device of the other operands; ``None`` allows any.

    Raises:
        FormatError: a dtype, rank or device that is not allowed, or a tensor that is not contiguous.
    """
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise FormatError(bad_value(f"{name}.dtype", tensor.dtype, f"pass one of {allowed}"))
    if rank is not None and tensor.dim() != rank:
        raise FormatError(bad_value(f"{name}.shape", tuple(tensor.shape), f"pass {rank} dimensions"))
    if device is not None and tensor.device != device:
        raise FormatError(bad_value(f"{name}.device", str(tensor.device), f"move it to {device}"))
    if not tensor.is_contiguous():
        raise FormatError(bad_value(f"{name}.stride()", tensor.stride(), "call .contiguous() on it first"))


def _nearest_code(value: torch.Tensor, grid: _Grid) -> torch.Tensor:
    """Round ``abs(value)`` (float64) to the nearest code of ``grid``, ties to the even code.

    The codes of one exponent are equally spaced, and the largest mantissa plus one is the next exponent's
    first code, so the code is (number of steps) + (exponents passed) * (codes per exponent). The number of
    steps is exact before the only rounding, because the spacing is a power of two. NaN comes out as
    ``max_code``.
    """
    magnitude = value.abs()
    magnitude = torch.where(magnitude < grid.ceiling, magnitude, grid.ceiling)
    exponent = ((magnitude.view(torch.int64) >> 52) - 1023).clamp(min=grid.min_exponent)
    # A float64 with this bit pattern is 2**(mantissa_bits - exponent) exactly; torch.exp2 and torch.ldexp
    # promise less.
    steps_per_unit = ((grid.mantissa_bits - exponent + 1023) << 52).view(torch.float64)
    steps = torch.round(magnitude * steps_per_unit).to(torch.int64)
    code = steps + ((exponent - grid.min_exponent) << grid.mantissa_bits)
    return code.clamp(max=grid.max_code)


def round_float64(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 to ``dtype`` once, to nearest even; overflow gives infinity, NaN stays NaN.

    ``Tensor.to`` goes from float64 to bfloat16 and float16 through float32 and so rounds twice: ``1 + 2**-8 +
    2**-40`` becomes the bfloat16 number 1, not ``1 + 2**-7``.

    Args:
        value: float64, any shape.
        dtype: bfloat16, float16, float32 or float64.

    Raises:
        FormatError: another dtype, or a tensor that is not contiguous.
    """
    require_tensor("value", value, (torch.float64,))
    if dtype not in FLOAT_DTYPES:
        raise FormatError(bad_value("dtype", dtype, "use bfloat16, float16, float32 or float64"))
    if dtype not in _WIDE_GRIDS:
        return value.to(dtype)
    code = _nearest_code(value, _WIDE_GRIDS[dtype])
    # Two's complement: subtracting 2**15 sets the sign bit of an int16.
    bits = torch.where(torch.signbit(value), code - 0x8000, code).to(torch.int16)
    return bits.view(dtype).masked_fill(value.isnan(), torch.nan)


def nearest_e2m1_code(numerator: torch.Tensor, denominator: torch.Tensor | float) -> torch.Tensor:
    """Return the e2m1 code nearest to ``numerator / denominator``, without dividing.

    The quotient lies above a midpoint exactly if the numerator lies above midpoint * denominator. That
    product is exact in float64 for a denominator of up to 50 bits, so nothing is rounded here except the
    result.

    Args:
        numerator: float64, any shape.
        denominator: float64 that broadcasts to it, greater than zero.

    Returns:
        uint8 codes, as :func:`encode_e2m1` describes them.
    """
    magnitude = numerator.abs()
    code = torch.zeros_like(numerator, dtype=torch.uint8)
    for midpoint, tie_goes_up in _E2M1_MIDPOINTS:
        boundary = midpoint * denominator
        code += (magnitude >= boundary) if tie_goes_up else (magnitude > boundary)
    code += torch.signbit(numerator).to(torch.uint8) << 3
    return code.masked_fill(numerator.isnan(), 7)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to e2m1 as ``cvt.rn.satfinite.e2m1x2`` does.

    To nearest, ties to the even code; above 6 and infinity give 6; NaN of either sign gives +6 (code 7),
    because e2m1 has no NaN. The sign is kept even where the magnitude becomes zero: -0.0 and -0.2 give code
    8.

    Args:
        x: any shape; bfloat16, float16, float32 or float64.

    Returns:
        uint8 codes 0..15, same shape.

    Raises:
        FormatError: another dtype, or a tensor that is not contiguous.
    """
    require_tensor("x", x, FLOAT_DTYPES)
    return nearest_e2m1_code(x.to(torch.float64), 1.0)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the value of every e2m1 code; code 8 is -0.0.

    Args:
        codes: uint8, any shape. Only the low four bits are read.
        dtype: bfloat16, float16, float32 or float64; e2m1 is exact in each.

    Raises:
        FormatError: a dtype that is not allowed, or a tensor that is not contiguous.
    """
    require_tensor("codes", codes, (torch.uint8,))
    if dtype not in FLOAT_DTYPES:
        raise FormatError(bad_value("dtype", dtype, "use bfloat16, float16, float32 or float64"))
    low = (codes & 7).to(torch.int64)
    # In halves: codes 0 and 1 are themselves, the others (2 + mantissa) << (exponent - 1).
    halves = torch.where(low < 2, low, (2 + (low & 1)) << (low >> 1) >> 1)
    magnitude = halves.to(dtype) / 2
    return torch.where((codes & 8) != 0, -magnitude, magnitude)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes ``[..., K]`` into bytes ``[..., K / 2]``; the low nibble holds the even k.

    That order is the one of ``mma.m16n8k64`` (PTX ISA: lower k in the lower bits) and of every NVFP4
    checkpoint.

    Args:
        codes: uint8, at least one dimension, K even. Only the low four bits are read.

    Raises:
        FormatError: another dtype, no dimension, odd K, or a tensor that is not contiguous.
    """
    require_tensor("codes", codes, (torch.uint8,))
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise FormatError(bad_value("codes.shape", tuple(codes.shape), "make the last dimension even"))
    return (codes[..., 0::2] & 0xF) | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Undo :func:`pack_e2m1`: bytes ``[..., K / 2]`` to uint8 codes ``[..., K]``.

    Raises:
        FormatError: a dtype other than uint8, no dimension, or a tensor that is not contiguous.
    """
    require_tensor("packed", packed, (torch.uint8,))
    if packed.dim() == 0:
        raise FormatError(bad_value("packed.shape", (), "pass at least one dimension"))
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode_ue4m3(x: torch.Tensor) -> torch.Tensor:
    """Round a block scale to ue4m3: to nearest even, saturating at 448, subnormals down to 2**-9.

    NaN gives 0x7F, the NaN of the format. So does a negative number, for which there is no code; -0.0 gives
    zero.

    Args:
        x: any shape; bfloat16, float16, float32 or float64.

    Returns:
        uint8, same shape; the sign bit is never set.

    Raises:
        FormatError: another dtype, or a tensor that is not contiguous.
    """
    require_tensor("x", x, FLOAT_DTYPES)
    value = x.to(torch.float64)
    code = _nearest_code(value, _UE4M3).to(torch.uint8)
    return code.masked_fill(value.isnan() | (value < 0), UE4M3_NAN)


def decode_ue4m3(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Return the float64 value of every ue4m3 byte.

    0x7F is NaN. Bytes with the sign bit set are no legal scale; they give NaN too, so that a buffer of
    anything else than scales cannot look like a sensible result.

    Args:
        scale_bytes: uint8 or float8_e4m3fn (read as bytes), any shape.

    Raises:
        FormatError: another dtype, or a tensor that is not contiguous.
    """
    require_tensor("scale_bytes", scale_bytes, (torch.uint8, torch.float8_e4m3fn))
    code = scale_bytes.view(torch.uint8).to(torch.int64)
    exponent, mantissa = code >> 3, code & 7
    # In units of the smallest subnormal, 2**-9. The clamp keeps the shift legal where its result is not used.
    units = torch.where(exponent == 0, mantissa, (8 + mantissa) << (exponent - 1).clamp(0, 14))
    return (units.to(torch.float64) * 2.0**-9).masked_fill(code >= UE4M3_NAN, torch.nan)
