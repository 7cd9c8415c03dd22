"""Put the seams of a watched server in place for one test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sglang.srt.layers.quantization.modelopt_quant as modelopt
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as ct,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4_moe as ct_moe,
)

from sglang_sm120.host import watch_patches, watch_seams
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.watch import Watcher


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch, *, every: int = 1, report: bool = False) -> Iterator[Watcher]:
    """Patch the seams of this module as ``install`` would with the variables set."""
    watcher, patcher = Watcher(every, report=report), Patcher()
    monkeypatch.setattr(watch_patches, "watcher", lambda: watcher)
    for seam in watch_seams.WATCH_SEAMS:
        if seam.module in (modelopt.__name__, ct.__name__, ct_moe.__name__):
            seam.apply(sys.modules[seam.module], patcher)
    try:
        yield watcher
    finally:
        patcher.undo()
