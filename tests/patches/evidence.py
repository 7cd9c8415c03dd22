"""Run inside a process of a patched SGLang: which file each patched module came from, and whether each hunk is in it.

An unpatched tree cannot pass for a patched one: what a process says is compared with the patches (``releases.check``).
Standard library only.

SM120_PATCHED_HUNKS   a JSON file: a list of (module, lines that a patch put there)
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "SM120_PATCHED_HUNKS"


def found() -> list[dict[str, Any]]:
    """Module, file and SHA-256 of each hunk's lines, ``None`` for lines that are not in the file."""
    hunks = json.loads(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
    return [_look(name, "\n".join(lines)) for name, lines in hunks]


def _look(name: str, block: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    there = block in Path(str(module.__file__)).read_text(encoding="utf-8")
    return {
        "module": name,
        "file": module.__file__,
        "hunk": hashlib.sha256(block.encode()).hexdigest() if there else None,
    }
