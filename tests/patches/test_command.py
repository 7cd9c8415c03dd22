"""``sglang-sm120 patches`` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120.upstream.catalog import Catalog
from sglang_sm120.upstream.target import find_target
from tests.patches.conftest import make_package
from tests.patches.overlay import overlay
from tests.patches.snapshot import snapshot

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_sm120.cli.main", "patches", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "SGLANG_SM120_DISABLE": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def newest(real: Catalog, tmp_path: Path) -> Path:
    """A ``site-packages`` with the SGLang of this environment."""
    from sglang_sm120.host.source_probe import package_root

    package = package_root()
    assert package is not None
    return overlay(package, real.pristine["0.5.23"], tmp_path, tree=False).package.parent


def test_a_published_release_is_checked_patched_listed_and_reverted(newest: Path, real: Catalog) -> None:
    names = [patch.name for patch in real.series("0.5.23")]
    before = snapshot(newest)
    check = run("apply", "--check", "--target", newest)
    assert check.returncode == 0, check.stderr
    assert "would change" in check.stdout
    assert snapshot(newest) == before
    assert "published" in run("list", "--target", newest).stdout

    done = run("apply", "--target", newest)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == names
    assert "SGLang 0.5.23" in done.stdout.splitlines()[-1]
    listing = run("list", "--target", newest).stdout
    assert listing.count("applied") == len(names)
    assert "patched" in listing.splitlines()[-1]

    again = run("apply", "--target", newest)
    assert (again.returncode, "patched already" in again.stderr) == (2, True)

    back = run("revert", "--target", newest)
    assert back.returncode == 0, back.stderr
    assert snapshot(newest) == before


def test_show_prints_the_patch_as_it_is(real: Catalog) -> None:
    patch = real.patches[0]
    assert run("show", patch.name).stdout == patch.text


def test_what_cannot_be_done_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for words in (["apply", "--target", tmp_path], ["show", "nothing"], ["revert", "--target", tmp_path]):
        done = run(*words)
        assert done.returncode == 2
        assert done.stderr.startswith("Error: ")
        assert len(done.stderr.splitlines()) == 1


def test_an_unknown_sglang_is_named(tmp_path: Path) -> None:
    make_package(tmp_path)
    assert find_target(tmp_path).stated_release() == "9.1"
    done = run("apply", "--target", tmp_path)
    assert (done.returncode, "SGLang 9.1" in done.stderr) == (2, True)
    assert "SGLang 9.1" in run("list", "--target", tmp_path).stdout
