"""SGLang's Marlin for NVFP4 experts, as its ``--moe-runner-backend marlin`` calls it.

Weight-only: activations stay bf16. SGLang compiles three kernels on first use, which takes minutes, and keeps them in
``TVM_FFI_CACHE_DIR``. They can be compiled before, on a machine without a GPU:

    TVM_FFI_CACHE_DIR=folder python -m benchmarks.peers.marlin_moe 9.0a
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from benchmarks.moe import Geometry

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def layers(geometry: Geometry) -> list[Layer]:
    """Return layers of random weights, prepared by SGLang, as many as the benchmark goes round.

    Raises:
        ImportError: there is no SGLang with this path, or something that it needs is missing.
        AssertionError, ValueError: a shape that it does not take.
        RuntimeError: its kernels cannot be compiled here.
    """
    from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_nvfp4_layer_for_marlin

    experts, hidden, inner = geometry.experts, geometry.hidden, geometry.inner

    def draw(rows: int, k: int) -> tuple[Any, Any]:
        packed = torch.randint(0, 256, (experts, rows, k // 2), device="cuda", dtype=torch.uint8)
        scales = (torch.rand(experts, rows, k // 16, device="cuda") * 384 + 64).to(torch.float8_e4m3fn)
        return _parameter(packed), _parameter(scales)

    layer: Any = SimpleNamespace(
        quant_config=SimpleNamespace(group_size=16),
        moe_runner_config=SimpleNamespace(is_gated=True),
        intermediate_size_per_partition=inner,
        params_dtype=torch.bfloat16,
        w13_weight_scale_2=_parameter(torch.full((experts,), 1e-4, device="cuda")),
        w2_weight_scale_2=_parameter(torch.full((experts,), 1e-4, device="cuda")),
    )
    layer.w13_weight, layer.w13_weight_scale = draw(2 * inner, hidden)
    layer.w2_weight, layer.w2_weight_scale = draw(hidden, inner)
    prepare_moe_nvfp4_layer_for_marlin(layer)
    return [_call(layer, copy=index > 0) for index in range(geometry.layers)]


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _call(layer: Any, *, copy: bool) -> Layer:
    from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe

    names = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
    w1, w2, w1_scale, w2_scale = (
        getattr(layer, n).detach().clone() if copy else getattr(layer, n).detach() for n in names
    )
    first, second = layer.w13_weight_scale_2.detach(), layer.w2_weight_scale_2.detach()

    def call(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = fused_marlin_moe(
            hidden_states=hidden, w1=w1, w2=w2, w1_scale=w1_scale, w2_scale=w2_scale, gating_output=hidden,
            topk_weights=weights, topk_ids=ids, w1_global_scale=first, w2_global_scale=second,
            workspace=layer.workspace, num_bits=4, is_k_full=True,
        )  # fmt: skip
        return out

    return call


def compile_ahead(capability: str) -> None:
    """Compile what :func:`layers` and its calls need for a card like ``9.0a``, and say how long it took."""
    from sglang.jit_kernel import gptq_marlin_repack, moe_wna16_marlin
    from sglang.jit_kernel.utils import override_jit_cuda_arch

    number = capability.rstrip("af")
    major, minor = map(int, number.split("."))
    with override_jit_cuda_arch(major, minor, capability[len(number) :]):
        for name, build in (
            ("repack", gptq_marlin_repack._jit_gptq_marlin_repack_module),
            ("experts", lambda: moe_wna16_marlin._jit_moe_wna16_marlin_module(torch.bfloat16)),
        ):
            began = time.monotonic()
            build()
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    compile_ahead(sys.argv[1])
