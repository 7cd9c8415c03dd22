"""Files that a user names are read through links, and believed only if nobody else could have written them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sglang_sm120 import records
from sglang_sm120.errors import RecordError


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """A file as Kubernetes mounts it from a ConfigMap: a link to a link to a folder with the data."""
    data = tmp_path / "..2026_11_30"
    data.mkdir()
    (data / "table.json").write_text(json.dumps({"schema": 1}))
    (tmp_path / "..data").symlink_to(data.name)
    (tmp_path / "table.json").symlink_to("..data/table.json")
    return tmp_path / "table.json"


def test_a_file_of_a_config_map_is_read(mounted: Path) -> None:
    assert records.read_json(mounted).integer("schema") == 1


def test_a_link_to_a_file_that_others_may_write_is_refused_with_the_name_of_the_file(mounted: Path) -> None:
    os.chmod(mounted.resolve(), 0o666)
    with pytest.raises(RecordError, match=r"2026_11_30/table.json can be written by other users: .*chmod go-w"):
        records.read_json(mounted)


def test_a_link_that_somebody_else_made_is_refused(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_trusted", lambda: (os.geteuid() + 1, os.geteuid() + 1))
    with pytest.raises(RecordError, match="belongs to another user: copy it, and name the copy"):
        records.read_json(mounted)


def test_a_link_to_itself_and_one_to_nothing_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(RecordError, match="a cannot be read: Too many levels"):
        records.read_json(tmp_path / "a")
    (tmp_path / "b").symlink_to("nothing")
    with pytest.raises(FileNotFoundError):
        records.read_json(tmp_path / "b")
