"""Two ranks talk, or doctor says what happened and nothing stays behind. On a CPU through gloo: the same code."""

from __future__ import annotations

import time

import pytest

from sglang_sm120.diagnosis.checks import talk_finding
from sglang_sm120.diagnosis.two_ranks import exchange


def test_two_ranks_that_can_talk_are_right() -> None:
    assert exchange("gloo", 300.0) == ""


@pytest.mark.parametrize(
    ("child", "timeout", "text"),
    [
        ("import time; time.sleep(600)", 1.0, "no answer for 1 s"),
        # The other one waits for it and need not be waited for.
        ("import sys, time; sys.exit('peer is mad') if sys.argv[2] == '1' else time.sleep(600)", 300.0, "peer is mad"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 300.0, "rank 0 ended with -11: no message"),
    ],
)
def test_a_rank_that_hangs_or_dies_is_named_and_ended(child: str, timeout: float, text: str) -> None:
    begin = time.monotonic()
    assert text in exchange("gloo", timeout, child)
    assert time.monotonic() - begin < 300  # none waits for the ten minutes of a sleeping rank


def test_a_hang_stops_servers_of_several_cards_and_the_switch_is_named() -> None:
    finding = talk_finding("no answer for 90 s")
    assert finding.severity == "stop"
    assert "NCCL_P2P_DISABLE=1" in finding.fix
