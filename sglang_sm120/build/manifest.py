"""The note beside a compiled library: which bytes it has, what it was made from, where it can run.

Written once the library is complete and read before it is loaded. A library without one, or with other bytes than
its manifest says, does not count.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_sm120.build.spec import Target


@dataclass(frozen=True)
class Manifest:
    """Facts about one compiled library."""

    #: SHA-256 of the library's bytes.
    library: str
    #: ``spec.digest`` of the sources it was made from.
    sources: str
    #: Names of the targets it has machine code for.
    targets: tuple[str, ...]
    #: Version of the CUDA compiler and of the runtime linked into it.
    cuda: tuple[int, int]
    #: Release of apache-tvm-ffi whose headers it was compiled against.
    tvm_ffi: str
    #: The processor it runs on, as ``platform.machine()`` names it.
    machine: str

    def refusal(self, sources: str, capability: tuple[int, int]) -> str | None:
        """Return why the library is not the one for these sources, this processor and this GPU; None if it is."""
        if self.machine != platform.machine():
            return f"it is for {self.machine} processors and this one is {platform.machine()}"
        if not any(Target(name).runs_on(capability) for name in self.targets):
            return f"it has code for sm_{', sm_'.join(self.targets)} and none for {capability[0]}.{capability[1]}"
        if self.sources != sources:
            return "it was compiled from other sources than the ones installed beside it"
        return None


def path_of(library: Path) -> Path:
    """Where the manifest of a library lies."""
    return library.with_suffix(".json")


def describe(library: Path, sources: str, targets: Sequence[Target], cuda: tuple[int, int], tvm_ffi: str) -> Manifest:
    """Return the manifest of a library that was compiled on this machine a moment ago."""
    names = tuple(target.name for target in targets)
    return Manifest(_hash(library), sources, names, cuda, tvm_ffi, platform.machine())


def write(library: Path, manifest: Manifest) -> None:
    """Put the manifest beside its library."""
    path_of(library).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")


def read(library: Path) -> tuple[Manifest | None, str]:
    """Return the manifest of a library that is there and whole, else None and what is wrong with it."""
    try:
        fields = json.loads(path_of(library).read_text(encoding="utf-8"))
        major, minor = fields.pop("cuda")
        manifest = Manifest(**fields | {"cuda": (int(major), int(minor)), "targets": tuple(fields["targets"])})
        if _hash(library) != manifest.library:
            return None, "its bytes are not the ones that were compiled"
    except FileNotFoundError:
        return None, "it is not complete"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"it cannot be read ({type(error).__name__}: {error})"
    return manifest, ""


def _hash(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()
