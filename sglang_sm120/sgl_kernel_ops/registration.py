"""Entries of ``torch.ops.sgl_kernel`` for wheels that have none.

An operator can be registered once in a process. Where the installed wheel has it, code or not, only the Python names
that SGLang calls are replaced (``host/operators.py``).
"""

# torch.library has no annotations.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sglang_sm120 import layout
from sglang_sm120.backends.operator_table import OPERATORS
from sglang_sm120.sgl_kernel_ops import matmul, quantizers

NAMESPACE = "sgl_kernel"

#: Kept for the life of the process: a library that is dropped takes its operators with it.
_LIBRARIES: list[torch.library.Library] = []


def register_missing(backend: str) -> list[str]:
    """Register the operators that ``torch.ops.sgl_kernel`` lacks; a second call finds none missing.

    Args:
        backend: the backend of ours that runs them.

    Returns:
        Names of the operators that were registered.
    """
    namespace = getattr(torch.ops, NAMESPACE)
    schemas = {operator.torch_name: operator.schema for operator in OPERATORS if operator.torch_name}
    missing = [name for name in schemas if not hasattr(namespace, name)]
    if missing:
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        _LIBRARIES.append(library)
        for name in missing:
            library.define(name + schemas[name])
            library.impl(name, partial(_BODIES[name], backend), "CompositeExplicitAutograd")
            torch.library.register_fake(f"{NAMESPACE}::{name}", _writes_its_arguments, lib=library)
    return missing


def _writes_its_arguments(*args: Any, **kwargs: Any) -> None:
    """Fake implementation: nothing is returned."""


def _scaled_fp4_quant(
    backend: str, output: torch.Tensor, input: torch.Tensor, output_scale: torch.Tensor, input_scale: torch.Tensor
) -> None:
    codes, scales = quantizers.scaled_fp4_quant(input, input_scale, backend=backend)
    output.copy_(codes)
    _bytes(output_scale).copy_(scales.view(torch.uint8))


def _scaled_fp4_experts_quant(
    backend: str,
    output: torch.Tensor,
    output_scale: torch.Tensor,
    input: torch.Tensor,
    input_global_scale: torch.Tensor,
    input_offset_by_experts: torch.Tensor,
    output_scale_offset_by_experts: torch.Tensor,
) -> None:
    quantizers.quantize_experts_into(
        output,
        _bytes(output_scale),
        input,
        input_global_scale,
        input_offset_by_experts,
        output_scale_offset_by_experts,
        backend,
    )


def _masked_quant(
    backend: str,
    output: torch.Tensor,
    output_scale: torch.Tensor,
    input: torch.Tensor,
    input_global_scale: torch.Tensor,
    mask: torch.Tensor,
    use_silu_and_mul: bool,
) -> None:
    groups, half_k = mask.shape[0], output.shape[1]
    stacked = input.view(groups, -1, input.shape[-1])
    m = stacked.shape[1]
    quantize = (
        quantizers.silu_and_mul_scaled_fp4_grouped_quant if use_silu_and_mul else quantizers.scaled_fp4_grouped_quant
    )
    codes, scales = quantize(stacked, input_global_scale, mask, backend=backend)
    output.view(groups, m, half_k).copy_(codes.permute(2, 0, 1))
    shape = layout.padded_scale_shape(m, half_k // 8)
    physical = scales.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).reshape(groups, *shape)
    _bytes(output_scale).view(groups, *shape).copy_(physical)


def _cutlass_scaled_fp4_mm(
    backend: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    block_scale_a: torch.Tensor,
    block_scale_b: torch.Tensor,
    alpha: torch.Tensor,
) -> None:
    out.copy_(matmul.cutlass_scaled_fp4_mm(a, b, block_scale_a, block_scale_b, alpha, out.dtype, backend=backend))


def _cutlass_fp4_group_mm(
    backend: str,
    output: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_blockscale: torch.Tensor,
    b_blockscale: torch.Tensor,
    alphas: torch.Tensor,
    ab_strides: torch.Tensor,
    c_strides: torch.Tensor,
    problem_sizes: torch.Tensor,
    expert_offsets: torch.Tensor,
    sf_offsets: torch.Tensor,
) -> None:
    matmul.multiply_experts_into(
        output, a, b, a_blockscale, b_blockscale, alphas, problem_sizes, expert_offsets, sf_offsets, backend
    )


def _bytes(scales: torch.Tensor) -> torch.Tensor:
    """View a buffer of scales, four to an int32, as bytes ``[rows, K / 16 to 4]``."""
    return scales.view(torch.uint8)


_BODIES: dict[str, Callable[..., None]] = {
    "scaled_fp4_quant": _scaled_fp4_quant,
    "scaled_fp4_experts_quant": _scaled_fp4_experts_quant,
    "silu_and_mul_scaled_fp4_experts_quant": _masked_quant,
    "cutlass_scaled_fp4_mm": _cutlass_scaled_fp4_mm,
    "cutlass_fp4_group_mm": _cutlass_fp4_group_mm,
}
