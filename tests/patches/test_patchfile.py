"""Reading one patch: what is accepted, what is refused and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_sm120.errors import PatchError
from sglang_sm120.upstream.patchfile import FileChange, Hunk, Patch, read_patch
from tests.patches.conftest import HEADER, VALUES_PATCH, patch_text

BODY = VALUES_PATCH.partition("\n---\n")[2].removesuffix("-- \n1.0\n")


def write(folder: Path, text: str, name: str = "sglang/9.1/0001-values.patch") -> Patch:
    file = folder / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return read_patch(file, folder)


def test_header_and_changes_are_read(tmp_path: Path) -> None:
    folded = HEADER.replace("because.", "because\nof this.")
    patch = write(tmp_path, patch_text("Add b12x", BODY, folded))
    assert (patch.project, patch.releases, patch.number, patch.subject) == ("sglang", "9.1", 1, "Add b12x")
    assert patch.header["Why"] == "because of this."
    assert [(c.path.split("/")[-1], c.creates) for c in patch.changes] == [
        ("values.py", False),
        ("new.py", True),
        ("test_values.py", True),
    ]
    assert patch.changes[0].hunks == (Hunk(('    "cutlass",',), ('    "b12x",', '    "cutlass",')),)


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        (VALUES_PATCH, "sglang/9.1/values.patch", "NNNN-words"),
        (VALUES_PATCH.replace("\n---\n", "\n"), "sglang/9.1/0001-a.patch", "'---'"),
        (VALUES_PATCH.replace("Upstream: none.\n\n", ""), "sglang/9.1/0001-a.patch", "Upstream"),
        (VALUES_PATCH.replace("Checked: here.", "Checked: "), "sglang/9.1/0001-a.patch", "Checked"),
        (VALUES_PATCH.replace("Subject", "Topic"), "sglang/9.1/0001-a.patch", "subject"),
        (patch_text("Nothing", ""), "sglang/9.1/0001-a.patch", "changes nothing"),
        (VALUES_PATCH.replace("@@ -3,1 +3,2 @@", "@@ -3,2 +3,3 @@"), "sglang/9.1/0001-a.patch", "fewer lines"),
        (VALUES_PATCH.replace("@@ -3,1 +3,2 @@", "@@ three @@"), "sglang/9.1/0001-a.patch", "no hunk"),
    ],
)
def test_a_damaged_patch_is_refused_with_the_reason(tmp_path: Path, text: str, name: str, reason: str) -> None:
    with pytest.raises(PatchError, match=reason):
        write(tmp_path, text, name)


CHANGE = FileChange("a.py", False, (Hunk(("one",), ("one", "two")),))


@pytest.mark.parametrize("text", ["zero\n", "one\nzero\none\n"])
def test_a_hunk_must_fit_in_exactly_one_place(text: str) -> None:
    with pytest.raises(PatchError, match="not once"):
        CHANGE.apply(text)


@pytest.mark.parametrize("text", ["one", "one\n", "zero\none\nthree", "\none\n\n"])
def test_nothing_but_the_hunk_changes_not_even_the_last_line_end(text: str) -> None:
    assert CHANGE.apply(text) == text.replace("one", "one\ntwo")


def test_a_file_that_is_missing_or_there_already_is_refused() -> None:
    with pytest.raises(PatchError, match="missing"):
        CHANGE.apply(None)
    with pytest.raises(PatchError, match="there already"):
        FileChange("a.py", True, (Hunk((), ("new",)),)).apply("")
