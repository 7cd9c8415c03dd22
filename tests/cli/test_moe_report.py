"""``backends`` and ``doctor`` show the MoE runners: what each does for each kind of experts, and what auto ends in."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from sglang_sm120.backends.moe_record import NVFP4_QUANTIZATIONS
from sglang_sm120.backends.moe_table import MOE_RUNNERS
from sglang_sm120.cli.backends_report import backends_report
from sglang_sm120.cli.doctor_report import doctor_report
from sglang_sm120.cli.render import render_backends, render_doctor
from sglang_sm120.cli.snapshot import Snapshot
from tests.dispatch.machines import B200, RTX, SPARK, machine


def _text(render: Any, report: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=400)
    render(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def _experts(report: dict[str, Any], value: str, quantization: str) -> dict[str, Any]:
    entry = next(entry for entry in report["moe"]["runners"] if entry["value"] == value)
    found: dict[str, Any] = next(e for e in entry["experts"] if quantization in e["quantizations"])
    return found


def test_every_runner_is_judged_for_every_kind_of_experts() -> None:
    report = backends_report(machine(RTX))
    assert [entry["value"] for entry in report["moe"]["runners"]] == list(MOE_RUNNERS)
    for entry in report["moe"]["runners"]:
        kinds = [kind for judged in entry["experts"] for kind in judged["quantizations"]]
        assert sorted(kinds) == sorted(NVFP4_QUANTIZATIONS)
    assert json.loads(json.dumps(report["moe"])) == report["moe"]
    assert _experts(report, "flashinfer_cutlass", "modelopt_fp4")["status"] == "ok"
    refused = _experts(report, "flashinfer_trtllm", "modelopt_mixed")
    assert refused["status"] == "unsupported"
    assert refused["source"] == {"kind": "issue", "ref": "flashinfer#3670"}
    assert _experts(report, "marlin", "compressed-tensors")["runner"] == "flashinfer_cutlass"


@pytest.mark.parametrize("card", [RTX, SPARK])
def test_auto_is_shown_for_each_kind(card: tuple[int, int]) -> None:
    auto = backends_report(machine(card))["moe"]["auto"]
    assert {kind: shown["value"] for kind, shown in auto.items()} == {
        "modelopt_fp4": "flashinfer_cutlass",
        "modelopt_mixed": "flashinfer_cutlass",
        "nvfp4_weight_only": "marlin",
        "fp8": None,
        "compressed-tensors": "auto",
    }
    assert auto["compressed-tensors"]["runner"] == "flashinfer_cutlass"


def test_on_other_cards_auto_is_sglangs() -> None:
    for facts in (machine(B200), machine(None)):
        shown = backends_report(facts)["moe"]["auto"].values()
        assert {(auto["value"], auto["reason"]) for auto in shown} == {(None, "auto is left to SGLang")}


def test_the_text_says_what_runs_instead_and_what_helps() -> None:
    text = _text(render_backends, backends_report(machine(RTX, flashinfer="0.6.7")))
    assert "install flashinfer-python >= 0.6.8.post1" in text
    assert "auto for modelopt_fp4 experts: no runner that auto may take serves them here." in text
    text = _text(render_backends, backends_report(machine(RTX)))
    assert "auto for modelopt_mixed experts: flashinfer_cutlass: " in text
    assert "serves these experts with flashinfer_cutlass, which runs here" in text


def test_doctor_names_what_auto_ends_in() -> None:
    text = _text(render_doctor, doctor_report(Snapshot(facts=machine(RTX), settings=())))
    assert "auto for modelopt_fp4: flashinfer_cutlass" in text
    assert "auto for fp8: no runner" in text
