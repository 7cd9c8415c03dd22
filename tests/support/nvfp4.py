"""Random NVFP4 data and the comparisons that every test of a backend uses.

A comparison fails with the place of the worst element, because "max error 0.3" does not say whether a row, a
column or a tile is wrong.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from sglang_sm120 import reference
from sglang_sm120.layout import ScaleLayout, swizzle_128x4

#: Relative rounding error of one operation that rounds to the dtype.
_UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
#: A tensor core shifts all addends to the exponent of the largest and cuts off what falls out of 24 bits.
_TENSOR_CORE_ROUNDOFF = 2.0**-23


@dataclass(frozen=True)
class Nvfp4Weight:
    """A random weight as a loaded layer holds it.

    Attributes:
        packed: uint8 ``[n, k / 2]``.
        linear_scales: uint8 ``[n, k / 16]``.
        scales: the same, swizzled 128x4.
        global_decode_scale: float32 scalar.
    """

    packed: torch.Tensor
    linear_scales: torch.Tensor
    scales: torch.Tensor
    global_decode_scale: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """Return the real weight, float64 ``[n, k]``."""
        n, half_k = self.packed.shape
        return reference.dequantize(
            self.packed, self.linear_scales, self.global_decode_scale, ScaleLayout.LINEAR, n, 2 * half_k
        )


def fresh_generator() -> torch.Generator:
    """Return a CPU generator with a new seed, printed so that pytest shows it with a failure.

    ``TEST_SEED`` in the environment repeats a run.
    """
    seed = int(os.environ.get("TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"TEST_SEED={seed}")
    return torch.Generator().manual_seed(seed)


def random_nvfp4_weight(n: int, k: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Nvfp4Weight:
    """Return a weight of uniformly random codes and block scales from 2**-4 to 30, one in 16 of them zero."""
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    linear = torch.randint(0x18, 0x60, (n, k // 16), dtype=torch.uint8, generator=generator)
    linear.masked_fill_(torch.rand(n, k // 16, generator=generator) < 1 / 16, 0)
    decode = torch.rand((), generator=generator) * 1e-3 + 1e-4
    linear = linear.to(device)
    return Nvfp4Weight(packed.to(device), linear, swizzle_128x4(linear), decode.to(device))


def random_activation(
    m: int,
    k: int,
    dtype: torch.dtype,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return ``[m, k]`` normal random numbers; rows differ in size by up to 2**6, as those of activations do."""
    row_size = torch.exp2(torch.rand(m, 1, generator=generator) * 6 - 3)
    return (torch.randn(m, k, generator=generator) * row_size).to(dtype).to(device)


def float32_gemm_bound(
    a_packed: torch.Tensor,
    b_packed: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    alpha: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    a_layout: ScaleLayout = ScaleLayout.SWIZZLE_128X4,
    b_layout: ScaleLayout = ScaleLayout.SWIZZLE_128X4,
    n: int | None = None,
    k: int | None = None,
) -> torch.Tensor:
    """Return how far a right kernel with float32 accumulators may be from ``reference.gemm(..., float64)``.

    Takes the arguments of :func:`reference.gemm`. Let T be the sum of the products' magnitudes. Every product
    is exact in float32 (12 bits), so the errors are:

    1. sums: K products in any order and grouping are at most 2 K additions (a split or a tile adds its part
    once more), each wrong by
       at most 2**-23 of a partial sum, and no partial sum exceeds T;
    2. the epilogue: alpha times the sum and plus the bias, 2**-24 each, doubled for an alpha that is itself a
       product;
    3. one rounding to ``out_dtype``, or half its smallest subnormal.

    Returns:
        float64 ``[M, n]``, for :func:`assert_matches_oracle`.
    """

    def exact(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, add: torch.Tensor | None) -> torch.Tensor:
        return reference.gemm(
            a,
            b,
            a_scales,
            b_scales,
            scale,
            torch.float64,
            add,
            a_layout=a_layout,
            b_layout=b_layout,
            n=n,
            k=k,
        )

    expected = exact(a_packed, b_packed, alpha, bias)
    no_sign = 0x77
    magnitude = exact(a_packed & no_sign, b_packed & no_sign, alpha.abs(), None)
    additions = 2 * (2 * a_packed.shape[1] if k is None else k)
    error = additions * _TENSOR_CORE_ROUNDOFF * magnitude
    epilogue = magnitude + (0.0 if bias is None else bias.to(torch.float64).abs())
    error += 4 * _UNIT_ROUNDOFF[torch.float32] * epilogue
    subnormal = torch.finfo(out_dtype).smallest_normal * torch.finfo(out_dtype).eps / 2
    return error + torch.clamp((expected.abs() + error) * _UNIT_ROUNDOFF[out_dtype], min=subnormal)


def assert_matches_oracle(out: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | float) -> None:
    """Assert that ``out`` is within ``bound`` of ``expected``, element by element.

    NaN and infinity first: NaN exactly where expected has it; an infinity only where the expected number,
    give or take the bound, does not fit into the dtype of ``out``.

    Args:
        out: what the implementation returned, any float dtype.
        expected: float64 before the last rounding, same shape.
        bound: the allowed absolute error, broadcastable to that shape.
    """
    assert out.shape == expected.shape, f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
    assert expected.dtype == torch.float64, "compare with the oracle's float64, not with a rounded copy"
    got = out.to(torch.float64)
    allowed = torch.as_tensor(bound, dtype=torch.float64, device=out.device).broadcast_to(got.shape)
    _assert_nowhere(got.isnan() & ~expected.isnan(), "NaN where the oracle has a number", got, expected)
    _assert_nowhere(~got.isnan() & expected.isnan(), "a number where the oracle has NaN", got, expected)
    largest = torch.finfo(out.dtype).max
    overflow_allowed = (expected.abs() + allowed > largest) & (expected.sign() == got.sign())
    _assert_nowhere(got.isinf() & ~overflow_allowed, "infinity where the oracle has a number", got, expected)

    compared = torch.isfinite(got)
    error = torch.where(compared, (got - expected).abs(), 0.0)
    wrong = compared & ~(error <= allowed)
    if wrong.any():
        excess = torch.where(wrong, error / allowed.clamp(min=1e-300), 0.0)
        where = _coordinate(int(excess.argmax()), got.shape)
        raise AssertionError(
            f"{int(wrong.sum())} of {got.numel()} elements are out of bound; worst at {where}: "
            f"got {float(got[where])!r}, expected {float(expected[where])!r}, "
            f"error {float(error[where]):.3g}, bound {float(allowed[where]):.3g}"
        )


def assert_same_bytes(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two byte tensors (packed codes or scales) are identical; say where they first differ."""
    assert out.shape == expected.shape, f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}"
    got, wanted = out.view(torch.uint8), expected.view(torch.uint8)
    different = got != wanted
    if different.any():
        where = _coordinate(int(different.to(torch.uint8).argmax()), got.shape)
        raise AssertionError(
            f"{int(different.sum())} of {got.numel()} bytes differ; first at {where}: "
            f"got {int(got[where]):#04x}, expected {int(wanted[where]):#04x}"
        )


def _assert_nowhere(bad: torch.Tensor, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    if bad.any():
        where = _coordinate(int(bad.to(torch.uint8).argmax()), bad.shape)
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} elements, first at {where}: "
            f"got {float(got[where])!r}, expected {float(expected[where])!r}"
        )


def _coordinate(flat: int, shape: torch.Size) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        place.append(flat % size)
        flat //= size
    return tuple(reversed(place))
