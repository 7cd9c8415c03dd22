"""Interpreters with a chosen set of packages: the command line on installations that are broken in a chosen way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def _needed() -> Iterator[Path]:
    """Files and folders of the distributions that this package depends on, whatever those depend on included."""
    wanted, seen = ["typer", "rich", "packaging"], set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        distribution = metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or ()} - {".."}
        yield from (Path(str(distribution.locate_file(top))) for top in tops if not top.endswith(".dist-info"))
        for requirement in map(Requirement, distribution.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)


@dataclass
class Bare:
    """A folder that is all that the interpreter can import besides the standard library and this package."""

    folder: Path
    path: list[Path] = field(default_factory=lambda: [ROOT])
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for place in _needed():
            if place.name != "__pycache__":
                (self.folder / place.name).symlink_to(place)

    def add(self, name: str, distribution: str, version: str, code: str = "", requires: str = "") -> None:
        """Put a package there whose ``__init__`` runs ``code``."""
        package = self.folder / name
        package.mkdir()
        (package / "__init__.py").write_text(code, encoding="utf-8")
        self.add_metadata(distribution, version, requires)

    def add_metadata(self, distribution: str, version: str, requires: str = "") -> None:
        """Put the metadata of an installed distribution there."""
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        text = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        (info / "METADATA").write_text(text + (f"Requires-Dist: {requires}\n" if requires else ""), encoding="utf-8")

    def add_real_sglang(self, version: str | None = None, *, file: str = "", old: str = "", new: str = "") -> None:
        """Link the installed SGLang, under another version or with one text replaced in one file."""
        spec = find_spec("sglang")
        assert spec is not None
        assert spec.submodule_search_locations
        root = Path(spec.submodule_search_locations[0])
        shutil.copytree(root, self.folder / "sglang", copy_function=os.symlink, ignore=lambda *_: ["__pycache__"])
        if file:
            text = (root / file).read_text(encoding="utf-8")
            assert old in text
            (self.folder / "sglang" / file).unlink()
            (self.folder / "sglang" / file).write_text(text.replace(old, new), encoding="utf-8")
        self.add_metadata("sglang", version or metadata.version("sglang"))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``sglang-sm120`` there."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "PYTHON", "XDG"))}
        environment = {
            **kept,
            "PYTHONPATH": os.pathsep.join(map(str, [*self.path, self.folder])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.folder.parent),
            **self.environment,
        }
        # -S: the environment's own site-packages stay away, and with them every package that is not named.
        command = [sys.executable, "-S", "-m", "sglang_sm120.cli.main", *arguments]
        return subprocess.run(
            command, env=environment, cwd=self.folder.parent, capture_output=True, text=True, check=False
        )

    def doctor(self) -> tuple[dict[str, Any], int]:
        """Run ``doctor --json``; return its report and exit code."""
        done = self.run("doctor", "--json")
        assert "Traceback" not in done.stderr, done.stderr
        return json.loads(done.stdout), done.returncode


def codes(report: dict[str, Any], severity: str | None = None) -> set[str]:
    """Return the codes of the findings."""
    return {f["code"] for f in report["findings"] if severity in (None, f["severity"])}
