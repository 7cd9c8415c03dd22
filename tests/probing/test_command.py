"""``sglang-sm120 probe`` as a user runs it, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120 import env
from sglang_sm120.backends.record import QUANTIZER
from tests.cli.bare import ROOT, Bare


def _run(cache: Path, *arguments: str, startup: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command; ``startup`` is a folder with a ``sitecustomize.py`` for it and its children."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")}
    environment |= {env.CACHE_DIR: str(cache), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    if startup is not None:
        environment["PYTHONPATH"] = str(startup)
    command = [sys.executable, "-m", "sglang_sm120.cli.main", "probe", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_one_value_and_its_record(tmp_path: Path) -> None:
    done = _run(tmp_path / "cache", "torch_reference", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report["outcomes"]) == [QUANTIZER, "torch_reference"]
    assert report["outcomes"]["torch_reference"]["status"] == "ok"
    assert report["outcomes"][QUANTIZER]["status"] == "unsupported"
    (kept,) = (tmp_path / "cache" / "probe").glob("*.json")
    assert json.loads(kept.read_text())["outcomes"] == report["outcomes"]
    assert report["experts"]["torch_reference"]["status"] == "ok"
    assert json.loads(kept.read_text())["experts"] == report["experts"]


def test_a_named_value_that_cannot_run_here_fails_the_command(tmp_path: Path) -> None:
    done = _run(tmp_path / "cache", "flashinfer_b12x")
    assert done.returncode == 1, done.stderr
    assert "needs a CUDA device" in done.stdout


def test_a_time_out_fails_the_command(tmp_path: Path) -> None:
    hang = "import sys, time\nif any('sglang_sm120.probing' in word for word in sys.orig_argv):\n    time.sleep(120)\n"
    (tmp_path / "sitecustomize.py").write_text(hang)
    done = _run(tmp_path / "cache", "torch_reference", "--timeout", "1", startup=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "no answer for 1 s" in done.stdout


@pytest.mark.parametrize("arguments", [["marlin"], ["torch_reference", "--timeout", "0"]])
def test_misuse(tmp_path: Path, arguments: list[str]) -> None:
    done = _run(tmp_path / "cache", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_a_cache_that_cannot_be_written_is_told_before_anything_is_tried(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    bare = Bare(tmp_path / "packages", environment={env.CACHE_DIR: str(tmp_path / "cache")})
    done = bare.run("probe", "--json")
    assert done.returncode == 2
    assert env.CACHE_DIR in done.stderr
    assert "Traceback" not in done.stderr


def test_without_torch_every_verdict_is_unsupported(tmp_path: Path) -> None:
    bare = Bare(tmp_path / "packages", environment={env.CACHE_DIR: str(tmp_path / "cache")})
    done = bare.run("probe", "--json")
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)["outcomes"]
    assert {outcome["status"] for outcome in outcomes.values()} == {"unsupported"}
    assert "No module named 'torch'" in outcomes["torch_reference"]["reason"]
