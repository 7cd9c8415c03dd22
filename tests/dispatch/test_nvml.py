"""Which GPUs the arguments of a server are judged for, without a CUDA context."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from sglang_sm120 import nvml

CARDS = [(12, 0), (9, 0), (12, 1)]


class Library:
    """NVML with three GPUs, as far as it is asked."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(CARDS)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = index + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = CARDS[device.value - 1]
        return 0


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, CARDS),
        ("0,1,2", CARDS),
        ("2, 1", [(9, 0), (12, 1)]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [(12, 0)]),
        ("GPU-8a3c", CARDS),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    listed: str | None, seen: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert nvml.compute_capabilities() == seen


@pytest.mark.parametrize(("cards", "listed", "seen"), [
    (CARDS, "1", CARDS),
    (CARDS, "-1", []),
    ([(12, 0)] * 3, "1", [(12, 0)]),
])  # fmt: skip
def test_indices_say_nothing_about_cards_that_cuda_numbers_by_speed(
    cards: list[tuple[int, int]], listed: str, seen: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    monkeypatch.setitem(globals(), "CARDS", cards)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert nvml.compute_capabilities() == seen


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert nvml.compute_capabilities() == []
