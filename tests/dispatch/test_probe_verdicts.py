"""What a passed or failed probe changes: code of ours is chosen silently only where it was checked."""

from __future__ import annotations

import logging

import pytest

from sglang_sm120.backends import BACKENDS
from sglang_sm120.backends.record import Capability, HostFacts
from sglang_sm120.dispatch import Decision, Request, layer_backend, resolve
from sglang_sm120.errors import UnsupportedError
from tests.dispatch.machines import RTX, SPARK, machine

NEEDS_PROBE = [value for value, record in BACKENDS.items() if record.needs_probe]
SM12X = pytest.mark.parametrize("card", [RTX, SPARK], ids=str)
AUTO = Decision("flashinfer_cutlass", "default", False, "test")


def facts(card: Capability, probed: dict[str, str], **versions: str | None) -> HostFacts:
    found = machine(card, **versions)
    found.probed.update(probed)
    return found


def serve(found: HostFacts, **changes: object) -> str:
    shape = {"n": 4096, "k": 4096, "out_dtype": "bfloat16", "fused_scales_differ": True, **changes}
    return layer_backend(AUTO, found, name="qkv_proj", **shape)  # type: ignore[arg-type]


def test_there_is_code_that_needs_a_probe() -> None:
    assert NEEDS_PROBE


@SM12X
@pytest.mark.parametrize("value", NEEDS_PROBE)
def test_auto_takes_our_code_where_flashinfer_is_missing_only_after_a_passed_probe(
    value: str, card: Capability
) -> None:
    found = facts(card, {value: "ok"}, flashinfer=None)
    decision = resolve(Request("auto"), found)
    assert decision.backend == value
    assert not decision.explicit
    assert "probe" in decision.reason
    for verdicts in ({}, {value: "wrong"}, {value: "timeout"}, {"torch_reference": "ok"}):
        with pytest.raises(UnsupportedError):
            resolve(Request("auto"), facts(card, verdicts, flashinfer=None))


@SM12X
@pytest.mark.parametrize("value", NEEDS_PROBE)
def test_a_passed_probe_does_not_displace_flashinfer_and_takes_nothing_from_an_explicit_value(
    value: str, card: Capability
) -> None:
    found = facts(card, {value: "ok", "flashinfer_b12x": "wrong"})
    assert resolve(Request("auto"), found).backend == "flashinfer_cutlass"
    assert resolve(Request("flashinfer_b12x"), found).backend == "flashinfer_b12x"
    assert resolve(Request(value), facts(card, {value: "wrong"})).backend == value


@SM12X
@pytest.mark.parametrize("value", NEEDS_PROBE)
def test_layers_with_different_scales_go_to_our_code_only_after_a_passed_probe(
    value: str, card: Capability, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        assert serve(facts(card, {value: "ok"})) == value
    assert "much slower" not in caplog.text
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        assert serve(facts(card, {value: "crash"})) == "torch_reference"
        assert serve(facts(card, {})) == "torch_reference"
    assert "much slower" in caplog.text


def test_the_substitute_must_be_able_to_take_the_shape() -> None:
    rule = BACKENDS["sm120"].rows[0].shape
    assert rule is not None
    odd = 4096 + rule.n_multiple // 2
    assert serve(facts(RTX, {"sm120": "ok"}), n=odd) == "torch_reference"


def test_the_substitute_of_a_weight_only_layer_does_not_quantize_its_input() -> None:
    assert not BACKENDS["sm120"].serves_weight_only
    assert serve(facts(RTX, {"sm120": "ok"}), weight_only=True) == "torch_reference"
