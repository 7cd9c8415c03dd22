"""How a layer that our kernels serve is judged, on the CPU (emulated) and on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.layout import ScaleLayout
from tests.host.linear_layers import Case, make_case
from tests.support.nvfp4 import assert_matches_oracle

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-25}


def quantize(
    device: str, x: torch.Tensor, encode: torch.Tensor, layout: ScaleLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Our quantizer's default rule, results on the CPU. Its distance from the oracle is measured in tests/kernels."""
    assert layout is ScaleLayout.LINEAR
    codes, scales = ops.nvfp4_quantize(x.to(device), encode.to(device), False, "sm120")
    return codes.cpu(), scales.cpu()


def make_sm120_case(*args: Any, device: str = "cpu", **kwargs: Any) -> Case:
    """``make_case`` of a layer whose activations our quantizer quantizes."""
    case = make_case(*args, device=device, **kwargs)
    case.quantize = partial(quantize, device)
    return case


def check(case: Case, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Run the layer and compare with float64.

    The bound: a sum passes through at most K / 64 + 16 float32 additions, each wrong by 2**-22 (tensor cores may
    truncate) of a partial sum that the sum of magnitudes bounds; alpha, its product and the sum with the bias are
    float32; the output type adds half an ulp.
    """
    expected, magnitude = case.expected(x, bias), case.magnitude(x)
    device = next(case.layer.parameters()).device
    out = case.run(x.to(device), None if bias is None else bias.to(device))
    assert out.dtype == x.dtype
    error = magnitude * (x.shape[1] / 64 + 16) * 2.0**-22
    if bias is not None:
        error = error + bias.cpu().double().abs() * 2.0**-22
    bound = expected.abs() * ROUNDING[x.dtype] * 1.01 + error * 1.01 + SMALLEST[x.dtype]
    assert_matches_oracle(out.cpu(), expected, bound)
