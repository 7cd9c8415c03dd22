"""Read the installed SGLang's source without importing it.

``install()`` must know that *every* seam matches before it patches the first one, but the modules that hold
the seams pull in torch and are imported much later, some of them only in a child process. Their source is on
disk already; parsing the ten or so files takes about 80 ms (``benchmarks/startup.py``).
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


def package_root() -> Path | None:
    """Folder of the ``sglang`` package that ``import sglang`` would take, or ``None``."""
    loaded = sys.modules.get("sglang")
    if loaded is not None and getattr(loaded, "__path__", None):
        return Path(next(iter(loaded.__path__)))
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


class ModuleSource:
    """The top level of one parsed module: what it assigns, defines and imports."""

    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name = name
        self._tree = tree

    @classmethod
    def load(cls, root: Path, name: str) -> ModuleSource | None:
        """Parse module ``name`` (dotted, starting with ``sglang.``) below ``root``; ``None`` if absent."""
        base = root.joinpath(*name.split(".")[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return cls(name, _parse(path))
        return None

    def binds(self, name: str) -> bool:
        """Whether the module gives ``name`` a value, by assignment, definition or import, at top level.

        Looks inside ``if`` and ``try`` at top level, where optional imports stand.
        """
        return any(name in _bound_names(node) for node in _top_level(self._tree.body))

    def function(self, name: str, cls: str | None = None) -> Function | None:
        """Definition of the function ``name``, or of the method ``cls.name``."""
        body: list[ast.stmt] = self._tree.body
        if cls is not None:
            owner = self.klass(cls)
            body = owner.body if owner is not None else []
        for node in _top_level(body):
            if isinstance(node, Function) and node.name == name:
                return node
        return None

    def klass(self, name: str) -> ast.ClassDef | None:
        for node in _top_level(self._tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node
        return None


def argument_names(function: Function) -> list[str]:
    """Positional argument names in order, ``self``/``cls`` included."""
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args)]


def calls(function: Function, name: str) -> list[ast.Call]:
    """All calls of the plain name ``name`` inside ``function``."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]


def enum_values(cls: ast.ClassDef) -> dict[str, str]:
    """``NAME = "value"`` members of an enum class."""
    return {
        target.id: node.value.value
        for node in cls.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@contextmanager
def without_collector() -> Iterator[None]:
    """Keep Python's cycle collector from running while trees are built and dropped.

    A tree is some 100,000 objects without a cycle. With torch loaded, the collector runs that they trigger cost ten
    times as much as the parsing itself.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _top_level(body: list[ast.stmt]) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If):
            found += _top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            found += _top_level([*node.body, *node.orelse, *node.finalbody])
            for handler in node.handlers:
                found += _top_level(handler.body)
    return found


def _bound_names(node: ast.stmt) -> set[str]:
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {t.id for t in node.targets if isinstance(t, ast.Name)}
    if isinstance(node, ast.AnnAssign):
        return {node.target.id} if isinstance(node.target, ast.Name) else set()
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return set()
