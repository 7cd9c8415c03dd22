"""Applying and reverting a series, on a made-up project: what is changed, what is refused, that it all goes back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sglang_sm120.errors import PatchError
from sglang_sm120.upstream import operations, transaction
from sglang_sm120.upstream.catalog import Catalog
from sglang_sm120.upstream.target import Target, find_target
from tests.patches.conftest import FILES, VALUES_PATCH, make_catalog
from tests.patches.snapshot import snapshot


def read(target: Target, path: str) -> str:
    return (target.package / path).read_text()


def test_the_series_changes_and_creates_files_and_leaves_the_others(installed: Target, catalog: Catalog) -> None:
    change = operations.apply(installed, catalog)
    assert change.release == "9.1"
    assert read(installed, "srt/values.py") == 'VALUES = [\n    "auto",\n    "two",\n    "b12x",\n    "cutlass",\n]\n'
    assert read(installed, "srt/engine.py").endswith("return 2\n")
    assert read(installed, "srt/added/deep/new.py") == "NEW = True\n"
    assert read(installed, "srt/other.py") == FILES["srt/other.py"]
    assert operations.inspect(installed, catalog).condition == "patched"


def test_an_installed_package_gets_no_tests_and_a_source_tree_does(
    installed: Target, tree: Target, catalog: Catalog
) -> None:
    operations.apply(installed, catalog)
    operations.apply(tree, catalog)
    assert not list(installed.package.parent.rglob("test_values.py"))
    assert tree.tree is not None
    assert (tree.tree / "test/unit/test_values.py").read_text() == "TEST = True\n"
    assert (tree.package / "srt/engine.py").read_text() == read(installed, "srt/engine.py")


@pytest.mark.parametrize("layout", ["installed", "tree"])
def test_revert_leaves_everything_as_it_was(layout: str, request: pytest.FixtureRequest, catalog: Catalog) -> None:
    target: Target = request.getfixturevalue(layout)
    root = target.tree or target.package.parent
    (target.package / "srt/engine.py").chmod(0o640)
    before = snapshot(root)
    operations.apply(target, catalog)
    assert snapshot(root) != before
    assert operations.revert(target) is not None
    assert snapshot(root) == before
    assert operations.revert(target) is None, "there is nothing left to revert"


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "5",
        "[1]",
        "{}",
        "{",
        '{"files": [5], "folders": []}',
        '{"phase": "applied", "release": "9.1", "patches": {}, "folders": [], '
        '"files": [{"path": "test/unit/test_values.py", "before": null, "after": ""}]}',
        '{"phase": "applied", "release": "9.1", "patches": {}, "folders": [], '
        '"files": [{"path": 5, "before": null, "after": ""}]}',
    ],
)
def test_a_damaged_state_is_refused_by_name(damage: str, installed: Target, catalog: Catalog) -> None:
    operations.apply(installed, catalog)
    (installed.package / transaction.FOLDER / "state.json").write_text(damage)
    with pytest.raises(PatchError, match=r"state\.json cannot be read"):
        operations.revert(installed)
    assert operations.inspect(installed, catalog).condition == "changed"


def test_check_says_the_same_and_changes_nothing(installed: Target, catalog: Catalog) -> None:
    before = snapshot(installed.package)
    expected = operations.check(installed, catalog)
    assert snapshot(installed.package) == before
    assert operations.apply(installed, catalog).contents == expected.contents


def test_a_hard_linked_file_of_a_cache_is_never_written(installed: Target, catalog: Catalog, tmp_path: Path) -> None:
    cached = tmp_path / "cache.py"
    os.link(installed.package / "srt/engine.py", cached)
    operations.apply(installed, catalog)
    assert cached.read_text() == FILES["srt/engine.py"]
    operations.revert(installed)
    assert cached.read_text() == FILES["srt/engine.py"]


def test_a_symbolic_link_into_a_cache_is_replaced_and_comes_back(
    installed: Target, catalog: Catalog, tmp_path: Path
) -> None:
    place, cached = installed.package / "srt/engine.py", tmp_path / "cache.py"
    shutil.move(place, cached)
    place.symlink_to(cached)
    operations.apply(installed, catalog)
    assert not place.is_symlink()
    assert cached.read_text() == FILES["srt/engine.py"]
    operations.revert(installed)
    assert place.readlink() == cached


def test_a_patched_file_keeps_its_mode(installed: Target, catalog: Catalog) -> None:
    (installed.package / "srt/engine.py").chmod(0o604)
    operations.apply(installed, catalog)
    assert (installed.package / "srt/engine.py").stat().st_mode & 0o777 == 0o604


def test_stale_bytecode_goes_and_other_bytecode_stays(installed: Target, catalog: Catalog) -> None:
    cache = installed.package / "srt/__pycache__"

    def compiled() -> set[str]:
        cache.mkdir(exist_ok=True)
        for name in ("engine", "other"):
            (cache / f"{name}.cpython-311.pyc").write_bytes(b"old")
        return {path.name for path in cache.iterdir()}

    assert len(compiled()) == 2
    operations.apply(installed, catalog)
    assert [path.name for path in cache.iterdir()] == ["other.cpython-311.pyc"]
    compiled()
    operations.revert(installed)
    assert [path.name for path in cache.iterdir()] == ["other.cpython-311.pyc"]


def test_a_locally_changed_file_is_refused_by_name(installed: Target, catalog: Catalog) -> None:
    file = installed.package / "srt/values.py"
    file.write_text(file.read_text() + "# mine\n")
    before = snapshot(installed.package)
    with pytest.raises(PatchError, match=r"9\.1 .*srt/values\.py changed"):
        operations.apply(installed, catalog)
    assert snapshot(installed.package) == before
    assert operations.inspect(installed, catalog).condition == "changed"


def test_an_unknown_release_is_refused(installed: Target, catalog: Catalog) -> None:
    (installed.package / "_version.py").write_text("__version__ = '8.0'\n")
    (installed.package / "srt/engine.py").write_text("other = 1\n")
    with pytest.raises(PatchError, match=r"8\.0 .*no patches.*9\.1, 9\.2"):
        operations.apply(installed, catalog)


def test_files_decide_which_release_it_is_not_what_it_states(
    installed: Target, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    assert (operations.check(installed, catalog).release, caplog.messages) == ("9.1", [])
    (installed.package / "_version.py").write_text("__version__ = '9.3'\n")
    assert operations.check(installed, catalog).release == "9.1"
    (warning,) = caplog.messages
    assert "states that it is SGLang 9.3" in warning
    assert "are those of 9.1" in warning


def test_a_second_apply_is_refused_and_changes_nothing(installed: Target, catalog: Catalog) -> None:
    operations.apply(installed, catalog)
    before = snapshot(installed.package)
    with pytest.raises(PatchError, match="patched already"):
        operations.apply(installed, catalog)
    assert snapshot(installed.package) == before


def test_revert_refuses_by_name_what_was_changed_after_the_patches(installed: Target, catalog: Catalog) -> None:
    operations.apply(installed, catalog)
    (installed.package / "srt/engine.py").write_text("mine = 1\n")
    before = snapshot(installed.package)
    with pytest.raises(PatchError, match=r"srt/engine\.py .*changed after"):
        operations.revert(installed)
    assert snapshot(installed.package) == before
    status = operations.inspect(installed, catalog)
    assert (status.condition, "srt/engine.py" in status.detail) == ("changed", True)


def install_anew(target: Target, **changed: str) -> None:
    """What an installer does: it replaces its own files and leaves those it does not know."""
    for path, text in FILES.items():
        (target.package / path).write_text(changed.get(Path(path).stem, text))


def test_an_installation_over_the_patches_can_be_patched_again(installed: Target, catalog: Catalog) -> None:
    before = snapshot(installed.package / "srt").keys()
    operations.apply(installed, catalog)
    install_anew(installed)
    assert operations.inspect(installed, catalog).condition == "published"
    assert len(operations.check(installed, catalog).contents) == 3
    operations.apply(installed, catalog)
    assert operations.inspect(installed, catalog).condition == "patched"
    operations.revert(installed)
    assert snapshot(installed.package / "srt").keys() == before


def test_what_patches_created_is_removed_from_a_new_installation(installed: Target, catalog: Catalog) -> None:
    names = snapshot(installed.package).keys()
    operations.apply(installed, catalog)
    install_anew(installed, engine="a_newer_release = True\n", values="here_too = True\n")
    operations.revert(installed)
    assert snapshot(installed.package).keys() == names
    assert read(installed, "srt/engine.py") == "a_newer_release = True\n"


def test_code_that_would_not_compile_is_refused(installed: Target, tmp_path: Path) -> None:
    broken = make_catalog(tmp_path / "broken", {"0001-values.patch": VALUES_PATCH.replace('"b12x",', "b12x'")})
    before = snapshot(installed.package)
    with pytest.raises(PatchError, match=r"values\.py would not compile"):
        operations.apply(installed, broken)
    assert snapshot(installed.package) == before


def test_a_patch_that_does_not_fit_is_refused(installed: Target, tmp_path: Path) -> None:
    body = VALUES_PATCH.replace('     "cutlass",', '     "marlin",')
    with pytest.raises(PatchError, match="0 times, not once"):
        operations.apply(installed, make_catalog(tmp_path / "other", {"0001-values.patch": body}))


@pytest.mark.parametrize("inside", [".", "sglang"])
def test_a_target_can_be_named_by_its_folder_or_by_what_holds_it(installed: Target, inside: str) -> None:
    assert find_target(installed.package.parent / inside).package == installed.package


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="--target"):
        find_target(tmp_path)


def test_the_record_says_what_was_done(installed: Target, catalog: Catalog) -> None:
    change = operations.apply(installed, catalog)
    state = transaction.read_state(installed)
    assert state is not None
    assert (state.phase, state.release, list(state.patches)) == ("applied", "9.1", [p.name for p in change.series])
    assert {f.path for f in state.files if f.before is None} == {"python/sglang/srt/added/deep/new.py"}
