"""One finding of ``doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, and what to do. ``stop``: a server would not start, or not serve rightly."""

    code: str
    severity: Literal["stop", "warning"]
    message: str
    fix: str
