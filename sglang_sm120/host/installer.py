"""Install every seam, or none: probe first, patch what is imported, arm the rest, verify.

States of a seam: ``live`` (patched and still in place), ``armed`` (its module is not imported yet; the patch
runs right after the import), ``absent`` (this SGLang release does not have the code), ``broken`` (the code
is not what the seam was written for, or somebody replaced our patch) and ``off`` (nothing was installed).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from packaging.version import Version

from sglang_sm120 import __version__, env
from sglang_sm120.errors import SeamError
from sglang_sm120.host import installation
from sglang_sm120.host.patching import Patcher
from sglang_sm120.host.source_probe import ModuleSource, package_root, without_collector

logger = logging.getLogger("sglang_sm120")

#: Imported by every process that serves, and hardly by anything else.
_SERVER_MODULE = "sglang.srt.managers.scheduler"

State = Literal["live", "armed", "absent", "broken", "off"]


@dataclass(frozen=True)
class SeamStatus:
    """State of one seam in this process."""

    name: str
    module: str
    state: State
    detail: str = ""


class _Installer:
    """The installation of this process. There is one; :data:`_INSTALLER`."""

    def __init__(self) -> None:
        self.done = False
        self.reason_off = "install() has not run"
        self.release: Version | None = None
        self._patchers: dict[str, Patcher] = {}
        self._pending: dict[str, list[Any]] = {}
        self._stop: str | None = None  # ends a server
        self._fatal: str | None = None  # ends every program

    def install(self) -> None:
        """See :func:`install`."""
        if self._fatal is not None:
            raise SystemExit(self._fatal)  # whoever caught it the first time and imports SGLang again
        if self.done:
            return
        switched_off = self._switched_off()
        if switched_off is None:
            env.require_readable()
        self.done = True
        if switched_off is not None:
            self.reason_off = switched_off
            return
        problem = self._reason_to_stay_off()
        if problem is None:
            problem = self._patch_or_arm()
        if problem is not None:
            self._stay_off(problem)

    def _switched_off(self) -> str | None:
        if env.disabled():
            return f"{env.DISABLE} is set"
        if not installation.excluded_by_whitelist():
            return None
        reason = "SGLANG_PLUGINS names other plugins only; add sm120 to it"
        why = installation.named()
        if why is not None:
            raise SystemExit(f"sglang-sm120 {__version__} cannot be used: {reason}. It is needed because {why}.")
        logger.warning("sglang-sm120 %s stays off: %s.", __version__, reason)
        return reason

    def _reason_to_stay_off(self) -> str | None:
        from sglang_sm120.host.seams import FIRST_SUPPORTED, LAST_TESTED

        conflict = installation.conflicting_copy()
        if conflict is not None:
            return conflict
        root = package_root()
        if root is None:
            return "SGLang's source files were not found"
        self.release = installation.sglang_version(root)
        if self.release is None:
            return "the version of SGLang cannot be told; reinstall it"
        if self.release < FIRST_SUPPORTED:
            return f"SGLang {self.release} is older than {FIRST_SUPPORTED}; upgrade it"
        problems = probe(root, self.release)
        if problems:
            listing = "; ".join(f"{name}: {text}" for name, text in problems.items())
            return (
                f"SGLang {self.release} differs from the releases this version was written for ({listing}); "
                "upgrade sglang-sm120, or install a supported SGLang"
            )
        if self.release > LAST_TESTED:
            logger.warning(
                "sglang-sm120 %s was tested up to SGLang %s; all seams match %s, so it runs.",
                __version__,
                LAST_TESTED,
                self.release,
            )
        return None

    def _stay_off(self, problem: str) -> None:
        self.reason_off = problem
        self.undo()
        why = installation.named()
        if why is not None:
            self._fatal = self._stop_message(problem, why)
            self._stop_servers(self._fatal)
            raise SystemExit(self._fatal)
        logger.warning("sglang-sm120 %s stays off: %s. SGLang runs unchanged.", __version__, problem)
        why = installation.automatic(self.release)
        if why is not None:
            # Programs that only import SGLang go on; a server, which is what needs auto, does not start.
            self._stop_servers(self._stop_message(problem, why))

    def _stop_message(self, problem: str, why: str) -> str:
        return (
            f"sglang-sm120 {__version__} cannot be used: {problem}. The start is stopped because {why}. "
            f"{env.DISABLE}=1 starts SGLang without this package."
        )

    def _stop_servers(self, message: str) -> None:
        self._stop = message
        if _SERVER_MODULE in sys.modules:
            raise SystemExit(message)
        sys.meta_path.insert(0, _FINDER)

    def _patch_or_arm(self) -> str | None:
        for seam in self.seams():
            self._pending.setdefault(seam.module, []).append(seam)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        try:
            for name in [name for name in self._pending if name in sys.modules]:
                self.patch(sys.modules[name])
        except SeamError as error:
            return str(error)
        return None

    def seams(self) -> list[Any]:
        from sglang_sm120.host.watch_seams import seams_in_force

        release = self.release
        return [] if release is None else [seam for seam in seams_in_force() if seam.exists_in(release)]

    def pending(self, name: str) -> bool:
        return name in self._pending or (self._stop is not None and name == _SERVER_MODULE)

    def patch(self, module: ModuleType) -> None:
        """Apply the seams of an imported module. All of them or, with an exception, none of any module."""
        if self._stop is not None:
            raise SystemExit(self._stop)
        for seam in self._pending.get(module.__name__, []):
            patcher = self._patchers[seam.name] = Patcher()
            try:
                seam.apply(module, patcher)
            except Exception as error:
                self.undo()
                raise SeamError(f"seam {seam.name!r} does not fit {module.__name__}: {error}") from error
        self._pending.pop(module.__name__, None)

    def undo(self) -> None:
        self._pending.clear()
        if _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        for patcher in reversed(list(self._patchers.values())):
            patcher.undo()
        self._patchers.clear()

    def status(self) -> list[SeamStatus]:
        from sglang_sm120.host.watch_seams import seams_in_force

        existing = {seam.name for seam in self.seams()}
        return [SeamStatus(s.name, s.module, *self._state(s, s.name in existing)) for s in seams_in_force()]

    def _state(self, seam: Any, exists: bool) -> tuple[State, str]:
        if self.release is None or (not self._patchers and not self._pending):
            return "off", self.reason_off
        if not exists:
            return "absent", f"SGLang {self.release} does not have this code"
        patcher = self._patchers.get(seam.name)
        if patcher is None:
            return "armed", f"{seam.module} is not imported"
        if patcher.in_place():
            return "live", ""
        return "broken", "another plugin replaced what was patched here"


class _PostImportFinder:
    """Patches a module right after its own code ran, before anybody else sees it."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self._searching or not _INSTALLER.pending(name):
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            # Replaced on the instance: the module keeps the loader class that inspect and runpy expect.
            spec.loader.exec_module = _then_patch(spec.loader.exec_module)  # type: ignore[method-assign, assignment]
        return spec


