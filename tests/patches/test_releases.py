"""The series of every supported release on the published wheel: it applies, compiles, does what it says, goes back."""

from __future__ import annotations

import base64
import csv
import os
import py_compile
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_sm120.upstream import operations
from sglang_sm120.upstream.catalog import Catalog
from sglang_sm120.upstream.target import sha256
from tests.patches.releases import NAMES, added_values, ask, copy_of, patched, published
from tests.patches.snapshot import snapshot
from tools.envs import RELEASES

pytestmark = pytest.mark.matrix


@pytest.fixture(params=list(RELEASES))
def release(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_the_table_of_published_files_is_the_wheel_s_own_record(release: str, real: Catalog) -> None:
    package = published(release).package
    (metadata,) = package.parent.glob(f"sglang-{release}.dist-info")
    record = {row[0]: row[1] for row in csv.reader((metadata / "RECORD").read_text().splitlines())}
    for path, digest in real.pristine[release].items():
        expected = base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()
        assert record[path.removeprefix("python/")] == f"sha256={expected}"


def test_it_applies_to_the_installed_package_and_goes_back(release: str, real: Catalog, tmp_path: Path) -> None:
    target = copy_of(published(release), real, tmp_path, tree=False)
    before = snapshot(target.package)
    change = operations.apply(target, real)
    assert change.release == release
    assert [p.name for p in change.series] == [p.name for p in real.series(release)]
    for file in change.state.files:
        place = target.locate(file.path)
        assert place is not None
        assert sha256(place) == file.after
        assert place.suffix != ".py" or py_compile.compile(str(place), doraise=True)
    operations.revert(target)
    assert snapshot(target.package) == before


def test_git_am_does_the_same(release: str, real: Catalog, tmp_path: Path) -> None:
    source = copy_of(published(release), real, tmp_path / "ours", tree=True)
    tree = tmp_path / "git"
    for path in real.pristine[release]:
        place = source.locate(path)
        assert place is not None
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(place, tree / path)
    change = operations.apply(source, real)

    def git(*words: str) -> str:
        # No configuration of this machine: it may sign commits, run hooks or convert the ends of lines.
        alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        names = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
        run = subprocess.run(
            ["git", *names, *words], cwd=tree, env={**os.environ, **alone}, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "published")
    git("am", *(str(real.root / patch.name) for patch in change.series))
    assert git("log", "--format=%s", "--reverse").splitlines()[1:] == [patch.subject for patch in change.series]
    for file in change.state.files:
        assert sha256(tree / file.path) == file.after


def test_the_patched_release_has_the_values_and_passes_the_patches_own_tests(
    release: str, real: Catalog, tmp_path: Path
) -> None:
    there = published(release)
    target, change = patched(there, real, tmp_path, tree=True)
    answer = ask(there.python, target, change, tmp_path / "witness", tests=True, SGLANG_SM120_DISABLE="1")
    assert not answer["plugin"]
    assert answer["tests"]["ok"], answer["tests"]["report"]
    assert answer["tests"]["run"] >= 2 * len(change.series)
    for value in added_values(change):
        assert answer["choices"].count(value) == 1
        assert answer["members"][value] == NAMES[value]
        assert f"'{value}'" in answer["help"]


def test_an_unpatched_copy_does_not_pass_for_a_patched_one(real: Catalog, tmp_path: Path) -> None:
    there = published("0.5.9")
    target = copy_of(there, real, tmp_path, tree=False)
    with pytest.raises(AssertionError, match="'hunk': None"):
        ask(there.python, target, operations.check(target, real), tmp_path / "witness", tests=False)
