"""What a release says about itself fits together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib
from packaging.version import Version

import sglang_sm120

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    version, _, date = headings[0].partition(" - ")
    assert version == sglang_sm120.__version__
    assert str(Version(version)) == version
    assert re.fullmatch(r"\d{4}-\d\d-\d\d|not yet published", date)


def test_the_oldest_python_of_the_classifiers_is_the_one_that_is_required() -> None:
    named = [Version(c.rpartition(" ")[2]) for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)]
    assert PROJECT["requires-python"] == f">={min(named)}"


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", *sorted(
    str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")
)])  # fmt: skip
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        file, _, anchor = target.partition("#")
        if "://" in target:
            continue
        aim = (ROOT / page).parent / file if file else ROOT / page
        if not aim.exists() or (anchor and anchor not in _anchors(aim)):
            broken.append(target)
    assert not broken


def _anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
