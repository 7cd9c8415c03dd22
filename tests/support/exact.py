"""NVFP4 by definition, in rational numbers: slow, short, and sharing nothing with the package.

Values are ``fractions.Fraction``; rounding is a search over all codes for the nearest one, the even code on a
tie.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from math import inf, isinf, isnan

E2M1 = [Fraction(half, 2) for half in (0, 1, 2, 3, 4, 6, 8, 12)]
#: Bytes 0x00..0x7E; 0x7F is NaN.
UE4M3 = [
    Fraction(byte & 7, 512) if byte < 8 else Fraction(8 + (byte & 7), 8) * Fraction(2) ** ((byte >> 3) - 7)
    for byte in range(0x7F)
]
NAN_BYTE = 0x7F


def nearest_index(value: Fraction, ascending: Sequence[Fraction]) -> int:
    """Return the index of the nearest member; on a tie the even index; beyond the end the last."""
    above = bisect_left(ascending, value)
    candidates = [index for index in (above - 1, above) if 0 <= index < len(ascending)]
    return min(candidates, key=lambda index: (abs(ascending[index] - value), index % 2))


def e2m1_code(value: Fraction, negative: bool) -> int:
    """Return the e2m1 code of ``abs(value)`` with the given sign."""
    return nearest_index(abs(value), E2M1) | (8 if negative else 0)


def e2m1_value(code: int) -> Fraction:
    """Return the value of a code 0..15; -0 and 0 are the same rational number."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def round_to_binary(value: Fraction, precision: int, min_exponent: int, max_exponent: int) -> float:
    """Round to a binary format of ``precision`` significant bits, nearest even, overflow to infinity."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    step = Fraction(2) ** (max(exponent, min_exponent) - precision + 1)
    rounded = round(magnitude / step) * step  # Python rounds a Fraction half to even
    result = inf if rounded >= Fraction(2) ** (max_exponent + 1) else float(rounded)
    return -result if value < 0 else result


def to_bfloat16(value: Fraction) -> float:
    """Round once to bfloat16."""
    return round_to_binary(value, precision=8, min_exponent=-126, max_exponent=127)


def to_float16(value: Fraction) -> float:
    """Round once to float16."""
    return round_to_binary(value, precision=11, min_exponent=-14, max_exponent=15)


def to_float32(value: Fraction) -> float:
    """Round once to float32."""
    return round_to_binary(value, precision=24, min_exponent=-126, max_exponent=127)


def quantize_block(block: Sequence[float], global_scale: float) -> tuple[int, list[int]]:
    """Return the scale byte and the codes of one block, by the rule in ``reference.quantize``."""
    numbers = [abs(x) for x in block if not isnan(x)]
    if not numbers:
        return NAN_BYTE, [7] * len(block)
    amax = max(numbers)
    encode = Fraction(global_scale)
    byte = 0x7E if isinf(amax) else nearest_index(encode * Fraction(amax) / 6, UE4M3)
    if byte == 0:
        return 0, [0] * len(block)
    return byte, [_code(x, encode / UE4M3[byte]) for x in block]


def _code(x: float, multiplier: Fraction) -> int:
    if isnan(x):
        return 7
    if isinf(x):
        return 15 if x < 0 else 7
    negative = x < 0 or str(x) == "-0.0"
    return e2m1_code(Fraction(x) * multiplier, negative)


def dequantize_block(byte: int, codes: Sequence[int]) -> list[Fraction]:
    """Return ``e2m1 * ue4m3`` of one block; the byte must be a legal scale."""
    return [e2m1_value(code) * UE4M3[byte] for code in codes]
