"""The quantizer on a real GPU: the exact rule is the reference bit for bit, the fast one at most a step away."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from library import native  # noqa: E402
from test_emulated_quantize import nasty  # noqa: E402

from sglang_sm120 import reference  # noqa: E402
from sglang_sm120.layout import ScaleLayout, padded_scale_shape  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def run(x: torch.Tensor, scale: float, layout: ScaleLayout, exact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales from poisoned buffers, on the CPU."""
    m, k = x.shape
    swizzled = layout is ScaleLayout.SWIZZLE_128X4
    codes = torch.full((m, k // 2), 0xEE, dtype=torch.uint8, device="cuda")
    shape = padded_scale_shape(m, k // 16) if swizzled else (m, k // 16)
    scales = torch.full(shape, 0xEE, dtype=torch.uint8, device="cuda")
    native().nvfp4_quantize(x.cuda(), torch.tensor(scale, device="cuda"), codes, scales, swizzled, exact, True)
    return codes.cpu(), scales.cpu()


@pytest.mark.parametrize("shape", [(1, 16), (5, 464), (33, 7168), (129, 64), (1000, 2880)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_both_rules(shape: tuple[int, int], dtype: torch.dtype, layout: ScaleLayout) -> None:
    x = nasty(*shape, dtype)
    for scale in (1.0, 0.37, 448.0):
        expected_codes, expected_scales = reference.quantize(x, torch.tensor(scale), layout)
        wanted = expected_scales.view(torch.uint8)
        codes, scales = run(x, scale, layout, True)
        assert torch.equal(scales, wanted)
        assert torch.equal(codes, expected_codes)
        codes, scales = run(x, scale, layout, False)
        assert int((scales.int() - wanted.int()).abs().max()) <= 1
        assert torch.equal(scales == 0x7F, wanted == 0x7F)
        assert float((scales != wanted).float().mean()) < 0.01
        assert float((codes != expected_codes).float().mean()) < 0.02
