"""The first calls of a plan fit into the memory that is there, whatever N is, and none is left out in silence."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from sglang_sm120.tuning import first_calls as room
from sglang_sm120.tuning.backend import Plan
from sglang_sm120.tuning.table import by_rows

N, K = 4096, 64
CHOICES = {1: "torch_reference", 64: "sm120", 8192: "torch_reference"}
CPU = torch.device("cpu")
#: Operands that have no rows, and what one row takes: input, codes, scales and two results.
WEIGHT, ROW = N * K // 2 + N * K // 16 + 4 * N, (K + 2 * N) * 2 + K // 2 + K // 16


def first_calls(linear: Callable[..., None]) -> list[int]:
    """Make the calls of a plan whose every function is ``linear``; the rows of each, in order."""
    seen: list[int] = []

    def noted(x: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        linear(x)
        return x

    values = by_rows(CHOICES)
    plan = Plan(CHOICES, tuple(values), (noted,) * len(values), (), ["lm_head"])
    assert room.first_calls(plan, (N, K, torch.bfloat16, True), CPU) == {}
    return seen


def test_with_room_every_measured_m_is_called() -> None:
    assert first_calls(lambda x: None) == [8192, 64, 1]


def test_an_m_without_room_is_called_with_the_rows_that_fit_into_half_of_what_is_free_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "_free_bytes", lambda device: 2 * (WEIGHT + 100 * ROW))
    with caplog.at_level(logging.INFO, "sglang_sm120"):
        assert first_calls(lambda x: None) == [100, 64, 1]
    (line,) = [record.getMessage() for record in caplog.records if "first call" in record.getMessage()]
    assert f"torch_reference for M=8192 N={N} K={K} was made with M=100" in line


def test_a_kernel_that_runs_out_of_memory_by_itself_is_called_with_fewer_rows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def linear(x: torch.Tensor) -> None:
        if x.shape[0] > 1500:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with caplog.at_level(logging.INFO, "sglang_sm120"):
        assert first_calls(linear) == [8192, 4096, 2048, 1024, 64, 1]
    assert "was made with M=1024" in caplog.text


def test_no_room_for_a_single_row_is_not_hidden() -> None:
    def linear(x: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        first_calls(linear)
