"""FlashInfer's backends go SGLang's own way; what we check and route on it, on a card that is not here.

FlashInfer's GEMM needs the card, so the oracle stands in its place, behind SGLang's real linear methods and our
seams; the capability is passed in. That FlashInfer's kernels compute what the oracle does is for ``probe``.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import sglang.srt.layers.quantization.modelopt_quant as modelopt
import torch
from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as ct

from sglang_sm120 import reference
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.host import patches_gemm
from sglang_sm120.host.patching import Patcher
from tests.host.conftest import Serving
from tests.host.linear_layers import make_case
from tests.host.test_resolution import NEWEST, RTX
from tests.support.nvfp4 import assert_matches_oracle, fresh_generator, random_activation, random_nvfp4_weight

FLASHINFER_VALUES = ["flashinfer_b12x", "flashinfer_auto", "flashinfer_cutlass"]
KINDS = ["modelopt", "compressed-tensors"]


def facts() -> HostFacts:
    return HostFacts(RTX, NEWEST, device_name="a card that is not here")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets SGLang's own path run on this machine; the list of backends that FlashInfer was asked for."""
    backends: list[str] = []

    def mm_fp4(a: Any, b: Any, a_sf: Any, b_sf: Any, alpha: Any, out_dtype: Any, *, backend: str) -> torch.Tensor:
        backends.append(backend)
        return reference.gemm(a, b.T.contiguous(), a_sf, b_sf.T.contiguous(), alpha, out_dtype)

    class Blackwell:
        is_blackwell, is_sm120, is_sm100 = True, True, False

    stand_in: Any = type("module", (), {"flashinfer_fp4_gemm": staticmethod(mm_fp4)})
    patches_gemm.route_gemm(stand_in, Patcher())
    monkeypatch.setattr(modelopt, "flashinfer_fp4_gemm", vars(stand_in)["flashinfer_fp4_gemm"])
    monkeypatch.setattr(modelopt, "get_platform", Blackwell)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    body = modelopt.fp4_gemm.__wrapped__
    for module in (modelopt, ct):
        monkeypatch.setattr(module, "enable_flashinfer_fp4_gemm", True)
        monkeypatch.setattr(module, "fp4_gemm", body)  # the operator has no CPU kernel; its Python body is the same
    return backends


def run(case: Any, generator: torch.Generator, k: int, pre_scale: torch.Tensor | None = None) -> None:
    x = random_activation(6, k, torch.bfloat16, generator)
    expected = case.expected(x if pre_scale is None else x * pre_scale)
    assert_matches_oracle(case.run(x), expected, expected.abs() * 2.0**-8 + float(expected.abs().max()) * 2.0**-20)


