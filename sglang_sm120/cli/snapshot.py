"""What ``doctor`` looks at, collected once. Every probe survives a broken installation and says what broke."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import sglang_sm120
from sglang_sm120 import env
from sglang_sm120.backends.record import HostFacts
from sglang_sm120.device import collect_facts
from sglang_sm120.diagnosis import compiled as compiled_code
from sglang_sm120.diagnosis import packages, two_ranks
from sglang_sm120.diagnosis.compiled import Compiled
from sglang_sm120.diagnosis.packages import Packages
from sglang_sm120.dispatch import Decision, Request, resolve, sglang_default
from sglang_sm120.errors import Sm120Error

T = TypeVar("T")


@dataclass(frozen=True)
class Copy:
    """One copy of this package that an import could find."""

    folder: Path
    version: str


@dataclass(frozen=True)
class Setting:
    """Value of one environment variable, and where it comes from."""

    name: str
    value: str
    origin: str
    problem: str = ""


@dataclass(frozen=True)
class Seams:
    """What a static look at the installed SGLang says about the hooks.

    ``differing`` maps a hook to what is different. ``note`` says why nobody could look.
    """

    names: tuple[str, ...] = ()
    differing: Mapping[str, str] = field(default_factory=dict)
    tested: tuple[str, str] | None = None
    note: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The installation as ``doctor`` found it."""

    facts: HostFacts
    settings: tuple[Setting, ...]
    misspelt: tuple[str, ...] = ()
    decision: Decision | None = None
    refusal: str = ""
    copies: tuple[Copy, ...] = ()
    seams: Seams = Seams()
    pth_active: bool | None = None
    pth_note: str = ""
    entry_point: bool = False
    plugins_whitelist: str = ""
    flashinfer_pin: str = ""
    site_packages: Path = Path()
    site_packages_writable: bool = True
    cache: str = ""
    cache_problem: str = ""
    compiled: Compiled = Compiled()
    compiled_note: str = ""
    packages: Packages = Packages()
    packages_note: str = ""
    ranks_problem: str = ""
    python: str = platform.python_version()


def take_snapshot() -> Snapshot:
    """Look at this interpreter's installation. Never imports SGLang, never writes a file."""
    facts = collect_facts()
    decision, refusal = _decide(facts)
    pth_active, pth_note = _pth()
    cache, cache_problem = _cache()
    flashinfer = facts.versions.get("flashinfer")
    compiled, compiled_note = _attempt(lambda: compiled_code.collect(facts.capability, flashinfer))
    found_packages, packages_note = _attempt(lambda: packages.collect(os.environ))
    site_packages = Path(sysconfig.get_path("purelib"))
    return Snapshot(
        facts=facts,
        settings=_settings(),
        misspelt=tuple(env.unknown_variables(os.environ)),
        decision=decision,
        refusal=refusal,
        copies=_copies(),
        seams=_seams(),
        pth_active=pth_active,
        pth_note=pth_note,
        entry_point=_has_entry_point(),
        plugins_whitelist=os.environ.get("SGLANG_PLUGINS", ""),
        flashinfer_pin=_flashinfer_pin(),
        site_packages=site_packages,
        site_packages_writable=os.access(site_packages, os.W_OK),
        cache=cache,
        cache_problem=cache_problem,
        compiled=compiled or Compiled(),
        compiled_note=compiled_note,
        packages=found_packages or Packages(),
        packages_note=packages_note,
        ranks_problem=_ranks_problem(facts),
    )


def _decide(facts: HostFacts) -> tuple[Decision | None, str]:
    """Resolve what a server that is started here without the flag would be given."""
    try:
        request = Request(
            server_value=sglang_default(facts),
            env_value=env.fp4_gemm_backend(),
            deprecated_value=env.deprecated_backend(),
            take_auto=env.take_auto(),
            allow_unsafe=env.allow_unsafe(),
        )
        return resolve(request, facts), ""
    except Sm120Error as error:
        return None, str(error)


def _settings() -> tuple[Setting, ...]:
    found = []
    for variable, value, problem in env.readings():
        if isinstance(value, bool):
            value = "1" if value else "0"
        shown = variable.default if value is None else str(value)
        given = bool(os.environ.get(variable.name, "").strip())
        found.append(Setting(variable.name, shown, "environment" if given else "default", problem))
    return tuple(found)


