"""Which machine and which request make our operators count, and what doctor says about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console

from sglang_sm120.backends.operator_table import OPERATORS, PROVIDERS, provider_of
from sglang_sm120.backends.record import CAPABILITIES, HostFacts
from sglang_sm120.cli.doctor_report import doctor_report
from sglang_sm120.cli.render import render_doctor
from sglang_sm120.cli.snapshot import Snapshot
from sglang_sm120.dispatch import Decision
from sglang_sm120.sgl_kernel_ops.choice import implementations, stand_in
from tests.dispatch.machines import B200, B300, HOPPER, RTX, SPARK, released


def decided(backend: str | None) -> Decision:
    return Decision(backend, "command line", backend is not None, "test")


@pytest.mark.parametrize(
    ("backend", "facts", "expected"),
    [
        ("sm120", released(RTX, "0.5.9"), None),  # the wheel has code for 12.0
        ("sm120", released(SPARK, "0.5.9"), "sm120"),  # and none for 12.1
        ("sm120", released(SPARK, "0.5.14"), None),  # compiled for the card that is there
        ("sm120", released(RTX, "0.5.14", cuda="12.6"), "sm120"),  # by a compiler that does not know it
        ("sm120", released(HOPPER, "0.5.14"), "sm120"),
        ("torch_reference", released(None, "0.5.9"), "torch_reference"),
        ("flashinfer_cutlass", released(SPARK, "0.5.9"), "torch_reference"),  # sm120 was not probed there
        ("sm120", released(SPARK, "0.5.16"), None),  # FlashInfer does everything
        (None, released(SPARK, "0.5.9"), None),  # left to SGLang
        (None, released(HOPPER, "0.5.14"), None),
        ("sm120", released(B200, "0.5.9"), None),
        ("sm120", released(B300, "0.5.9"), "sm120"),
    ],
)
def test_ours_count_where_sglangs_have_no_code(backend: str | None, facts: HostFacts, expected: str | None) -> None:
    assert stand_in(decided(backend), facts) == expected


def test_the_installed_library_can_take_a_card_from_the_table_and_give_it_none() -> None:
    """Without the library's word the table decides; sources that refuse a card refuse it whatever was compiled."""
    for card, word, expected in (
        (RTX, None, None),
        (RTX, True, None),
        (RTX, False, "sm120"),
        (SPARK, True, "sm120"),
        (HOPPER, True, "sm120"),
    ):
        assert stand_in(decided("sm120"), replace(released(card, "0.5.9"), wheel_code=word)) == expected
    # Later releases compile their operators: nothing of the wheel counts.
    assert stand_in(decided("sm120"), replace(released(RTX, "0.5.14"), wheel_code=False)) is None


def test_doctor_says_whether_the_library_was_asked() -> None:
    def line(word: bool | None) -> str:
        facts = replace(released(RTX, "0.5.9"), wheel_code=word)
        return implementations(decided("sm120"), facts)["cutlass_fp4_group_mm"]

    assert line(None) == "sgl_kernel, SGLang's own; by the table of published wheels; its library was not read"
    assert line(True) == "sgl_kernel, SGLang's own; its library has code for this card"
    assert line(False) == (
        "sm120 of this package (sgl_kernel was compiled for other cards than compute capability 12.0); its library has "
        "no code for this card"
    )


def test_a_checked_kernel_is_preferred_where_another_backend_multiplies() -> None:
    facts = released(SPARK, "0.5.9")
    probed = HostFacts(facts.capability, facts.versions, probed={"sm120": "ok"})
    assert stand_in(decided("flashinfer_cutlass"), probed) == "sm120"


def test_doctor_is_told_whose_code_it_is() -> None:
    ours = implementations(decided("sm120"), released(SPARK, "0.5.9"))
    assert set(ours) == {o.name for o in OPERATORS} - {"silu_and_mul_scaled_fp4_experts_quant_packed"}
    assert all("sm120 of this package (sgl_kernel does not run on compute capability 12.1" in t for t in ours.values())
    theirs = implementations(decided("sm120"), released(RTX, "0.5.14"))
    assert set(theirs.values()) == {"sglang.jit_kernel.nvfp4, SGLang's own"}
    assert set(implementations(None, released(HOPPER, "0.5.14")).values()) == {
        "none that runs here: sglang.jit_kernel.nvfp4 does not run on compute capability 9.0: the kernels refuse "
        "capabilities below 10.0"
    }
    assert implementations(decided("sm120"), released(RTX, "0.5.16")) == {}


def test_every_capability_has_one_row_or_one_reason_to_have_none() -> None:
    for releases, provider in PROVIDERS:
        assert releases.package == "sglang"
        with_row = [row.capability for row in provider.rows]
        without = [c for absence in provider.absent for c in absence.capabilities]
        assert Counter([*with_row, *without]) == Counter(CAPABILITIES)
    assert provider_of(released(RTX, "0.5.23")) is None


def test_doctor_shows_it() -> None:
    report = doctor_report(Snapshot(facts=released(SPARK, "0.5.9"), settings=(), decision=decided("sm120")))
    assert report["operators"] == implementations(decided("sm120"), released(SPARK, "0.5.9"))
    console = Console(record=True, width=200)
    render_doctor(report, console)
    text = console.export_text()
    assert "scaled_fp4_quant, scaled_fp4_experts_quant" in text
    assert "cutlass_fp4_group_mm: sm120 of this package (sgl_kernel does not run" in text
