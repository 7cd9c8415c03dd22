"""One environment and one tiny checkpoint for each release; nothing is shared between releases but packages."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from cpu_host.checkpoints import Spec, make
from cpu_host.server import free_port
from tools.envs import RELEASES

ROOT = Path(__file__).resolve().parents[2]


@cache
def interpreter_of(release: str) -> str:
    """Path of the Python that has this SGLang release and our wheel; made on first use, then cached."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "envs.py"), f"sglang-{release}", "--print"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return run.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("checkpoint"), Spec(format="modelopt"))


@pytest.fixture(params=list(RELEASES))
def release(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def unused_port() -> int:
    return free_port()
