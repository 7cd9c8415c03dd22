"""Every code, and every rounding decision of e2m1, ue4m3, bfloat16 and float16, against rational numbers."""

from __future__ import annotations

from fractions import Fraction
from math import copysign, inf, isinf, isnan, nan

import pytest
import torch

from sglang_sm120.formats import (
    E2M1_MAGNITUDES,
    decode_e2m1,
    decode_ue4m3,
    encode_e2m1,
    encode_ue4m3,
    pack_e2m1,
    round_float64,
    unpack_e2m1,
)
from tests.support import exact
from tests.support.compare import first_difference

ALL_16_BIT_PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


def neighbours(values: torch.Tensor) -> torch.Tensor:
    """Return the float64 numbers just below, at and just above every value."""
    below = torch.nextafter(values, torch.full_like(values, -inf))
    above = torch.nextafter(values, torch.full_like(values, inf))
    return torch.stack((below, values, above), dim=-1).flatten()


def expected_e2m1(x: float) -> int:
    if isnan(x):
        return 7
    negative = copysign(1.0, x) < 0
    return (15 if negative else 7) if isinf(x) else exact.e2m1_code(Fraction(x), negative)


def expected_ue4m3(x: float) -> int:
    if isnan(x) or x < 0:
        return exact.NAN_BYTE
    return 0x7E if isinf(x) else exact.nearest_index(Fraction(x), exact.UE4M3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_e2m1_of_every_16_bit_number_is_the_nearest_code(device: torch.device, dtype: torch.dtype) -> None:
    x = ALL_16_BIT_PATTERNS.view(dtype)
    expected = [expected_e2m1(value) for value in x.to(torch.float64).tolist()]
    assert first_difference(encode_e2m1(x.to(device)).tolist(), expected) is None


def test_e2m1_rounds_right_beside_every_midpoint(device: torch.device) -> None:
    # Written out, not computed: these are the decisions that implementations get wrong.
    ties = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}
    for dtype in (torch.float64, torch.float32):
        points = torch.tensor(list(ties), dtype=dtype, device=device)
        assert encode_e2m1(points).tolist() == list(ties.values())
        assert encode_e2m1(-points).tolist() == [code + 8 for code in ties.values()]
        below = torch.nextafter(points, torch.zeros_like(points))
        above = torch.nextafter(points, torch.full_like(points, inf))
        assert encode_e2m1(below).tolist() == list(range(7))
        assert encode_e2m1(above).tolist() == list(range(1, 8))


