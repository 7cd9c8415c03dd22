"""SGLang's Marlin for NVFP4 weights, as its ``--fp4-gemm-backend marlin`` calls it.

Weight-only: activations stay bf16. SGLang compiles the kernel on first use (minutes; kept in ``TVM_FFI_CACHE_DIR``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def layers(n: int, k: int, count: int) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Return ``count`` layers of random weights, prepared by SGLang: bf16 [M, K] to bf16 [M, N].

    Raises:
        ImportError: there is no SGLang with this path, or something that it needs is missing.
        ValueError: a shape that it does not take.
        RuntimeError: its kernel cannot be compiled here.
    """
    from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_nvfp4_layer_for_marlin

    layer = SimpleNamespace(
        output_size_per_partition=n,
        input_size_per_partition=k,
        params_dtype=torch.bfloat16,
        weight=torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8),
        weight_scale=(torch.rand(n, k // 16, device="cuda") * 384 + 64).to(torch.float8_e4m3fn),
        weight_global_scale=torch.tensor(1e-4, device="cuda"),
    )
    prepare_nvfp4_layer_for_marlin(layer)
    return [_call(layer, n, k) for _ in range(count)]


def _call(layer: Any, n: int, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """One layer on a copy of the weights."""
    from sglang.srt.layers.quantization.marlin_utils_fp4 import apply_fp4_marlin_linear

    weight, scale = layer.weight.detach().clone(), layer.weight_scale.detach().clone()
    alpha, workspace = layer.weight_global_scale.detach(), layer.workspace

    def call(x: torch.Tensor) -> torch.Tensor:
        return apply_fp4_marlin_linear(x, weight, scale, alpha, workspace, n, k)

    return call
