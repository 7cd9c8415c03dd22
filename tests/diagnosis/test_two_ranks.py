"""Two ranks talk, or doctor says what happened and nothing stays behind. On a CPU through gloo: the same code."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_sm120 import nvml
from sglang_sm120.cli import snapshot
from sglang_sm120.diagnosis.checks import talk_finding
from sglang_sm120.diagnosis.two_ranks import exchange
from tests.dispatch.machines import RTX, machine


def test_two_ranks_that_can_talk_are_right() -> None:
    assert exchange("gloo", 300.0) == ""


@pytest.mark.parametrize(
    ("child", "timeout", "text"),
    [
        ("import time; time.sleep(600)", 1.0, "no answer for 1 s"),
        # The other one waits for it and need not be waited for.
        ("import sys, time; sys.exit('peer is mad') if sys.argv[2] == '1' else time.sleep(600)", 300.0, "peer is mad"),
        # Both die, and which of them is seen first is chance.
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 300.0, "ended with -11: no message"),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named_and_ended(child: str, timeout: float, text: str) -> None:
    begin = time.monotonic()
    assert text in exchange("gloo", timeout, child)
    assert time.monotonic() - begin < 300  # none waits for the ten minutes of a sleeping rank


def test_ranks_end_with_a_doctor_that_is_killed(tmp_path: Path) -> None:
    """A rank in an all-reduce that hangs would keep its GPU until somebody finds it."""
    child = f"import time; open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w'); time.sleep(600)"
    program = f"from sglang_sm120.diagnosis.two_ranks import exchange; exchange('gloo', 600.0, {child!r})"
    doctor = subprocess.Popen([sys.executable, "-c", program])
    try:
        _wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    finally:
        doctor.send_signal(signal.SIGKILL)
        doctor.wait()
    _wait_until(lambda: not any(_runs(int(file.name)) for file in tmp_path.iterdir()))


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return re.search(r"\) [ZX] ", state) is None  # in a container nobody may fetch its exit code


@pytest.mark.parametrize(("gpus", "asked"), [(0, []), (1, []), (2, ["nccl"]), (8, ["nccl"])])
def test_doctor_lets_two_gpus_talk_where_torch_may_use_two(
    gpus: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def exchange(backend: str) -> str:
        tried.append(backend)
        return "no answer for 90 s"

    monkeypatch.setattr(snapshot.two_ranks, "exchange", exchange)
    # The machine has eight; a build of torch for the CPU, or CUDA_VISIBLE_DEVICES with UUIDs, leaves fewer.
    monkeypatch.setattr(nvml, "compute_capabilities", lambda: [RTX] * 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert snapshot._ranks_problem(machine(RTX)) == ("no answer for 90 s" if asked else "")
    assert tried == asked
    assert snapshot._ranks_problem(machine(RTX, torch=None)) == ""


def test_a_hang_stops_servers_of_several_cards_and_the_switch_is_named() -> None:
    finding = talk_finding("no answer for 90 s")
    assert finding.severity == "stop"
    assert "NCCL_P2P_DISABLE=1" in finding.fix
