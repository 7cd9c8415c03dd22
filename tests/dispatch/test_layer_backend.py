"""Which backend one layer gets: odd shapes, half precision, and fused shards with different global scales."""

from __future__ import annotations

import logging

import pytest

from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import Capability, HostFacts
from sglang_sm120.dispatch import Decision, Request, layer_backend, resolve
from sglang_sm120.errors import ConfigError, UnsupportedError
from tests.dispatch.machines import B200, HOPPER, RTX, SPARK, machine

SM12X = pytest.mark.parametrize("card", [RTX, SPARK], ids=str)


def _layer(
    decision: Decision,
    facts: HostFacts,
    *,
    n: int = 5120,
    k: int = 5120,
    out_dtype: str = "bfloat16",
    fused_scales_differ: bool = False,
) -> str:
    return layer_backend(
        decision,
        facts,
        name="model.layers.0.qkv_proj",
        n=n,
        k=k,
        out_dtype=out_dtype,
        fused_scales_differ=fused_scales_differ,
    )


@SM12X
@pytest.mark.parametrize("value", [v for v in BACKENDS if v not in ("flashinfer_trtllm", "cutlass")])
def test_an_ordinary_layer_gets_the_backend_of_the_process(value: str, card: Capability) -> None:
    facts = machine(card)
    assert _layer(resolve(Request(value), facts), facts) == value
    assert _layer(resolve(Request("auto"), facts), facts) == "flashinfer_cutlass"


class TestDifferentGlobalScales:
    @SM12X
    def test_the_reference_is_exact(self, card: Capability) -> None:
        facts = machine(card)
        decision = resolve(Request("torch_reference"), facts)
        assert _layer(decision, facts, fused_scales_differ=True) == "torch_reference"

    @SM12X
    @pytest.mark.parametrize("value", ["flashinfer_cutlass", "flashinfer_b12x", "flashinfer_auto", "marlin"])
    def test_another_named_backend_stops_and_names_the_exact_one(self, value: str, card: Capability) -> None:
        facts = machine(card)
        decision = resolve(Request(value), facts)
        with pytest.raises(ConfigError, match=r"--fp4-gemm-backend.*qkv_proj.*torch_reference.*ALLOW_UNSAFE") as caught:
            _layer(decision, facts, fused_scales_differ=True)
        assert value in str(caught.value)

    def test_the_message_names_the_variable_that_chose(self) -> None:
        facts = machine(RTX)
        decision = resolve(Request("auto", env_value="flashinfer_b12x"), facts)
        with pytest.raises(ConfigError, match="^SGLANG_SM120_FP4_GEMM_BACKEND="):
            _layer(decision, facts, fused_scales_differ=True)

    @SM12X
    def test_auto_routes_the_layer_and_says_that_it_is_slow_and_why(
        self, card: Capability, caplog: pytest.LogCaptureFixture
    ) -> None:
        facts = machine(card)
        with caplog.at_level(logging.WARNING, logger="sglang_sm120"):
            assert _layer(resolve(Request("auto"), facts), facts, fused_scales_differ=True) == "torch_reference"
        assert "qkv_proj" in caplog.text
        assert "slower" in caplog.text
        assert "different global scales" in caplog.text

    def test_unsafe_goes_on_with_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        facts = machine(RTX)
        decision = resolve(Request("flashinfer_cutlass", allow_unsafe=True), facts)
        assert _layer(decision, facts, fused_scales_differ=True) == "flashinfer_cutlass"
        assert "different global scales" in caplog.text


