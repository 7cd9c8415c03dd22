"""Seams of SGLang's own NVFP4 operators (0.5.9 to 0.5.15): ours where SGLang's have no code for the card.

The names that SGLang's code calls are replaced, at the modules that imported them and at the module they come from. An
entry of ``torch.ops`` is added only where the installed wheel has none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.backends.operator_table import has_no_kernels_here
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host import moe_layers
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.state import STATE
from sglang_sm120.sgl_kernel_ops import matmul, quantizers, registration, runner

logger = logging.getLogger("sglang_sm120")


def _group_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """SGLang 0.5.9 passes the device between dtype and parameters; the operands say it already."""
    kept = [argument for argument in args if not isinstance(argument, torch.device)]
    return matmul.cutlass_fp4_group_mm(*kept, **kwargs)


_OURS: dict[str, Callable[..., Any]] = {
    "scaled_fp4_quant": quantizers.scaled_fp4_quant,
    "scaled_fp4_experts_quant": quantizers.scaled_fp4_experts_quant,
    "silu_and_mul_scaled_fp4_experts_quant_packed": quantizers.silu_and_mul_scaled_fp4_experts_quant_packed,
    "scaled_fp4_grouped_quant": quantizers.scaled_fp4_grouped_quant,
    "silu_and_mul_scaled_fp4_grouped_quant": quantizers.silu_and_mul_scaled_fp4_grouped_quant,
    "cutlass_scaled_fp4_mm": matmul.cutlass_scaled_fp4_mm,
    "cutlass_fp4_group_mm": _group_mm,
    "cutlass_moe_fp4": runner.cutlass_moe_fp4,
}
#: SGLang's own runner, and what it calls.
_RUNNER = "cutlass_moe_fp4"
_EXPERTS = ("scaled_fp4_experts_quant", "silu_and_mul_scaled_fp4_experts_quant_packed", "cutlass_fp4_group_mm")


def route_experts(module: ModuleType, patcher: Patcher) -> None:
    """Replace ``cutlass_moe_fp4``, and its operators where it holds them, for who calls the original."""
    for name in (_RUNNER, *_EXPERTS):
        _route(module, patcher, name, name, "operators (experts)")


def route_dense(module: ModuleType, patcher: Patcher) -> None:
    """Replace the operator behind ``fp4_gemm`` where FlashInfer does not multiply."""
    _route(module, patcher, "cutlass_fp4_gemm", "cutlass_scaled_fp4_mm", "operators (dense)")


def route_module(module: ModuleType, patcher: Patcher) -> None:
    """Replace what ``sglang.jit_kernel.nvfp4`` gives to everybody else."""
    for name in _OURS:
        if hasattr(module, name):
            _route(module, patcher, name, name, "operators (module)")


def start(device: torch.device, *, rank: int) -> None:
    """Load what the operators will call and register those that ``torch.ops`` lacks, where ours count.

    Raises:
        UnsupportedError: our kernels cannot be had on this machine.
    """
    backend, facts = STATE.operators, STATE.facts
    if backend is None or facts is None:
        return
    ops.start(backend, device)
    moe_layers.start(backend, device)
    added = registration.register_missing(backend)
    logger.log(
        logging.INFO if rank == 0 else logging.DEBUG,
        "SGLang's own NVFP4 operators cannot run here (%s): %s of this package stands in, for SGLang's own runner of "
        "NVFP4 experts too. Added to torch.ops.%s: %s.",
        has_no_kernels_here(facts),
        backend,
        registration.NAMESPACE,
        ", ".join(added) or "nothing",
    )


def _route(module: ModuleType, patcher: Patcher, name: str, operator: str, seam: str) -> None:
    original, ours = getattr(module, name, None), _OURS[operator]

    def routed(*args: Any, **kwargs: Any) -> Any:
        backend = STATE.operators
        if backend is not None:
            return ours(*args, **kwargs, backend=backend)
        if original is None:
            raise UnsupportedError(
                f"{operator} cannot be called: SGLang has no code for it on this machine, and sglang-sm120 stands in "
                "only on SM12x cards and where a backend of its own was chosen. Use --fp4-gemm-backend sm120, or "
                "torch_reference."
            )
        return original(*args, **kwargs)

    patcher.set(module, name, mark(seam, routed, original))
