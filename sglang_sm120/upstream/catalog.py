"""The patches that come with this package: which releases they are for, and how those releases look unpatched.

A folder below ``patches/sglang/`` is named after one release or after the first and the last of a range; its patches
are for every *known* release in it. ``patches/pristine.json`` knows the releases: for each, the SHA-256 of every file
that its series changes, as published. Folders of other projects are named after the commit they were made for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import Version

from sglang_sm120.errors import PatchError, bad_value
from sglang_sm120.upstream.patchfile import FileChange, Patch, read_patch

#: The one project whose patches can be applied here; the others are for people who build from source.
APPLICABLE = "sglang"


@dataclass(frozen=True)
class Catalog:
    """Everything below one folder ``patches``.

    Attributes:
        root: the folder.
        pristine: for each known release of SGLang the published files, path to SHA-256.
    """

    root: Path
    pristine: Mapping[str, Mapping[str, str]]

    @cached_property
    def patches(self) -> tuple[Patch, ...]:
        """All patches, by project, number and release."""
        found = [read_patch(path, self.root) for path in self.root.glob("*/*/*.patch")]
        first = {p.name: Version(span(p.releases)[0]) if p.project == APPLICABLE else Version("0") for p in found}
        return tuple(sorted(found, key=lambda p: (p.project != APPLICABLE, p.number, first[p.name])))

    def series(self, release: str) -> tuple[Patch, ...]:
        """Patches for this release of SGLang, in the order in which they apply; empty for an unknown one."""
        if release not in self.pristine:
            return ()
        return tuple(p for p in self.patches if p.project == APPLICABLE and covers(p.releases, release))

    def releases_of(self, patch: Patch) -> list[str]:
        """Known releases that the patch is for, oldest first; for another project the commit it was made for."""
        if patch.project != APPLICABLE:
            return [f"commit {patch.releases} of sgl-project/sglang"]
        return [release for release in self.pristine if covers(patch.releases, release)]

    def find(self, name: str) -> Patch:
        """The patch of this name, or the only one with this text in its name.

        Raises:
            PatchError: there is none, or more than one; the message says how to list them.
        """
        found = [patch for patch in self.patches if patch.name == name] or [p for p in self.patches if name in p.name]
        if len(found) == 1:
            return found[0]
        remedy = "take a name that `sglang-sm120 patches list` shows, or a part that only one of them has"
        raise PatchError(bad_value("patch", name, remedy))


def load_catalog(root: Path | None = None) -> Catalog:
    """Read the catalogue below ``root``, by default the one that came with the package.

    Raises:
        PatchError: it is not there; the installation is damaged.
    """
    folder = root or _folder()
    table = json.loads((folder / "pristine.json").read_text(encoding="utf-8"))
    return Catalog(folder, table)


def span(releases: str) -> tuple[str, str]:
    """First and last release of a folder's name."""
    first, _, last = releases.partition("-")
    return first, last or first


def covers(releases: str, release: str) -> bool:
    """Whether ``release`` lies in the range that the folder's name gives."""
    first, last = span(releases)
    return Version(first) <= Version(release) <= Version(last)


def combined(series: Iterable[Patch]) -> dict[str, list[FileChange]]:
    """For each file what the series does to it, in order."""
    changes: dict[str, list[FileChange]] = {}
    for patch in series:
        for change in patch.changes:
            changes.setdefault(change.path, []).append(change)
    return changes


def _folder() -> Path:
    # Inside the installed package, or beside it in a checkout.
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "patches", package.parent / "patches"):
        if (folder / "pristine.json").is_file():
            return folder
    raise PatchError(f"The patches are missing in {package / 'patches'}: install sglang-sm120 again.")
