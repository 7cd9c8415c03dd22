"""Stand-ins for compiled packages that SGLang imports at the top of its modules but never calls on the CPU.

``triton`` (every release): decorators return the function, types are empty classes. The real package would do
as well and is used if it is installed; it costs 1 GB.

``sgl_kernel`` (every release, also its submodules, which 0.5.9 imports): imported by name under
``SGLANG_USE_CPU_ENGINE=1``. There is no build of it for the CPU on the package index. Every name imports,
and calling one raises, so that a path that really needs a kernel cannot pass unnoticed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _EmptyType:
    """Base of stand-in classes: can be made and inherited from, whatever the arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __init_subclass__(cls, **kwargs: Any) -> None: ...


#: Classes of triton with a small first letter: torch.compile puts ``triton.language.dtype`` into ``isinstance``.
_SMALL_CLASSES = ("dtype",)


class _Triton(ModuleType):
    """A module of the ``triton`` stand-in; also stands for functions, decorators and values in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any
        if name[:1].isupper() or name in _SMALL_CLASSES:
            value = type(name, (_EmptyType,), {"__module__": self.__name__})
        else:
            value = _new_module(_Triton, f"{self.__name__}.{name}")
            value = sys.modules.setdefault(value.__name__, value)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """``@triton.jit`` and ``@triton.jit(...)`` alike give the function back."""
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __getitem__(self, key: Any) -> _Triton:
        return self

    def __iter__(self) -> Iterator[Any]:
        """Empty. Without this, ``"cpu" in triton.backends.backends`` would ask ``__getitem__`` for ever."""
        return iter(())

    def __or__(self, other: Any) -> _Triton:  # annotations such as ``tl.tensor | None``
        return self

    __ror__ = __or__


class _Raising(ModuleType):
    """A module whose every name is a function that raises."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} is a stand-in: no kernels on a machine without a GPU")

        missing.__name__ = missing.__qualname__ = name
        return missing


#: Package, kind of its modules, the version it claims (the newest pin; SGLang compares it in places).
_STANDINS: dict[str, tuple[type[ModuleType], str]] = {
    "triton": (_Triton, "3.9.0"),
    "sgl_kernel": (_Raising, "0.4.10"),
}


def _new_module(kind: type[ModuleType], name: str) -> ModuleType:
    module = kind(name)
    module.__path__ = []
    module.__package__ = name
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    return module


class _Finder(MetaPathFinder, Loader):
    """Finds the stand-ins whose real package is not installed."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # SGLang has a mock of its own for this module's values and takes it when the import fails.
        if fullname != "sgl_kernel.scalar_type" and fullname.partition(".")[0] in self._packages:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        package = spec.name.partition(".")[0]
        kind, version = _STANDINS[package]
        module = sys.modules.get(spec.name) or _new_module(kind, spec.name)
        if spec.name == package:
            vars(module)["__version__"] = version
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names appear when they are asked for."""


def arm() -> None:
    missing = frozenset(name for name in _STANDINS if PathFinder.find_spec(name) is None)
    sys.meta_path.append(_Finder(missing))