def _copies() -> tuple[Copy, ...]:
    """Find every folder on the path that ``import sglang_sm120`` could take, in order."""
    found: dict[Path, Copy] = {}
    for entry in [str(Path(sglang_sm120.__file__).parents[1]), *sys.path]:
        folder = Path(entry or ".").resolve() / "sglang_sm120"
        init = folder / "__init__.py"
        if folder not in found and os.path.isfile(init):
            text, _ = _attempt(partial(init.read_text, encoding="utf-8"))
            match = re.search(r'^__version__ = "([^"]+)"', text or "", re.MULTILINE)
            found[folder] = Copy(folder, match.group(1) if match else "unknown")
    return tuple(found.values())


def _seams() -> Seams:
    def look() -> Seams:
        from sglang_sm120.host import installation, installer
        from sglang_sm120.host.seams import FIRST_SUPPORTED, LAST_TESTED, SEAMS
        from sglang_sm120.host.source_probe import package_root

        tested = (str(FIRST_SUPPORTED), str(LAST_TESTED))
        root = package_root()
        release = installation.sglang_version(root) if root is not None else None
        if root is None or release is None:
            return Seams(tested=tested, note="no installed SGLang was found to look at")
        names = tuple(seam.name for seam in SEAMS if seam.exists_in(release))
        return Seams(names, installer.probe(root, release), tested)

    answer, problem = _attempt(look)
    return answer or Seams(note=f"the hooks could not be examined ({problem})")


def _pth() -> tuple[bool | None, str]:
    def look() -> bool:
        from sglang_sm120 import _boot

        return _boot.is_active()

    return _attempt(look)


def _has_entry_point() -> bool:
    def look() -> bool:
        return any(e.value.startswith("sglang_sm120.") for e in metadata.entry_points(group="sglang.srt.plugins"))

    return bool(_attempt(look)[0])


def _flashinfer_pin() -> str:
    """Return the FlashInfer version that the installed SGLang asks for, empty if it cannot be told."""
    requirements, _ = _attempt(lambda: metadata.requires("sglang"))
    for text in requirements or []:
        match = re.match(r"flashinfer[-_]python(?:\[[^\]]*\])?\s*==\s*([\w.]+)", text)
        if match:
            return match.group(1)
    return ""


def _cache() -> tuple[str, str]:
    """Return the cache folder and what is wrong with it. One that does not exist yet is only looked at."""
    try:
        path = env.cache_path()
    except Sm120Error as error:
        return "", str(error)
    try:
        os.stat(path)
        env.cache_dir()
        # A read-only disk tells itself only when something is written.
        return str(path), "" if os.access(path, os.W_OK) else f"the cache folder {path} is read-only"
    except Sm120Error as error:
        return str(path), str(error)
    except FileNotFoundError:
        parent = next(parent for parent in path.parents if os.path.exists(parent))
        if os.access(parent, os.W_OK):
            return str(path), ""
        return str(path), f"the cache folder {path} cannot be created: {parent} is read-only"
    except OSError as error:
        return str(path), f"the cache folder {path} cannot be used: {error.strerror or error}"


def _ranks_problem(facts: HostFacts) -> str:
    """Let two GPUs talk where torch may use two; empty if they can, or nobody could try."""
    if "torch" in facts.problems or "torch" not in facts.versions:
        return ""
    gpus, _ = _attempt(_gpus_of_torch)
    return two_ranks.exchange("nccl") if gpus is not None and gpus >= 2 else ""


def _gpus_of_torch() -> int:
    """How many GPUs torch may use, not how many there are: its build may be for the CPU, and others may be hidden."""
    torch = importlib.import_module("torch")
    return int(torch.cuda.device_count())


def _attempt(look: Callable[[], T]) -> tuple[T | None, str]:
    """Run a probe that may meet code of a broken or half-removed installation."""
    try:
        return look(), ""
    except Exception as error:  # noqa: BLE001 - doctor reports what is broken, whatever it raises
        return None, f"{type(error).__name__}: {error}"
