"""Every problem that was reported for NVFP4 on SM12x, and can be shown without a GPU, has a test or a reason."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("known_problems.json").read_text(encoding="utf-8"))


@cache
def defined_in(file: Path) -> frozenset[str]:
    """Names of the tests of a file, those of classes included."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


@pytest.mark.parametrize("entry", PROBLEMS, ids=lambda entry: entry["reported"][0])
def test_an_entry_names_tests_that_exist_or_says_why_there_is_none(entry: dict[str, Any]) -> None:
    assert entry.keys() in ({"problem", "reported", "tests"}, {"problem", "reported", "not_tested"})
    assert all(re.fullmatch(r"[\w.-]+#\d+", issue) for issue in entry["reported"])
    assert entry.get("not_tested", "a test")
    assert entry.get("tests", ["a reason"])
    for name in entry.get("tests", ()):
        file, _, test = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert test in defined_in(ROOT / file), name


def test_a_problem_stands_there_once() -> None:
    issues = [issue for entry in PROBLEMS for issue in entry["reported"]]
    assert sorted(set(issues)) == sorted(issues)
