#!/usr/bin/env python3
"""House rules that no linter knows, checked in every file that git tracks or would track.

Source files stay under 500 lines. A to-do names its issue. Nothing names a folder of one machine, and nothing
names a package registry: which one is used is the business of whoever runs pip.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500
SOURCE_SUFFIXES = {".py", ".cu", ".cuh", ".h", ".cc"}

RULES = {
    "a to-do without its issue, write TODO(#12)": re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!\(#\d+\))"),
    "a path of one machine": re.compile(r"(?<![\w.~}])/(?:root|home(?!/ann|/user)|work|Users|tmp|mnt|scratch)/\w"),
    "the host of a package registry": re.compile(
        r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|conda\.anaconda\.org|pypi\.nvidia\.com|flashinfer\.ai"
        r"|ghcr\.io|docker\.io|nvcr\.io|quay\.io)\b"
    ),
}


def files(root: Path) -> Iterator[Path]:
    """Every file of the working tree that is not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    paths = (root / name for name in listing.split("\0") if name)
    # A patch quotes lines that are not ours; a deleted file is still listed.
    yield from (path for path in paths if path.is_file() and path.suffix != ".patch")


def problems(path: Path) -> Iterator[str]:
    """Say where a file breaks a rule, as ``line: what``."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return
    if path.suffix in SOURCE_SUFFIXES and len(lines) > MAX_LINES:
        yield f"{len(lines)}: more than {MAX_LINES} lines, split the file"
    for number, line in enumerate(lines, start=1):
        for what, pattern in RULES.items():
            # This file has to spell the rules out.
            if path != Path(__file__).resolve() and (match := pattern.search(line)):
                yield f"{number}: {what}: {match.group()}"


def main() -> int:
    """Check the repository, or the one given; return 1 if anything is wrong."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    found = [f"{path.relative_to(root)}:{problem}" for path in files(root) for problem in problems(path)]
    print("\n".join(found) or "check_tree: nothing to complain about")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
