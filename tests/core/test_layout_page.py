"""The drawings of docs/layouts.md are what the code computes."""

from __future__ import annotations

import re
from pathlib import Path

from sglang_sm120.layout import swizzle_offset

PAGE = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")


def checked(name: str) -> str:
    """What stands below the mark of a name, up to the next blank line behind it."""
    return PAGE.split(f"<!-- checked: {name} -->\n")[1].split("\n\n")[0]


def test_the_tile_is_drawn_as_scales_are_swizzled() -> None:
    lines = re.findall(r"^ *(\d+) +(row.+)$", checked("swizzle"), re.MULTILINE)
    assert len(lines) == 4
    for offset, rows in lines:
        places = [swizzle_offset(int(row), 0, 4) for row in re.findall(r"row +(\d+)", rows)]
        assert places == [int(offset) + shift for shift in (0, 4, 8, 12)]


def test_offsets_are_those_of_scales_in_memory() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \|$", checked("offsets"), re.MULTILINE)
    assert len(rows) == 8
    for row, block, offset in rows:
        assert swizzle_offset(int(row), int(block), 8) == int(offset)


def test_a_tile_of_the_skinny_gemm_has_its_scales_in_one_piece() -> None:
    ranges = [(int(a), int(b)) for a, b in re.findall(r"rows +(\d+) \.\. +(\d+)", checked("rows"))]
    words = [swizzle_offset(row, 0, 4) for first, last in ranges for row in range(first, last + 1)]
    assert len(words) == 32
    assert sorted(words) == list(range(min(words), min(words) + 128, 4))
