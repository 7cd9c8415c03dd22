"""SGLang's own linear methods, run for real, compute the right product with a backend of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_sm120 import layout, reference
from sglang_sm120.errors import ConfigError, FormatError
from sglang_sm120.host.conventions import CONVENTIONS
from sglang_sm120.host.state import STATE
from tests.host.conftest import Serving
from tests.host.linear_layers import Case, make_case
from tests.support.nvfp4 import assert_matches_oracle, fresh_generator, random_activation, random_nvfp4_weight

KINDS = ["modelopt", "compressed-tensors", "modelopt, weight-only", "compressed-tensors, weight-only"]
QUANTIZING = KINDS[:2]
#: Relative error of one rounding to nearest.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def check(case: Case, x: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    expected = case.expected(x, bias)
    out = case.run(x, bias)
    assert out.dtype == x.dtype
    # alpha is one float32 number per column: its own rounding is a relative error of 2**-24 of the product.
    product = case.expected(x).abs()
    # Where products cancel, the order of float64 additions shows; and results may be subnormal.
    tiny = float(product.max()) * 1e-12 if product.numel() else 0.0
    tiny += 2.0**-25 if x.dtype == torch.float16 else 1e-30
    bound = expected.abs() * ROUNDING[x.dtype] + product * 2.0**-22 + tiny
    assert_matches_oracle(out, expected, bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [0, 1, 7, 130, 1000])
def test_every_number_of_tokens_is_served(serving: Serving, kind: str, m: int) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case(kind, 256, [128], generator)
    check(case, random_activation(m, 256, torch.bfloat16, generator))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 16), (24, 48), (200, 3696), (464, 176), (136, 1856), (128, 64), (8, 80)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_odd_shards_need_no_padding(serving: Serving, kind: str, n: int, k: int, dtype: torch.dtype) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case(kind, k, [n], generator, dtype=dtype)
    bias = torch.randn(n, generator=generator).to(dtype)
    check(case, random_activation(5, k, dtype, generator), bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [[128, 64, 64], [96, 32, 40], [256, 256]])
def test_fused_projections_keep_each_shards_own_scale(serving: Serving, kind: str, widths: list[int]) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case(kind, 192, widths, generator, same_scales=False)
    x = random_activation(9, 192, torch.bfloat16, generator)
    check(case, x, torch.randn(sum(widths), generator=generator).to(torch.bfloat16))


@pytest.mark.parametrize("kind", QUANTIZING)
def test_shards_with_different_input_scales_quantize_by_themselves(serving: Serving, kind: str) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case(kind, 128, [128, 64, 72], generator, same_scales=False, input_decode=[0.002, 0.004, 0.001])
    check(case, random_activation(11, 128, torch.bfloat16, generator))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("widths", [[128, 128], [96, 40]])
def test_weights_reload_into_the_same_tensors(serving: Serving, kind: str, widths: list[int]) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case(kind, 128, widths, generator, same_scales=False)
    addresses = {name: p.data_ptr() for name, p in case.layer.named_parameters()}
    x = random_activation(6, 128, torch.bfloat16, generator)
    for _ in range(2):
        case.load([random_nvfp4_weight(n, 128, generator) for n in widths])
        case.prepare()
        check(case, x)
    assert {name: p.data_ptr() for name, p in case.layer.named_parameters()} == addresses


@pytest.mark.parametrize("kind", KINDS)
def test_preparing_twice_or_after_a_partial_reload_changes_nothing_else(serving: Serving, kind: str) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case(kind, 128, [128], generator)
    x = random_activation(6, 128, torch.bfloat16, generator)
    case.prepare()
    check(case, x)
    # Only the packed weight comes again; its block scales stay swizzled in place.
    again = random_nvfp4_weight(128, 128, generator)
    name = "weight" if kind.startswith("modelopt") else "weight_packed"
    parameter = getattr(case.layer, name)
    parameter.weight_loader(parameter, again.packed)
    case.shards[0].packed.copy_(again.packed)
    case.prepare()
    check(case, x)


@pytest.mark.parametrize("kind", KINDS)
def test_block_scales_that_fill_whole_tiles_are_held_once(serving: Serving, kind: str) -> None:
    serving.decide("torch_reference")
    case = make_case(kind, 256, [256], fresh_generator())
    scale_bytes = sum(p.numel() for p in case.layer.parameters() if p.dtype == torch.float8_e4m3fn)
    assert scale_bytes == 256 * 256 // 16


def test_awq_checkpoints_scale_the_input_per_channel(serving: Serving) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case("modelopt", 128, [64], generator)
    case.method.quant_config.is_awq = True
    case.layer.pre_quant_scale = torch.nn.Parameter(
        (torch.rand(128, generator=generator) + 0.5).to(torch.bfloat16), requires_grad=False
    )
    case.prepare()
    x = random_activation(7, 128, torch.bfloat16, generator)
    out = case.run(x)
    expected = case.expected(x * case.layer.pre_quant_scale)
    assert_matches_oracle(out, expected, expected.abs() * 2.0**-8 + 1e-30)
    # Negative control: without the per-channel scale the same comparison fails.
    with pytest.raises(AssertionError, match="out of bound"):
        assert_matches_oracle(out, case.expected(x), case.expected(x).abs() * 2.0**-8 + 1e-30)


@pytest.mark.parametrize("m", [0, 1, 130])
def test_activations_quantized_by_sglang_are_taken_as_they_are(serving: Serving, m: int) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case("modelopt", 128, [128, 64], generator, same_scales=False)
    x = random_activation(m, 128, torch.bfloat16, generator)
    packed, scales = reference.quantize(x, case.layer.input_scale_inv.data, layout.ScaleLayout.SWIZZLE_128X4)
    assert torch.equal(case.run((packed, scales)), case.run(x))


def test_quantized_activations_are_refused_where_they_cannot_be_right(serving: Serving) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case("modelopt", 128, [64, 64], generator, input_decode=[0.002, 0.004])
    x = random_activation(2, 128, torch.bfloat16, generator)
    quantized = reference.quantize(x, torch.tensor(250.0), layout.ScaleLayout.SWIZZLE_128X4)
    with pytest.raises(ConfigError, match="SGLANG_DISABLE_SILU_FP4_QUANT_FUSION=1"):
        case.run(quantized)


@pytest.mark.parametrize("kind", QUANTIZING)
def test_one_scale_for_a_projection_fused_on_disk_serves_all_shards(serving: Serving, kind: str) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case(kind, 128, [64, 32, 32], generator)
    names = ("weight_scale_2", "input_scale") if kind == "modelopt" else ("weight_global_scale", "input_global_scale")
    for name in names:  # what releases up to 0.5.11 leave behind: the first slot only
        getattr(case.layer, name).data[1:] = float("nan")
    case.prepare()
    check(case, random_activation(3, 128, torch.bfloat16, generator))


@pytest.mark.parametrize("kind", KINDS)
def test_a_reload_of_a_projection_fused_on_disk_serves_all_shards_too(serving: Serving, kind: str) -> None:
    """The loaders that write only the first slot leave the old scale in the others, which is not missing then."""
    serving.decide("torch_reference")
    case = make_case(kind, 128, [64, 64], fresh_generator())
    decode = kind.startswith("modelopt")
    parameter = getattr(case.layer, "weight_scale_2" if decode else "weight_global_scale")
    parameter.data[1:] = float("nan")
    case.prepare()
    alpha = case.layer.sm120_alpha.clone()
    parameter.data[0] *= 2
    case.prepare()
    assert torch.allclose(case.layer.sm120_alpha, alpha * 2 if decode else alpha / 2, rtol=1e-6)
    parameter.data.copy_(torch.tensor([1.0, 4.0]) * parameter.data[0])  # a checkpoint with one scale for each shard
    case.prepare()
    assert len(case.layer.sm120_alpha.unique()) == 2


@pytest.mark.parametrize("wrong", [0.0, float("inf"), float("nan"), -1.0])
@pytest.mark.parametrize("kind", QUANTIZING)
def test_an_absurd_global_scale_stops_the_load_by_name(serving: Serving, kind: str, wrong: float) -> None:
    serving.decide("torch_reference")
    case = make_case(kind, 128, [64], fresh_generator())
    name = "weight_scale_2" if kind == "modelopt" else "weight_global_scale"
    getattr(case.layer, name).data.fill_(wrong)
    with pytest.raises(FormatError, match=name):
        case.prepare()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mutation", ["swizzle", "alpha", "nibbles"])
def test_a_planted_mistake_is_seen(serving: Serving, kind: str, mutation: str) -> None:
    serving.decide("torch_reference")
    generator = fresh_generator()
    case = make_case(kind, 256, [128], generator)
    x = random_activation(8, 256, torch.bfloat16, generator)
    check(case, x)
    weight = case.layer.weight if kind.startswith("modelopt") else case.layer.weight_packed
    if mutation == "swizzle":
        case.layer.weight_scale.data.copy_(layout.unswizzle_128x4(case.layer.weight_scale.data, 128, 16))
    elif mutation == "alpha":
        case.layer.sm120_alpha.data.mul_(1.01)
    else:
        weight.data.copy_((weight.data >> 4) | (weight.data << 4))
    with pytest.raises(AssertionError, match="out of bound"):
        check(case, x)


def test_a_group_size_other_than_16_is_refused(serving: Serving) -> None:
    serving.decide("torch_reference")
    case = make_case("modelopt", 128, [64], fresh_generator())
    case.method.quant_config.group_size = 32
    with pytest.raises(ConfigError, match="group_size=32"):
        case.prepare()


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights_can_be_measured(serving: Serving, kind: str) -> None:
    """``--load-format dummy`` fills global scales with random numbers of either sign."""
    serving.decide("torch_reference")
    STATE.dummy_weights = True
    case = make_case(kind, 128, [64, 64], fresh_generator())
    for parameter in list(case.layer.parameters()):
        if parameter.dtype == torch.float32:
            parameter.data.uniform_(-1e-3, 1e-3)
    case.prepare()
    assert torch.isfinite(case.run(torch.ones(3, 128, dtype=torch.bfloat16))).all()


@pytest.mark.parametrize("kind", ["modelopt", "modelopt, weight-only"])
def test_a_quantized_lm_head_is_multiplied_by_its_method(serving: Serving, kind: str) -> None:
    """sglang#35354: its packed bytes were multiplied as a weight, or K did not fit."""
    from sglang.srt.layers import logits_processor

    serving.decide("torch_reference")
    case = make_case(kind, 128, [64], fresh_generator())
    assert logits_processor.should_apply_lm_head_quant_method(case.layer, case.method)
    case.layer.quant_method = SimpleNamespace(apply=lambda layer, x, bias: case.run(x, bias))
    x = random_activation(3, 128, torch.bfloat16, fresh_generator())
    processor: Any = SimpleNamespace()
    logits = logits_processor.LogitsProcessor._compute_lm_head(processor, x, case.layer)
    assert torch.equal(logits, case.run(x))
    # An unprepared layer is still SGLang's to judge.
    assert not logits_processor.should_apply_lm_head_quant_method(torch.nn.Module(), case.method)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [128, 72])
