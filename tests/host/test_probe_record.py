"""A server reads the probe record of its card: the quantizer's verdict, and why a record is not used."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_sm120 import env, ops
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import UnsupportedError
from sglang_sm120.host import patches_gemm
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.state import STATE
from sglang_sm120.probing.record import Outcome, save
from sglang_sm120.records import identity_of
from tests.host.conftest import Serving
from tests.host.linear_layers import make_case
from tests.host.test_resolution import B200, NEWEST, RTX, Kernels, Start
from tests.support.nvfp4 import fresh_generator


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, serving: Serving, tmp_path: Path) -> Start:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    return Start(monkeypatch)


def _record(status: str, **versions: str) -> None:
    facts = HostFacts(RTX, {**NEWEST, **versions}, device_name="a card that is not here")
    save(identity_of(facts), {"quantizer": Outcome(status, "test")})  # type: ignore[arg-type]


def _save_passed_kernels() -> None:
    facts = HostFacts(RTX, NEWEST, device_name="a card that is not here")
    save(identity_of(facts), {"quantizer": Outcome("timeout", "test"), "sm120": Outcome("ok", "test")})


@pytest.mark.parametrize(("status", "rejected"), [("ok", False), ("unsupported", False), ("wrong", True)])
def test_a_quantizer_that_failed_its_probe_is_replaced(start: Start, status: str, rejected: bool) -> None:
    _record(status)
    start("flashinfer_cutlass", RTX)
    assert STATE.quantizer_rejected is rejected


def test_a_quantizer_of_ours_that_passed_takes_over_and_is_loaded_before_weights(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = Kernels(monkeypatch)
    _save_passed_kernels()
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        start("flashinfer_cutlass", RTX)
    assert STATE.quantizing_backend == "sm120"
    assert kernels.loaded == ["cuda:0"]
    assert "failed sglang-sm120 probe on this card (timeout): sm120 quantizes instead." in caplog.text


def test_a_quantizer_of_ours_that_cannot_be_loaded_stops_the_first_nvfp4_layer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kernels(monkeypatch, UnsupportedError("No compiled kernels."))
    _save_passed_kernels()
    start("flashinfer_cutlass", RTX)
    with pytest.raises(UnsupportedError, match="No compiled kernels"):
        make_case("modelopt", 128, [128], fresh_generator())


def test_without_one_the_oracle_does_and_the_user_is_told(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    _record("wrong")
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        start("flashinfer_cutlass", RTX)
    assert STATE.quantizer == "torch_reference"
    assert "torch_reference quantizes instead, which is very slow" in caplog.text


def test_the_seam_takes_the_quantizer_that_was_chosen(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(ops, "nvfp4_quantize", lambda x, scale, swizzled, backend: asked.append(backend))
    module: Any = SimpleNamespace(fp4_quantize=lambda *_: asked.append("FlashInfer"))
    patches_gemm.route_quantizer(module, Patcher())
    facts = HostFacts(RTX, NEWEST, device_name="a card that is not here")
    serving.decide("flashinfer_cutlass", facts=facts)
    module.fp4_quantize(None, None)
    STATE.quantizer_rejected, STATE.quantizer = True, "sm120"
    module.fp4_quantize(None, None)
    assert asked == ["FlashInfer", "sm120"]


def test_where_the_package_does_nothing_a_record_does_nothing(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    facts = HostFacts(B200, NEWEST, device_name="a card that is not here")
    save(identity_of(facts), {"quantizer": Outcome("wrong", "test")})
    with caplog.at_level(logging.WARNING, "sglang_sm120"):
        start("auto", B200)
        start("auto", B200, driver="590.10")
    assert not STATE.quantizer_rejected
    assert "probe" not in caplog.text


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