def _then_patch(execute: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_module(module: ModuleType) -> None:
        execute(module)
        try:
            _INSTALLER.patch(module)
        except SeamError as error:
            _INSTALLER._stay_off(str(error))

    return exec_module


_INSTALLER = _Installer()
_FINDER = _PostImportFinder()


def install() -> None:
    """Hook this process's SGLang; the second and every later call does nothing.

    Raises:
        ConfigError: a variable of the environment cannot be understood; every later call raises it again.
        SystemExit: the hooks do not fit and the server that starts depends on them. It is not an ordinary
            exception on purpose: SGLang's plugin loader swallows those.
    """
    _INSTALLER.install()


def verify() -> list[SeamStatus]:
    """Return the state of every seam in this process, in the order of the table."""
    return _INSTALLER.status()


def require_live() -> None:
    """Check that this process, which is about to load weights, has every seam in place.

    Raises:
        SeamError: names each seam that is not live. One that SGLang imports on demand may be armed.
    """
    seams = _INSTALLER.seams()
    for module in {seam.module for seam in seams if not seam.on_demand}:
        importlib.import_module(module)
    waiting = {seam.name for seam in seams if seam.on_demand}
    wrong = [s for s in verify() if not (s.state in ("live", "absent") or (s.state == "armed" and s.name in waiting))]
    if wrong:
        listing = "; ".join(f"{s.name} is {s.state} ({s.detail})" for s in wrong)
        raise SeamError(f"sglang-sm120 is not fully installed in this process: {listing}.")


def probe(root: Path, release: Version) -> dict[str, str]:
    """Compare the source below ``root`` with what the seams expect; return what differs, by seam."""
    from sglang_sm120.host.watch_seams import seams_in_force

    by_module: dict[str, list[Any]] = {}
    for seam in seams_in_force():
        if seam.exists_in(release):
            by_module.setdefault(seam.module, []).append(seam)
    problems: dict[str, str] = {}
    with without_collector():
        for name, seams in by_module.items():
            source = ModuleSource.load(root, name)
            for seam in seams:
                problem = f"no module {name}" if source is None else seam.check(source)
                if problem is not None:
                    problems[seam.name] = problem
    return problems
