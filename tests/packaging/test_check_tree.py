"""The house rules that ``make lint`` checks are broken by what they forbid, and by nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environments import ROOT, clean_environ


def check(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools" / "check_tree.py", root]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True, env=clean_environ())
    (tmp_path / "good.py").write_text(
        "# TODO(#12): a to-do with its issue\nCACHE = '~/.cache/home/x'\nCUDA = '/usr/local/cuda'\n", encoding="utf-8"
    )
    return tmp_path


def test_good_tree_passes(repository: Path) -> None:
    assert check(repository).returncode == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("long.cu", "\n" * 501),
        ("todo.h", "// TO" + "DO later\n"),
        ("path.md", "see /ho" + "me/somebody/models\n"),
        ("registry.txt", "--index-url https://py" + "pi.org/simple\n"),
    ],
)
def test_broken_rule_is_named_with_file_and_line(repository: Path, name: str, text: str) -> None:
    (repository / name).write_text(text, encoding="utf-8")
    result = check(repository)
    assert result.returncode == 1
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == [name]


def test_ignored_files_are_left_alone(repository: Path) -> None:
    (repository / ".gitignore").write_text("*.log\n", encoding="utf-8")
    (repository / "run.log").write_text("/ro" + "ot/x\n", encoding="utf-8")
    assert check(repository).returncode == 0
