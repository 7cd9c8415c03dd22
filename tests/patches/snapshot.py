"""What a folder holds, for comparison."""

from __future__ import annotations

import os
from pathlib import Path


def snapshot(root: Path) -> dict[str, object]:
    """Everything below ``root`` except bytecode: kind, mode, time of change and bytes of each entry."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        if path.name == "__pycache__" or path.suffix == ".pyc":
            continue
        facts = path.lstat()
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_dir():
            found[str(path)] = facts.st_mode
        else:
            found[str(path)] = (facts.st_mode, facts.st_mtime_ns, path.read_bytes())
    return found
