"""Published SGLang releases on this machine, patched copies of them, and what an interpreter finds in such a copy."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sglang_sm120.upstream import operations
from sglang_sm120.upstream.catalog import Catalog, combined
from sglang_sm120.upstream.operations import Change
from sglang_sm120.upstream.patchfile import Hunk
from sglang_sm120.upstream.target import Target
from tests.matrix.conftest import ROOT, interpreter_of
from tests.patches import evidence
from tests.patches.overlay import overlay

SCRIPT = Path(__file__).with_name("patched.py")
#: What mm_fp4 calls the values that the patches add.
NAMES = {"flashinfer_cutedsl": "cute-dsl", "flashinfer_auto": "auto", "flashinfer_b12x": "b12x"}


@dataclass(frozen=True)
class Release:
    """One release: the interpreter that has it, and its package as the wheel brought it."""

    name: str
    python: str
    package: Path


@cache
def published(name: str) -> Release:
    """The release ``name``, in an environment that is made if it is missing."""
    python = interpreter_of(name)
    where = "import importlib.util as u; print(u.find_spec('sglang').submodule_search_locations[0])"
    run = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    return Release(name, python, Path(run.stdout.splitlines()[-1]))


def copy_of(release: Release, catalog: Catalog, folder: Path, *, tree: bool) -> Target:
    """A copy in which exactly the files of the release's series are real."""
    touched = [path for path in combined(catalog.series(release.name)) if path.startswith("python/")]
    return overlay(release.package, touched, folder, tree=tree)


def added_values(change: Change) -> list[str]:
    """The values of ``--fp4-gemm-backend`` that a release's series of patches adds."""
    return ["flashinfer_cutedsl"] if len(change.series) == 1 else ["flashinfer_auto", "flashinfer_b12x"]


def added_lines(hunk: Hunk) -> list[str]:
    """The new lines of a hunk without its context, which a later patch may separate from them."""
    old, new = list(hunk.old), list(hunk.new)
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    while old and new and old[0] == new[0]:
        old.pop(0)
        new.pop(0)
    return new


def hunks_of(change: Change) -> list[tuple[str, list[str]]]:
    """Module and added lines of every hunk in a module of the package."""
    return [
        (
            c.path.removeprefix("python/").removesuffix(".py").removesuffix("/__init__").replace("/", "."),
            added_lines(hunk),
        )
        for patch in change.series
        for c in patch.changes
        if c.path.startswith("python/") and c.path.endswith(".py")
        for hunk in c.hunks
    ]


def witnessing(change: Change, folder: Path, package: str = "sglang") -> dict[str, str]:
    """Environment in which ``evidence.found`` looks for the hunks in modules of ``package``."""
    folder.mkdir(exist_ok=True)
    job = folder / "hunks.json"
    job.write_text(json.dumps([hunk for hunk in hunks_of(change) if hunk[0].startswith(package)]))
    return {evidence.VARIABLE: str(job)}


def check(found: list[dict[str, Any]], target: Target, change: Change, package: str = "sglang") -> None:
    """Every module of ``package`` names its file in the patched copy and has each hunk in it."""
    hunks = [hunk for hunk in hunks_of(change) if hunk[0].startswith(package)]
    assert len(found) == len(hunks) > 0
    for (module, lines), seen in zip(hunks, found, strict=True):
        assert seen["module"] == module
        assert Path(seen["file"]).is_relative_to(target.package), seen
        assert seen["hunk"] == hashlib.sha256("\n".join(lines).encode()).hexdigest(), seen


def ask(python: str, target: Target, change: Change, folder: Path, *, tests: bool, **environ: str) -> dict[str, Any]:
    """Run ``patched.py`` with the patched copy first on the path, check its evidence and return its answer."""
    files = [str(target.locate(f.path)) for f in change.state.files if f.path.startswith("test/")] if tests else []
    run = subprocess.run(
        [python, str(SCRIPT)],
        input=json.dumps([file for file in files if Path(file).name.startswith("test_")]),
        env={
            **os.environ,
            "PYTHONPATH": f"{target.package.parent}:{ROOT}",
            "SGLANG_USE_CPU_ENGINE": "1",
            **witnessing(change, folder),
            **environ,
        },
        cwd=target.package.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-6000:]
    answer: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    check(answer["evidence"], target, change)
    return answer


def patched(release: Release, catalog: Catalog, folder: Path, *, tree: bool) -> tuple[Target, Change]:
    """A copy with its series applied."""
    target = copy_of(release, catalog, folder, tree=tree)
    return target, operations.apply(target, catalog)
