"""A server that checks itself: a fault below the interface ends it, and what was wrong can be run again alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from cpu_host.checkpoints import Spec
from cpu_host.kernels.build import library_path
from cpu_host.runtime import KERNELS_VARIABLE
from cpu_host.server import Server, ServerError
from sglang_sm120 import env
from tests.support.checkpoints import Checkpoints
from tests.support.servers import ask, interpreter, judge, launch

pytestmark = pytest.mark.server

ROOT = Path(__file__).resolve().parents[2]
SPEC = Spec(format="modelopt", odd=True, different_scales=True, bias=True)
COVERAGE = r"SGLANG_SM120_VERIFY: (\d+) of \1 pairs of layer and M checked \(8 layers, \d+ calls\)"
MESSAGE = (
    r"model\.layers\.0\.\w+\.\w+ \(\w+, linear M=\d+ N=\d+ K=\d+\), served by sm120, is wrong: "
    r"(.*; max error \S+, \S+ times the bound)\. It is kept: sglang-sm120 replay (\S+)"
)
#: Plants into the emulated kernels of the child what the server had.
FAULTY_REPLAY = """
import sys
from pathlib import Path
from sglang_sm120.device import collect_facts
from sglang_sm120.verification import replay
outcome = replay.run(Path(sys.argv[1]), None, collect_facts(), 300, factory="tests.verification.calls:swapped_nibbles")
print(outcome.status, outcome.reason)
"""


def test_a_planted_fault_ends_the_server_and_replays(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder, report = checkpoints.folder(SPEC), tmp_path / "served.json"
    environ = {
        KERNELS_VARIABLE: str(library_path()),
        env.CACHE_DIR: str(tmp_path / "cache"),
        env.REPORT: str(report),
        env.VERIFY: "1",
    }
    options = launch(SPEC, folder, tmp_path, backend="sm120", environ=environ)
    with Server(options) as server:
        assert judge(ask(server), checkpoints.reference(folder)).agrees
        assert re.search(COVERAGE, server.log())
        assert "RowParallelLinear N=144 K=176 M=1: sm120, 2 layers" in server.log()
        assert {row["backend"] for row in json.loads(report.read_text())["rows"]} == {"sm120"}
        server.plant("nibbles")
        with pytest.raises(ServerError):
            ask(server)
        deadline = time.monotonic() + 60
        while server.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.processes() == []
        (message,) = set(re.findall(r"VerificationError: (.*)", server.log()))
    found = re.fullmatch(MESSAGE, message)
    assert found, message
    wrong, kept = found[1], found[2]
    assert str(tmp_path) not in Path(kept).read_text()

    faulty = run([str(interpreter("dev")), "-W", "ignore", "-c", FAULTY_REPLAY, kept], environ, PYTHONPATH=str(ROOT))
    assert faulty.stdout.startswith("wrong linear M="), faulty.stdout + faulty.stderr
    assert wrong in faulty.stdout
    right = run([str(interpreter("dev").with_name("sglang-sm120")), "replay", kept, "--backend", "torch_reference"])
    assert right.returncode == 0, right.stdout + right.stderr
    assert "here, torch_reference: ok" in " ".join(right.stdout.split())


def run(command: list[str], environ: dict[str, str] | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **(environ or {}), **more}, capture_output=True, text=True, timeout=300
    )