def test_e2m1_saturates_drops_nan_and_keeps_the_sign_of_zero(device: torch.device) -> None:
    x = torch.tensor([6.1, 1e30, inf, -inf, nan, -nan, 0.0, -0.0, -0.2, 5e-324], dtype=torch.float64)
    assert encode_e2m1(x.to(device)).tolist() == [7, 7, 7, 15, 7, 7, 0, 8, 8, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_e2m1_codes_have_their_values_in_every_dtype(device: torch.device, dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    decoded = decode_e2m1(codes, dtype)
    assert decoded.dtype == dtype
    assert decoded.tolist() == [float(exact.e2m1_value(code)) for code in range(16)]
    assert torch.signbit(decoded).tolist() == [code >= 8 for code in range(16)]
    assert decoded[:8].tolist() == list(E2M1_MAGNITUDES)
    assert torch.equal(encode_e2m1(decoded), codes)


def test_the_low_nibble_is_the_even_k(device: torch.device) -> None:
    codes = torch.tensor([[1, 2, 3, 4], [15, 0, 0, 15]], dtype=torch.uint8, device=device)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [[0x21, 0x43], [0x0F, 0xF0]]
    assert torch.equal(unpack_e2m1(packed), codes)


def test_unpack_undoes_pack_for_every_byte_and_rank(device: torch.device) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    for shape in ((256,), (4, 64), (2, 2, 64), (0, 8)):
        packed = every_byte[: torch.Size(shape).numel()].view(shape)
        assert torch.equal(pack_e2m1(unpack_e2m1(packed)), packed)


def test_every_scale_byte_has_its_value_or_is_nan(device: torch.device) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8, device=device)
    decoded = decode_ue4m3(every_byte).tolist()
    assert decoded[:0x7F] == [float(value) for value in exact.UE4M3]
    assert all(isnan(value) for value in decoded[0x7F:])
    as_float8 = decode_ue4m3(every_byte.view(torch.float8_e4m3fn)).tolist()
    assert as_float8[:0x7F] == decoded[:0x7F]
    # torch's own float8 agrees wherever the byte is a legal scale
    assert every_byte[:0x7F].view(torch.float8_e4m3fn).to(torch.float64).tolist() == decoded[:0x7F]


def test_ue4m3_rounds_right_beside_every_value_and_midpoint(device: torch.device) -> None:
    values = torch.tensor([float(value) for value in exact.UE4M3], dtype=torch.float64)
    points = neighbours(torch.cat((values[1:], (values[1:] + values[:-1]) / 2)))
    expected = [expected_ue4m3(value) for value in points.tolist()]
    assert first_difference(encode_ue4m3(points.to(device)).tolist(), expected) is None


def test_ue4m3_saturates_and_maps_what_is_no_scale_to_nan(device: torch.device) -> None:
    x = torch.tensor(
        [448.1, 464.0, 480.0, 1e300, inf, nan, -1.0, -1e-300, -inf, 0.0, -0.0, 2.0**-10, 5e-324],
        dtype=torch.float64,
        device=device,
    )
    assert encode_ue4m3(x).tolist() == [0x7E] * 5 + [0x7F] * 4 + [0, 0, 0, 0]


def test_ue4m3_does_not_round_through_float32(device: torch.device) -> None:
    # A float32 detour turns "just above a tie" into the tie, which then goes down to the even code.
    above_tie = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64, device=device)
    assert encode_ue4m3(above_tie).tolist() == [0x39]
    assert encode_ue4m3(above_tie.to(torch.float32)).tolist() == [0x38]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_is_rounded_once_beside_every_number_and_midpoint(device: torch.device, dtype: torch.dtype) -> None:
    patterns = torch.arange(2**15, dtype=torch.int16, device=device).view(dtype)
    finite = patterns[torch.isfinite(patterns)]
    values = finite.to(torch.float64)
    # The next spacing above the largest number is where rounding to infinity begins.
    midpoints = values + torch.diff(values, append=2 * values[-1:] - values[-2:-1]) / 2
    up = torch.cat((finite[1:], torch.full_like(finite[:1], inf)))
    even_is_up = torch.arange(finite.numel(), device=device) % 2 == 1
    expected = torch.stack((finite, torch.where(even_is_up, up, finite), up), dim=-1).flatten()
    points = neighbours(midpoints)
    assert torch.equal(round_float64(points, dtype), expected)
    assert torch.equal(round_float64(-points, dtype), -expected)
    around = round_float64(neighbours(values), dtype).view(-1, 3)
    assert torch.equal(around, finite.unsqueeze(-1).expand(-1, 3))


def test_float64_rounding_agrees_with_rational_numbers(device: torch.device, generator: torch.Generator) -> None:
    exponents = torch.exp2(torch.randint(-160, 125, (4000,), generator=generator).to(torch.float64))
    x = torch.randn(4000, dtype=torch.float64, generator=generator) * exponents
    # a third of them a hair beside a bfloat16 tie, another third beside a float16 tie
    x[0::3] = (torch.randint(128, 256, (1334,), generator=generator) + 0.5 + 2.0**-30) * exponents[0::3]
    x[1::3] = (torch.randint(1024, 2048, (1333,), generator=generator) + 0.5 - 2.0**-30) * exponents[1::3]
    for dtype, rounding in ((torch.bfloat16, exact.to_bfloat16), (torch.float16, exact.to_float16)):
        got = round_float64(x.to(device), dtype).to(torch.float64).tolist()
        assert got == [rounding(Fraction(value)) for value in x.tolist()]


def test_float64_rounding_keeps_nan_infinity_and_the_sign_of_zero(device: torch.device) -> None:
    x = torch.tensor([nan, inf, -inf, 1e300, -1e300, -0.0, -1e-300], dtype=torch.float64, device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rounded = round_float64(x, dtype)
        assert rounded.dtype == dtype
        assert rounded[0].isnan()
        assert rounded[1:].tolist() == [inf, -inf, inf, -inf, 0.0, 0.0]
        assert torch.signbit(rounded[5:]).all()
    assert torch.equal(round_float64(x[1:], torch.float64), x[1:])
