"""What a right quantizer and a right GEMM look like: comparisons with the float64 oracle, with derived bounds."""

from __future__ import annotations

import torch

from sglang_sm120 import layout, reference
from sglang_sm120.formats import BLOCK_SIZE, E2M1_MAX, UE4M3_NAN, decode_e2m1, decode_ue4m3, unpack_e2m1
from sglang_sm120.layout import ScaleLayout
from sglang_sm120.probing.child import WrongResult

#: A tensor core aligns all addends to the largest and drops what falls out of 24 bits.
_SUM_ROUNDOFF = 2.0**-23
_FLOAT32_ROUNDOFF = 2.0**-24
#: Quantizers of the field divide by an approximate reciprocal (a few float32 ulp); this is far above and still
#: far below the distance of neighbouring codes.
_QUANTIZER_SLACK = 2.0**-10


def gemm_bound(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact product and how far a right kernel with float32 accumulators may be from it.

    With T the sum of the magnitudes of the K products of an element: each of at most 2K additions (tiles and splits
    add their parts once more) errs by 2**-23 T; alpha and bias round twice in float32; the result is rounded once
    to ``out_dtype``. Operands as in :func:`reference.gemm`, scales in the 128x4 swizzle.

    Returns:
        Two float64 tensors ``[M, N]``.
    """
    exact = reference.gemm(a, b, a_scale, b_scale, alpha, torch.float64, bias)
    unsigned = 0x77
    magnitude = reference.gemm(a & unsigned, b & unsigned, a_scale, b_scale, alpha.abs(), torch.float64)
    error = 2 * 2 * a.shape[1] * _SUM_ROUNDOFF * magnitude
    error += 4 * _FLOAT32_ROUNDOFF * (magnitude if bias is None else magnitude + bias.to(torch.float64).abs())
    info = torch.finfo(out_dtype)
    rounding = (exact.abs() + error) * (info.eps / 2)
    return exact, error + rounding.clamp(min=info.smallest_normal * info.eps / 2)


def check_product(
    out: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, numbers: torch.Tensor | None = None
) -> None:
    """Compare a product with the oracle, element by element.

    Args:
        out: ``[M, N]`` of any type.
        exact: float64 ``[M, N]``.
        bound: float64 ``[M, N]``, how far ``out`` may be from it.
        numbers: int64 ``[M]``, what the rows are called in messages: they may be a selection.

    Raises:
        WrongResult: says which rows are wrong, and the worst element.
    """
    if out.shape != exact.shape:
        raise WrongResult(f"the result has shape {tuple(out.shape)} instead of {tuple(exact.shape)}")
    got = out.to(torch.float64)
    error = (got - exact).abs()
    # A comparison with NaN is false, so NaN counts as wrong. A right result may overflow the output type.
    overflow = (exact.abs() + bound > torch.finfo(out.dtype).max) & got.isinf() & (got.sign() == exact.sign())
    wrong = ~(error <= bound) & ~overflow
    if not bool(wrong.any()):
        return
    excess = torch.where(wrong, (error / bound).nan_to_num(nan=torch.inf), 0.0)
    row, column = divmod(int(excess.argmax()), out.shape[1])
    worst = float(got[row, column]), float(exact[row, column])
    rows = wrong.any(1).nonzero().flatten()
    if numbers is not None:
        rows, row = numbers[rows], int(numbers[row])
    where = f"row {int(rows[0])}" if len(rows) == 1 else f"rows {int(rows[0])} to {int(rows[-1])}"
    raise WrongResult(
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, in {where}{_pattern(got, exact, wrong)}; "
        f"[{row}, {column}] is {worst[0]:.6g} instead of {worst[1]:.6g}"
    )


def _pattern(got: torch.Tensor, exact: torch.Tensor, wrong: torch.Tensor) -> str:
    """Name the kind of mistake where it is obvious."""
    bad = got[wrong]
    if bool(bad.isnan().all()):
        return " (NaN: never written, or made of a NaN scale)"
    if bool((bad == 0).all()):
        return " (zeros)"
    ratio = (bad / exact[wrong]).nan_to_num()
    middle = float(ratio.median())
    alike = (ratio - middle).abs() <= 0.02 * abs(middle)
    if middle != 0 and wrong.numel() > 16 and int(wrong.sum()) > 0.9 * wrong.numel() and bool(alike.all()):
        return f" ({middle:.4g} times the right ones: a wrong global scale)"
    return ""


def check_quantized(
    x: torch.Tensor,
    scale: torch.Tensor,
    packed: torch.Tensor,
    block_scales: torch.Tensor,
    numbers: torch.Tensor | None = None,
) -> None:
    """Compare codes and scales with what they stand for.

    A block scale may be one code off the oracle's (the quotient is rounded in float32), and an element must be the
    nearest code under the scale that was chosen. Scales in padded columns of real rows must not be NaN: GEMMs
    read them and multiply them with zeros (vllm#48898).

    Args:
        x: ``[M, K]`` that was quantized.
        scale: float32 encode scale.
        packed: uint8 ``[M, K/2]``.
        block_scales: in the 128x4 swizzle, any 1-byte dtype.
        numbers: int64 ``[M]``, what the rows are called in messages: they may be a selection.

    Raises:
        WrongResult: says which block or element.
    """
    m, k = x.shape
    blocks = k // BLOCK_SIZE
    shape = layout.padded_scale_shape(m, blocks)
    if packed.shape != (m, k // 2) or block_scales.numel() != shape[0] * shape[1]:
        raise WrongResult(f"codes {tuple(packed.shape)} and {block_scales.numel()} scales for M={m}, K={k}")
    linear = layout.unswizzle_128x4(block_scales.view(torch.uint8).reshape(shape), m, shape[1])
    numbers = torch.arange(m) if numbers is None else numbers
    _check_scales(linear[:, :blocks], reference.quantize(x, scale, ScaleLayout.LINEAR)[1], numbers)
    padding = linear[:, blocks:] & 0x7F == UE4M3_NAN
    if bool(padding.any()):
        raise WrongResult(f"{int(padding.sum())} scales in padded columns are NaN")
    decoded = decode_ue4m3(linear[:, :blocks].contiguous()).unsqueeze(-1)
    target = (x.to(torch.float64) * scale.to(torch.float64)).view(m, blocks, BLOCK_SIZE) / decoded
    target = target.nan_to_num().clamp(-E2M1_MAX, E2M1_MAX)
    got = decode_e2m1(unpack_e2m1(packed)).view(m, blocks, BLOCK_SIZE)
    step = torch.where(target.abs() < 2, 0.5, torch.where(target.abs() < 4, 1.0, 2.0))
    wrong = ((got - target).abs() > step / 2 + _QUANTIZER_SLACK * (1 + target.abs())) & (decoded != 0)
    if bool(wrong.any()):
        row, block, element = (int(i) for i in wrong.nonzero()[0])
        raise WrongResult(
            f"{int(wrong.sum())} of {wrong.numel()} codes are not the nearest; first at row {int(numbers[row])}, "
            f"column {block * BLOCK_SIZE + element}: {float(got[row, block, element])} for "
            f"{float(target[row, block, element]):.6g}"
        )


def _check_scales(got: torch.Tensor, right: torch.Tensor, numbers: torch.Tensor) -> None:
    wrong = (got.to(torch.int16) - right.to(torch.int16)).abs() > 1
    if not bool(wrong.any()):
        return
    row, block = (int(i) for i in wrong.nonzero()[0])
    zeros = " (zeros)" if bool((got[wrong] == 0).all()) else ""
    raise WrongResult(
        f"{int(wrong.sum())} of {wrong.numel()} block scales are wrong{zeros}; first at row {int(numbers[row])}, "
        f"block {block}: byte {int(got[row, block]):#04x} instead of {int(right[row, block]):#04x}"
    )
