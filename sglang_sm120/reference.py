"""The oracle: what every NVFP4 kernel of this package, and every backend it can choose, has to compute.

Arithmetic is float64 and each result is rounded once, at the end. Up to that rounding nearly everything is
exact:

- ``x * global scale`` has at most 24 + 24 bits, and an e2m1 midpoint times a block scale at most 7, so
  quantizing takes every decision on exact numbers.
- A product of two dequantized elements (before the global scales) is a multiple of ``2**-20`` below
  ``2**23``, so float64 adds at least 1024 of them exactly in any order; longer sums are exact too unless the
  data is extreme.
- Only alpha, bias and, for experts, the activation add float64 roundings, about 2**-52 of the result each.

Functions other than :func:`find_nonfinite` and :func:`moe` look at shapes and dtypes only: the host does not
wait for the GPU and CUDA graphs can capture them.

Sources: PTX ISA (``cvt.rn.satfinite`` for e2m1x2 and e4m3x2, ``max`` drops a NaN operand); the two-level
scaling recipe that ModelOpt, TensorRT-LLM and FlashInfer share (block scale = global scale * block amax / 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sglang_sm120.errors import FormatError, bad_value
from sglang_sm120.formats import (
    BLOCK_SIZE,
    E2M1_MAX,
    FLOAT_DTYPES,
    decode_e2m1,
    decode_ue4m3,
    encode_ue4m3,
    nearest_e2m1_code,
    pack_e2m1,
    require_tensor,
    round_float64,
    unpack_e2m1,
)
from sglang_sm120.layout import (
    SCALE_DTYPES,
    ScaleLayout,
    padded_scale_shape,
    swizzle_128x4,
    unswizzle_128x4,
)

#: The exactness argument above needs 24 bits; float64 activations would have 53.
ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Weights are dequantized to float64 a slice of N at a time, so that a language-model head fits in memory.
_SLICE_ELEMENTS = 2**24

Activation = Literal["silu", "relu2"]


@dataclass(frozen=True)
class ExpertWeights:
    """One of the two weight stacks of a mixture-of-experts layer.

    Attributes:
        packed: uint8 ``[E, N, K / 2]``.
        scales: uint8 or float8_e4m3fn, ``[E, ...]`` with each expert's scale buffer in ``layout``.
        alpha: float32 ``[E]``, or ``[E, N]`` for shards with scales of their own.
        input_global_scale: float32 encode scale of the input, ``[]`` for all experts or ``[E]``.
        layout: order of ``scales``.
    """

    packed: torch.Tensor
    scales: torch.Tensor
    alpha: torch.Tensor
    input_global_scale: torch.Tensor
    layout: ScaleLayout = ScaleLayout.SWIZZLE_128X4


def quantize(
    x: torch.Tensor, global_scale: torch.Tensor, layout: ScaleLayout = ScaleLayout.SWIZZLE_128X4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to NVFP4.

    For every block of 16 along K, with all arithmetic exact::

        s    = ue4m3(global_scale * max|x| / 6)     nearest even, at most 448
        code = e2m1(x * global_scale / s)           nearest even, at most 6

    Special cases. NaN and infinity come out as the hardware's ``max`` and ``cvt`` make them:

    - ``s == 0`` (a block of zeros, or one so small that its scale rounds to zero): all codes are 0, -0.0
      included, so that such a block is all zero bytes.
    - NaN does not count for the maximum and becomes +6 (its code has no NaN). Only a block of nothing but NaN
      has no maximum; its scale is NaN and so will be its results.
    - infinity: s = 448, the element becomes +-6.

    Args:
        x: ``[M, K]`` bfloat16, float16 or float32; M may be 0, K is a multiple of 16.
        global_scale: float32 scalar, the *encode* scale (see :mod:`sglang_sm120.scales`), positive and
            finite; not read by the host.
        layout: order of the returned scales.

    Returns:
        Packed codes, uint8 ``[M, K / 2]``, and scale bytes, uint8 ``[M, K / 16]`` or the padded swizzle.

    Raises:
        FormatError: a dtype, shape, device or stride that is not allowed.
    """
    require_tensor("x", x, ACTIVATION_DTYPES, rank=2)
    rows, k = x.shape
    _require_k("x.shape[1]", k)
    _require_scalar("global_scale", global_scale, x.device)

    scaled = x.to(torch.float64) * global_scale.to(torch.float64)
    blocks = scaled.view(rows, k // BLOCK_SIZE, BLOCK_SIZE)
    is_nan = blocks.isnan()
    amax = blocks.abs().masked_fill(is_nan, 0.0).amax(-1).masked_fill(is_nan.all(-1), torch.nan)
    # The quotient is rounded to 53 bits before it is rounded to e4m3. That changes nothing: amax has 48 bits,
    # so a quotient that is no tie is at least 2**-48 (relative) away from one. It takes a true division,
    # though: dividing a CUDA tensor by a Python number multiplies by the reciprocal, which misses ties.
    scale_bytes = encode_ue4m3(amax / torch.full_like(amax, E2M1_MAX))
    block_scale = decode_ue4m3(scale_bytes).unsqueeze(-1)
    codes = nearest_e2m1_code(blocks, block_scale).masked_fill(block_scale == 0, 0)
    packed = pack_e2m1(codes.view(rows, k))
    return packed, swizzle_128x4(scale_bytes) if layout is ScaleLayout.SWIZZLE_128X4 else scale_bytes


def find_nonfinite(x: torch.Tensor) -> None:
    """Raise if ``x`` holds a NaN or an infinity, which NVFP4 would turn into ordinary numbers.

    Reads the values: on a GPU the host waits for them.

    Args:
        x: ``[M, K]`` bfloat16, float16 or float32.

    Raises:
        FormatError: the first such element in row-major order, by row and column.
    """
    require_tensor("x", x, ACTIVATION_DTYPES, rank=2)
    bad = torch.nonzero(~torch.isfinite(x))
    if bad.shape[0]:
        row, column = (int(index) for index in bad[0])
        remedy = f"quantize finite numbers only; {bad.shape[0]} elements are not, this is the first"
        raise FormatError(bad_value(f"x[{row}, {column}]", float(x[row, column]), remedy))


def dequantize(
    packed: torch.Tensor,
    scales: torch.Tensor,
    global_decode_scale: torch.Tensor,
    layout: ScaleLayout,
    rows: int,
    k: int,
) -> torch.Tensor:
    """Return the real values ``e2m1 * ue4m3 * global_decode_scale``, exactly.

    Args:
        packed: uint8 ``[R, C]``, R >= rows and C >= k / 2 (larger if the weight is padded).
        scales: uint8 or float8_e4m3fn in ``layout``.
        global_decode_scale: float32 scalar, the *decode* scale.
        layout: order of ``scales``.
        rows: rows to return.
        k: elements per row to return, a multiple of 16.

    Returns:
        float64 ``[rows, k]``; NaN where the scale byte is no legal scale.

    Raises:
        FormatError: a dtype, shape, device or stride that is not allowed.
    """
    require_tensor("packed", packed, (torch.uint8,), rank=2)
    _require_scalar("global_decode_scale", global_decode_scale, packed.device)
    linear_scales = _linear_scales("", packed, scales, layout, rows, k)
    return _block_scaled(packed, linear_scales, k) * global_decode_scale.to(torch.float64)


def gemm(
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
    """Return ``round(alpha * (A @ B.T) + bias)``.

    Args:
        a_packed: activations, uint8 ``[M, K / 2]``; M may be 0.
        b_packed: weight, uint8 ``[N, K / 2]``.
        a_scales: block scales of A in ``a_layout``, uint8 or float8_e4m3fn.
        b_scales: block scales of B in ``b_layout``.
        alpha: float32, a scalar or one per output column, ``[n]``.
        out_dtype: bfloat16, float16, float32, or float64 for the value before rounding.
        bias: ``[n]``, any of these dtypes, added before the rounding.
        a_layout: order of ``a_scales``.
        b_layout: order of ``b_scales``.
        n: output columns, if the weight is padded; rows of B from there on are ignored.
        k: inner dimension, if an operand is padded; elements from there on are ignored. A multiple of 16.

    Returns:
        ``[M, n]`` of ``out_dtype``. A scale byte that is no legal scale makes its row of A (or column of the
        result, for B) NaN and no other.

    Raises:
        FormatError: a dtype, shape, device or stride that is not allowed.
    """
    m, n, k = _gemm_extents(a_packed, b_packed, n, k)
    device = a_packed.device
    a_linear = _linear_scales("a", a_packed, a_scales, a_layout, m, k)
    b_linear = _linear_scales("b", b_packed, b_scales, b_layout, n, k)
    _require_per_column("alpha", alpha, (torch.float32,), n, device, scalar_allowed=True)
    if bias is not None:
        _require_per_column("bias", bias, FLOAT_DTYPES, n, device, scalar_allowed=False)

    a = _block_scaled(a_packed, a_linear, k)
    out = torch.empty(m, n, dtype=torch.float64, device=device)
    step = max(1, _SLICE_ELEMENTS // k)
    for start in range(0, n, step):
        end = min(start + step, n)
        out[:, start:end] = a @ _block_scaled(b_packed[start:end], b_linear[start:end], k).T
    out *= alpha.to(torch.float64)
    if bias is not None:
        out += bias.to(torch.float64)
    return round_float64(out, out_dtype)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    input_global_scale: torch.Tensor,
    alpha: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    weight_layout: ScaleLayout = ScaleLayout.SWIZZLE_128X4,
    n: int | None = None,
    k: int | None = None,
) -> torch.Tensor:
    """Quantize ``x`` and multiply: :func:`quantize`, then :func:`gemm`.

    Args:
        x: ``[M, K]`` bfloat16, float16 or float32.
        weight: uint8 ``[N, K / 2]``.
        weight_scales: block scales of the weight in ``weight_layout``.
        input_global_scale: float32 scalar, the *encode* scale of ``x``.
        alpha: float32, a scalar or ``[n]``; includes the decode scale of ``x``.
        bias: ``[n]``.
        out_dtype: as in :func:`gemm`; the dtype of ``x`` if not given.
        weight_layout: order of ``weight_scales``.
        n: output columns, if the weight is padded.
        k: inner dimension, if ``x`` or the weight is padded.

    Returns:
        ``[M, n]`` of ``out_dtype``.

    Raises:
        FormatError: a dtype, shape, device or stride that is not allowed.
    """
    packed, scales = quantize(x, input_global_scale, ScaleLayout.LINEAR)
    return gemm(
        packed,
        weight,
        scales,
        weight_scales,
        alpha,
        x.dtype if out_dtype is None else out_dtype,
        bias,
        a_layout=ScaleLayout.LINEAR,
        b_layout=weight_layout,
        n=n,
        k=k,
    )


def moe(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    activation: Activation,
    gate_first: bool | None = None,
) -> torch.Tensor:
    """Mixture of experts: for every token the weighted sum of its experts' outputs.

    Expert e computes ``w2[e] @ quantize(act(w13[e] @ quantize(hidden)))``. The format asks for two roundings,
    the quantizations; the function adds one more, to float32 before the second quantization, where every
    kernel holds its accumulators anyway. Rounding to the dtype of ``hidden`` there would be an artefact of
    keeping the intermediate in memory, and a fused kernel does not. An implementation that does may pick a
    neighbouring e2m1 code for elements next to a midpoint.

    Args:
        hidden: ``[T, H]`` bfloat16, float16 or float32; T may be 0.
        topk_ids: int32 or int64 ``[T, top_k]``. Ids outside ``[0, E)`` are skipped: -1 marks an expert of
            another rank.
        topk_weights: float32 ``[T, top_k]``, applied to the experts' outputs.
        w13: first weights, N = 2 * I for ``silu`` (gate and up), N = I for ``relu2``; K = H.
        w2: second weights, N = H, K = I.
        activation: ``silu``: ``silu(gate) * up``. ``relu2``: ``max(x, 0) ** 2``, no gate.
        gate_first: for ``silu``, whether the gate is the first half of w13's rows; ``None`` for ``relu2``.

    Returns:
        ``[T, H]`` of the dtype of ``hidden``: summed in float64 in top-k order, rounded once.

    Raises:
        FormatError: a dtype, shape, device, stride or combination that is not allowed.
    """
    _check_moe(hidden, topk_ids, topk_weights, w13, w2, activation, gate_first)
    tokens, width = hidden.shape
    outputs = torch.zeros(tokens, topk_ids.shape[1], width, dtype=torch.float64, device=hidden.device)
    for expert in range(w13.packed.shape[0]):
        token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        first = _expert_gemm(hidden[token], w13, expert)
        second = _expert_gemm(_activate(first, activation, gate_first).to(torch.float32), w2, expert)
        outputs[token, slot] = second * topk_weights[token, slot].to(torch.float64).unsqueeze(-1)
    total = torch.zeros(tokens, width, dtype=torch.float64, device=hidden.device)
    for slot_outputs in outputs.unbind(1):
        total += slot_outputs
    return round_float64(total, hidden.dtype)


def _block_scaled(packed: torch.Tensor, linear_scales: torch.Tensor, k: int) -> torch.Tensor:
    """Return float64 ``e2m1 * ue4m3``, as many rows as there are scales and ``k`` columns."""
    rows = linear_scales.shape[0]
    values = decode_e2m1(unpack_e2m1(packed[:rows, : k // 2].contiguous()))
    scaled = values.view(rows, k // BLOCK_SIZE, BLOCK_SIZE) * decode_ue4m3(linear_scales).unsqueeze(-1)
    return scaled.view(rows, k)


def _expert_gemm(x: torch.Tensor, weights: ExpertWeights, expert: int) -> torch.Tensor:
    scale = weights.input_global_scale
    return linear(
        x,
        weights.packed[expert],
        weights.scales[expert],
        scale if scale.dim() == 0 else scale[expert],
        weights.alpha[expert],
        out_dtype=torch.float64,
        weight_layout=weights.layout,
    )


def _activate(first: torch.Tensor, activation: Activation, gate_first: bool | None) -> torch.Tensor:
    if activation == "relu2":
        return torch.relu(first).square()
    left, right = first.chunk(2, dim=1)
    gate, up = (left, right) if gate_first else (right, left)
    return gate * torch.sigmoid(gate) * up


def _linear_scales(
    name: str, packed: torch.Tensor, scales: torch.Tensor, layout: ScaleLayout, rows: int, k: int
) -> torch.Tensor:
    """Check the buffers of operand ``name`` and return its scale bytes as uint8 ``[rows, k / 16]``."""
    packed_name, scales_name = (f"{name}_packed", f"{name}_scales") if name else ("packed", "scales")
    require_tensor(scales_name, scales, SCALE_DTYPES, rank=2, device=packed.device)
    _require_k("k", k)
    if not 0 <= rows <= packed.shape[0] or k > 2 * packed.shape[1]:
        remedy = f"pass a buffer of at least [{rows}, {k // 2}] bytes, rows and k not below 0"
        raise FormatError(bad_value(f"{packed_name}.shape", tuple(packed.shape), remedy))
    # The scales of a padded operand may be padded with it or not. Anything larger belongs to another operand.
    least = (rows, k // BLOCK_SIZE)
    most = (packed.shape[0], -(-2 * packed.shape[1] // BLOCK_SIZE))
    if layout is ScaleLayout.SWIZZLE_128X4:
        least, most = padded_scale_shape(*least), padded_scale_shape(*most)
    have = (scales.shape[0], scales.shape[1])
    if not all(low <= size <= high for low, size, high in zip(least, have, most, strict=True)):
        remedy = f"the {layout.value} scales of this operand have {list(least)} to {list(most)} bytes"
        raise FormatError(bad_value(f"{scales_name}.shape", have, remedy))
    if layout is ScaleLayout.SWIZZLE_128X4:
        return unswizzle_128x4(scales, rows, k // BLOCK_SIZE).view(torch.uint8)
    return scales[:rows, : k // BLOCK_SIZE].contiguous().view(torch.uint8)


def _gemm_extents(a_packed: torch.Tensor, b_packed: torch.Tensor, n: int | None, k: int | None) -> tuple[int, int, int]:
    """Return M, N, K; sizes that are not given must follow from the operands without doubt."""
    for name, packed in (("a_packed", a_packed), ("b_packed", b_packed)):
        require_tensor(name, packed, (torch.uint8,), rank=2, device=a_packed.device)
    if k is None and a_packed.shape[1] != b_packed.shape[1]:
        remedy = f"a_packed has {a_packed.shape[1]} bytes per row; pass k if an operand is padded"
        raise FormatError(bad_value("b_packed.shape", tuple(b_packed.shape), remedy))
    n = b_packed.shape[0] if n is None else n
    if n < 1:
        raise FormatError(bad_value("n", n, "a weight has at least one row"))
    return a_packed.shape[0], n, 2 * a_packed.shape[1] if k is None else k


def _require_k(name: str, k: int) -> None:
    if k < BLOCK_SIZE or k % BLOCK_SIZE:
        raise FormatError(bad_value(name, k, f"K must be a positive multiple of {BLOCK_SIZE}"))


def _require_scalar(name: str, scale: torch.Tensor, device: torch.device) -> None:
    require_tensor(name, scale, (torch.float32,), device=device)
    if scale.numel() != 1:
        raise FormatError(bad_value(f"{name}.shape", tuple(scale.shape), "pass one number"))


def _require_per_column(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    n: int,
    device: torch.device,
    scalar_allowed: bool,
) -> None:
    require_tensor(name, tensor, dtypes, device=device)
    if tensor.shape == (n,) or (scalar_allowed and tensor.shape in ((), (1,))):
        return
    remedy = f"pass one number per output column, [{n}]" + (", or a scalar" if scalar_allowed else "")
    raise FormatError(bad_value(f"{name}.shape", tuple(tensor.shape), remedy))


def _check_moe(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: ExpertWeights,
    w2: ExpertWeights,
    activation: Activation,
    gate_first: bool | None,
) -> None:
    """Check what :func:`linear` does not see: routing, the stacks of experts and how the two GEMMs meet."""
    require_tensor("hidden", hidden, ACTIVATION_DTYPES, rank=2)
    require_tensor("topk_ids", topk_ids, (torch.int32, torch.int64), rank=2, device=hidden.device)
    require_tensor("topk_weights", topk_weights, (torch.float32,), rank=2, device=hidden.device)
    if topk_ids.shape[0] != hidden.shape[0] or topk_weights.shape != topk_ids.shape:
        shapes = (tuple(topk_ids.shape), tuple(topk_weights.shape))
        remedy = f"both are [T, top_k] with T = {hidden.shape[0]}"
        raise FormatError(bad_value("topk_ids.shape, topk_weights.shape", shapes, remedy))
    if activation not in ("silu", "relu2"):
        raise FormatError(bad_value("activation", activation, "use 'silu' or 'relu2'"))
    if (gate_first is None) is (activation == "silu"):
        raise FormatError(bad_value("gate_first", gate_first, "set it for 'silu' and only for 'silu'"))
    for name, weights in (("w13", w13), ("w2", w2)):
        require_tensor(f"{name}.packed", weights.packed, (torch.uint8,), rank=3, device=hidden.device)
        require_tensor(f"{name}.scales", weights.scales, SCALE_DTYPES, rank=3, device=hidden.device)
    experts, first_rows = w13.packed.shape[:2]
    if activation == "silu" and first_rows % 2:
        raise FormatError(bad_value("w13.packed.shape", tuple(w13.packed.shape), "silu needs 2 * I rows"))
    width = hidden.shape[1]
    inner = first_rows // 2 if activation == "silu" else first_rows
    _require_k("hidden.shape[1]", width)
    _require_k("I", inner)
    _check_experts("w13", w13, (experts, first_rows, width // 2))
    _check_experts("w2", w2, (experts, width, inner // 2))


def _check_experts(name: str, weights: ExpertWeights, packed_shape: tuple[int, int, int]) -> None:
    experts, rows, _ = packed_shape
    require_tensor(f"{name}.alpha", weights.alpha, (torch.float32,), device=weights.packed.device)
    scale = weights.input_global_scale
    require_tensor(f"{name}.input_global_scale", scale, (torch.float32,), device=weights.packed.device)
    checks: tuple[tuple[str, torch.Size, tuple[tuple[int, ...], ...]], ...] = (
        ("packed", weights.packed.shape, (packed_shape,)),
        ("scales", weights.scales.shape[:1], ((experts,),)),
        ("alpha", weights.alpha.shape, ((experts,), (experts, rows))),
        ("input_global_scale", scale.shape, ((), (experts,))),
    )
    for field, shape, allowed in checks:
        if tuple(shape) not in allowed:
            remedy = "it must be " + " or ".join(str(list(wanted)) for wanted in allowed)
            raise FormatError(bad_value(f"{name}.{field}.shape", tuple(shape), remedy))
