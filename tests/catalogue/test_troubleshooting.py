"""What docs/troubleshooting.md quotes as a message of this package is one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
#: Stands for whatever a message fills in.
FILLED = "…"


def texts(file: Path) -> Iterator[str]:
    """Every text that the code of a file can print: literals with what is filled in replaced."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(_constant(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield "".join(map(_constant, (node.left, node.right)))


def _constant(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_constant, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else FILLED


SAID = "\n".join(text for file in sorted((ROOT / "sglang_sm120").rglob("*.py")) for text in texts(file))
QUOTED = sorted(set(re.findall("“([^”]+)”", PAGE)) - {"quotes"})


def test_messages_are_quoted() -> None:
    assert len(QUOTED) > 25


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_said_by_the_package(quoted: str) -> None:
    # Between two fillings a text may be long; it must stand in the code as it is.
    parts = [part.strip() for part in re.split(rf"{FILLED}|%\w", quoted)]
    missing = [part for part in parts if part and part.rstrip(".:") not in SAID]
    assert not missing, f"{quoted!r} is no message of this package"
