"""The capability table and what follows from it. Importing this needs neither torch nor sglang."""

from __future__ import annotations

from sglang_sm120.backends.table import AUTO_ORDER, BACKENDS
from sglang_sm120.backends.verdict import available_values, offered_backends, offered_values, verdict

__all__ = ["AUTO_ORDER", "BACKENDS", "available_values", "offered_backends", "offered_values", "verdict"]