@pytest.mark.parametrize("value", FLASHINFER_VALUES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_named_backend_multiplies(serving: Serving, asked: list[str], value: str, kind: str) -> None:
    serving.decide(value, facts=facts())
    generator = fresh_generator()
    run(make_case(kind, 256, [128, 64], generator), generator, 256)
    assert asked == [value.removeprefix("flashinfer_")]


@pytest.mark.parametrize("value", FLASHINFER_VALUES)
def test_awq_checkpoints_are_served(serving: Serving, asked: list[str], value: str) -> None:
    serving.decide(value, facts=facts())
    generator = fresh_generator()
    case = make_case("modelopt", 128, [64], generator)
    case.method.quant_config.is_awq = True
    scale = (torch.rand(128, generator=generator) + 0.5).to(torch.bfloat16)
    case.layer.pre_quant_scale = torch.nn.Parameter(scale, requires_grad=False)
    run(case, generator, 128, pre_scale=scale)
    assert asked


@pytest.mark.parametrize("value", FLASHINFER_VALUES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_projection_with_different_scales_stops_the_load(
    serving: Serving, asked: list[str], value: str, kind: str
) -> None:
    serving.decide(value, facts=facts())
    with pytest.raises(ConfigError, match="different global scales") as refusal:
        make_case(kind, 128, [64, 64], fresh_generator(), same_scales=False)
    assert f"--fp4-gemm-backend={value!r}" in str(refusal.value)
    assert "torch_reference" in str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
def test_under_auto_such_a_projection_goes_to_an_exact_backend_with_a_warning(
    serving: Serving, asked: list[str], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    serving.decide("flashinfer_cutlass", explicit=False, facts=facts())
    generator = fresh_generator()
    with caplog.at_level(logging.WARNING):
        case = make_case(kind, 128, [64, 64], generator, same_scales=False)
    run(case, generator, 128)
    assert asked == []
    assert "torch_reference" in caplog.text
    run(make_case(kind, 128, [64, 64], generator), generator, 128)
    assert asked == ["cutlass"]


@pytest.mark.parametrize("value", ["flashinfer_b12x", "flashinfer_auto"])
def test_a_shape_that_the_kernels_cannot_take_stops_the_load(serving: Serving, asked: list[str], value: str) -> None:
    serving.decide(value, facts=facts())
    generator = fresh_generator()
    # ModelOpt's path pads to 32; compressed-tensors' hands 176 = 11 * 16 to a kernel that wants 32.
    run(make_case("modelopt", 176, [64], generator), generator, 176)
    with pytest.raises(UnsupportedError, match="K"):
        make_case("compressed-tensors", 176, [64], generator)


@pytest.mark.parametrize("value", FLASHINFER_VALUES)
def test_weights_that_need_no_padding_reload(serving: Serving, asked: list[str], value: str) -> None:
    serving.decide(value, facts=facts())
    generator = fresh_generator()
    case = make_case("modelopt", 128, [128], generator)
    case.load([random_nvfp4_weight(128, 128, generator)])
    case.prepare()
    run(case, generator, 128)


@pytest.mark.parametrize("value", FLASHINFER_VALUES)
def test_a_padded_layer_refuses_to_reload_by_name(serving: Serving, asked: list[str], value: str) -> None:
    serving.decide(value, facts=facts())
    generator = fresh_generator()
    case = make_case("modelopt", 176, [200], generator)
    before = case.layer.weight.clone()
    with pytest.raises(ConfigError, match=rf"N=200, K=176 for --fp4-gemm-backend {value}"):
        case.load([random_nvfp4_weight(200, 176, generator)])
    assert torch.equal(case.layer.weight, before)
    run(case, generator, 176)


def test_weight_only_layers_under_a_flashinfer_value_are_named(
    serving: Serving, asked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = []
    monkeypatch.setattr(modelopt, "prepare_nvfp4_layer_for_marlin", served.append)
    serving.decide("flashinfer_b12x", facts=facts())
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        for _ in range(2):
            make_case("modelopt, weight-only", 128, [64], fresh_generator())
    assert len(served) == 2
    assert caplog.text.count("weight-only (W4A16)") == 1


def test_weight_only_shards_with_different_scales_follow_the_same_rule(serving: Serving, asked: list[str]) -> None:
    """SGLang's weight-only path takes the largest scale for all shards."""
    serving.decide("flashinfer_b12x", facts=facts())
    with pytest.raises(ConfigError, match="different global scales"):
        make_case("modelopt, weight-only", 128, [64, 64], fresh_generator(), same_scales=False)
    serving.decide("flashinfer_cutlass", explicit=False, facts=facts())
    generator = fresh_generator()
    run(make_case("modelopt, weight-only", 128, [64, 64], generator, same_scales=False), generator, 128)


def test_marlin_may_have_different_input_scales_which_it_ignores(
    serving: Serving, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = []
    monkeypatch.setattr(modelopt, "prepare_nvfp4_layer_for_marlin", served.append)
    serving.decide("marlin", facts=facts())
    make_case("modelopt", 128, [64, 64], fresh_generator(), input_decode=[0.002, 0.004])
    assert len(served) == 1
