"""Arguments, files and terminals that nobody planned for: one line and exit code 2, or the report, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120 import env
from sglang_sm120.cli.snapshot import take_snapshot
from sglang_sm120.models.source import presets
from tests.cli.bare import Bare

CARD = ("--card", "rtx-5090")
MANY = "1" + "0" * 400


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    return Bare(tmp_path_factory.mktemp("bare") / "packages")


def _model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    preset = presets()["qwen3-32b"]
    config = {**preset["config"], "quantization_config": preset["quantization"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "qwen3-32b", *CARD, "--batch", MANY),
        ("explain", "qwen3-32b", *CARD, "--context", MANY),
        ("explain", "qwen3-32b", *CARD, "--tp", MANY),
        ("serve-args", "qwen3-32b", *CARD, "--gpus", MANY),
        ("serve-args", "~no-such-user/model", *CARD),
        ("check-checkpoint", "a" * 5000),
        ("check-checkpoint", "qwen3-32b", "--tp", MANY),
        ("bench", "qwen3-32b", "--tp", MANY),
        ("bench", "qwen3-32b", "--compile-budget", "nan"),
        ("probe", "--timeout", "nan"),
        ("probe", "--timeout", "inf"),
        ("patches", "list", "--target", "a" * 5000),
    ],
    ids=lambda arguments: " ".join(word[:12] for word in arguments),
)
def test_an_argument_that_cannot_be(bare: Bare, arguments: tuple[str, ...]) -> None:
    done = bare.run(*arguments)
    assert done.returncode == 2, done.stdout
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_that_is_no_text_on_a_terminal_without_unicode(bare: Bare, tmp_path: Path) -> None:
    folder = _model(tmp_path / os.fsdecode(b"m\xff"))
    command = [sys.executable, "-m", "sglang_sm120.cli.main", "explain", str(folder), *CARD]
    environment = {**bare.environment, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "m\\udcff" in done.stdout


@pytest.mark.parametrize("place", ["x" * 5000, "file/cache"])
def test_doctor_reports_a_cache_folder_that_cannot_be(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path / place))
    assert "cannot be used" in take_snapshot().cache_problem


def test_doctor_reports_a_cache_folder_on_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))
    assert take_snapshot().cache_problem == ""
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path and allowed(path, mode))
    assert take_snapshot().cache_problem == f"the cache folder {tmp_path} is read-only"


def test_the_command_names_the_folder_of_a_config_json(bare: Bare, tmp_path: Path) -> None:
    folder = _model(tmp_path / "m")
    done = bare.run("serve-args", str(folder / "config.json"), *CARD)
    assert done.returncode == 0, done.stderr
    assert f"--model-path {folder} " in done.stdout


@pytest.mark.parametrize("name", ["QWEN3-32B", "nvidia/qwen3-32b-nvfp4"])
def test_the_command_names_a_checkpoint_however_the_preset_was_written(bare: Bare, name: str) -> None:
    done = bare.run("serve-args", name, *CARD)
    assert "--model-path nvidia/Qwen3-32B-NVFP4 " in done.stdout
