"""Collects what ``doctor`` must know about compiled code: libraries, FlashInfer's cache, room for compiling."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sglang_sm120.diagnosis import jit_cache
from sglang_sm120.diagnosis.fatbin import Target, containers
from sglang_sm120.diagnosis.jit_cache import JitModule


@dataclass(frozen=True)
class Library:
    """A package's shared libraries with GPU code.

    Attributes:
        owner: the package.
        units: the targets of each compiled source file, in all of its libraries.
        problems: libraries that could not be read, and why.
    """

    owner: str
    units: tuple[frozenset[Target], ...]
    problems: tuple[str, ...] = ()

    def running(self, capability: tuple[int, int]) -> int:
        """Return how many of the compiled source files have code for a GPU."""
        return sum(any(target.runs_on(capability) for target in unit) for unit in self.units)

    @property
    def targets(self) -> list[str]:
        """Every target of any file, for a person."""
        return [str(target) for target in sorted(frozenset().union(*self.units))]


@dataclass(frozen=True)
class Compiled:
    """Compiled code on this machine, and the room for more. Sizes in bytes, 0 where they cannot be told."""

    libraries: tuple[Library, ...] = ()
    jit_modules: tuple[JitModule, ...] = ()
    disk_free: int = 0
    memory_available: int = 0
    jobs: int = 1


def collect(capability: tuple[int, int] | None, flashinfer: str | None) -> Compiled:
    """Look at the installed packages and at FlashInfer's cache. Writes nothing.

    Args:
        capability: of the GPU; some packages load another library for it.
        flashinfer: its release, ``None`` if it is not installed.
    """
    root = jit_cache.cache_root(os.environ)
    return Compiled(
        libraries=tuple(_libraries(capability)),
        jit_modules=jit_cache.modules(root, flashinfer) if flashinfer else (),
        disk_free=_disk_free(root),
        memory_available=_memory_available(),
        jobs=_jobs(),
    )


def read_library(owner: str, files: Iterator[Path]) -> Library | None:
    """Return what the files of a package have code for; ``None`` if none of them has GPU code or a problem."""
    units: list[frozenset[Target]] = []
    problems = []
    for file in files:
        try:
            units += containers(file)
        except (OSError, ValueError) as error:
            problems.append(f"{file.name}: {error}")
    return Library(owner, tuple(units), tuple(problems)) if units or problems else None


def library_of(package: str, capability: tuple[int, int] | None, pattern: str = "*.so") -> Library | None:
    """Return what an installed package has code for; ``None`` if it is missing or has no GPU code.

    Args:
        package: its import name.
        capability: of the GPU; some packages load another library for it.
        pattern: names of the files that count.
    """
    folder = _package(package)
    if folder is None:
        return None
    return read_library(package, (f for f in sorted(folder.rglob(pattern)) if _is_loaded(f, capability)))


def _libraries(capability: tuple[int, int] | None) -> Iterator[Library]:
    ours = Path(__file__).resolve().parents[1] / "prebuilt"
    found = [read_library("sglang_sm120", iter(sorted(ours.rglob("*.so"))))] if ours.is_dir() else []
    found += [library_of(package, capability) for package in ("sgl_kernel", "flashinfer", "flashinfer_jit_cache")]
    return (library for library in found if library is not None)


def _is_loaded(file: Path, capability: tuple[int, int] | None) -> bool:
    """sgl_kernel has a library for Hopper beside the one for every other card."""
    return file.parent.name != "sm90" or capability is None or capability == (9, 0)


def _package(name: str) -> Path | None:
    """Where a package lies, without importing it."""
    spec = find_spec(name)
    found = next(iter(spec.submodule_search_locations or ()), None) if spec is not None else None
    return Path(found) if found is not None else None


def _disk_free(folder: Path) -> int:
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(there).free


def _memory_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    return int(found) * 1024


def _jobs() -> int:
    """Compilers that ninja starts at once for FlashInfer."""
    named = os.environ.get("MAX_JOBS", "")
    return int(named) if named.isdigit() and int(named) > 0 else len(os.sched_getaffinity(0))
