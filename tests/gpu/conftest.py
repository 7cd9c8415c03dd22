"""Tests that need an NVIDIA GPU; ``make test-gpu`` runs them."""

from __future__ import annotations

from tests.host.conftest import serving

__all__ = ["serving"]
