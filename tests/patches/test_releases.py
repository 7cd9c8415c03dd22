"""The series of every supported release on the published wheel: it applies, compiles, does what it says, goes back."""

from __future__ import annotations

import base64
import csv
import py_compile
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


def test_git_applies_the_same(release: str, real: Catalog, tmp_path: Path) -> None:
    source = copy_of(published(release), real, tmp_path / "ours", tree=True)
    with_git = copy_of(published(release), real, tmp_path / "git", tree=True)
    change = operations.apply(source, real)
    for patch in change.series:
        subprocess.run(
            ["git", "apply", "--unsafe-paths", f"--directory={with_git.tree}", str(real.root / patch.name)],
            cwd=tmp_path,
            check=True,
        )
    for file in change.state.files:
        place = with_git.locate(file.path)
        assert place is not None
        assert sha256(place) == file.after


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
