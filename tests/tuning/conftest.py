"""A machine without a GPU, as ``bench`` and ``tune`` see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_sm120 import device, env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.probing import record
from sglang_sm120.probing.record import Outcome
from sglang_sm120.records import identity_of
from sglang_sm120.tuning import timing

FACTS = HostFacts(None, {"torch": "2.13.0"})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which the oracle passed its probe, dense and with experts, and short repeats."""
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(device, "collect_facts", lambda: FACTS)
    monkeypatch.setattr(timing, "REPEATS", 3)
    monkeypatch.setattr(timing, "SECONDS_PER_REPEAT", 1e-3)
    passed = {"torch_reference": Outcome("ok", "test")}
    record.save(identity_of(FACTS), passed, passed)
