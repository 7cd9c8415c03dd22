"""Quantizing: every byte against rational numbers, ties, extreme blocks, NaN and infinity."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan

import pytest
import torch

from sglang_sm120 import reference
from sglang_sm120.errors import FormatError
from sglang_sm120.formats import unpack_e2m1
from sglang_sm120.layout import ScaleLayout, padded_scale_shape, swizzle_128x4
from sglang_sm120.scales import encode_scale_from_amax
from tests.support import exact
from tests.support.compare import first_difference
from tests.support.nvfp4 import assert_same_bytes, random_activation

LINEAR = ScaleLayout.LINEAR


def quantize_exactly(x: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes ``[M, K]`` and scale bytes ``[M, K / 16]`` by rational arithmetic."""
    codes: list[list[int]] = []
    scales: list[list[int]] = []
    for row in x.to(torch.float64).tolist():
        blocks = [exact.quantize_block(row[k : k + 16], global_scale) for k in range(0, len(row), 16)]
        scales.append([byte for byte, _ in blocks])
        codes.append([code for _, block_codes in blocks for code in block_codes])
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(scales, dtype=torch.uint8)


def assert_quantized_exactly(x: torch.Tensor, global_scale: float, device: torch.device) -> None:
    """Assert that codes and scales are the ones of rational arithmetic."""
    encode = torch.tensor(global_scale, dtype=torch.float32)
    packed, scales = reference.quantize(x.to(device), encode.to(device), LINEAR)
    expected_codes, expected_scales = quantize_exactly(x, float(encode))
    assert_same_bytes(scales.cpu(), expected_scales)
    assert_same_bytes(unpack_e2m1(packed.cpu()), expected_codes)
    # not through unpack_e2m1: a wrong nibble order must not cancel out
    assert_same_bytes(packed.cpu(), expected_codes[:, 0::2] + 16 * expected_codes[:, 1::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_rows_are_quantized_exactly(
    dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    x = random_activation(12, 96, dtype, generator)
    for amax in (float(x.abs().amax()), 0.37, 11.1, 900.0):
        assert_quantized_exactly(x, 2688 / amax, device)


def test_one_block_of_every_scale_with_every_tie(device: torch.device) -> None:
    scales = [float(value) for value in exact.UE4M3[1:]]
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    rows = [[6 * s, *(m * s for m in midpoints), *(-m * s for m in midpoints), -0.0] for s in scales]
    x = torch.tensor(rows, dtype=torch.float64).to(torch.float32)
    packed, scale_bytes = reference.quantize(x.to(device), torch.tensor(1.0, device=device), LINEAR)
    assert first_difference(scale_bytes.flatten().tolist(), range(1, 0x7F)) is None
    ties = [0, 2, 2, 4, 4, 6, 6]
    expected = [7, *ties, *(code + 8 for code in ties), 8]
    assert first_difference(unpack_e2m1(packed).tolist(), [expected] * len(scales)) is None


def test_every_tie_of_the_block_scale_goes_to_the_even_byte(device: torch.device) -> None:
    ties = [(low + high) / 2 for low, high in zip(exact.UE4M3, exact.UE4M3[1:], strict=False)]
    x = torch.zeros(len(ties), 16, dtype=torch.float32)
    x[:, 5] = torch.tensor([float(6 * tie) for tie in ties])
    for scaled_up in (1.0, 2.0**40):
        encode = torch.tensor(1 / scaled_up, device=device)
        _, scale_bytes = reference.quantize((x * scaled_up).to(device), encode, LINEAR)
        expected = [byte + byte % 2 for byte in range(len(ties))]
        assert first_difference(scale_bytes.flatten().tolist(), expected) is None


def test_the_block_scale_is_decided_on_the_exact_product(device: torch.device, generator: torch.Generator) -> None:
    # amax is the float32 nearest to 6 * tie / global scale, so that a product rounded to float32 often *is* the
    # tie. One power of two has all mantissas of a scale; many global scales make the test sure to be sharp.
    ties = torch.tensor([float((exact.UE4M3[byte] + exact.UE4M3[byte + 1]) / 2) for byte in range(56, 64)])
    careless: list[int] = []
    right: list[int] = []
    for encode in (torch.rand(24, generator=generator) + 1).tolist():
        x = torch.zeros(ties.numel(), 16, dtype=torch.float32)
        x[:, 0] = (6 * ties.to(torch.float64) / encode).to(torch.float32)
        assert_quantized_exactly(x, encode, device)
        rounded_early = (x[:, 0] * torch.tensor(encode)).tolist()
        careless += [exact.nearest_index(Fraction(product) / 6, exact.UE4M3) for product in rounded_early]
        right += quantize_exactly(x, encode)[1].flatten().tolist()
    assert careless != right, "the data does not tell the two apart"


def test_codes_are_decided_on_the_exact_product(device: torch.device, generator: torch.Generator) -> None:
    encode = float(torch.rand((), generator=generator) + 1)
    x = torch.zeros(300, 16, dtype=torch.float32)
    x[:, 0] = torch.rand(300, generator=generator) * 100 + 1
    _, scale_bytes = quantize_exactly(x, encode)
    scales = torch.tensor([float(exact.UE4M3[byte]) for byte in scale_bytes.flatten().tolist()])
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
    x[:, 1:8] = (scales.to(torch.float64).unsqueeze(1) * midpoints / encode).to(torch.float32)
    x[:, 8:15] = -x[:, 1:8]
    assert_quantized_exactly(x, encode, device)


def test_an_all_zero_tensor_is_all_zero_bytes(device: torch.device) -> None:
    x = torch.zeros(3, 48, dtype=torch.bfloat16, device=device)
    x[1] = -0.0
    packed, scales = reference.quantize(x, encode_scale_from_amax(x.abs().amax()))
    assert not packed.any()
    assert not scales.any()


def test_a_block_whose_scale_rounds_to_zero_is_all_zero_bytes(device: torch.device) -> None:
    # 6 * 2**-10 is the tie between scale 0 and the smallest subnormal; it goes to 0
    x = torch.full((2, 16), -6 * 2.0**-10, dtype=torch.float32, device=device)
    x[1] *= 1.01
    packed, scales = reference.quantize(x, torch.tensor(1.0, device=device), LINEAR)
    assert scales.tolist() == [[0], [1]]
    assert not packed[0].any()
    assert (packed[1] != 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_extreme_blocks_are_quantized_exactly(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.zeros(6, 32, dtype=torch.float32)
    x[0, ::2] = 1e-40  # subnormal in float32 and bfloat16
    x[1, :16] = 1e30
    x[2, 16:] = -1e30
    x[3] = torch.linspace(-2688, 2688, 32)
    x[4] = torch.logspace(-38, 38, 32)
    x[5, 7] = 3e38
    for encode in (1.0, 1e-30, 2.0**63, 2688 / 1e30):
        assert_quantized_exactly(x.to(dtype), encode, device)


def test_the_largest_element_gets_the_largest_scale_and_code(device: torch.device) -> None:
    x = torch.full((1, 16), 0.125, dtype=torch.bfloat16, device=device)
    x[0, 3] = -336.0
    packed, scales = reference.quantize(x, encode_scale_from_amax(x.abs().amax()), LINEAR)
    assert scales.tolist() == [[0x7E]]
    assert unpack_e2m1(packed)[0, 3] == 15
    # saturation: a global scale that is too large by 100
    packed, scales = reference.quantize(x, torch.tensor(800.0, device=device), LINEAR)
    assert scales.tolist() == [[0x7E]]
    assert unpack_e2m1(packed)[0, 3] == 15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_and_infinity_follow_the_documented_rule(dtype: torch.dtype, device: torch.device) -> None:
    x = torch.linspace(-3, 3, 64).view(4, 16).to(dtype)
    x[0, 2] = nan
    x[1, 3], x[1, 4] = inf, -inf
    x[2] = nan
    x[3, 0], x[3, 1], x[3, 2] = nan, -inf, -nan
    assert_quantized_exactly(x, 100.0, device)
    packed, scales = reference.quantize(x.to(device), torch.tensor(100.0, device=device), LINEAR)
    codes = unpack_e2m1(packed)
    assert codes[0, 2] == 7
    assert codes[1, 3:5].tolist() == [7, 15]
    assert scales.flatten().tolist()[1:] == [0x7E, 0x7F, 0x7E]
    assert codes[3, :3].tolist() == [7, 15, 7]


def test_a_nan_changes_nothing_but_its_own_element(device: torch.device, generator: torch.Generator) -> None:
    x = random_activation(1, 32, torch.bfloat16, generator, device)
    x[0, 5] = 0.0
    encode = torch.tensor(300.0, device=device)
    clean, clean_scales = reference.quantize(x, encode)
    x[0, 5] = nan
    dirty, dirty_scales = reference.quantize(x, encode)
    assert torch.equal(clean_scales, dirty_scales)
    assert (unpack_e2m1(clean) != unpack_e2m1(dirty)).nonzero().tolist() == [[0, 5]]


def test_find_nonfinite_names_row_and_column(device: torch.device) -> None:
    x = torch.zeros(3, 16, dtype=torch.bfloat16, device=device)
    reference.find_nonfinite(x)
    reference.find_nonfinite(x[:0])
    for bad in (nan, inf, -inf):
        x[1, 9], x[2, 1], x[2, 3] = bad, bad, bad
        with pytest.raises(FormatError, match=r"x\[1, 9\]=.*3 elements"):
            reference.find_nonfinite(x)


@pytest.mark.parametrize("k", [16, 48, 3696])
@pytest.mark.parametrize("m", [0, 1, 129])
def test_swizzled_scales_are_the_linear_ones_with_zero_padding(
    m: int, k: int, device: torch.device, generator: torch.Generator
) -> None:
    x = random_activation(m, k, torch.bfloat16, generator, device)
    encode = torch.tensor(50.0, device=device)
    packed, linear = reference.quantize(x, encode, LINEAR)
    packed_again, swizzled = reference.quantize(x, encode)
    assert packed.shape == (m, k // 2)
    assert linear.shape == (m, k // 16)
    assert tuple(swizzled.shape) == padded_scale_shape(m, k // 16)
    assert torch.equal(packed, packed_again)
    assert torch.equal(swizzled, swizzle_128x4(linear))


def test_dequantized_values_are_code_times_scale_times_global(device: torch.device, generator: torch.Generator) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    packed = torch.randint(0, 256, (256, 8), dtype=torch.uint8, generator=generator)
    decode = torch.rand((), generator=generator)
    got = reference.dequantize(packed.to(device), every_byte.to(device), decode.to(device), LINEAR, 256, 16)
    for byte in range(0x7F):
        codes = [code for both in packed[byte].tolist() for code in (both & 15, both >> 4)]
        values = [exact.e2m1_value(code) * exact.UE4M3[byte] * Fraction(float(decode)) for code in codes]
        assert got[byte].tolist() == [float(value) for value in values]
    assert got[0x7F:].isnan().all()


def test_dequantize_reads_both_layouts_and_a_part_of_a_padded_weight(
    device: torch.device, generator: torch.Generator
) -> None:
    packed = torch.randint(0, 256, (160, 48), dtype=torch.uint8, generator=generator).to(device)
    linear = torch.randint(0, 0x7F, (160, 6), dtype=torch.uint8, generator=generator).to(device)
    decode = torch.tensor(2.0, device=device)
    whole = reference.dequantize(packed, linear, decode, LINEAR, 160, 96)
    for scales, layout in ((linear, LINEAR), (swizzle_128x4(linear), ScaleLayout.SWIZZLE_128X4)):
        for as_dtype in (scales, scales.view(torch.float8_e4m3fn)):
            part = reference.dequantize(packed, as_dtype, decode, layout, 131, 80)
            assert torch.equal(part, whole[:131, :80])
