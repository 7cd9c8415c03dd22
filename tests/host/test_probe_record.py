"""A server reads the probe record of its card: the quantizer's verdict, and why a record is not used."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from sglang_sm120 import env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.host.state import STATE
from sglang_sm120.probing.record import Outcome, save
from sglang_sm120.records import identity_of
from tests.host.conftest import Serving
from tests.host.test_resolution import NEWEST, RTX, Start


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, serving: Serving, tmp_path: Path) -> Start:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return Start(monkeypatch)


def _record(status: str, **versions: str) -> None:
    facts = HostFacts(RTX, {**NEWEST, **versions}, device_name="a card that is not here")
    save(identity_of(facts), {"quantizer": Outcome(status, "test")})  # type: ignore[arg-type]


@pytest.mark.parametrize(("status", "rejected"), [("ok", False), ("unsupported", False), ("wrong", True)])
def test_a_quantizer_that_failed_its_probe_is_replaced(start: Start, status: str, rejected: bool) -> None:
    _record(status)
    start("flashinfer_cutlass", RTX)
    assert STATE.quantizer_rejected is rejected


def test_a_stale_record_changes_nothing_and_is_named_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    _record("wrong", driver="570.10")
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        start("flashinfer_cutlass", RTX)
    assert not STATE.quantizer_rejected
    assert caplog.text.count("driver 570.10 → 580.95") == 1


def test_without_a_record_nothing_is_said(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        start("flashinfer_cutlass", RTX)
    assert not STATE.quantizer_rejected
    assert "probe" not in caplog.text
