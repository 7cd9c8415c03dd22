"""What a kernel would have to assume is checked, and the message names argument, value and remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_sm120 import formats, layout, reference
from sglang_sm120.errors import FormatError
from sglang_sm120.layout import ScaleLayout
from sglang_sm120.reference import ExpertWeights
from tests.support.nvfp4 import fresh_generator, random_nvfp4_weight

ONE = torch.tensor(1.0)
U8 = torch.uint8
LINEAR, SWIZZLED = ScaleLayout.LINEAR, ScaleLayout.SWIZZLE_128X4


def byte_zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=U8)


FORMATS: list[tuple[Callable[[], object], str]] = [
    (lambda: formats.encode_e2m1(torch.zeros(3, dtype=torch.int32)), "x.dtype"),
    (lambda: formats.encode_e2m1(torch.zeros(4, 4).T), "x.stride()"),
    (lambda: formats.decode_e2m1(torch.zeros(4)), "codes.dtype"),
    (lambda: formats.decode_e2m1(byte_zeros(4), torch.int32), "dtype=torch.int32"),
    (lambda: formats.pack_e2m1(byte_zeros(2, 3)), "codes.shape=(2, 3)"),
    (lambda: formats.pack_e2m1(byte_zeros()), "codes.shape=()"),
    (lambda: formats.unpack_e2m1(byte_zeros()), "packed.shape=()"),
    (lambda: formats.unpack_e2m1(torch.zeros(4)), "packed.dtype"),
    (lambda: formats.encode_ue4m3(byte_zeros(2)), "x.dtype"),
    (lambda: formats.decode_ue4m3(torch.zeros(2)), "scale_bytes.dtype"),
    (lambda: formats.round_float64(torch.zeros(2), torch.bfloat16), "value.dtype"),
    (lambda: formats.round_float64(torch.zeros(2, dtype=torch.float64), torch.int8), "dtype=torch.int8"),
]
LAYOUTS: list[tuple[Callable[[], object], str]] = [
    (lambda: layout.padded_scale_shape(-1, 4), "-1"),
    (lambda: layout.padded_scale_shape(1, 0), "blocks=0"),
    (lambda: layout.swizzle_offset(0, 4, 4), "block=4"),
    (lambda: layout.swizzle_offset(-1, 0, 4), "-1"),
    (lambda: layout.swizzle_128x4(torch.zeros(4, 4)), "scales.dtype"),
    (lambda: layout.swizzle_128x4(byte_zeros(4)), "scales.shape=(4,)"),
    (lambda: layout.swizzle_128x4(byte_zeros(4, 8).T), "scales.stride()"),
    (lambda: layout.unswizzle_128x4(byte_zeros(100, 4), 4, 4), "swizzled.shape=(100, 4)"),
    (lambda: layout.unswizzle_128x4(byte_zeros(128, 6), 4, 4), "swizzled.shape=(128, 6)"),
    (lambda: layout.unswizzle_128x4(byte_zeros(128, 4), 129, 4), "at least [256, 4]"),
    (lambda: layout.unswizzle_128x4(byte_zeros(128, 4), 4, 5), "at least [128, 8]"),
]


@pytest.mark.parametrize(("call", "message"), FORMATS + LAYOUTS)
def test_format_and_layout_functions_refuse_what_they_cannot_read(call: Callable[[], object], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("x", "scale", "message"),
    [
        (torch.zeros(2, 24), ONE, "x.shape[1]=24"),
        (torch.zeros(2, 0), ONE, "x.shape[1]=0"),
        (torch.zeros(32), ONE, "x.shape=(32,)"),
        (torch.zeros(2, 16, dtype=torch.float64), ONE, "x.dtype=torch.float64"),
        (torch.zeros(16, 16).T, ONE, "x.stride()"),
        (torch.zeros(2, 16), torch.ones(2), "global_scale.shape=(2,)"),
        (torch.zeros(2, 16), ONE.to(torch.float64), "global_scale.dtype"),
        (torch.zeros(2, 16), torch.ones((), device="meta"), "global_scale.device"),
    ],
)
def test_quantize_refuses(x: torch.Tensor, scale: torch.Tensor, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        reference.quantize(x, scale)
    assert message in str(caught.value)


def gemm_arguments(**changes: Any) -> dict[str, Any]:
    """Return a legal GEMM of M = 4, N = 6, K = 32 with some arguments replaced."""
    legal = {
        "a_packed": byte_zeros(4, 16),
        "b_packed": byte_zeros(6, 16),
        "a_scales": byte_zeros(128, 4),
        "b_scales": byte_zeros(128, 4),
        "alpha": ONE,
        "out_dtype": torch.bfloat16,
    }
    return {**legal, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a_packed": torch.zeros(4, 16)}, "a_packed.dtype"),
        ({"b_packed": byte_zeros(16, 6).T}, "b_packed.stride()"),
        ({"b_packed": byte_zeros(6, 24)}, "pass k if"),
        ({"b_packed": byte_zeros(0, 16)}, "n=0"),
        ({"b_packed": torch.zeros(6, 16, dtype=U8, device="meta")}, "b_packed.device"),
        ({"a_packed": byte_zeros(4, 12), "b_packed": byte_zeros(6, 12)}, "k=24"),
        ({"k": 48}, "a_packed.shape=(4, 16)"),
        ({"k": 0}, "k=0"),
        ({"n": 7}, "b_packed.shape=(6, 16)"),
        ({"a_scales": byte_zeros(4, 2)}, "a_scales.shape=(4, 2)"),
        ({"a_scales": byte_zeros(128, 8)}, "a_scales.shape=(128, 8)"),
        ({"b_scales": byte_zeros(256, 4)}, "b_scales.shape=(256, 4)"),
        ({"b_scales": torch.zeros(128, 4)}, "b_scales.dtype"),
        ({"b_scales": byte_zeros(4, 128).T}, "b_scales.stride()"),
        ({"b_layout": LINEAR}, "b_scales.shape=(128, 4)"),
        ({"b_layout": LINEAR, "b_scales": byte_zeros(6, 3)}, "b_scales.shape=(6, 3)"),
        ({"alpha": torch.ones(5)}, "alpha.shape=(5,)"),
        ({"alpha": ONE.to(torch.bfloat16)}, "alpha.dtype"),
        ({"alpha": torch.ones(6), "n": 5}, "alpha.shape=(6,)"),
        ({"bias": torch.ones(())}, "bias.shape=()"),
        ({"bias": torch.ones(6, dtype=torch.int32)}, "bias.dtype"),
        ({"out_dtype": torch.int8}, "dtype=torch.int8"),
    ],
)
def test_gemm_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError) as caught:
        reference.gemm(**gemm_arguments(**changes))
    assert message in str(caught.value)
    assert "cannot be used" in str(caught.value)


def test_the_legal_gemm_of_these_tests_runs() -> None:
    assert reference.gemm(**gemm_arguments()).shape == (4, 6)
    assert reference.gemm(**gemm_arguments(b_layout=LINEAR, b_scales=byte_zeros(6, 2))).shape == (4, 6)
    assert reference.gemm(**gemm_arguments(n=5, k=16, alpha=torch.ones(5))).shape == (4, 5)
    assert reference.gemm(**gemm_arguments(alpha=torch.ones(1))).shape == (4, 6)


def test_dequantize_refuses_more_than_the_buffer_has() -> None:
    scales = byte_zeros(128, 4)
    for rows, k in ((5, 32), (-1, 32), (4, 48)):
        with pytest.raises(FormatError, match=r"packed\.shape=\(4, 16\)"):
            reference.dequantize(byte_zeros(4, 16), scales, ONE, SWIZZLED, rows, k)


def experts(n: int, k: int) -> ExpertWeights:
    weight = random_nvfp4_weight(n, k, fresh_generator())
    both = (
        torch.stack((weight.packed, weight.packed)),
        torch.stack((weight.linear_scales, weight.linear_scales)),
    )
    return ExpertWeights(*both, torch.ones(2), torch.ones(2), LINEAR)


def moe_arguments(**changes: Any) -> dict[str, Any]:
    """Return a legal layer of 2 experts, H = 32, I = 16, with some arguments replaced."""
    legal = {
        "hidden": torch.zeros(3, 32),
        "topk_ids": torch.zeros(3, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(3, 2),
        "w13": experts(32, 32),
        "w2": experts(32, 16),
        "activation": "silu",
        "gate_first": True,
    }
    return {**legal, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(3, 2, 16)}, "hidden.shape"),
        ({"topk_ids": torch.zeros(3, 2)}, "topk_ids.dtype"),
        ({"topk_ids": torch.zeros(2, 2, dtype=torch.int64)}, "T = 3"),
        ({"topk_weights": torch.zeros(3, 1)}, "topk_weights.shape"),
        ({"topk_weights": torch.zeros(3, 2, dtype=torch.bfloat16)}, "topk_weights.dtype"),
        ({"activation": "gelu"}, "activation='gelu'"),
        ({"gate_first": None}, "gate_first=None"),
        ({"activation": "relu2"}, "gate_first=True"),
        ({"activation": "relu2", "gate_first": None}, "w2.packed.shape"),
        ({"hidden": torch.zeros(3, 48)}, "w13.packed.shape"),
        ({"hidden": torch.zeros(3, 40)}, "hidden.shape[1]=40"),
        ({"w13": experts(33, 32)}, "w13.packed.shape"),
        ({"w13": experts(48, 32)}, "I=24"),
        ({"w2": experts(48, 16)}, "w2.packed.shape"),
        ({"w13": replace(experts(32, 32), alpha=torch.ones(3))}, "w13.alpha.shape=(3,)"),
        ({"w2": replace(experts(32, 16), input_global_scale=torch.ones(1))}, "w2.input_global_scale.shape"),
        ({"w2": replace(experts(32, 16), scales=byte_zeros(3, 32, 1))}, "w2.scales.shape"),
        ({"w2": replace(experts(32, 16), scales=byte_zeros(2, 32))}, "w2.scales.shape"),
        ({"w2": replace(experts(32, 16), packed=byte_zeros(32, 8))}, "w2.packed.shape"),
    ],
)
def test_moe_refuses(changes: dict[str, Any], message: str) -> None:
    assert reference.moe(**moe_arguments()).shape == (3, 32)
    with pytest.raises(FormatError) as caught:
        reference.moe(**moe_arguments(**changes))
    assert message in str(caught.value)
