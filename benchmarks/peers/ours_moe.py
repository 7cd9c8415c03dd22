"""The kernels of this package, called as SGLang's expert layers call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_sm120 import native, ops

if TYPE_CHECKING:
    from benchmarks.moe import Geometry

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def use_library(path: str | None) -> None:
    """Take compiled kernels from ``path``; ``None`` leaves the choice to the package."""
    if path is None:
        return
    import tvm_ffi

    library = tvm_ffi.load_module(path)
    can_depend = torch.cuda.get_device_capability() >= (9, 0)
    vars(native)["_library"] = lambda device: (library, can_depend)


def layers(geometry: Geometry) -> list[Layer]:
    """Return layers of random weights, as many as the benchmark goes round."""
    return [_layer(geometry) for _ in range(geometry.layers)]


def _stack(experts: int, rows: int, k: int) -> list[Any]:
    packed = torch.randint(0, 256, (experts, rows, k // 2), device="cuda", dtype=torch.uint8)
    padded = (experts, -(-rows // 128) * 128, -(-k // 64) * 4)
    scales = torch.randint(0x28, 0x40, padded, device="cuda", dtype=torch.uint8)
    alpha = torch.full((experts,), 0.3 / k**0.5, device="cuda")
    return [packed, scales, alpha, torch.ones((), device="cuda")]


def _layer(geometry: Geometry) -> Layer:
    w13 = _stack(geometry.experts, 2 * geometry.inner, geometry.hidden)
    w2 = _stack(geometry.experts, geometry.hidden, geometry.inner)

    def call(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ops.nvfp4_moe(hidden, ids, weights, *w13, *w2, "silu", False, 0, "sm120")

    return call
