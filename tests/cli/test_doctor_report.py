"""What doctor concludes, for installations given as data: machines with cards that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_sm120 import env
from sglang_sm120.cli.doctor_report import doctor_report
from sglang_sm120.cli.render import render_backends, render_doctor
from sglang_sm120.cli.snapshot import Copy, Seams, Setting, Snapshot, take_snapshot
from sglang_sm120.diagnosis.compiled import Compiled, Library
from sglang_sm120.diagnosis.fatbin import Target
from sglang_sm120.diagnosis.packages import Packages
from sglang_sm120.dispatch import Request, resolve
from tests.cli.bare import codes
from tests.dispatch.machines import CARDS, RTX, machine

TESTED = ("0.5.9", "0.5.23")
HOPPER_ONLY = Library("sgl_kernel", (frozenset({Target("sm", 90, "a")}),))


def _sound(**changes: Any) -> Snapshot:
    """A machine with an RTX card on which nothing is wrong."""
    facts = machine(RTX)
    values: dict[str, Any] = {
        "facts": facts,
        "settings": tuple(Setting(v.name, "0", "default") for v in env.VARIABLES),
        "decision": resolve(Request("auto"), facts),
        "copies": (Copy(Path("/site/sglang_sm120"), "0.1.0"),),
        "seams": Seams(("choices", "enum"), {}, TESTED),
        "pth_active": True,
        "entry_point": True,
        "flashinfer_pin": "0.7.2",
        "site_packages": Path("/site"),
        "cache": "/cache",
    }
    return Snapshot(**{**values, **changes})


def test_every_variable_of_the_package_is_shown() -> None:
    assert [setting.name for setting in take_snapshot().settings] == [variable.name for variable in env.VARIABLES]


def test_a_sound_machine_has_no_findings() -> None:
    report = doctor_report(_sound())
    assert report["findings"] == []
    assert report["ok"]
    assert report["decision"]["backend"] == "flashinfer_cutlass"


@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        ({"facts": machine(RTX, torch=None)}, "torch-missing", "stop"),
        ({"facts": machine(RTX, sglang=None)}, "sglang-missing", "stop"),
        ({"facts": machine(RTX, sglang="0.5.8")}, "sglang-old", "stop"),
        ({"facts": machine(RTX, sglang="0.6.0")}, "sglang-new", "warning"),
        ({"facts": machine(RTX, flashinfer=None)}, "flashinfer-missing", "warning"),
        ({"facts": machine(RTX, flashinfer="0.7.1")}, "flashinfer-old", "stop"),
        ({"seams": Seams(("enum",), {"enum": "no class"}, TESTED)}, "seam-differs", "stop"),
        ({"seams": Seams(note="the hooks could not be examined")}, "seams-unknown", "stop"),
        ({"pth_active": False}, "pth-inactive", "warning"),
        ({"pth_active": False, "entry_point": False}, "pth-inactive", "stop"),
        ({"pth_active": False, "facts": machine(RTX, sglang="0.5.10")}, "pth-inactive", "stop"),
        ({"plugins_whitelist": "other"}, "plugins-whitelist", "stop"),
        ({"site_packages_writable": False}, "read-only", "warning"),
        ({"settings": (Setting(env.DISABLE, "1", "environment"),)}, "disabled", "warning"),
        ({"settings": (Setting(env.AUTO, "x", "environment", "bad."),)}, "bad-setting", "stop"),
        ({"misspelt": ("SGLANG_SM120_X",)}, "unknown-variable", "warning"),
        ({"decision": None, "refusal": "No."}, "start-refused", "stop"),
        ({"cache_problem": "it is read-only"}, "cache", "warning"),
        ({"compiled": Compiled((HOPPER_ONLY,))}, "no-kernel-image", "stop"),
        ({"ranks_problem": "no answer for 90 s"}, "ranks-cannot-talk", "stop"),
        ({"compiled_note": "PermissionError: x"}, "compiled-unknown", "warning"),
        ({"packages": Packages({"flashinfer-cubin": "0.7.1"})}, "flashinfer-companion", "stop"),
        ({"packages_note": "PermissionError: x"}, "packages-unknown", "warning"),
        ({"copies": (Copy(Path("/a"), "0.1.0"), Copy(Path("/b"), "0.2.0"))}, "two-copies", "stop"),
        ({"copies": (Copy(Path("/a"), "0.1.0"), Copy(Path("/b"), "0.1.0"))}, "two-copies", "warning"),
    ],
)
def test_each_defect_is_found_and_has_a_fix(change: dict[str, Any], code: str, severity: str) -> None:
    report = doctor_report(_sound(**change))
    assert code in codes(report, severity)
    assert report["ok"] == (not codes(report, "stop"))
    assert all(finding["message"].endswith(".") and finding["fix"].endswith(".") for finding in report["findings"])


def test_the_whitelist_may_name_this_plugin() -> None:
    assert doctor_report(_sound(plugins_whitelist="other, sm120"))["ok"]


def test_a_newer_flashinfer_than_sglang_asks_for_is_fine() -> None:
    assert doctor_report(_sound(facts=machine(RTX, flashinfer="0.7.4")))["findings"] == []


def test_a_read_only_site_packages_changes_the_advice() -> None:
    report = doctor_report(_sound(pth_active=False, site_packages_writable=False))
    (finding,) = (f for f in report["findings"] if f["code"] == "pth-inactive")
    assert "virtual environment" in finding["fix"]


def test_warnings_of_the_decision_are_findings() -> None:
    facts = machine(RTX)
    decision = resolve(Request("auto", deprecated_value="cudnn"), facts)
    report = doctor_report(_sound(decision=decision))
    assert any("deprecated" in finding["message"] for finding in report["findings"])
    assert report["ok"]


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_both_reports_can_be_shown_for_every_card(
    card: tuple[int, int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = machine(card)
    report = doctor_report(_sound(facts=facts, decision=resolve(Request("auto"), facts)))
    render_doctor(report)
    render_backends(report)
    text = capsys.readouterr().out
    assert "torch_reference" in text
    assert "Nothing stops a start." in text
