"""A copy of the installed SGLang in which chosen files are edited: the real code with one thing renamed.

Everything else is a symbolic link, bytecode too, so that a copy costs milliseconds and its import no more than another.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import sglang

from tests.support.bytecode import link_bytecode


def shadow_sglang(folder: Path, edits: Mapping[str, tuple[str, str]], version: str | None = None) -> Path:
    """Link the installed SGLang below ``folder`` and replace text in the files named by ``edits``.

    Args:
        edits: relative path of a file -> (old text, new text); the old text must be there.
        version: pretend that this is another release.
    """
    source = Path(sglang.__file__).parent
    for relative, (old, new) in edits.items():
        text = (source / relative).read_text()
        assert old in text, f"{relative} does not contain {old!r}"
        _write(source, folder / "sglang", Path(relative), text.replace(old, new))
    _link_rest(source, folder / "sglang")
    info = folder / f"sglang-{version or importlib.metadata.version('sglang')}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {info.stem.split('-')[1]}\n")
    return folder


def _write(source: Path, target: Path, relative: Path, text: str) -> None:
    place = target / relative
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)
    for parent in list(relative.parents):
        _link_rest(source / parent, target / parent)


def _link_rest(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        link = target / entry.name
        if entry.name != "__pycache__" and not link.exists():
            link.symlink_to(entry)
    link_bytecode(source, target)


def run_python(code: str, *argv: str, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter of this environment, ``path`` first on its import path."""
    environment = {**os.environ, **env}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, env=environment, timeout=300
    )
