"""The quantizers: one tensor, rows sorted by expert, and padded groups with a mask.

A scale buffer is the 128x4 swizzle throughout, float8_e4m3fn. Unlike SGLang's, ours writes every byte: padding
columns, padding rows and rows of no expert are zero.
"""

from __future__ import annotations

import torch

from sglang_sm120 import layout, ops
from sglang_sm120.errors import FormatError, bad_value
from sglang_sm120.formats import BLOCK_SIZE
from sglang_sm120.sgl_kernel_ops.experts import Span, spans

_ACTIVATIONS = (torch.bfloat16, torch.float16)


def scaled_fp4_quant(
    input: torch.Tensor, input_global_scale: torch.Tensor, *, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the last dimension of a tensor.

    Args:
        input: bf16/fp16 ``[..., K]``; K is a multiple of 16.
        input_global_scale: float32, one value, the encode scale.
        backend: the backend of ours that quantizes.

    Returns:
        Packed codes, uint8 ``[M, K / 2]`` with M the product of the leading dimensions, and block scales,
        float8_e4m3fn ``[M to 128, K / 16 to 4]`` swizzled.

    Raises:
        FormatError: a dtype or shape that is not allowed.
    """
    _check_activations("input", input, input.shape[-1] if input.ndim else 0)
    rows = input.reshape(1 if input.ndim == 1 else -1, input.shape[-1])
    codes, scales = ops.nvfp4_quantize(rows.contiguous(), _one(input_global_scale), True, backend)
    return codes, scales.view(torch.float8_e4m3fn)


def scaled_fp4_experts_quant(
    input_tensor: torch.Tensor,
    input_global_scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    blockscale_offsets: torch.Tensor,
    topk: int,
    expert_map: torch.Tensor | None = None,
    *,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows that are sorted by expert, each with the scale of its expert.

    Args:
        input_tensor: bf16/fp16 ``[R, K]`` sorted, or ``[M, K]`` with ``expert_map``.
        input_global_scale: float32 ``[E]``, encode scales.
        expert_offsets: int32 ``[E + 1]``, first row of each expert.
        blockscale_offsets: int32 ``[E + 1]``, first row of each expert's scales, multiples of 128.
        topk: experts per token; R = M * topk.
        expert_map: int32 ``[R]``, the row of ``input_tensor`` that each sorted row is; what stands behind the last
            row of an expert does not count.
        backend: the backend of ours that quantizes.

    Returns:
        Codes, uint8 ``[R, K / 2]``, and scales, float8_e4m3fn. The scale buffer has as many rows as R rows can need,
        where SGLang's has room for ``MODELOPT_MAX_TOKENS_PER_EXPERT`` tokens; both are read by ``blockscale_offsets``.

    Raises:
        FormatError: a dtype or shape that is not allowed, or offsets that do not fit.
        UnsupportedError: called while a CUDA graph is captured; see :func:`experts.spans`.
    """
    rows = input_tensor if expert_map is None else _sorted(input_tensor, expert_map, expert_offsets, topk)
    _check_activations("input_tensor", rows, rows.shape[-1])
    experts = expert_offsets.shape[0] - 1
    codes = torch.zeros(rows.shape[0], rows.shape[1] // 2, dtype=torch.uint8, device=rows.device)
    scales = _empty_scales(_most_scale_rows(rows.shape[0], experts), rows.shape[1], rows.device)
    quantize_experts_into(codes, scales, rows, input_global_scale, expert_offsets, blockscale_offsets, backend)
    return codes, scales.view(torch.float8_e4m3fn)


def silu_and_mul_scaled_fp4_experts_quant_packed(
    input_tensor: torch.Tensor,
    input_global_scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    blockscale_offsets: torch.Tensor,
    topk: int,
    expert_map: torch.Tensor | None = None,
    *,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply ``silu(gate) * up``, round to the input's dtype, then :func:`scaled_fp4_experts_quant`.

    Args:
        input_tensor: ``[R, 2 * K]``, gate first; the other arguments as there.
    """
    rows = input_tensor if expert_map is None else _sorted(input_tensor, expert_map, expert_offsets, topk)
    return scaled_fp4_experts_quant(
        _silu_and_mul(rows), input_global_scale, expert_offsets, blockscale_offsets, topk, backend=backend
    )


def scaled_fp4_grouped_quant(
    input_tensor: torch.Tensor, input_global_scale: torch.Tensor, mask: torch.Tensor, *, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize groups of rows, of which the first ``mask`` of each count.

    Nothing is read on the host, so a CUDA graph can capture it.

    Args:
        input_tensor: bf16/fp16 ``[L, M, K]``.
        input_global_scale: float32 ``[L]``, encode scales.
        mask: int32 ``[L]``, rows of each group that count; the others become zero.
        backend: the backend of ours that quantizes.

    Returns:
        Codes, uint8, logically ``[M, K / 2, L]``, and scales, float8_e4m3fn, logically
        ``[32, 4, M / 128, 4, K / 64, L]`` (each quotient rounded up); in memory group after group.

    Raises:
        FormatError: a dtype or shape that is not allowed.
    """
    groups, m, k = input_tensor.shape
    codes = torch.empty(groups, m, k // 2, dtype=torch.uint8, device=input_tensor.device)
    shape = layout.padded_scale_shape(m, k // BLOCK_SIZE)
    scales = torch.empty(groups, *shape, dtype=torch.uint8, device=input_tensor.device)
    quantize_groups_into(codes, scales, input_tensor, input_global_scale, mask, backend)
    tiles = scales.view(torch.float8_e4m3fn).view(groups, shape[0] // 128, shape[1] // 4, 32, 4, 4)
    return codes.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)


def silu_and_mul_scaled_fp4_grouped_quant(
    input_tensor: torch.Tensor, input_global_scale: torch.Tensor, mask: torch.Tensor, *, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply ``silu(gate) * up`` to ``[L, M, 2 * K]``, gate first, then :func:`scaled_fp4_grouped_quant`."""
    return scaled_fp4_grouped_quant(_silu_and_mul(input_tensor), input_global_scale, mask, backend=backend)


def quantize_experts_into(
    codes: torch.Tensor,
    scales: torch.Tensor,
    rows: torch.Tensor,
    global_scales: torch.Tensor,
    expert_offsets: torch.Tensor,
    blockscale_offsets: torch.Tensor,
    backend: str,
) -> None:
    """Write codes ``[R, K / 2]`` and swizzled scale bytes ``[S, K / 16 to 4]`` of rows sorted by expert."""
    experts = global_scales.numel()
    _check_scales_of("input_global_scale", global_scales, expert_offsets.shape[0] - 1)
    found = spans(expert_offsets[:experts], expert_offsets[1:] - expert_offsets[:-1], blockscale_offsets[:experts])
    scales.zero_()
    for span in found:
        span.require_room(rows.shape[0], scales.shape[0])
        part, part_scales = ops.nvfp4_quantize(rows[span.rows], _expert(global_scales, span), True, backend)
        codes[span.rows] = part
        scales[span.scale_rows] = part_scales


def quantize_groups_into(
    codes: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    global_scales: torch.Tensor,
    mask: torch.Tensor,
    backend: str,
) -> None:
    """Write codes ``[L, M, K / 2]`` and swizzled scale bytes ``[L, M to 128, K / 16 to 4]`` of masked groups."""
    _check_activations("input_tensor", groups, groups.shape[-1])
    _check_scales_of("input_global_scale", global_scales, groups.shape[0])
    _check_scales_of("mask", mask, groups.shape[0])
    position = torch.arange(groups.shape[1], device=groups.device)
    counted = groups.masked_fill((position >= mask.unsqueeze(1)).unsqueeze(2), 0)
    for index in range(groups.shape[0]):
        codes[index], scales[index] = ops.nvfp4_quantize(counted[index], global_scales[index], True, backend)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.to(torch.float32).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _sorted(x: torch.Tensor, expert_map: torch.Tensor, expert_offsets: torch.Tensor, topk: int) -> torch.Tensor:
    if expert_map.shape != (x.shape[0] * topk,):
        remedy = f"pass one row number for each of {x.shape[0]} tokens and {topk} experts"
        raise FormatError(bad_value("expert_map.shape", tuple(expert_map.shape), remedy))
    # Slots of expert id -1 sort behind the last expert. SGLang leaves their places in the map unwritten.
    position = torch.arange(expert_map.shape[0], device=expert_map.device)
    return x.index_select(0, expert_map.masked_fill(position >= expert_offsets[-1], 0))


def _empty_scales(rows: int, k: int, device: torch.device) -> torch.Tensor:
    return torch.empty(layout.padded_scale_shape(rows, k // BLOCK_SIZE), dtype=torch.uint8, device=device)


def _most_scale_rows(rows: int, experts: int) -> int:
    # Every expert that has rows may leave up to 127 of its last tile unused.
    return rows + (layout.TILE_ROWS - 1) * min(rows, experts)


def _one(scale: torch.Tensor) -> torch.Tensor:
    _check_scales_of("input_global_scale", scale, 1)
    return scale.reshape(())


def _expert(global_scales: torch.Tensor, span: Span) -> torch.Tensor:
    return global_scales.reshape(-1)[span.expert]


def _check_scales_of(name: str, scales: torch.Tensor, count: int) -> None:
    if scales.numel() != count:
        raise FormatError(bad_value(f"{name}.shape", tuple(scales.shape), f"pass {count} number(s)"))


def _check_activations(name: str, x: torch.Tensor, k: int) -> None:
    if x.dtype not in _ACTIVATIONS:
        raise FormatError(bad_value(f"{name}.dtype", x.dtype, "pass bfloat16 or float16"))
    if k < BLOCK_SIZE or k % BLOCK_SIZE:
        raise FormatError(bad_value(f"{name}.shape", tuple(x.shape), f"K must be a positive multiple of {BLOCK_SIZE}"))
