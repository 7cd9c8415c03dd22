"""What the start of a server does with ``sm120_tuned``: which table counts, what is said, where other layers go."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.layers.quantization.fp4_utils as fp4_utils
import torch

from sglang_sm120 import env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.errors import ConfigError
from sglang_sm120.host import patches_gemm
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.state import STATE
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import backend, table
from sglang_sm120.tuning.choice import Timing
from sglang_sm120.tuning.results import Entry
from tests.host.conftest import Serving
from tests.host.test_resolution import NEWEST, RTX, Start

COMMAND = ["sglang-sm120", "tune", "some/model"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, serving: Serving, tmp_path: Path) -> Iterator[Start]:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    yield Start(monkeypatch)
    backend.forget_plans()


def facts(capability: tuple[int, int] | None, **versions: str) -> HostFacts:
    return HostFacts(capability, {**NEWEST, **versions}, device_name="a card that is not here")


def entry(value: str) -> Entry:
    return Entry(64, 128, "bfloat16", 1, value, {value: Timing(1, 1, 1)})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "tun" in r.getMessage()]


def test_without_a_table_one_warning_names_the_command_and_who_serves(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    assert start("sm120_tuned", RTX) == "sm120_tuned"
    (warning,) = warnings(caplog)
    assert "Run sglang-sm120 tune MODEL. Until then flashinfer_cutlass serves every layer." in warning


def test_a_stale_table_is_one_warning_with_the_difference(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    table.save(identity_of(facts(RTX, driver="570.1")), [entry("flashinfer_b12x")], COMMAND)
    start("sm120_tuned", RTX)
    (warning,) = warnings(caplog)
    assert "driver 570.1 → 580.95" in warning
    assert "Run again: sglang-sm120 tune some/model" in warning
    assert STATE.tuning is not None
    assert STATE.tuning.table is None


def test_a_named_table_of_another_card_stops_the_start(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.save(identity_of(facts(RTX)), [entry("flashinfer_b12x")], COMMAND, tmp_path / "copy.json")
    monkeypatch.setenv(env.TUNING_TABLE, str(tmp_path / "copy.json"))
    with pytest.raises(ConfigError, match="run sglang-sm120 tune on such a card"):
        start("sm120_tuned", (12, 1))


def test_a_second_decision_of_a_process_forgets_the_plans_of_the_first(start: Start) -> None:
    key = (64, 128, torch.bfloat16, True)
    backend.add_plan(key, backend.make_plan({1: "torch_reference"}, None))
    start("sm120_tuned", RTX)
    assert backend.plan_of(key) is None


def test_layers_without_an_entry_are_autotuned_and_multiplied_as_under_auto(start: Start) -> None:
    """SGLang runs FlashInfer's autotuner for them, and its call of FlashInfer gets the name that auto has."""
    table.save(identity_of(facts(RTX)), [entry("flashinfer_b12x")], COMMAND)
    start("sm120_tuned", RTX)
    member = fp4_utils.get_fp4_gemm_runner_backend()
    assert member.is_flashinfer_cutlass()
    asked = []

    def mm_fp4(*args: Any, backend: str) -> torch.Tensor:
        asked.append(backend)
        return torch.empty(0)

    module: Any = SimpleNamespace(flashinfer_fp4_gemm=mm_fp4)
    patches_gemm.route_gemm(module, Patcher())
    module.flashinfer_fp4_gemm(*[torch.empty(0)] * 5, torch.bfloat16, backend=member.get_flashinfer_backend())
    assert asked == ["cutlass"]


def test_without_a_card_of_ours_a_backend_of_this_package_serves_the_others(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    table.save(identity_of(facts(None)), [entry("torch_reference")], COMMAND)
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        start("sm120_tuned", None)
    assert warnings(caplog) == []
    assert not fp4_utils.get_fp4_gemm_runner_backend().is_flashinfer_cutlass()
    assert "1 shapes, else torch_reference" in caplog.text