def test_weights_written_without_their_preparation_are_not_multiplied(serving: Serving, kind: str, n: int) -> None:
    """Block scales of 128 rows stand in the parameter, those of 72 beside it: both would be stale, as alpha would."""
    serving.decide("torch_reference")
    case = make_case(kind, 128, [n], fresh_generator())
    convention = next(c for c in CONVENTIONS if c.cls == type(case.method).__name__)
    global_names = [name for name in (convention.weight_global, convention.input_global) if name is not None]
    written = {name: getattr(case.layer, name).data.clone() for name in global_names}
    written["weight_scale"] = case.shards[0].linear_scales.view(torch.float8_e4m3fn)
    for name, value in written.items():
        parameter = getattr(case.layer, name)
        parameter.weight_loader(parameter, value)
        with pytest.raises(ConfigError, match="update_weights_from_disk"):
            case.run(torch.ones(1, 128, dtype=torch.bfloat16))
        case.prepare()
        check(case, random_activation(3, 128, torch.bfloat16, fresh_generator()))


def test_a_layer_of_sglangs_fused_swiglu_is_refused_by_name(serving: Serving) -> None:
    serving.decide("torch_reference")
    case = make_case("modelopt", 128, [64], fresh_generator())
    case.layer._interleave_for_swiglu_fusion = True
    with pytest.raises(ConfigError, match="SwiGLU"):
        case.prepare()
