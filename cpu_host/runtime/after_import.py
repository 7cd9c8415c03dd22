"""Run a function right before or after a module of a given name is executed, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Wrapped(Loader):
    """Delegates to the real loader and calls the hooks around the execution of the module."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        # Taken here and not in find_spec: a program may only ask whether the module exists.
        for call in _HOOKS.before.pop(module.__name__, []):
            call()
        self._real.exec_module(module)
        for hook in _HOOKS.after.pop(module.__name__, []):
            hook(module)


class _Hooks(MetaPathFinder):
    def __init__(self) -> None:
        self.before: dict[str, list[Callable[[], None]]] = {}
        self.after: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.before and fullname not in self.after:
            return None
        for finder in tuple(sys.meta_path):
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Wrapped(spec.loader)
                return spec
        return None


_HOOKS = _Hooks()


def _arm() -> None:
    if _HOOKS not in sys.meta_path:
        sys.meta_path.insert(0, _HOOKS)


def before(module: str, call: Callable[[], None]) -> None:
    """Call ``call()`` before ``module`` is executed."""
    _HOOKS.before.setdefault(module, []).append(call)
    _arm()


def after(module: str, hook: Callable[[ModuleType], None]) -> None:
    """Call ``hook(module)`` once ``module`` was executed, before the importer sees it."""
    _HOOKS.after.setdefault(module, []).append(hook)
    _arm()
