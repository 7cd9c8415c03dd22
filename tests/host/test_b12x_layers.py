"""FlashInfer's fused experts for SM12x behind SGLang's layers: b12x_layers.py, with two FlashInfer releases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_sm120.backends.table import NEWEST_FLASHINFER_READ
from tests.support import flashinfer_releases

pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("release", ["0.7.1", NEWEST_FLASHINFER_READ])
def test_experts_of_flashinfer_are_called_as_they_want_to_be(release: str) -> None:
    folders = [flashinfer_releases.release(release), flashinfer_releases.companions(), *flashinfer_releases.cute_dsl()]
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).with_name("b12x_layers.py"))]
    done = subprocess.run(
        command, env=flashinfer_releases.environment(folders), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
