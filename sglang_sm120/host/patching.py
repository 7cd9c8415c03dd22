"""Set attributes of a foreign module so that every step can be undone and recognised.

Originals live in closures, never in module globals: SGLang's own hook sweep rebinds every module attribute
that is identical to a hooked function, a plugin's saved original included.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

SEAM_MARK = "__sm120_seam__"
_MISSING = object()


class Patcher:
    """Collects what was changed; :meth:`undo` puts everything back in reverse order."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self._checks: list[Callable[[], bool]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """``setattr(owner, name, value)``, remembering what was there."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)

        def restore() -> None:
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        seam = seam_of(value)
        self.changed(restore, lambda: is_marked(vars(owner).get(name), seam))

    def set_everywhere(self, module: ModuleType, name: str, original: Any, replacement: Any) -> None:
        """Set it in ``module`` and in every module of SGLang that imported the original by name.

        Where the entry point is the only way in, such modules are imported before we are called.
        """
        self.set(module, name, replacement)
        importers = [m for n, m in list(sys.modules.items()) if n.startswith("sglang.") and m is not module]
        for importer in importers:
            if vars(importer).get(name) is original:
                self.set(importer, name, replacement)

    def changed(self, undo: Callable[[], None], in_place: Callable[[], bool]) -> None:
        """Note a change made by other means: how to take it back, how to see that it is still there."""
        self._undo.append(undo)
        self._checks.append(in_place)

    def in_place(self) -> bool:
        """Whether every change is still there; a later plugin may have replaced what we set."""
        return bool(self._checks) and all(check() for check in self._checks)

    def undo(self) -> None:
        self._checks.clear()
        while self._undo:
            self._undo.pop()()


def mark(seam: str, replacement: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    """Give ``replacement`` the identity of ``original`` and the name of the seam it belongs to."""
    if original is not None:
        functools.update_wrapper(replacement, original)
    setattr(replacement, SEAM_MARK, seam)
    return replacement


def seam_of(function: Any) -> str | None:
    """Name of the seam that ``function`` itself replaces, or ``None``."""
    function = getattr(function, "__func__", function)
    return getattr(function, SEAM_MARK, None) if callable(function) else None


def is_marked(function: Any, seam: str | None) -> bool:
    """Whether ``function`` is our replacement for ``seam`` or wraps it, at any depth.

    Another plugin may have wrapped ours in turn; ``functools.wraps`` leaves the trail that is followed here
    (it also copies our mark, which is right: the wrapper still ends in our code).
    """
    while function is not None:
        if seam_of(function) == seam:
            return True
        function = getattr(getattr(function, "__func__", function), "__wrapped__", None)
    return False
