"""The GEMM oracle: against rational numbers, with odd shapes, padding, NaN scales, bias and one rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf, nan

import pytest
import torch

from sglang_sm120 import reference
from sglang_sm120.layout import ScaleLayout, swizzle_128x4, unswizzle_128x4
from tests.support import exact
from tests.support.nvfp4 import (
    assert_matches_oracle,
    assert_same_bytes,
    float32_gemm_bound,
    fresh_generator,
    random_activation,
    random_nvfp4_weight,
)

LINEAR = ScaleLayout.LINEAR
ROUNDINGS = {
    torch.bfloat16: exact.to_bfloat16,
    torch.float16: exact.to_float16,
    torch.float32: exact.to_float32,
}


@dataclass(frozen=True)
class Problem:
    """One GEMM. Scales are linear here; ``run`` swizzles them."""

    a_packed: torch.Tensor
    a_scales: torch.Tensor
    b_packed: torch.Tensor
    b_scales: torch.Tensor
    alpha: torch.Tensor
    bias: torch.Tensor | None = None

    def to(self, device: torch.device) -> Problem:
        return Problem(
            self.a_packed.to(device),
            self.a_scales.to(device),
            self.b_packed.to(device),
            self.b_scales.to(device),
            self.alpha.to(device),
            None if self.bias is None else self.bias.to(device),
        )

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        a_scales, b_scales = swizzle_128x4(self.a_scales), swizzle_128x4(self.b_scales)
        return self.a_packed, self.b_packed, a_scales, b_scales, self.alpha

    def run(self, out_dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return reference.gemm(*self.operands(), out_dtype, self.bias)

    def bound(self, out_dtype: torch.dtype) -> torch.Tensor:
        return float32_gemm_bound(*self.operands(), out_dtype, self.bias)


def random_problem(m: int, n: int, k: int, generator: torch.Generator) -> Problem:
    """Return a problem with one alpha per column and a bias."""
    a, b = random_nvfp4_weight(m, k, generator), random_nvfp4_weight(n, k, generator)
    alpha = torch.rand(n, generator=generator) * 1e-3 + 1e-4
    bias = torch.randn(n, generator=generator).to(torch.bfloat16)
    return Problem(a.packed, a.linear_scales, b.packed, b.linear_scales, alpha, bias)


def exact_rows(packed: torch.Tensor, scales: torch.Tensor) -> list[list[Fraction]]:
    rows = []
    for row, row_scales in zip(packed.tolist(), scales.tolist(), strict=True):
        codes = [code for byte in row for code in (byte & 15, byte >> 4)]
        blocks = [exact.dequantize_block(s, codes[16 * i : 16 * i + 16]) for i, s in enumerate(row_scales)]
        rows.append([value for block in blocks for value in block])
    return rows


def exact_gemm(problem: Problem) -> list[list[Fraction]]:
    """Return the real-number result."""
    a = exact_rows(problem.a_packed, problem.a_scales)
    b = exact_rows(problem.b_packed, problem.b_scales)
    alpha = [Fraction(value) for value in problem.alpha.tolist()]
    bias = [Fraction(0)] * len(b) if problem.bias is None else [Fraction(v) for v in problem.bias.tolist()]

    def element(row: list[Fraction], n: int) -> Fraction:
        return sum((x * y for x, y in zip(row, b[n], strict=True)), Fraction(0)) * alpha[n] + bias[n]

    return [[element(row, n) for n in range(len(b))] for row in a]


@pytest.mark.parametrize("out_dtype", list(ROUNDINGS))
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 16), (3, 5, 48), (2, 7, 80)])
def test_gemm_is_the_exact_result_rounded_once(
    m: int, n: int, k: int, out_dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> None:
    problem = random_problem(m, n, k, generator)
    expected = [[ROUNDINGS[out_dtype](value) for value in row] for row in exact_gemm(problem)]
    out = problem.to(device).run(out_dtype)
    assert out.dtype == out_dtype
    assert out.to(torch.float64).tolist() == expected


@pytest.mark.parametrize(("out_dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
def test_the_result_is_not_rounded_through_float32(out_dtype: torch.dtype, bits: int, device: torch.device) -> None:
    # 1 * 1 + 2**-k * 1 is a tie of the output; a bias of 2**-30 lifts it, but not in float32
    a = torch.zeros(1, 16, dtype=torch.uint8)
    a[0, 0], a[0, 8] = 0x02, 0x02  # code 2 is 1.0, once in each block
    problem = Problem(
        a_packed=a,
        a_scales=torch.tensor([[0x38, 0x38]], dtype=torch.uint8),
        b_packed=a,
        b_scales=torch.tensor([[0x38, 0x38 - 8 * 6]], dtype=torch.uint8),  # 1 and 2**-6
        alpha=torch.tensor([1.0]),
        bias=torch.tensor([2.0**-bits - 2.0**-6 + 2.0**-30], dtype=torch.float64),
    )
    assert problem.to(device).run(out_dtype).item() == 1 + 2.0 ** (1 - bits)
    tie = replace(problem, bias=torch.tensor([2.0**-bits - 2.0**-6], dtype=torch.float64))
    assert tie.to(device).run(out_dtype).item() == 1.0


def test_bias_is_added_before_the_rounding(device: torch.device, generator: torch.Generator) -> None:
    problem = random_problem(4, 9, 64, generator).to(device)
    assert problem.bias is not None
    plain = replace(problem, bias=None)
    assert torch.equal(problem.run(), plain.run() + problem.bias.to(torch.float64))
    rounded_twice = (plain.run(torch.bfloat16) + problem.bias).to(torch.float64)
    with pytest.raises(AssertionError):
        assert_matches_oracle(rounded_twice, problem.run(torch.bfloat16).to(torch.float64), 0.0)


@pytest.mark.parametrize("k", [16, 48, 3696])
@pytest.mark.parametrize("n", [1, 7, 129])
def test_odd_shapes_match_a_dense_product(n: int, k: int, device: torch.device, generator: torch.Generator) -> None:
    weight = random_nvfp4_weight(n, k, generator, device)
    x = random_activation(5, k, torch.bfloat16, generator, device)
    encode = torch.tensor(16.0, device=device)
    alpha = weight.global_decode_scale / encode
    packed, scales = reference.quantize(x, encode)
    dense = reference.dequantize(packed, scales, 1 / encode, ScaleLayout.SWIZZLE_128X4, 5, k)
    dense = dense @ weight.dequantized().T
    out = reference.linear(x, weight.packed, weight.scales, encode, alpha, out_dtype=torch.float64)
    assert torch.allclose(out, dense, rtol=1e-12, atol=1e-12 * float(dense.abs().amax()))
    assert reference.linear(x, weight.packed, weight.scales, encode, alpha).dtype == x.dtype


def test_an_empty_batch_gives_an_empty_result(device: torch.device, generator: torch.Generator) -> None:
    weight = random_nvfp4_weight(9, 48, generator, device)
    x = torch.empty(0, 48, dtype=torch.float16, device=device)
    one = torch.tensor(1.0, device=device)
    out = reference.linear(x, weight.packed, weight.scales, one, one, torch.zeros(9, device=device))
    assert out.shape == (0, 9)
    assert out.dtype == torch.float16


def test_a_scale_that_is_nan_spoils_its_own_row_or_column_only(
    device: torch.device, generator: torch.Generator
) -> None:
    problem = random_problem(6, 10, 64, generator)
    clean = problem.run()
    for byte in (0x7F, 0x80, 0xFF):
        a_scales, b_scales = problem.a_scales.clone(), problem.b_scales.clone()
        a_packed = problem.a_packed.clone()
        a_packed[:, 8:16] = 0  # zero times NaN is NaN
        a_scales[2, 3], b_scales[7, 1] = byte, byte
        spoiled = replace(problem, a_packed=a_packed, a_scales=a_scales, b_scales=b_scales).to(device).run()
        expected = torch.zeros_like(clean, dtype=torch.bool)
        expected[2], expected[:, 7] = True, True
        assert torch.equal(spoiled.isnan().cpu(), expected)


def test_only_the_named_part_of_a_padded_weight_counts(device: torch.device, generator: torch.Generator) -> None:
    n, k = 130, 80
    problem = random_problem(3, n, k, generator)
    b_packed = torch.full((160, 64), 0x77, dtype=torch.uint8)
    b_packed[:n, : k // 2] = problem.b_packed
    poisoned = torch.full((160, 8), 0x7F, dtype=torch.uint8)
    poisoned[:n, : k // 16] = problem.b_scales
    swizzled = swizzle_128x4(poisoned)
    swizzled[swizzle_128x4(torch.ones_like(poisoned)) == 0] = 0x7F
    moved = problem.to(device)
    for scales, layout in ((poisoned, LINEAR), (swizzled, ScaleLayout.SWIZZLE_128X4)):
        out = reference.gemm(
            moved.a_packed,
            b_packed.to(device),
            moved.a_scales,
            scales.to(device),
            moved.alpha,
            torch.float64,
            moved.bias,
            a_layout=LINEAR,
            b_layout=layout,
            n=n,
            k=k,
        )
        assert torch.equal(out, moved.run())


def test_a_weight_larger_than_one_slice_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, generator: torch.Generator
) -> None:
    problem = random_problem(3, 11, 64, generator).to(device)
    whole = problem.run()
    for elements in (1, 64 * 4, 64 * 11):
        monkeypatch.setattr(reference, "_SLICE_ELEMENTS", elements)
        assert torch.equal(problem.run(), whole)


def test_each_shard_with_its_own_input_scale_is_a_gemm_of_its_own(generator: torch.Generator) -> None:
    weight = random_nvfp4_weight(12, 64, generator)
    x = random_activation(4, 64, torch.bfloat16, generator)
    encodes, parts = torch.tensor([30.0, 7.0]), []
    for shard, rows in enumerate((slice(0, 5), slice(5, 12))):
        alpha = weight.global_decode_scale / encodes[shard]
        scales = weight.linear_scales[rows]
        parts.append(reference.linear(x, weight.packed[rows], scales, encodes[shard], alpha, weight_layout=LINEAR))
    whole = torch.cat(parts, dim=1).to(torch.float64)
    real = x.to(torch.float64) @ weight.dequantized().T
    assert (whole - real).norm() < 0.2 * real.norm()


@pytest.mark.gpu
def test_linear_can_be_captured_in_a_cuda_graph(generator: torch.Generator) -> None:
    weight = random_nvfp4_weight(40, 64, generator, "cuda")
    x = random_activation(3, 64, torch.bfloat16, generator, "cuda")
    encode, alpha = torch.tensor(20.0, device="cuda"), torch.full((40,), 0.01, device="cuda")

    def run() -> torch.Tensor:
        return reference.linear(x, weight.packed, weight.scales, encode, alpha)

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    x.copy_(random_activation(3, 64, torch.bfloat16, generator, "cuda"))
    graph.replay()
    assert torch.equal(captured, run())


# The comparison itself: it must accept a right float32 kernel and refuse the usual wrong ones.


def float32_kernel(problem: Problem, out_dtype: torch.dtype) -> torch.Tensor:
    """Return what a right kernel returns: float32 sums in some order, alpha and bias in float32."""
    one = torch.tensor(1.0)
    n, m, k = problem.b_packed.shape[0], problem.a_packed.shape[0], 2 * problem.a_packed.shape[1]
    a = reference.dequantize(problem.a_packed, problem.a_scales, one, LINEAR, m, k).to(torch.float32)
    b = reference.dequantize(problem.b_packed, problem.b_scales, one, LINEAR, n, k).to(torch.float32)
    out = (a @ b.T) * problem.alpha
    return (out if problem.bias is None else out + problem.bias.to(torch.float32)).to(out_dtype)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [16, 1024, 7168])
def test_the_bound_accepts_a_right_float32_kernel(k: int, out_dtype: torch.dtype, generator: torch.Generator) -> None:
    problem = random_problem(9, 33, k, generator)
    assert_matches_oracle(float32_kernel(problem, out_dtype), problem.run(), problem.bound(out_dtype))


def wrong_problems() -> dict[str, Problem]:
    """Return a right problem and, by name of the bug, what a wrong kernel would make of it."""
    right = random_problem(150, 140, 256, fresh_generator())
    right.b_packed[17, 5], right.b_scales[17, 0] = 0x07, 0x50  # 6 * 8, one of the larger weights
    swapped = (right.b_packed >> 4) | (right.b_packed << 4)
    not_swizzled = unswizzle_128x4(torch.nn.functional.pad(right.b_scales, (0, 0, 0, 116)), 140, 16)
    shifted = right.b_scales.roll(1, dims=1)
    stale_rows = right.a_scales.clone()
    stale_rows[128:] = right.a_scales[:22]
    one_code = right.b_packed.clone()
    one_code[17, 5] = 0x0F
    return {
        "right": right,
        "nibbles swapped": replace(right, b_packed=swapped),
        "scales read as if swizzled": replace(right, b_scales=not_swizzled),
        "scales one block off": replace(right, b_scales=shifted),
        "scales of the first row tile used for the second": replace(right, a_scales=stale_rows),
        "one alpha for all columns": replace(right, alpha=right.alpha.amax().expand(140).contiguous()),
        "alpha inverted": replace(right, alpha=1 / right.alpha),
        "bias forgotten": replace(right, bias=None),
        "one sign of one weight": replace(right, b_packed=one_code),
    }


def test_the_comparison_refuses_the_usual_bugs() -> None:
    problems = wrong_problems()
    right = problems.pop("right")
    expected, bound = right.run(), right.bound(torch.bfloat16)
    assert_matches_oracle(float32_kernel(right, torch.bfloat16), expected, bound)
    for bug, problem in problems.items():
        out = float32_kernel(problem, torch.bfloat16)
        with pytest.raises(AssertionError):
            assert_matches_oracle(out, expected, bound)
        print("noticed:", bug)


def test_the_comparison_names_the_worst_element() -> None:
    expected = torch.zeros(3, 4, dtype=torch.float64)
    out = expected.clone()
    out[1, 2], out[2, 0] = 0.5, 0.1
    with pytest.raises(AssertionError, match=r"2 of 12 elements .* worst at \(1, 2\)"):
        assert_matches_oracle(out, expected, 0.01)
    assert_matches_oracle(out, expected, 0.5)
    with pytest.raises(AssertionError, match="shape"):
        assert_matches_oracle(out[:2], expected, 1.0)


def test_the_comparison_looks_at_nan_and_infinity_first() -> None:
    expected = torch.tensor([[1.0, nan, 70000.0, 65510.0]], dtype=torch.float64)
    right = torch.tensor([[1.0, nan, inf, 65504.0]], dtype=torch.float16)
    assert_matches_oracle(right, expected, 32.0)
    for index, bad in ((0, nan), (0, inf), (1, 1.0), (2, -inf), (2, 65504.0)):
        wrong = right.clone()
        wrong[0, index] = bad
        with pytest.raises(AssertionError, match=rf"\(0, {index}\)"):
            assert_matches_oracle(wrong, expected, 32.0)
    near_overflow = right.clone()
    near_overflow[0, 3] = inf
    assert_matches_oracle(near_overflow, expected, 32.0)


def test_the_byte_comparison_names_the_first_difference() -> None:
    expected = torch.arange(12, dtype=torch.uint8).view(3, 4)
    assert_same_bytes(expected.clone().view(torch.float8_e4m3fn), expected)
    out = expected.clone()
    out[1, 3] = 0x40
    with pytest.raises(AssertionError, match=r"1 of 12 bytes differ; first at \(1, 3\): got 0x40, expected 0x07"):
        assert_same_bytes(out, expected)
