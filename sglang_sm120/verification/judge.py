"""Compare the result of one call with the float64 oracle, within the bounds that ``sglang-sm120 probe`` uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_sm120 import layout, reference
from sglang_sm120.formats import BLOCK_SIZE, UE4M3_NAN
from sglang_sm120.probing.checks import check_product, check_quantized, gemm_bound
from sglang_sm120.probing.child import WrongResult
from sglang_sm120.verification.call import Call

#: Of a larger M so many rows are judged: the first, the last and others at random. The oracle's float64 matrices of a
#: language-model head (N = 150,000) then take 0.15 GB each.
ROWS = 128

#: ``quantize(x [M, K], encode scale) -> (packed [M, K/2], block scales, 128x4 swizzle)``
Quantize = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Judgement:
    """What the oracle says about one call.

    Attributes:
        wrong: which elements are wrong and how; empty if the result is right.
        max_error: the largest absolute difference from the exact product; NaN if an element is NaN. 0 for a quantizer.
        ratio: the largest difference, divided by its bound.
        rows: how many rows were judged. 0 if every row of the input holds a NaN or an infinity, for which the format
            promises nothing.
    """

    wrong: str
    max_error: float
    ratio: float
    rows: int

    @property
    def text(self) -> str:
        """One line for logs and reports."""
        figures = f"max error {self.max_error:.6g}, {self.ratio:.3g} times the bound"
        return f"{self.wrong}; {figures}" if self.wrong else f"{figures}, {self.rows} rows"


def judge(
    call: Call,
    results: Sequence[torch.Tensor],
    quantize: Quantize | None = None,
    generator: torch.Generator | None = None,
    *,
    bias_afterwards: bool = False,
) -> Judgement:
    """Judge ``results``, what a backend returned for ``call``. Waits for the GPU.

    Args:
        call: what it was asked.
        results: one product [M, N], or packed codes and block scales.
        quantize: the quantizer of the backend, for ``linear``, whose quantized input nobody sees. Either its rounding
            or the oracle's must explain the product, and it is judged itself.
        generator: chooses the rows if there are too many.
        bias_afterwards: the product was rounded before the bias was added, as with kernels that take no bias.
    """
    rows = _rows(call, generator)
    if not len(rows):
        return Judgement("", 0.0, 0.0, 0)
    try:
        if call.operation == "quantize":
            _check_quantizer(call, rows, *results)
            return Judgement("", 0.0, 0.0, len(rows))
        if results[0].shape != (call.m, call.n):
            raise WrongResult(f"the result has shape {tuple(results[0].shape)} instead of {(call.m, call.n)}")
        if call.operation == "gemm":
            a = call.operands["a"][rows], _select(call.operands["a_scale"], call.m, call.k, rows)
            return _judge_product(call, *a, results[0], rows, bias_afterwards)
        return _judge_linear(call, results[0], rows, quantize, bias_afterwards)
    except WrongResult as error:
        return Judgement(str(error), float("nan"), float("nan"), len(rows))


def _judge_linear(
    call: Call, out: torch.Tensor, rows: torch.Tensor, quantize: Quantize | None, bias_afterwards: bool
) -> Judgement:
    x, scale = call.operands["x"], call.operands["activation_scale"]
    first = None
    if quantize is not None:
        packed, scales = quantize(x, scale)
        _check_quantizer(Call.quantize(x, scale), rows, packed, scales)
        first = _judge_product(call, packed[rows], _select(scales, call.m, call.k, rows), out, rows, bias_afterwards)
        if not first.wrong:
            return first
    # Of these rows alone: the float64 numbers of a whole prefill would need gigabytes, just where something is wrong.
    second = _judge_product(call, *reference.quantize(x[rows], scale), out, rows, bias_afterwards)
    return second if first is None or not second.wrong else first


def _judge_product(
    call: Call, a: torch.Tensor, a_scale: torch.Tensor, out: torch.Tensor, rows: torch.Tensor, bias_afterwards: bool
) -> Judgement:
    """Judge ``rows`` of ``out``; ``a`` and ``a_scale`` are the quantized input of these rows alone."""
    named = call.operands
    exact, bound = gemm_bound(
        a,
        named["weight"].contiguous(),
        a_scale,
        named["weight_scale"],
        named["alpha"],
        named.get("bias"),
        call.out_dtype,
    )
    if bias_afterwards and "bias" in named:
        # The sum before the bias is rounded once more, by half an ulp of itself.
        bound = bound + (exact - named["bias"].to(torch.float64)).abs() * torch.finfo(call.out_dtype).eps
    return compare(out[rows], exact, bound, rows)


def compare(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, rows: torch.Tensor) -> Judgement:
    """Judge rows of a result.

    Args:
        got: [R, N], what a backend returned for these rows.
        exact: float64 [R, N], what the oracle says.
        bound: float64 [R, N], how far a right result may be from it.
        rows: int64 [R], their numbers, for the message.
    """
    # A weight whose block scale is NaN makes a column of NaN, and so does the oracle.
    same = exact.isnan() & got.isnan()
    got, exact = got.masked_fill(same, 0), exact.masked_fill(same, 0)
    bound = bound.masked_fill(same, torch.inf)
    error = (got.to(torch.float64) - exact).abs()
    wrong = ""
    try:
        check_product(got, exact, bound, rows)
    except WrongResult as found:
        wrong = str(found)
    return Judgement(wrong, float(error.max()), float((error / bound).max()), len(rows))


def _check_quantizer(call: Call, rows: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> None:
    m, k = call.m, call.k
    shape = layout.padded_scale_shape(m, k // BLOCK_SIZE)
    if packed.shape != (m, k // 2) or scales.numel() != shape[0] * shape[1]:
        raise WrongResult(f"codes {tuple(packed.shape)} and {scales.numel()} scales for M={m}, K={k}")
    selected = _select(scales, m, k, rows)
    check_quantized(call.operands["x"][rows], call.operands["activation_scale"], packed[rows], selected, rows)


def _select(scales: torch.Tensor, m: int, k: int, rows: torch.Tensor) -> torch.Tensor:
    """Swizzled block scales of some rows, padded columns included, as the operand of a smaller product."""
    shape = layout.padded_scale_shape(m, k // BLOCK_SIZE)
    linear = layout.unswizzle_128x4(scales.view(torch.uint8).reshape(shape), m, shape[1])
    return layout.swizzle_128x4(linear[rows])


def _rows(call: Call, generator: torch.Generator | None) -> torch.Tensor:
    """Numbers of the rows to judge, in order: finite ones, at most :data:`ROWS`."""
    if call.operation == "gemm":
        linear = layout.unswizzle_128x4(call.operands["a_scale"], call.m, call.k // BLOCK_SIZE)
        finite = ((linear & 0x7F) != UE4M3_NAN).all(1)
    else:
        finite = call.operands["x"].isfinite().all(1)
    return some_rows(finite, ROWS, generator)


def some_rows(finite: torch.Tensor, most: int, generator: torch.Generator | None) -> torch.Tensor:
    """Numbers of the rows to judge, in order: of those that are finite (bool [M]), at most ``most``."""
    rows = finite.nonzero().flatten()
    if len(rows) <= most:
        return rows
    inner = torch.randperm(len(rows) - 2, generator=generator, device="cpu")[: most - 2].to(rows.device) + 1
    return torch.cat([rows[:1], rows[inner].sort().values, rows[-1:]])