class TestOurKernels:
    @pytest.mark.parametrize("card", [RTX, SPARK, HOPPER], ids=str)
    def test_multiples_of_8_and_16_and_different_scales_are_served(self, card: Capability) -> None:
        facts = machine(card)
        decision = resolve(Request("sm120"), facts)
        for dtype in ("bfloat16", "float16"):
            assert _layer(decision, facts, n=8, k=16, out_dtype=dtype, fused_scales_differ=True) == "sm120"

    @pytest.mark.parametrize(("n", "k", "says"), [(12, 16, "N=12"), (8, 24, "K=24")])
    def test_other_sizes_are_refused_by_name(self, n: int, k: int, says: str) -> None:
        facts = machine(RTX)
        with pytest.raises(UnsupportedError, match=f"{says}.*qkv_proj.*torch_reference"):
            _layer(resolve(Request("sm120"), facts), facts, n=n, k=k)

    @pytest.mark.parametrize("facts", [machine(RTX), machine((8, 9))], ids=["known card", "card without a row"])
    @pytest.mark.parametrize(
        ("n", "k", "dtype", "says"),
        [(12, 16, "bfloat16", "N=12"), (8, 24, "bfloat16", "K=24"), (8, 16, "float32", "wants float32")],
    )
    def test_what_the_kernels_refuse_on_every_call_cannot_be_forced(
        self, facts: HostFacts, n: int, k: int, dtype: str, says: str
    ) -> None:
        decision = resolve(Request("sm120", allow_unsafe=True), facts)
        with pytest.raises(UnsupportedError, match=f"{says}.*qkv_proj.*torch_reference") as caught:
            _layer(decision, facts, n=n, k=k, out_dtype=dtype)
        assert "ALLOW_UNSAFE" not in str(caught.value)
        assert _layer(decision, facts, n=8, k=16) == "sm120"

    def test_weight_only_shards_of_different_scales_are_left_to_the_reference(self) -> None:
        facts = machine(RTX)
        arguments = {"name": "qkv", "n": 64, "k": 64, "out_dtype": "bfloat16", "fused_scales_differ": True}
        with pytest.raises(ConfigError, match="W4A16.*torch_reference"):
            layer_backend(resolve(Request("sm120"), facts), facts, **arguments, weight_only=True)
        reference = resolve(Request("torch_reference"), facts)
        assert layer_backend(reference, facts, **arguments, weight_only=True) == "torch_reference"


class TestLayersThatDoNotFit:
    def test_a_named_backend_stops_and_names_layer_and_size(self) -> None:
        facts = machine(RTX)
        decision = resolve(Request("flashinfer_cutedsl"), facts)
        with pytest.raises(UnsupportedError, match="N=96.*qkv_proj.*torch_reference"):
            _layer(decision, facts, n=96)

    def test_half_precision(self) -> None:
        facts = machine(RTX)
        decision = resolve(Request("flashinfer_cutedsl"), facts)
        with pytest.raises(UnsupportedError, match="bfloat16 and the layer wants float16"):
            _layer(decision, facts, out_dtype="float16")

    def test_auto_routes_the_layer(self, caplog: pytest.LogCaptureFixture) -> None:
        facts = machine(RTX)
        assert _layer(resolve(Request("auto"), facts), facts, n=464) == "torch_reference"
        assert "N=464" in caplog.text

    def test_layers_of_a_process_that_was_forced_past_its_guard_do_not_repeat_the_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        facts = machine(RTX)
        decision = resolve(Request("flashinfer_trtllm", allow_unsafe=True), facts)
        assert _layer(decision, facts) == "flashinfer_trtllm"
        assert caplog.text == ""


class TestNotOurs:
    def test_what_is_left_to_sglang_stays_there(self) -> None:
        facts = machine(RTX)
        decision = resolve(Request("auto", take_auto=False), facts)
        assert _layer(decision, facts, n=17, fused_scales_differ=True) == "auto"

    def test_a_value_of_sglang_on_another_card_stays_its_business(self) -> None:
        """Only a variable makes the package choose one there, and only SGLang knows what it does with the layer."""
        facts = machine(B200)
        decision = resolve(Request("auto", env_value="flashinfer_trtllm"), facts)
        assert _layer(decision, facts, n=17, fused_scales_differ=True) == "flashinfer_trtllm"

    @pytest.mark.parametrize("card", [HOPPER, None], ids=str)
    def test_the_reference_serves_anything_on_any_card(self, card: Capability | None) -> None:
        facts = machine(card)
        decision = resolve(Request("torch_reference"), facts)
        assert _layer(decision, facts, n=17, k=48, out_dtype="float16", fused_scales_differ=True) == "torch_reference"
