"""The quantizer on a real GPU: the exact rule is the reference bit for bit, the fast one at most a step away.

Both mappings of rows to threads are covered: from 2**22 elements on a thread takes four rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from library import native  # noqa: E402
from test_emulated_quantize import nasty, padded_rows  # noqa: E402

from sglang_sm120 import reference  # noqa: E402
from sglang_sm120.errors import FormatError  # noqa: E402
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
    device_x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)
    native().nvfp4_quantize(device_x, torch.tensor(scale, device="cuda"), codes, scales, swizzled, exact, True)
    return codes.cpu(), scales.cpu()


@pytest.mark.parametrize("shape", [(1, 16), (5, 464), (33, 7168), (129, 64), (1000, 2880), (601, 7184)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", list(ScaleLayout))
def test_both_rules(shape: tuple[int, int], dtype: torch.dtype, layout: ScaleLayout) -> None:
    x = nasty(*shape, dtype)
    strided = padded_rows(x, 24)
    for scale in (1.0, 0.37, 448.0):
        expected_codes, expected_scales = reference.quantize(x, torch.tensor(scale), layout)
        wanted = expected_scales.view(torch.uint8)
        codes, scales = run(strided, scale, layout, True)
        assert torch.equal(scales, wanted)
        assert torch.equal(codes, expected_codes)
        codes, scales = run(strided, scale, layout, False)
        assert int((scales.int() - wanted.int()).abs().max()) <= 1
        assert torch.equal(scales == 0x7F, wanted == 0x7F)
        assert float((scales != wanted).float().mean()) < 0.01
        assert float((codes != expected_codes).float().mean()) < 0.02


def test_special_blocks_come_out_as_documented_with_both_rules() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor(
        [[0.0, -0.0] * 8, [nan] * 16, [nan, 2.0, -2.0, 0.0] * 4, [inf, -inf, 1.0, -1.0] * 4, [nan, -inf] * 8]
    ).to(torch.bfloat16)
    codes, scales = reference.quantize(x, torch.tensor(1.0), ScaleLayout.LINEAR)
    for exact in (True, False):
        ours = run(x, 1.0, ScaleLayout.LINEAR, exact)
        assert torch.equal(ours[0], codes)
        assert torch.equal(ours[1], scales.view(torch.uint8))
    with pytest.raises(FormatError, match=r"x\[1, 0\]=nan"):
        reference.find_nonfinite(x.cuda())


@pytest.mark.parametrize("shape", [(3, 7168), (700, 7168)])
def test_repeated_calls_give_the_same_bytes(shape: tuple[int, int]) -> None:
    m, k = shape
    x = torch.randn(m, k, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).to(torch.bfloat16)
    scale = torch.tensor(37.0, device="cuda")
    codes = torch.empty(200, m, k // 2, dtype=torch.uint8, device="cuda")
    scales = torch.empty(200, *padded_scale_shape(m, k // 16), dtype=torch.uint8, device="cuda")
    for i in range(200):
        native().nvfp4_quantize(x, scale, codes[i], scales[i], True, False, True)
    assert bool((codes == codes[0]).all())
    assert bool((scales == scales[0]).all())


def test_no_rows_are_no_launch_and_too_many_are_refused() -> None:
    empty, _ = run(torch.empty(0, 64, dtype=torch.bfloat16), 1.0, ScaleLayout.SWIZZLE_128X4, False)
    assert empty.shape == (0, 32)
    m = 1 << 20
    x = torch.zeros(m, 16, dtype=torch.bfloat16, device="cuda")
    codes = torch.empty(m, 8, dtype=torch.uint8, device="cuda")
    scales = torch.empty(m, 4, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="M must be at most"):
        native().nvfp4_quantize(x, torch.ones((), device="cuda"), codes, scales, True, False, True)
