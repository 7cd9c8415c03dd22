"""``doctor`` on a machine with two GPUs: they can talk, and where NCCL cannot start it says so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from sglang_sm120.diagnosis.checks import talk_finding

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]
CODE = talk_finding("").code


def findings(**environ: str) -> dict[str, dict[str, Any]]:
    """What ``doctor --json`` finds, by code."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_sm120.cli.main", "doctor", "--json"],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=400,
    )
    return {finding["code"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_two_gpus_that_can_talk_are_no_finding() -> None:
    assert CODE not in findings()


def test_two_gpus_whose_nccl_cannot_start_stop_a_server() -> None:
    """Ranks find one another over a network interface; there is none of this name."""
    found = findings(NCCL_SOCKET_IFNAME="=missing0")[CODE]
    assert found["severity"] == "stop"
    assert re.search(r"rank \d ended with", found["message"]), found
