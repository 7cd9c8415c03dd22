"""Which MoE runner serves NVFP4 experts, on cards and releases that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version

from sglang_sm120.backends.moe_record import NVFP4_QUANTIZATIONS, Quantization
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from sglang_sm120.backends.moe_verdict import moe_verdict, recommend_moe_runner, route_of, working_runners
from sglang_sm120.backends.record import Capability, HostFacts
from tests.dispatch.machines import AMPERE, B200, B300, HOPPER, PINS, RTX, SPARK, machine, released

MODELOPT: tuple[Quantization, ...] = ("modelopt_fp4", "modelopt_mixed")
SM12X = (RTX, SPARK)


def _status(value: str, quantization: Quantization, facts: HostFacts) -> str:
    judged = moe_verdict(value, quantization, facts)
    assert judged is not None
    return judged.status


@pytest.mark.parametrize("card", SM12X)
@pytest.mark.parametrize("release", PINS)
@pytest.mark.parametrize("quantization", [*MODELOPT, "compressed-tensors"])
def test_with_its_own_pins_every_release_has_a_runner(
    release: str, card: Capability, quantization: Quantization
) -> None:
    """Three exceptions: the kernels of 0.5.9 are binaries without 12.1, its FlashInfer has the race; it does not know
    mixed checkpoints; and 0.5.16 swaps gate and up of compressed-tensors."""
    choice = recommend_moe_runner(released(card, release), quantization)
    incomplete = release == "0.5.9" and (card == SPARK or quantization == "modelopt_mixed")
    if incomplete or (release, quantization) == ("0.5.16", "compressed-tensors"):
        assert choice is None
    else:
        assert choice is not None
        assert choice.verdict.status == "ok"
        assert choice.reason
        assert MOE_RUNNERS[choice.runner].value in ("flashinfer_cutlass", "cutlass")


@pytest.mark.parametrize("card", SM12X)
@pytest.mark.parametrize("release", ["0.5.16", "0.5.21", "0.5.22", "0.5.23"])
def test_from_0_5_16_on_auto_alone_does_not_run_and_is_replaced(release: str, card: Capability) -> None:
    facts = released(card, release)
    for quantization in MODELOPT:
        judged = moe_verdict("auto", quantization, facts)
        assert judged is not None
        assert judged.status == "unsupported"
        assert "flashinfer_trtllm" in judged.reason
        choice = recommend_moe_runner(facts, quantization)
        assert choice is not None
        assert choice.value == "flashinfer_cutlass"
    weight_only = recommend_moe_runner(facts, "nvfp4_weight_only")
    assert weight_only is not None
    assert weight_only.value == "marlin"


@pytest.mark.parametrize("card", SM12X)
@pytest.mark.parametrize("release", PINS)
def test_compressed_tensors_keeps_auto_because_its_class_decides_itself(release: str, card: Capability) -> None:
    facts = released(card, release)
    if (release, card) == ("0.5.9", SPARK) or release == "0.5.16":
        return  # see above
    choice = recommend_moe_runner(facts, "compressed-tensors")
    assert choice is not None
    assert choice.value == "auto"
    assert choice.runner == ("cutlass" if Version(release) < Version("0.5.16") else "flashinfer_cutlass")
    assert _status("marlin", "compressed-tensors", facts) == "ok"
    assert _status("flashinfer_trtllm", "compressed-tensors", facts) == "unsupported"


@pytest.mark.parametrize("card", SM12X)
@pytest.mark.parametrize("release", PINS)
@pytest.mark.parametrize("quantization", MODELOPT)
@pytest.mark.parametrize(
    "value",
    [
        "flashinfer_trtllm",
        "flashinfer_trtllm_routed",
        "experimental_sgl_trtllm",
        "flashinfer_cutedsl",
        "flashinfer_megamoe",
    ],
)
def test_runners_of_capability_10_are_refused_with_reason_and_source(
    value: str, quantization: Quantization, release: str, card: Capability
) -> None:
    judged = moe_verdict(value, quantization, released(card, release))
    assert judged is not None
    assert judged.status == "unsupported"
    assert "10.x" in judged.reason
    assert judged.source is not None


@pytest.mark.parametrize("card", [B200, B300])
def test_they_run_on_their_own_cards(card: Capability) -> None:
    for value in ("flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl"):
        assert _status(value, "modelopt_fp4", machine(card)) == "ok"


@pytest.mark.parametrize("card", [AMPERE, HOPPER, B200, B300, None])
@pytest.mark.parametrize("quantization", NVFP4_QUANTIZATIONS)
def test_on_other_cards_nothing_is_recommended(card: Capability | None, quantization: Quantization) -> None:
    assert recommend_moe_runner(machine(card), quantization) is None


@pytest.mark.parametrize("card", SM12X)
@pytest.mark.parametrize(
    ("flashinfer", "status"),
    [("0.6.3", "refused"), ("0.6.7.post3", "refused"), ("0.6.8.post1", "ok"), ("0.6.9", "ok"), ("0.7.4", "ok")],
)
def test_the_race_of_the_grouped_gemm_ends_one_release_after_that_of_the_dense_one(
    flashinfer: str, status: str, card: Capability
) -> None:
    judged = moe_verdict("flashinfer_cutlass", "modelopt_fp4", machine(card, flashinfer=flashinfer))
    assert judged is not None
    assert judged.status == status
    if status == "refused":
        assert judged.source is not None
        assert judged.source.ref == "flashinfer#2913"
        assert "0.6.8.post1" in judged.remedy


def test_a_flashinfer_with_the_race_spoils_what_sglang_takes_by_itself_too() -> None:
    facts = machine(RTX, flashinfer="0.6.7")
    assert _status("auto", "compressed-tensors", facts) == "refused"
    assert recommend_moe_runner(facts, "modelopt_fp4") is None
    # On 0.5.14 auto need not end in FlashInfer.
    choice = recommend_moe_runner(machine(RTX, sglang="0.5.14", flashinfer="0.6.7"), "modelopt_fp4")
    assert choice is not None
    assert (choice.value, choice.runner) == ("auto", "cutlass")


def test_a_toolkit_that_flashinfer_cannot_compile_with_is_a_refusal() -> None:
    assert _status("flashinfer_cutlass", "modelopt_fp4", machine(RTX, flashinfer="0.7.0", cuda="12.8")) == "refused"
    assert _status("flashinfer_cutlass", "modelopt_fp4", machine(RTX, flashinfer="0.7.2", cuda="12.8")) == "ok"
    assert _status("flashinfer_cutlass", "modelopt_fp4", machine(SPARK, flashinfer="0.7.2", cuda="12.8")) != "ok"


@pytest.mark.parametrize(
    ("release", "works"),
    [
        ("0.5.9", True),
        ("0.5.10", True),
        ("0.5.11", False),
        ("0.5.14", False),
        ("0.5.15.post1", True),
        ("0.5.16", False),
    ],
)
def test_cutlass_by_name_works_only_where_sglang_has_a_path_for_it(release: str, works: bool) -> None:
    facts = machine(RTX, sglang=release)
    assert (_status("cutlass", "modelopt_fp4", facts) == "ok") == works
    assert ("cutlass" in working_runners("modelopt_fp4", facts)) == works


@pytest.mark.parametrize("value", ["triton", "deep_gemm", "flashinfer_mxfp4", "humming"])
def test_runners_without_nvfp4_fall_through_to_cutlass_and_later_raise(value: str) -> None:
    before, after = machine(RTX, sglang="0.5.15.post1"), machine(RTX, sglang="0.5.16")
    route = route_of(value, "modelopt_fp4", before)
    assert route is not None
    assert route.runner == "cutlass"
    judged = moe_verdict(value, "modelopt_fp4", after)
    assert judged is not None
    assert judged.status == "unsupported"
    assert "NotImplementedError" in judged.reason
    assert _status(value, "compressed-tensors", machine(RTX, sglang="0.5.17")) == "ok"


@pytest.mark.parametrize("value", ["auto", "flashinfer_cutlass", "marlin"])
def test_the_release_that_swaps_gate_and_up_of_compressed_tensors_serves_them_with_ours_alone(value: str) -> None:
    for release, status in (("0.5.15", "ok"), ("0.5.16", "unsupported"), ("0.5.17", "ok")):
        assert _status(value, "compressed-tensors", machine(RTX, sglang=release)) == status
    swapped = machine(RTX, sglang="0.5.16")
    judged = moe_verdict(value, "compressed-tensors", swapped)
    assert judged is not None
    assert judged.source is not None
    assert judged.source.ref == "sglang#32430"
    assert _status("sm120", "compressed-tensors", swapped) == "ok"
    assert _status("flashinfer_cutlass", "modelopt_fp4", swapped) == "ok"


@pytest.mark.parametrize("quantization", MODELOPT)
@pytest.mark.parametrize("release", ["0.5.11", "0.5.15.post1"])
def test_a_part_of_modelopts_experts_cannot_be_loaded_for_sglangs_own_kernels(
    release: str, quantization: Quantization
) -> None:
    facts = machine(RTX, sglang=release)
    for value in ("auto", "triton"):
        judged = moe_verdict(value, quantization, facts, expert_parallel=True)
        assert judged is not None
        assert (judged.status, "input scales of all experts" in judged.reason) == ("unsupported", True)
        assert _status(value, quantization, facts) == "ok"
    assert working_runners(quantization, facts)[0] == "flashinfer_cutlass"
    if quantization == "modelopt_fp4":
        choice = recommend_moe_runner(facts, quantization, expert_parallel=True)
        assert choice is not None
        assert choice.value == "flashinfer_cutlass"


def test_a_checkpoint_in_fp8_with_nvfp4_experts_is_left_to_the_user() -> None:
    facts = machine(RTX)
    assert recommend_moe_runner(facts, "fp8") is None
    assert "marlin" in working_runners("fp8", facts)


def test_weight_only_experts_have_no_other_runner_than_marlin() -> None:
    facts = machine(RTX)
    assert working_runners("nvfp4_weight_only", facts) == ["marlin"]
    for value in ("auto", "flashinfer_cutlass", "triton"):
        judged = moe_verdict(value, "nvfp4_weight_only", facts)
        assert judged is not None
        assert judged.status == "unsupported"
        assert "input scales" in judged.reason


def test_marlin_warns_that_the_numbers_change() -> None:
    judged = moe_verdict("marlin", "modelopt_fp4", machine(RTX))
    assert judged is not None
    assert judged.status == "ok"
    assert "calibrated" in judged.warnings[0]
    assert _status("marlin", "modelopt_fp4", machine(HOPPER)) == "ok"


def test_unquantized_experts_are_judged_only_where_a_runner_has_no_kernels_at_all() -> None:
    facts = machine(RTX)
    assert _status("flashinfer_trtllm", "unquantized", facts) == "unsupported"
    for value in ("auto", "triton", "flashinfer_cutlass", "marlin"):
        assert moe_verdict(value, "unquantized", facts) is None


def test_a_release_that_cannot_be_read_counts_as_the_newest() -> None:
    facts = machine(RTX, sglang="unknown")
    assert route_of("auto", "modelopt_fp4", facts) == route_of("auto", "modelopt_fp4", machine(RTX))
    verdicts = [moe_verdict(value, "modelopt_fp4", facts) for value in ("auto", *MOE_RUNNERS)]
    reasons = [judged.reason for judged in verdicts if judged is not None]
    assert any("the newest SGLang serves these experts with" in reason for reason in reasons)
    assert not any("999" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("status", "warned"), [("wrong", True), ("timeout", True), ("ok", False), ("unsupported", False)]
)
def test_a_runner_that_failed_its_probe_of_experts_is_warned_of_under_every_value_that_runs_it(
    status: str, warned: bool
) -> None:
    facts = replace(machine(RTX), probed_experts={"flashinfer_cutlass": status})
    for value, quantization in (("flashinfer_cutlass", MODELOPT[0]), ("auto", "compressed-tensors")):
        judged = moe_verdict(value, quantization, facts)  # type: ignore[arg-type]
        assert judged is not None
        assert judged.status == "ok"
        assert any("failed sglang-sm120 probe" in warning for warning in judged.warnings) == warned


def test_an_installed_wheel_without_code_for_the_card_is_no_runner() -> None:
    """0.5.9 alone calls the wheel; what its library was not asked, or says of a later release, changes nothing."""
    old, new = released(RTX, "0.5.9"), released(RTX, "0.5.14")
    for facts, word, status in (
        (old, None, "ok"),
        (old, True, "ok"),
        (old, False, "unsupported"),
        (new, False, "ok"),
    ):
        asked = replace(facts, wheel_code=word)
        assert _status("auto", "modelopt_fp4", asked) == status
    choice = recommend_moe_runner(replace(old, wheel_code=False), "modelopt_fp4")
    assert choice is None or choice.runner != "cutlass"
    judged = moe_verdict("auto", "modelopt_fp4", replace(old, wheel_code=False))
    assert judged is not None
    assert judged.reason.endswith("was compiled for other cards than compute capability 12.0")
