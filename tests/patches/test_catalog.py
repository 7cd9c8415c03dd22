"""The patches that come with the package: complete, without overlaps, described, and their register up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from sglang_sm120.errors import PatchError
from sglang_sm120.upstream.catalog import Catalog, combined, covers
from sglang_sm120.upstream.patchfile import HEADERS
from tests.patches.conftest import make_catalog
from tools import patch_register
from tools.envs import RELEASES
from tools.patch_register import register

#: The first release that each change is for; below it the change is not needed or not possible.
SINCE = {2: "0.5.12", 3: "0.5.12", 4: "0.5.16", 5: "0.5.20", 6: "0.5.23", 7: "0.5.23", 8: "0.5.23"}


def test_the_register_is_up_to_date(real: Catalog) -> None:
    assert (real.root / "README.md").read_text() == register(real), "run python tools/patch_register.py"


def test_the_register_s_command_starts_in_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(patch_register.__file__)), "--help"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "--pristine" in run.stdout


def test_every_supported_release_has_its_series(real: Catalog) -> None:
    assert list(real.pristine) == list(RELEASES)
    for release in RELEASES:
        expected = [1, *(number for number, first in SINCE.items() if covers(f"{first}-99", release))]
        assert [p.number for p in real.series(release)] == expected, release


def test_a_number_is_the_same_change_everywhere(real: Catalog) -> None:
    slugs = {(p.project, p.number, p.name.split("/")[2]) for p in real.patches}
    several = [key for key, count in Counter(key[:2] for key in slugs).items() if count > 1]
    assert several == [("sglang", 1)], "0001 is flashinfer_cutedsl in the releases that lack it, b12x and auto later"


def test_the_table_of_published_files_names_what_the_series_changes(real: Catalog) -> None:
    for release, files in real.pristine.items():
        changed = {path for path, c in combined(real.series(release)).items() if not c[0].creates}
        assert set(files) == changed
        assert all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in files.values())


def test_releases_that_look_the_same_have_the_same_series(real: Catalog) -> None:
    by_files: dict[str, set[str]] = {}
    for release, files in real.pristine.items():
        by_files.setdefault(str(sorted(files.items())), set()).add(str([p.name for p in real.series(release)]))
    assert all(len(series) == 1 for series in by_files.values())


def test_every_change_of_sglang_brings_a_test_in_upstream_s_place(real: Catalog) -> None:
    for patch in real.patches:
        created = [c.path for c in patch.changes if c.creates]
        tests = [path for path in created if path.startswith("test/registered/unit/")]
        assert len(tests) == (1 if patch.project == "sglang" else 0), patch.name
        if tests:
            assert "register_cpu_ci(" in patch.text


def test_every_header_says_what_upstream_thinks_and_claims_no_result_on_the_card(real: Catalog) -> None:
    for patch in real.patches:
        assert tuple(patch.header) == HEADERS
        assert re.search(r"[\w-]+/[\w-]+#\d+", patch.header["Upstream"]), patch.name
        assert re.search(r"\b(?:open|merged|closed)\b", patch.header["Upstream"]), patch.name
        assert re.search("othing of it has run on an SM12x GPU", patch.header["Checked"]), patch.name


def test_context_is_as_small_as_it_can_be(real: Catalog) -> None:
    for patch in real.patches:
        for change in patch.changes:
            for hunk in change.hunks:
                common = len(set(hunk.old) & set(hunk.new))
                assert common <= 5, (patch.name, hunk.old)


def test_a_part_of_a_name_is_enough_where_only_one_patch_has_it(real: Catalog) -> None:
    (only,) = (patch for patch in real.patches if "0005-" in patch.name)
    assert real.find("0005-") is only
    assert real.find(only.name) is only
    with pytest.raises(PatchError, match="only one of them"):
        real.find("0001-")


def test_an_unknown_name_is_refused(real: Catalog, tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="patches list"):
        real.find("sglang/0.5.9/0009-nothing.patch")
    assert make_catalog(tmp_path / "made-up").series("8.0") == ()
