"""The Python interpreters of this machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

#: Minor versions of Python 3 that the package supports.
SUPPORTED = range(10, 15)


@cache
def interpreter(minor: int) -> str | None:
    """Path of a working Python 3.``minor``: this one, the search path's, or one that pyenv manages."""
    candidates = [sys.executable] if sys.version_info[1] == minor else []
    on_path = shutil.which(f"python3.{minor}")
    candidates += [on_path] if on_path else []
    candidates += [str(p) for p in sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python3"))]
    for candidate in candidates:
        # pyenv's shims are on the search path for every version and fail for all but the selected one.
        if subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return candidate
    return None
