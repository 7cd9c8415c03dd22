"""The tables in the documentation are what the code says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools import generate_docs

ROOT = Path(__file__).parents[2]


def test_the_pages_are_current() -> None:
    script = str(ROOT / "tools" / "generate_docs.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_block_stands_on_exactly_one_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert sorted(re.findall(r"<!-- generated: (\w+) -->", pages)) == sorted(generate_docs.BLOCKS)


def test_a_stale_page_is_noticed_and_repaired() -> None:
    page = "before\n<!-- generated: variables -->\n| old |\n<!-- end -->\nafter\n"
    repaired = generate_docs.refreshed(page)
    assert repaired != page
    assert repaired.startswith("before\n")
    assert repaired.endswith("\nafter\n")
    assert "SGLANG_SM120_DISABLE" in repaired
    assert generate_docs.refreshed(repaired) == repaired
