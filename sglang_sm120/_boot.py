"""Calls ``install()`` before SGLang's own code runs, in every process that imports SGLang.

``sglang_sm120_boot.pth`` calls ``arm`` at the start of every Python interpreter that sees this package,
most of which never import SGLang. So this file imports nothing but ``sys`` and ``os``, which are loaded
by then; even ``__future__`` and ``typing`` would cost more than all the rest, hence the quoted annotations.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

origin = __file__
"""Where the copy of the package lies that this interpreter was armed with; a second copy has another."""

_active = False


class _InstallFirst:
    """Stands in for the loader of SGLang until SGLang is executed.

    The call hangs on the execution, not on the search, because programs that only ask whether SGLang is
    there (``importlib.util.find_spec``) must not be patched or stopped.
    """

    def __init__(self, loader: "Loader") -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        if name == "_loader":  # asked for before __init__ ran: copy and pickle do
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Run ``install()``, then SGLang's package file, which sees only its own loader."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        _install()
        # After install(), so that an import that it stopped with SystemExit is stopped again when retried.
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        self._loader.exec_module(module)


class _SglangFinder:
    """Waits for the name ``sglang``; any other import costs one comparison."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "sglang":
            return None
        for finder in tuple(sys.meta_path):
            # Python 3.10 and 3.11 still allow finders that have only the older find_module.
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                # No loader: a folder that happens to be called sglang, not SGLang.
                if spec.loader is not None:
                    spec.loader = _InstallFirst(spec.loader)  # type: ignore[assignment]
                return spec
        return None


_FINDER = _SglangFinder()


def arm() -> None:
    """Wait for the first import of SGLang, unless ``SGLANG_SM120_DISABLE=1``. Calling it twice is harmless."""
    global _active
    # The words that env.disabled() takes for yes; importing env here would load modules.
    if os.environ.get("SGLANG_SM120_DISABLE", "").strip().lower() in ("1", "true", "yes", "on"):
        return
    _active = True
    if "sglang" not in sys.modules and _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def is_active() -> bool:
    """Return whether this interpreter was armed at its start.

    False under ``SGLANG_SM120_DISABLE=1``, under ``python -S`` and for a copy that was installed with
    ``pip install --target``, because Python reads ``.pth`` files in site-packages only.
    """
    return _active


def _install() -> None:
    try:
        from sglang_sm120.host.installer import install
    except ImportError as error:
        import logging

        logging.getLogger("sglang_sm120").warning(
            "sglang-sm120 is installed incompletely (%s) and stays off: SGLang runs unchanged. "
            "Reinstall it (in its clone: pip install --force-reinstall --no-deps .) "
            "or remove it (pip uninstall sglang-sm120).",
            error,
        )
        return
    install()
