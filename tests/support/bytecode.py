"""Bytecode for packages that consist of links: without it, every process compiles hundreds of modules again."""

from __future__ import annotations

from pathlib import Path


def link_bytecode(source: Path, target: Path) -> None:
    """Link bytecode of ``source`` into ``target``, for those modules of ``target`` that are links themselves.

    Args:
        source: a folder of a package with modules and, perhaps, a ``__pycache__``.
        target: its copy, where some modules are links to those of ``source`` and others are files of their own. The
            ``__pycache__`` is a folder of its own too: what these compile to must not get into the one of ``source``.
    """
    for file in (source / "__pycache__").glob("*.pyc"):
        if (target / f"{file.name.partition('.')[0]}.py").is_symlink():
            link = target / "__pycache__" / file.name
            link.parent.mkdir(exist_ok=True)
            if not link.exists():
                link.symlink_to(file)
