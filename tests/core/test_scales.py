"""Global scales: both checkpoint conventions, one alpha per column, and numbers that are refused."""

from __future__ import annotations

from fractions import Fraction
from math import inf, nan

import pytest
import torch

from sglang_sm120 import reference
from sglang_sm120.errors import FormatError
from sglang_sm120.layout import ScaleLayout
from sglang_sm120.scales import (
    activation_scales_compressed_tensors,
    activation_scales_modelopt,
    column_alpha_compressed_tensors,
    column_alpha_modelopt,
    encode_scale_from_amax,
)
from tests.support import exact
from tests.support.nvfp4 import random_activation


def random_scales(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.exp2(torch.rand(count, generator=generator) * 40 - 20)


def test_encode_scale_is_2688_over_amax(device: torch.device) -> None:
    amax = torch.tensor([2688.0, 1.0, 3.0, 448.0, 1e30, 3e38], device=device)
    expected = [exact.to_float32(Fraction(2688) / Fraction(value)) for value in amax.tolist()]
    encode = encode_scale_from_amax(amax)
    assert encode.dtype == torch.float32
    assert encode.tolist() == expected


def test_encode_scale_of_zeros_and_of_a_tiny_amax_is_finite() -> None:
    tiny = torch.tensor([0.0, 1e-45, 1e-30])
    assert encode_scale_from_amax(tiny).tolist() == [1.0, 2.0**63, 2.0**63]


@pytest.mark.parametrize("amax", [nan, inf, -1.0])
def test_encode_scale_refuses_an_amax_that_is_none(amax: float) -> None:
    with pytest.raises(FormatError, match=r"amax\[1\]"):
        encode_scale_from_amax(torch.tensor([1.0, amax]))


def test_every_column_gets_the_alpha_of_its_own_shard(device: torch.device, generator: torch.Generator) -> None:
    widths = [3, 1, 4]
    shard_of_column = [0, 0, 0, 1, 2, 2, 2, 2]
    activation, weight = random_scales(3, generator), random_scales(3, generator)
    products = [Fraction(a) * Fraction(w) for a, w in zip(activation.tolist(), weight.tolist(), strict=True)]
    modelopt = column_alpha_modelopt(widths, activation.to(device), weight.to(device))
    assert modelopt.dtype == torch.float32
    assert modelopt.device == device
    assert modelopt.tolist() == [exact.to_float32(products[shard]) for shard in shard_of_column]
    stored_encode = column_alpha_compressed_tensors(widths, activation.to(device), weight.to(device))
    assert stored_encode.device == device
    assert stored_encode.tolist() == [exact.to_float32(1 / products[shard]) for shard in shard_of_column]


def test_one_scale_serves_all_shards(generator: torch.Generator) -> None:
    weight = random_scales(2, generator)
    for one in (torch.tensor(0.25), torch.tensor([0.25])):
        assert column_alpha_modelopt([2, 1], one, weight).tolist() == [
            0.25 * float(weight[0]),
            0.25 * float(weight[0]),
            0.25 * float(weight[1]),
        ]
    assert column_alpha_modelopt([2, 3], torch.tensor(0.5), torch.tensor(0.5)).tolist() == [0.25] * 5


@pytest.mark.parametrize("bad", [0.0, -1.0, inf, -inf, nan, 2.0**-64, 2.0**64])
@pytest.mark.parametrize(
    ("build", "names"),
    [
        (column_alpha_modelopt, ("input_scale", "weight_scale_2")),
        (column_alpha_compressed_tensors, ("input_global_scale", "weight_global_scale")),
    ],
)
def test_an_impossible_scale_is_named_with_index_and_value(bad: float, build, names: tuple[str, str]) -> None:  # type: ignore[no-untyped-def]
    good, wrong = torch.tensor([1.0, 1.0]), torch.tensor([1.0, bad])
    for arguments, name in (((wrong, good), names[0]), ((good, wrong), names[1])):
        with pytest.raises(FormatError) as caught:
            build([1, 1], *arguments)
        assert f"{name}[1]={bad!r}" in str(caught.value)


def test_scale_counts_and_widths_must_match() -> None:
    one, three = torch.ones(1), torch.ones(3)
    with pytest.raises(FormatError, match=r"weight_scale_2\.shape"):
        column_alpha_modelopt([1, 1], one, three)
    with pytest.raises(FormatError, match=r"widths\[1\]=0"):
        column_alpha_modelopt([1, 0], one, one)
    with pytest.raises(FormatError, match="shards=0"):
        column_alpha_modelopt([], one, one)
    with pytest.raises(FormatError, match="float32"):
        column_alpha_modelopt([1], one.to(torch.float64), one)


def test_the_extreme_legal_scales_give_a_normal_alpha() -> None:
    for scale in (2.0**-63, 2.0**63):
        both = torch.tensor([scale])
        for alpha in (
            column_alpha_modelopt([1], both, both),
            column_alpha_compressed_tensors([1], both, both),
        ):
            assert torch.finfo(torch.float32).smallest_normal <= float(alpha) < inf


def test_activation_scales_are_encode_scales_in_both_conventions(device: torch.device) -> None:
    decode = torch.tensor([0.5, 3.0], device=device)
    modelopt = activation_scales_modelopt(2, decode)
    assert modelopt.encode.device == device
    assert modelopt.encode.tolist() == [2.0, exact.to_float32(Fraction(1, 3))]
    assert not modelopt.all_equal
    stored = activation_scales_compressed_tensors(2, decode)
    assert stored.encode.tolist() == [0.5, 3.0]
    assert not stored.all_equal
    for same in (torch.tensor(4.0), torch.tensor([4.0, 4.0, 4.0])):
        result = activation_scales_compressed_tensors(3, same)
        assert result.encode.tolist() == [4.0, 4.0, 4.0]
        assert result.all_equal


def test_both_checkpoint_conventions_describe_the_same_weight(generator: torch.Generator) -> None:
    weight = random_activation(20, 64, torch.bfloat16, generator)
    encode = encode_scale_from_amax(weight.abs().amax())
    packed, scales = reference.quantize(weight, encode, ScaleLayout.LINEAR)

    def real(decode: torch.Tensor) -> torch.Tensor:
        return reference.dequantize(packed, scales, decode, ScaleLayout.LINEAR, 20, 64)

    # ModelOpt's exporter stores amax / 2688, the other one 2688 / amax; both are rounded to float32
    modelopt = real(weight.abs().amax().to(torch.float32) / 2688)
    compressed_tensors = real((1 / encode.to(torch.float64)).to(torch.float32))
    assert torch.allclose(modelopt, compressed_tensors, rtol=2.0**-22, atol=0)
    step = weight.to(torch.float64).view(20, 4, 16).abs().amax(-1, keepdim=True) / 6
    error = (modelopt - weight.to(torch.float64)).view(20, 4, 16).abs()
    assert (error <= 1.2 * step).all()  # half the widest e2m1 step plus the block scale's own rounding


def test_alpha_makes_both_conventions_the_same_layer(generator: torch.Generator) -> None:
    decode_x, decode_w = random_scales(2, generator), random_scales(2, generator)
    modelopt = column_alpha_modelopt([2, 3], decode_x, decode_w).to(torch.float64)
    stored = column_alpha_compressed_tensors([2, 3], 1 / decode_x, 1 / decode_w).to(torch.float64)
    assert torch.allclose(modelopt, stored, rtol=2.0**-22, atol=0)
