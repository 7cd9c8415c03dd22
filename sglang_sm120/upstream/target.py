"""An SGLang on disk: where its files are, and which release they are.

Two layouts are known: the installed package (``site-packages/sglang``), and a source tree, where the package lies in
``python/sglang`` beside the tests. Patches name files as the source tree does.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from sglang_sm120.errors import PatchError, bad_value
from sglang_sm120.upstream.catalog import Catalog

_IN_TREE = "python/sglang/"


@dataclass(frozen=True)
class Target:
    """One SGLang.

    Attributes:
        package: its folder ``sglang``.
        tree: root of the source tree that the package is part of, ``None`` if it is installed.
    """

    package: Path
    tree: Path | None

    def locate(self, path: str) -> Path | None:
        """Where the file ``path`` of a patch is here; ``None`` if this layout has no place for it (the tests)."""
        if self.tree is not None:
            return self.tree / path
        return self.package / path.removeprefix(_IN_TREE) if path.startswith(_IN_TREE) else None

    def stated_release(self) -> str | None:
        """The release that the metadata beside the package, or its version file, states; ``None`` without either."""
        for folder in self.package.parent.glob("sglang-*.dist-info"):
            return folder.name.removeprefix("sglang-").removesuffix(".dist-info")
        for name in ("_version.py", "version.py"):
            file = self.package / name
            text = file.read_text(encoding="utf-8") if file.is_file() else ""
            if found := re.search(r"^__version__\b.*?=\s*['\"]([^'\"]+)", text, re.M):
                return found[1]
        return None


def find_target(folder: Path) -> Target:
    """The SGLang at ``folder``: its package, the ``site-packages`` that holds it, or the root of a source tree.

    Raises:
        PatchError: there is none.
    """
    for package in (folder / "python" / "sglang", folder, folder / "sglang"):
        if package.name == "sglang" and (package / "srt").is_dir():
            package = package.absolute()
            in_tree = package.parent.name == "python" and (package.parent / "pyproject.toml").is_file()
            return Target(package, package.parent.parent if in_tree else None)
    raise PatchError(
        bad_value("--target", str(folder), "name site-packages, the folder sglang in it, or SGLang's source tree")
    )


def sha256(path: Path) -> str | None:
    """SHA-256 of a file in hexadecimal, ``None`` if there is no such file."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def differing(target: Target, files: dict[str, str]) -> list[str]:
    """Those of ``files``, path to SHA-256, that are missing or different in ``target``."""
    located = {path: target.locate(path) for path in files}
    return [path for path, place in located.items() if place is not None and sha256(place) != files[path]]


def identify(target: Target, catalog: Catalog) -> str:
    """The release whose published files these are.

    Files decide, not what the metadata states: a build from an unreleased commit states the release it precedes.

    Raises:
        PatchError: no known release; the message names the files that were changed, or the releases that are known.
    """
    unlike = {release: differing(target, dict(files)) for release, files in catalog.pristine.items()}
    matching = [release for release, files in unlike.items() if not files]
    stated = target.stated_release()
    if matching:
        return stated if stated in matching else matching[-1]
    if stated in unlike:
        names = ", ".join(unlike[stated])
        raise PatchError(
            f"SGLang {stated} in {target.package} is not as published: {names} changed. Nothing was touched; "
            "reinstall it, or merge the patches by hand (`sglang-sm120 patches show`)."
        )
    raise PatchError(
        f"SGLang {stated or 'of an unknown release'} in {target.package} has no patches; there are some for "
        f"{', '.join(catalog.pristine)}."
    )
