"""An SGLang that can be patched without copying it: files that patches touch are copies, all others are links.

Python imports the copies, so what is tested is the real module of the real package.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from sglang_sm120.upstream.target import Target, find_target
from tests.support.bytecode import link_bytecode


def overlay(package: Path, touched: Iterable[str], folder: Path, *, tree: bool) -> Target:
    """Build one below ``folder`` from the installed ``package``.

    Args:
        touched: paths below ``python/`` that will be copies.
        tree: as a source tree, with room for the tests that patches bring; else as ``site-packages``.
    """
    site = folder / "python" if tree else folder / "site-packages"
    site.mkdir(parents=True)
    if tree:
        (site / "pyproject.toml").write_text("")
    for metadata in package.parent.glob("sglang-*.dist-info"):
        (site / metadata.name).symlink_to(metadata)
    _link(package, site / "sglang", [Path(path.removeprefix("python/sglang/")) for path in touched])
    return find_target(folder if tree else site)


def _link(source: Path, folder: Path, touched: list[Path]) -> None:
    folder.mkdir()
    inner: dict[str, list[Path]] = {}
    for path in touched:
        if len(path.parts) > 1:
            inner.setdefault(path.parts[0], []).append(Path(*path.parts[1:]))
    copied = {path.name for path in touched if len(path.parts) == 1}
    for entry in source.iterdir():
        if entry.name in inner:
            _link(entry, folder / entry.name, inner[entry.name])
        elif entry.name in copied:
            shutil.copy2(entry, folder / entry.name)
        elif entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)
    link_bytecode(source, folder)
