"""One git-format patch: its header, and what it changes.

A hunk is found by its text, not by its line number: the old lines, context included, must stand in the file exactly
once. So one patch serves every release whose touched lines are the same, with as little context as that needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_sm120.errors import PatchError, bad_value

#: The paragraphs that the message of every patch must have, in this order.
HEADERS = ("Why", "Checked", "Upstream", "Remove-when")

_NAME = re.compile(r"(\d{4})-([a-z0-9-]+)\.patch")
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_SIGNATURE = "-- "


@dataclass(frozen=True)
class Hunk:
    """Lines, without their ends, that replace other lines."""

    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file.

    Attributes:
        path: relative to the root of the project's repository, with ``/``.
        creates: the file does not exist before.
        hunks: in the order of the file.
    """

    path: str
    creates: bool
    hunks: tuple[Hunk, ...]

    def apply(self, text: str | None) -> str:
        """Return the file's new text; ``text`` is the old one, ``None`` if there is no such file.

        Raises:
            PatchError: the file is missing or there already, or a hunk does not fit in exactly one place.
        """
        if self.creates != (text is None):
            raise PatchError(f"{self.path} {'is there already' if self.creates else 'is missing'}.")
        lines = [] if text is None else text.split("\n")
        for hunk in self.hunks:
            start = self._place(lines, hunk.old)
            lines[start : start + len(hunk.old)] = hunk.new
        return "\n".join(lines) + ("\n" if self.creates else "")

    def _place(self, lines: list[str], old: tuple[str, ...]) -> int:
        if not old:
            return 0
        found = [i for i in range(len(lines) - len(old) + 1) if tuple(lines[i : i + len(old)]) == old]
        if len(found) != 1:
            raise PatchError(f"{self.path} has the lines that start with {old[0]!r} {len(found)} times, not once.")
        return found[0]


@dataclass(frozen=True)
class Patch:
    """One file below ``patches/<project>/<releases>/``.

    Attributes:
        name: path below ``patches/``, which is how users name it.
        project: ``sglang`` or ``sgl-kernel``.
        releases: name of the folder, one release or ``first-last``.
        number: position in the series; the same change has the same number in every release.
        header: the paragraphs named in :data:`HEADERS`.
        text: the whole file.
    """

    name: str
    project: str
    releases: str
    number: int
    subject: str
    header: Mapping[str, str]
    changes: tuple[FileChange, ...]
    text: str


def read_patch(path: Path, root: Path) -> Patch:
    """Parse the patch at ``path`` below ``root``.

    Raises:
        PatchError: it is not a git-format patch with a full header; the message says what is wrong.
    """
    name = path.relative_to(root).as_posix()
    text = path.read_text(encoding="utf-8")
    try:
        project, releases, file = name.split("/")
        number = _NAME.fullmatch(file)
        if number is None:
            raise ValueError("its name is not NNNN-words-with-dashes.patch")
        head, separator, body = text.partition("\n---\n")
        if not separator:
            raise ValueError("no line '---' ends its message")
        subject, header = _message(head)
        changes = tuple(_changes(body.split("\n")))
    except ValueError as error:
        raise PatchError(bad_value("patch", name, f"repair the file, {error}")) from error
    return Patch(name, project, releases, int(number[1]), subject, header, changes, text)


def _message(head: str) -> tuple[str, dict[str, str]]:
    mail, _, message = head.partition("\n\n")
    subject = re.search(r"^Subject: \[PATCH\] (.+)$", mail, re.M)
    if subject is None:
        raise ValueError("it has no subject")
    header: dict[str, str] = {}
    for paragraph in message.split("\n\n"):
        key, _, value = " ".join(paragraph.split()).partition(": ")
        header[key] = value
    if tuple(header) != HEADERS or not all(header.values()):
        raise ValueError(f"its message must have the paragraphs {', '.join(HEADERS)}")
    return subject[1], header


def _changes(lines: list[str]) -> Iterator[FileChange]:
    starts = [i for i, line in enumerate(lines) if line.startswith("diff --git ")]
    if not starts:
        raise ValueError("it changes nothing")
    end = lines.index(_SIGNATURE) if _SIGNATURE in lines else len(lines)
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        yield _change(lines[start:stop])


def _change(lines: list[str]) -> FileChange:
    at = next((i for i, line in enumerate(lines) if line.startswith("+++ b/")), None)
    if at is None:
        raise ValueError("it may only change and create files")
    hunks: list[Hunk] = []
    position = at + 1
    while position < len(lines):
        counts = _HUNK.match(lines[position])
        if counts is None:
            raise ValueError(f"no hunk starts at {lines[position]!r}")
        hunk, position = _hunk(lines, position + 1, int(counts[1] or 1), int(counts[2] or 1))
        hunks.append(hunk)
    return FileChange(lines[at].removeprefix("+++ b/"), lines[at - 1] == "--- /dev/null", tuple(hunks))


def _hunk(lines: list[str], position: int, old_count: int, new_count: int) -> tuple[Hunk, int]:
    old: list[str] = []
    new: list[str] = []
    while len(old) < old_count or len(new) < new_count:
        mark, line = (lines[position][:1], lines[position][1:]) if position < len(lines) else ("", "")
        if mark not in {" ", "-", "+"}:
            raise ValueError("a hunk has fewer lines than it says")
        if mark != "+":
            old.append(line)
        if mark != "-":
            new.append(line)
        position += 1
    return Hunk(tuple(old), tuple(new)), position
