"""Seams of one GEMM call: the FlashInfer handle, the activation quantizer, SGLang's pre-empting kernel."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.backends import BACKENDS
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host.patching import Patcher, mark
from sglang_sm120.host.state import STATE


def route_gemm(module: ModuleType, patcher: Patcher) -> None:
    """Replace the module's handle of ``flashinfer.mm_fp4`` (and nothing of FlashInfer's own).

    SGLang's op body reads this global on every call, so eager mode, torch.compile and graph capture are all
    covered. Going through SGLang's hook registry instead would rebind FlashInfer's function inside
    FlashInfer, whose ``auto`` reads attributes of it.
    """
    original = getattr(module, "flashinfer_fp4_gemm", None)
    ours = {b.value for b in BACKENDS.values() if b.implementation is not None}

    def flashinfer_fp4_gemm(
        a: torch.Tensor,
        b: torch.Tensor,
        a_descale: torch.Tensor,
        b_descale: torch.Tensor,
        alpha: torch.Tensor,
        out_dtype: torch.dtype,
        *args: Any,
        backend: str = "auto",
        **kwargs: Any,
    ) -> torch.Tensor:
        if STATE.tuning is not None:
            backend = STATE.tuning.flashinfer_name  # only layers that the tuning table says nothing about come here
        if backend in ours:
            # SGLang passes weight and scales as transposed views of the row-major tensors.
            return ops.nvfp4_gemm(a, b.T, a_descale, b_descale.T, alpha, None, out_dtype, backend)
        if original is None:
            raise UnsupportedError(
                f"--fp4-gemm-backend with FlashInfer's backend {backend!r} cannot run: FlashInfer is not "
                "installed. Install flashinfer-python, or choose torch_reference."
            )
        out: torch.Tensor = original(a, b, a_descale, b_descale, alpha, out_dtype, *args, backend=backend, **kwargs)
        return out

    patcher.set(module, "flashinfer_fp4_gemm", mark("gemm", flashinfer_fp4_gemm, original))


def route_quantizer(module: ModuleType, patcher: Patcher) -> None:
    """Replace the module's ``fp4_quantize`` by one that can be ours.

    Ours quantizes when there is no other quantizer, and where :attr:`ServingState.replaces_quantizer` says so.
    """
    original = module.fp4_quantize

    def fp4_quantize(
        input: torch.Tensor, global_scale: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if args or kwargs or not (original is None or STATE.replaces_quantizer):
            return original(input, global_scale, *args, **kwargs)  # type: ignore[no-any-return]
        return ops.nvfp4_quantize(input, global_scale, True, STATE.quantizing_backend)

    patcher.set(module, "fp4_quantize", mark("quantizer", fp4_quantize, original))


def guard_preemption(module: ModuleType, patcher: Patcher) -> None:
    """Keep SGLang's own Qwen3.x kernel from serving shapes that the user gave to a named backend.

    From 0.5.20 ``fp4_gemm`` asks this function first, whatever ``--fp4-gemm-backend`` says. Under ``auto`` it
    may stay; a named backend must be the one that runs, or every measurement of it would be wrong.
    """
    original = module.try_qwen3x_nvfp4_gemm

    def try_qwen3x_nvfp4_gemm(*args: Any, **kwargs: Any) -> torch.Tensor | None:
        if STATE.decision is not None and STATE.chosen is not None and STATE.decision.explicit:
            return None
        return original(*args, **kwargs)  # type: ignore[no-any-return]

    patcher.set(module, "try_qwen3x_nvfp4_gemm", mark("pre-emption", try_qwen3x_nvfp4_gemm, original))
